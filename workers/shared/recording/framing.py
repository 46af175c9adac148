"""The bytes of a recording's file: zstd frames, each behind a mark, so that standard tools can unpack the file, too.

    file   | head | mark | frame | mark | frame | ...
    head   | 0x184D2A5E u32 | 24 u32 | "EPP recording  " 16 bytes | version u32 | 0 u32 |      a frame that zstd skips
    mark   | 0x184D2A5F u32 | 12 u32 | "EPPR" | length of the frame u32 | records u32 |        a frame that zstd skips
    frame  one zstd frame with its content's size and checksum; its content is a frame of `epp.recording.records`

All numbers are little-endian. A truncated file is readable up to its last whole frame.
"""

from struct import Struct
from typing import Final

import zstandard

from epp.recording.records import VERSION

HEAD_MAGIC: Final = 0x184D2A5E
MARK_MAGIC: Final = 0x184D2A5F
NAME: Final = b"EPP recording".ljust(16)
MARK_NAME: Final = b"EPPR"
HEAD: Final = Struct("<II16sII")
MARK: Final = Struct("<II4sII")
PREFIX_BYTES: Final = 8
LEVEL: Final = 3
CONTENT_BYTES_MAX: Final = 16 << 20  # a larger frame is refused
PACKED_BYTES_MAX: Final = CONTENT_BYTES_MAX + (1 << 16)


def head() -> bytes:
    """Returns the beginning of every file."""
    return HEAD.pack(HEAD_MAGIC, HEAD.size - PREFIX_BYTES, NAME, VERSION, 0)


class Packer:
    """Packs frames. Only one thread may use an object."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)

    def pack(self, content: bytes, records: int) -> bytes:
        """Returns mark and frame for this content."""
        packed = self._compressor.compress(content)
        return MARK.pack(MARK_MAGIC, MARK.size - PREFIX_BYTES, MARK_NAME, len(packed), records) + packed


def unpack(packed: bytes) -> bytes:
    """Returns the content of one zstd frame. Raises ValueError with the reason if the frame is damaged or too large."""
    try:
        size = zstandard.get_frame_parameters(packed).content_size
        if not 0 <= size <= CONTENT_BYTES_MAX:
            raise ValueError(f"its content has {size} bytes; at most {CONTENT_BYTES_MAX} are possible")
        return zstandard.ZstdDecompressor().decompress(packed, max_output_size=CONTENT_BYTES_MAX)
    except zstandard.ZstdError as damaged:
        raise ValueError(str(damaged)) from damaged
