"""Writes and reads snapshot files in `--state-dir`. Such a file is either complete or absent.

    header   from the caller; its first bytes say what the file is
    parts    from the caller
    trailer  from the caller, in msgpack
    footer   length of the trailer in bytes | CRC-32 of everything before the footer | end mark

A writer creates a temporary file, appends to it, then syncs and renames it. A reader takes the whole file or refuses it with a reason.
No failure ends the picker: `Snapshot` logs why the content is lost or not saved.
"""

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final, TypeVar
from zlib import crc32

import msgspec
import structlog

from epp.errors import UNREADABLE
from shm.index_capacity import OWNER_IDS
from shm.prefix_index import FIRST_OWNER
from workers.process.prefix_secret import create_private

AGE_MAX_S = 3600.0
FUTURE_MAX_S = 60.0  # the most that the clocks of two machines may differ
END = b"EPPWHOLE"
FOOTER = Struct("=QI8s")

T = TypeVar("T")

log = structlog.get_logger()


class RefusedSnapshot(Exception):
    """Raised if a snapshot cannot be used. The text gives the reason."""


def append(descriptor: int, parts: Sequence[bytes | memoryview], checksum: int) -> int:
    """Writes the parts to the file. Returns the CRC-32 of everything so far. `checksum`: the CRC-32 of all earlier bytes."""
    for part in parts:
        checksum = crc32(part, checksum)
        left = memoryview(part).cast("B")
        while len(left):
            left = left[os.write(descriptor, left) :]
    return checksum


def finish(descriptor: int, kept: msgspec.Struct, checksum: int) -> None:
    """Writes the trailer and the footer. `checksum`: the checksum of everything before the trailer."""
    trailer = msgspec.msgpack.encode(kept)
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


def trailer(content: bytes, kind: type[T]) -> tuple[T, int]:
    """Returns the trailer of a complete file, and the offset at which it begins."""
    length, _, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
    begin = len(content) - FOOTER.size - int(length)
    try:
        return msgspec.msgpack.decode(memoryview(content)[begin : -FOOTER.size], type=kind), begin
    except UNREADABLE as failure:
        raise RefusedSnapshot(f"it is damaged: {failure}") from failure


def check_owners(ids: Collection[int]) -> None:
    """Raises RefusedSnapshot unless all these owner ids can be used at once."""
    if len(set(ids)) != len(ids) or not all(FIRST_OWNER <= owner < OWNER_IDS for owner in ids):
        raise RefusedSnapshot("it is damaged: its owner ids are not valid")


def age(written_at: float, now: float) -> float:
    """Returns the age of a snapshot in seconds. Both times are Unix time. Raises RefusedSnapshot if it is too old or from the future."""
    age_s = now - written_at
    if age_s > AGE_MAX_S:
        raise RefusedSnapshot(f"it is {age_s / 3600:.1f} hours old: after 1 hour servers hold other prefixes")
    if age_s < -FUTURE_MAX_S:
        raise RefusedSnapshot(f"it was written {-age_s:.0f} seconds in the future: the clock was set back")
    return age_s


class Snapshot:
    """The snapshot file of one kind. Checks the header, and logs failures.

    `name` names the content of the file in log lines. `header` begins with magic and version; `present` returns the values for a file of
    this picker. `faults`: the other values that must be the same, in the order of the comparison: the number of the value, and the reason
    of a refusal. A reason may contain {0}, the value in the file, and {1}, the value of this picker.
    """

    def __init__(
        self, path: Path, name: str, header: Struct, present: Callable[[], Sequence[Any]], faults: Sequence[tuple[int, str]] = ()
    ) -> None:
        self.path: Final = path
        self._name = name
        self._header = header
        self._present = present
        self._faults = ((1, "it has version {0}, and this picker reads version {1}"), *faults)
        self._failed = False

    def header(self) -> bytes:
        """Returns the header of a new file."""
        return self._header.pack(*self._present())

    def write(self, parts: Sequence[bytes], kept: msgspec.Struct) -> None:
        """Writes a whole file with `kept` as its trailer. Raises OSError, and then leaves no temporary file."""
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        descriptor = create_private(temporary)
        try:
            finish(descriptor, kept, append(descriptor, [self.header(), *parts], 0))
            publish(descriptor, temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):  # frees the space on a full disk
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)

    def loaded(self, load: Callable[[], T]) -> T | None:
        """Returns the result of `load`. Returns None without a file. If the file cannot be used, logs the reason and returns None."""
        try:
            return load()
        except FileNotFoundError:
            return None
        except (OSError, RefusedSnapshot) as refused:
            why = refused.strerror if isinstance(refused, OSError) else str(refused)
            log.warning("a part of the state starts empty", part=self._name, file=str(self.path), why=why)
            return None

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Suppresses an OSError of the block. Of several failures in a row, logs only the first."""
        try:
            yield
        except OSError as refused:
            if not self._failed:
                log.warning("a part of the state is not saved", part=self._name, file=str(self.path), why=refused.strerror)
            self._failed = True
            return
        if self._failed:
            log.info("a part of the state is saved again", part=self._name, file=str(self.path))
        self._failed = False

    def read(self, content_max: int) -> bytes:
        """Returns the whole content of the file. Raises OSError, and RefusedSnapshot if it is incomplete or does not fit this picker.

        `content_max`: the greatest number of bytes between header and footer.
        """
        bytes_max = self._header.size + content_max + FOOTER.size
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            head = file.read(self._header.size) if stat.S_ISREG(status.st_mode) else b""
            self._check(head)
            if status.st_size > bytes_max:
                raise RefusedSnapshot(f"it is damaged: it has {status.st_size} bytes, but it can have at most {bytes_max}")
            content = head + file.read(bytes_max)
        if len(content) < self._header.size + FOOTER.size or not content.endswith(END):
            raise RefusedSnapshot(f"it is truncated: its {len(content)} bytes have no end mark")
        _, checksum, _ = FOOTER.unpack_from(content, len(content) - FOOTER.size)
        if crc32(memoryview(content)[: -FOOTER.size]) != checksum:
            raise RefusedSnapshot("it is damaged: its checksum differs")
        return content

    def _check(self, head: bytes) -> None:
        ours = self._present()
        if not head.startswith(ours[0]):
            raise RefusedSnapshot("it is not a snapshot of this kind")
        if len(head) < self._header.size:
            raise RefusedSnapshot(f"it is truncated: it has {len(head)} bytes")
        theirs = self._header.unpack(head)
        for number, reason in self._faults:
            if theirs[number] != ours[number]:
                raise RefusedSnapshot(reason.format(theirs[number], ours[number]))
