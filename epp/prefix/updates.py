"""Encodes updates from a worker to the writer of the prefix index, as frames of at most 4,096 bytes, each complete in itself.

    frame    | checksum u32 | version u8 | kind u8 | records u16 |                          8 bytes
    records  | owner u16 | hashes u16 | ...                                                 4 bytes each
    hashes   | hash u64 | ...                in the order of the records, to the end of the frame

A CACHED frame has one number in the place of the hashes: the cached tokens that an endpoint reported for one prompt.

All numbers have the byte order of the machine, because frames never leave it. The checksum is CRC-32 over the bytes after it. A frame
that is truncated, corrupt or of another version is refused as a whole. Its updates are lost, which only lowers the hit rate. An
update that does not fit into one frame continues in the next frame as another record.
"""

from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

FRAME_BYTES_MAX: Final = 4096
VERSION: Final = 1
LEARN: Final = 1
FORGET: Final = 2
CACHED: Final = 5  # samples and records on the same pipe have the kinds 3 and 4
KINDS: Final = (LEARN, FORGET, CACHED)
CHECKSUM: Final = Struct("=I")
HEAD: Final = Struct("=BBH")
HEADER: Final = Struct("=IBBH")
RECORD_BYTES: Final = 4
HASH_BYTES: Final = 8
RECORDS_MAX: Final = (FRAME_BYTES_MAX - HEADER.size) // (RECORD_BYTES + HASH_BYTES)
SINGLE_BYTES_MAX: Final = FRAME_BYTES_MAX - HEADER.size - RECORD_BYTES

_RECORDS: Final = tuple(Struct(f"={2 * count}H") for count in range(RECORDS_MAX + 1))
_pack_checksum: Final = CHECKSUM.pack
_pack_single: Final = Struct("=BBHHH").pack
_unpack_header: Final = HEADER.unpack_from


class CorruptFrame(Exception):
    """Says that a frame is invalid. The text says why."""


class Frame(NamedTuple):
    """Holds one decoded frame: the owner and the number of hashes of each record, and the bytes of all hashes."""

    kind: int
    owners: tuple[int, ...]
    counts: tuple[int, ...]
    hashes: bytes


def single(owner: int, hashes: bytes) -> bytes:
    """Returns the LEARN frame of one short update. At low load, this is the usual frame."""
    content = _pack_single(VERSION, LEARN, 1, owner, len(hashes) >> 3) + hashes
    return _pack_checksum(crc32(content)) + content


def frames(kind: int, updates: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Packs updates in order into as few frames as possible. `updates`: (owner id, hashes as bytes)."""
    records: list[int] = []
    parts: list[bytes] = []
    room = FRAME_BYTES_MAX - HEADER.size
    for owner, hashes in updates:
        at, size = 0, len(hashes)
        while at < size:
            if room < RECORD_BYTES + HASH_BYTES:
                yield _frame(kind, records, parts)
                records, parts, room = [], [], FRAME_BYTES_MAX - HEADER.size
            taken = min(size - at, (room - RECORD_BYTES) & -HASH_BYTES)
            records += (owner, taken // HASH_BYTES)
            parts.append(hashes if taken == size else hashes[at : at + taken])
            room -= RECORD_BYTES + taken
            at += taken
    if records:
        yield _frame(kind, records, parts)


def decode(data: bytes) -> Frame:
    """Decodes one frame. Raises CorruptFrame."""
    size = len(data)
    if not HEADER.size <= size <= FRAME_BYTES_MAX:
        raise CorruptFrame(f"{size} bytes are not a frame: a frame has {HEADER.size} to {FRAME_BYTES_MAX}")
    checksum, version, kind, count = _unpack_header(data)
    if crc32(data[CHECKSUM.size :]) != checksum:
        raise CorruptFrame("the checksum differs")
    if version != VERSION or kind not in KINDS or not 0 < count <= RECORDS_MAX:
        raise CorruptFrame(f"version {version}, kind {kind}, {count} records: not a frame of version {VERSION}")
    hashes_at = HEADER.size + count * RECORD_BYTES
    if hashes_at > size:
        raise CorruptFrame(f"{count} records do not fit {size} bytes")
    words = _RECORDS[count].unpack_from(data, HEADER.size)
    counts = words[1::2]
    if sum(counts) * HASH_BYTES != size - hashes_at:
        raise CorruptFrame(f"records announce {sum(counts)} hashes, {size - hashes_at} bytes follow")
    return Frame(kind, words[::2], counts, data[hashes_at:])


def _frame(kind: int, records: list[int], parts: list[bytes]) -> bytes:
    count = len(records) >> 1
    content = b"".join((HEAD.pack(VERSION, kind, count), _RECORDS[count].pack(*records), *parts))
    return _pack_checksum(crc32(content)) + content
