"""Documents: blobs of bytes that change rarely. Each document has two slots, so a reader never waits.

    document  | version | capacity | 0 ... |                                     one cache line
    slot 0    | version | length | crc | 0 ... | bytes, padded to a cache line
    slot 1    | version | length | crc | 0 ... | bytes, padded to a cache line

- Version v lies in slot v & 1. The writer fills the other slot and then increments the version. So a
  write disturbs a reader only if a second write starts before the read ends. The reader notices the
  second write by the slot's version and the CRC (over version, length and bytes), and tries again.
- A writer that dies inside a write leaves the current slot whole, so there is nothing to repair.
- Version 0 means that the document was never written. A writer that has just started cannot tell such a document from one that
  another program has zeroed.
- If the current slot has a wrong checksum, or the version has decreased, another program has overwritten the document.
  `DocumentWriter.overwritten` finds both. A new writer notices only the checksum, because it has not seen earlier versions.

This module does not know what the bytes mean.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from shm import fence
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

READ_TRIES_MAX = 16
VERSION_MAX = (1 << 48) - 1  # limits the version of a document that another program has overwritten, so that later writes do not overflow

VERSION, CAPACITY = range(2)
SLOT_VERSION, SLOT_LENGTH, SLOT_CRC = range(3)

T = TypeVar("T")


class DocumentTooLarge(Exception):
    """Raised if a blob does not fit into the slots of its document."""


class DocumentSchema:
    """Lays out the documents of a segment: how many there are, and the capacity of each in bytes."""

    def __init__(self, capacities: tuple[int, ...]) -> None:
        if not capacities or min(capacities) < 1:
            raise ValueError(f"documents need a capacity of at least one byte, not {capacities}")
        self.capacities = capacities
        self.offsets: list[int] = []
        end = 0
        for capacity in capacities:
            self.offsets.append(end)
            end += CACHE_LINE + 2 * slot_bytes(capacity)
        self.bytes = end
        self.layout_hash = layout_hash("documents 1", capacities)
        self.description: Mapping[str, object] = {"kind": "documents", "capacities": capacities}


def slot_bytes(capacity: int) -> int:
    return CACHE_LINE + aligned(capacity)


def _crc(version: int, blob: bytes | memoryview) -> int:
    return zlib.crc32(blob, zlib.crc32(b"%d,%d" % (version, len(blob))))


class DocumentWriter:
    """Writes documents. Only one process has a writer; its successor continues from the versions that it finds."""

    def __init__(self, schema: DocumentSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words
        self._bytes = region.bytes
        self._reader = DocumentReader(schema, region)
        self._repaired: set[int] = set()  # overwritten documents that were not written since
        self._seen = [0] * len(schema.capacities)  # each document's version when this writer last wrote or checked it
        for offset, capacity in zip(schema.offsets, schema.capacities, strict=True):
            self._words[offset // WORD + CAPACITY] = capacity

    def write(self, index: int, blob: bytes) -> None:
        """Makes `blob` the current version of document `index`. Raises DocumentTooLarge."""
        capacity = self.schema.capacities[index]
        if len(blob) > capacity:
            raise DocumentTooLarge(
                f"document {index} has {len(blob)} bytes, its slots hold {capacity}: "
                f"configure a larger capacity, or fewer or shorter entries"
            )
        words, at = self._words, self.schema.offsets[index]
        version = words[at // WORD + VERSION] + 1
        start = at + CACHE_LINE + (version & 1) * slot_bytes(capacity)
        slot = start // WORD
        # A reader that still reads this slot's older version notices the 0, or the wrong CRC.
        words[slot + SLOT_VERSION] = 0
        words[slot + SLOT_LENGTH] = len(blob)
        words[slot + SLOT_CRC] = _crc(version, blob)
        self._bytes[start + CACHE_LINE : start + CACHE_LINE + len(blob)] = blob
        words[slot + SLOT_VERSION] = version
        fence.order()
        words[at // WORD + VERSION] = self._seen[index] = version

    def overwritten(self) -> list[int]:
        """Returns the numbers of the documents that another program has overwritten since the last call of `repair`."""
        broken = self._broken()
        self._seen = [max(seen, self._reader.version(i)) for i, seen in enumerate(self._seen)]
        self._repaired &= broken  # all other documents were written again
        return sorted(broken - self._repaired)

    def repair(self) -> list[int]:
        """Gives each overwritten document a valid version number, and returns the numbers of these documents.

        `DocumentReader.read` returns None for such a document until the next write. Only the process that writes all documents may
        call this method.
        """
        self._repaired = self._broken()
        for index in self._repaired:
            version = self.schema.offsets[index] // WORD + VERSION
            self._seen[index] = self._words[version] = (self._words[version] & VERSION_MAX) + 1
        return sorted(self._repaired)

    def _broken(self) -> set[int]:
        """Returns the numbers of the documents whose version has decreased, or whose current slot is not whole."""
        reader = self._reader
        versions = [(reader.version(i), seen) for i, seen in enumerate(self._seen)]
        return {i for i, (v, seen) in enumerate(versions) if v < seen or (v and not reader.is_whole(i))}


class DocumentReader:
    """Reads current versions, and never writes."""

    def __init__(self, schema: DocumentSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words.toreadonly()
        self._bytes = region.bytes.toreadonly()
        self._versions = [offset // WORD + VERSION for offset in schema.offsets]

    def version(self, index: int) -> int:
        """Returns the document's version, which grows with each write; 0 if the document was never written."""
        return self._words[self._versions[index]]

    def version_word(self, index: int) -> tuple[memoryview, int]:
        """Returns the words of the documents and the index of the document's version, for callers that read it for each request."""
        return self._words, self._versions[index]

    def is_whole(self, index: int) -> bool:
        """Returns whether version, length and CRC of the current slot agree. In another process, False may mean that a write is under
        way.
        """
        return self._whole(index, self.version(index)) is not None

    def read(self, index: int) -> tuple[int, bytes] | None:
        """Returns the current version and its bytes. Returns None if the document was never written, or was torn at every try."""
        for _ in range(READ_TRIES_MAX):
            version = self.version(index)
            fence.order()
            if version == 0:
                return None
            blob = self._whole(index, version)
            if blob is not None:
                return version, blob
        return None

    def _whole(self, index: int, version: int) -> bytes | None:
        words, capacity = self._words, self.schema.capacities[index]
        start = self.schema.offsets[index] + CACHE_LINE + (version & 1) * slot_bytes(capacity)
        slot = start // WORD
        length, crc = words[slot + SLOT_LENGTH], words[slot + SLOT_CRC]
        if words[slot + SLOT_VERSION] != version or length > capacity:
            return None
        blob = bytes(self._bytes[start + CACHE_LINE : start + CACHE_LINE + length])
        return blob if _crc(version, blob) == crc else None


class DocumentView(Generic[T]):
    """Decodes each version of a document once. Keeps the last version if the current one cannot be read.

    `version`: the version of `content`; 0 before the first version.
    """

    def __init__(self, reader: DocumentReader, index: int, decode: Callable[[bytes], T], content: T) -> None:
        """`content`: the content before the first version."""
        self._reader = reader
        self._index = index
        self._decode = decode
        self._words, self._at = reader.version_word(index)
        self._tried = 0  # the version that a request has tried to read
        self.content = content
        self.version = 0

    def look_once(self) -> None:
        """Reads each version only once, so that a document that another program has overwritten does not slow each request down."""
        version = self._words[self._at]
        if version != self._tried:
            self._tried = version
            self.look()

    def look(self) -> bool:
        """Reads the document if it has changed. Returns whether it has changed."""
        if self._words[self._at] == self.version:
            return False
        found = self._reader.read(self._index)
        if found is None or found[0] == self.version:
            return False
        self.version, blob = found
        self.content = self._decode(blob)
        return True

    def current(self) -> T:
        """Returns the content of the current version."""
        self.look()
        return self.content
