"""Documents: blobs of bytes that change rarely, each in two slots so that reading never waits.

    document  | version | capacity | 0 ... |                                     one cache line
    slot 0    | version | length | crc | 0 ... | bytes, padded to a cache line
    slot 1    | version | length | crc | 0 ... | bytes, padded to a cache line

- Version v lies in slot v & 1. The writer fills the other slot and then moves the version, so a
  reader of the current slot is disturbed only when two documents are written while it reads one;
  it notices by the slot's version and the CRC (over version, length and bytes) and tries again.
- A writer that dies inside a write leaves the current slot whole: there is nothing to repair.
- Version 0 means: never written.

What this does not do: know what the bytes mean.
"""

import zlib
from typing import Any

from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

READ_TRIES_MAX = 16

VERSION, CAPACITY = range(2)
SLOT_VERSION, SLOT_LENGTH, SLOT_CRC = range(3)


class DocumentTooLarge(Exception):
    """A document does not fit its slots."""


class DocumentSchema:
    """How many documents there are, and how many bytes each may have."""

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

    def describe(self) -> dict[str, Any]:
        return {"kind": "documents", "capacities": self.capacities}


def slot_bytes(capacity: int) -> int:
    return CACHE_LINE + aligned(capacity)


def _crc(version: int, blob: bytes | memoryview) -> int:
    return zlib.crc32(blob, zlib.crc32(b"%d,%d" % (version, len(blob))))


class DocumentWriter:
    """The only writer; a successor goes on with the version it finds."""

    def __init__(self, schema: DocumentSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words
        self._bytes = region.bytes
        for offset, capacity in zip(schema.offsets, schema.capacities, strict=True):
            self._words[offset // WORD + CAPACITY] = capacity

    def write(self, index: int, blob: bytes) -> None:
        """Make `blob` the current version of document `index`."""
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
        words[slot + SLOT_VERSION] = 0  # a reader two versions behind sees this, or the CRC
        words[slot + SLOT_LENGTH] = len(blob)
        words[slot + SLOT_CRC] = _crc(version, blob)
        self._bytes[start + CACHE_LINE : start + CACHE_LINE + len(blob)] = blob
        words[slot + SLOT_VERSION] = version
        words[at // WORD + VERSION] = version


class DocumentReader:
    """Reads current versions; never writes."""

    def __init__(self, schema: DocumentSchema, region: Region) -> None:
        self.schema = schema
        self._words = region.words.toreadonly()
        self._bytes = region.bytes.toreadonly()
        self._versions = [offset // WORD + VERSION for offset in schema.offsets]

    def version(self, index: int) -> int:
        """Moves when the document has changed; 0 before the first."""
        return self._words[self._versions[index]]

    def read(self, index: int) -> tuple[int, bytes] | None:
        """The current version and its bytes; None = never written, or torn on every try."""
        for _ in range(READ_TRIES_MAX):
            version = self.version(index)
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
