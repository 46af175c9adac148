"""Files of recordings: how the supervisor writes them, and how commands read them."""

from typing import Final, NamedTuple

OFF: Final = "none"  # the value of --record-dir without any recording
# a frame of this size is written at once: it compresses well, and a reader needs little memory
FRAME_BYTES: Final = 512 << 10


class Limits(NamedTuple):
    """Bounds of a recording: seconds and bytes of one file, and how many files and bytes an instance keeps in the folder."""

    file_s: float = 600.0
    file_bytes: int = 64 << 20
    files: int = 144
    bytes: int = 2 << 30


RECENT: Final = Limits(file_bytes=4 << 20, files=64, bytes=64 << 20)  # the limits of the small recording that is always on


class Frame(NamedTuple):
    """A frame to write. `content`: as in `epp.recording.records`; None means to close the file."""

    file: int
    content: bytes | None
    records: int


class Unreadable(Exception):
    """Raised if a file or folder cannot be read as a recording. The text names the file or folder, and the reason."""
