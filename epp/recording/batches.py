"""Carries batches of records over the bus: packets of at most 4,096 bytes, which are put together again in the supervisor.

    packet   | unused u32 | version u8 | kind u8 | part u16 | parts u16 | records u16 | stream u32 | file u32 | bytes of the batch |

The kind is at the place where frames of `epp.prefix.updates` and of `epp.learning.samples` have their kind, because all use the same pipe.
A packet is lost if the pipe is full; then the batch is lost, and a later batch begins with part 0 again.

`records`: how many records the batch has. `stream`: the number of the worker process (`Batch.stream`). `file`: the number of the
recording's file that the worker has written for. All numbers have the byte order of the machine, because packets never leave it.
"""

from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

KIND: Final = 4
VERSION: Final = 1
HEADER: Final = Struct("=4xBBHHHII")
KIND_AT: Final = 5
PACKET_BYTES_MAX: Final = 4096
CONTENT_MAX: Final = PACKET_BYTES_MAX - HEADER.size
BATCH_BYTES_MAX: Final = 4 << 20  # more than the longest record: the hashes of a prompt of two million tokens take 256 KB
PARTS_MAX: Final = -(-BATCH_BYTES_MAX // CONTENT_MAX)
RECORDS_MAX: Final = (1 << 16) - 1
STREAMS_MAX: Final = 4096


class Whole(NamedTuple):
    """One batch as the supervisor gets it. `data`: an encoded array of records."""

    file: int
    records: int
    data: bytes


class CorruptPacket(Exception):
    """Says that a packet is invalid. The text says why."""


def is_records(data: bytes) -> bool:
    """Returns whether a frame of the bus has records. It may still be corrupt."""
    return len(data) > KIND_AT and data[KIND_AT] == KIND


def packets(data: bytes | bytearray, records: int, stream: int, file: int) -> Iterator[bytes]:
    """Yields the packets of a batch of at most BATCH_BYTES_MAX bytes and RECORDS_MAX records."""
    parts = -(-len(data) // CONTENT_MAX)
    for part in range(parts):
        at = part * CONTENT_MAX
        yield HEADER.pack(VERSION, KIND, part, parts, records, stream, file) + data[at : at + CONTENT_MAX]


class Assembler:
    """Joins packets to batches. Drops a batch if one of its packets is missing: its worker has counted it as lost, or has died."""

    def __init__(self) -> None:
        self._begun: dict[int, list[bytes]] = {}  # stream -> the parts of its unfinished batch so far

    def take(self, data: bytes) -> Whole | None:
        """Takes one packet. Returns the batch that the packet completes, else None. Raises CorruptPacket."""
        if not HEADER.size < len(data) <= PACKET_BYTES_MAX:
            raise CorruptPacket(f"{len(data)} bytes are not a packet")
        version, kind, part, parts, records, stream, file = HEADER.unpack_from(data)
        if version != VERSION or kind != KIND or not 0 <= part < parts <= PARTS_MAX:
            raise CorruptPacket(f"version {version}, kind {kind}, part {part} of {parts}")
        begun = self._begun.pop(stream, [])
        if part == 0:
            begun = []
        elif part != len(begun):
            return None
        begun.append(data[HEADER.size :])
        if part == parts - 1:
            return Whole(file, records, b"".join(begun))
        if len(self._begun) >= STREAMS_MAX:  # bounded, because workers that have died leave their streams here
            del self._begun[next(iter(self._begun))]
        self._begun[stream] = begun
        return None
