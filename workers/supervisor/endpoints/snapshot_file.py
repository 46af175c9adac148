"""Writes and reads snapshot files in `--state-dir`. Such a file is either complete or absent.

    header   from the caller; its first bytes say what the file is
    parts    from the caller
    trailer  from the caller, in msgpack
    footer   length of the trailer in bytes | CRC-32 of everything before the footer | end mark

A writer creates a temporary file, appends to it, then syncs and renames it. A reader takes the whole file or refuses it with a reason.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from zlib import crc32

from workers.process.prefix_secret import create_private

AGE_MAX_S = 3600.0
FUTURE_MAX_S = 60.0  # the most that the clocks of two machines may differ
END = b"EPPWHOLE"
FOOTER = Struct("=QI8s")


class RefusedSnapshot(Exception):
    """Raised if a snapshot cannot be used. The text gives the reason."""


def write(path: Path, parts: Sequence[bytes | memoryview], trailer: bytes) -> None:
    """Writes a whole file: `parts` (the header first), the trailer and the footer. Raises OSError, and then leaves no temporary file."""
    temporary = path.with_name(f"{path.name}.tmp")
    descriptor = create_private(temporary)
    try:
        finish(descriptor, trailer, append(descriptor, parts, 0))
        publish(descriptor, temporary, path)
    except OSError:
        with contextlib.suppress(OSError):  # frees the space on a full disk
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def append(descriptor: int, parts: Sequence[bytes | memoryview], checksum: int) -> int:
    """Writes the parts to the file. Returns the CRC-32 of everything so far. `checksum`: the CRC-32 of what was written before."""
    for part in parts:
        checksum = crc32(part, checksum)
        left = memoryview(part).cast("B")
        while len(left):
            left = left[os.write(descriptor, left) :]
    return checksum


def finish(descriptor: int, trailer: bytes, checksum: int) -> None:
    """Writes the trailer and the footer. `checksum`: the checksum of everything before the trailer."""
    checksum = append(descriptor, [trailer], checksum)
    append(descriptor, [FOOTER.pack(len(trailer), checksum, END)], 0)


def publish(descriptor: int, temporary: Path, path: Path) -> None:
    """Syncs the temporary file and renames it to the snapshot's path."""
    os.fsync(descriptor)
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, header_bytes: int, check_header: Callable[[bytes], None], bytes_max: int) -> bytes:
    """Returns the whole content of a file. Raises OSError, and RefusedSnapshot if the file is incomplete or `check_header` refuses it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        head = file.read(header_bytes) if stat.S_ISREG(status.st_mode) else b""
        check_header(head)
        if status.st_size > bytes_max:
            raise RefusedSnapshot(f"it is damaged: it has {status.st_size} bytes, but it can have at most {bytes_max}")
        content = head + file.read(bytes_max)
    if len(content) < header_bytes + FOOTER.size or not content.endswith(END):
        raise RefusedSnapshot(f"it is truncated: its {len(content)} bytes have no end mark")
    _, checksum, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
    if crc32(memoryview(content)[: -FOOTER.size]) != checksum:
        raise RefusedSnapshot("it is damaged: its checksum differs")
    return content


def trailer_at(content: bytes) -> int:
    """Returns the offset at which the trailer of a complete file begins."""
    length, _, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
    return len(content) - FOOTER.size - int(length)


def age(written_at: float, now: float) -> float:
    """Returns the age of a snapshot in seconds. Both times are Unix time. Raises RefusedSnapshot if it is too old or from the future."""
    age_s = now - written_at
    if age_s > AGE_MAX_S:
        raise RefusedSnapshot(f"it is {age_s / 3600:.1f} hours old: after 1 hour servers hold other prefixes")
    if age_s < -FUTURE_MAX_S:
        raise RefusedSnapshot(f"it was written {-age_s:.0f} seconds in the future: the clock was set back")
    return age_s
