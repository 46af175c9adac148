"""Encodes what workers tell the process that learns, as frames of at most 4,096 bytes, each complete in itself.

    frame    | checksum u32 | version u8 | kind u8 | samples u16 | sample | ...
    sample   | what u8 | slot u32 | generation u64 | seven times f64 |

All numbers have the byte order of the machine, because frames never leave it. The checksum is CRC-32 over the bytes after it. The kind
differs from the kinds of `epp.prefix.updates`, because all these frames travel on the same pipe.
"""

from collections.abc import Callable
from struct import Struct
from typing import Final
from zlib import crc32

from epp.learning.model import FirstToken, LatencyModel

KIND: Final = 3
VERSION: Final = 1
FIRST_TOKEN: Final = 1
PER_TOKEN: Final = 2
HEADER: Final = Struct("=IBBH")
HEAD: Final = Struct("=BBH")
CHECKSUM: Final = Struct("=I")
SAMPLE: Final = Struct("=BIQ7d")
SLOT: Final = Struct("=I")
KIND_AT: Final = 5
SLOT_AT: Final = HEADER.size + 1
FRAME_BYTES_MAX: Final = 4096
SAMPLES_MAX: Final = (FRAME_BYTES_MAX - HEADER.size) // SAMPLE.size


class CorruptSamples(Exception):
    """Says that a frame of samples is invalid. The text says why."""


def first_token(seen: FirstToken) -> bytes:
    """Encodes one time to the first token."""
    at, slot, generation, *numbers = seen
    return SAMPLE.pack(FIRST_TOKEN, slot, generation, at, *numbers)


def per_token(slot: int, generation: int, load: float, observed: float, lasted: float) -> bytes:
    """Encodes one time per output token, with the arguments of `LatencyModel.learn_token`."""
    return SAMPLE.pack(PER_TOKEN, slot, generation, 0.0, 0.0, 0.0, lasted, load, 0.0, observed)


def frame(samples: list[bytes]) -> bytes:
    """Returns the frame of at most SAMPLES_MAX samples."""
    content = HEAD.pack(VERSION, KIND, len(samples)) + b"".join(samples)
    return CHECKSUM.pack(crc32(content)) + content


def is_samples(data: bytes) -> bool:
    """Returns whether a frame of the bus has samples. It may still be corrupt."""
    return len(data) > KIND_AT and data[KIND_AT] == KIND


def slot_of(data: bytes) -> int:
    """Returns the slot of the first sample of a frame; -1 if the frame is too short to have one."""
    return int(SLOT.unpack_from(data, SLOT_AT)[0]) if len(data) >= HEADER.size + SAMPLE.size else -1


def learn(model: LatencyModel, data: bytes, begun: Callable[[FirstToken], object] = lambda first: None) -> int:
    """Lets the model learn all samples of a frame. Returns their number. Raises CorruptSamples, and then learns none.

    `begun`: a function to call with each time to the first token.
    """
    if not HEADER.size <= len(data) <= FRAME_BYTES_MAX:
        raise CorruptSamples(f"{len(data)} bytes are not a frame")
    checksum, version, kind, count = HEADER.unpack_from(data)
    if crc32(data[CHECKSUM.size :]) != checksum:
        raise CorruptSamples("the checksum differs")
    if version != VERSION or kind != KIND or count * SAMPLE.size != len(data) - HEADER.size:
        raise CorruptSamples(f"version {version}, kind {kind}, {count} samples in {len(data)} bytes: not a frame of version {VERSION}")
    for what, slot, generation, at, tokens, ahead, elapsed, load, predicted, observed in SAMPLE.iter_unpack(data[HEADER.size :]):
        if what == FIRST_TOKEN:
            first = FirstToken(at, slot, generation, tokens, ahead, elapsed, load, predicted, observed)
            begun(first)
            model.learn_first(first)
        else:
            model.learn_token(slot, generation, load, observed, elapsed)
    return int(count)
