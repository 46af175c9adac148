"""Locks of running instances, and the segments that each of them owns.

A file in the run directory with an exclusive `flock` identifies a running instance. Forked children
inherit the lock with the open file. So another process gets the lock only after the whole process
tree has ended, and may then unlink its segments. (A process id proves nothing: two containers that
share /dev/shm have the same ids.) The file names each segment *before* it is created, so a kill at
any point leaves no segment that no file names.
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

from shm.segment import SEGMENT_MODE, SegmentError, unlink_segment

INSTANCE_SUFFIX = ".instance"
ACQUIRE_TRIES_MAX = 8
INSTANCE_FILE_BYTES_MAX = 1 << 20


class InstanceLock:
    """Locks the file of a running instance, and lists in it the segments that the instance owns.

    Each `record` appends one JSON line. A kill in the middle leaves a torn last line, and the segments
    that this line would have named do not exist yet.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.info: dict[str, Any] = {"segments": []}

    @classmethod
    def acquire(cls, run_dir: str, instance: str) -> Self:
        """Takes the lock of `instance` and unlinks the segments of a dead predecessor.

        Raises SegmentError if the instance is running, or if the file cannot be written.
        """
        if not instance or "/" in instance:
            raise SegmentError(f"instance {instance!r}: the name must be a file name without '/'")
        path = os.path.join(run_dir, instance + INSTANCE_SUFFIX)
        for _ in range(ACQUIRE_TRIES_MAX):
            try:
                os.makedirs(run_dir, mode=0o700, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, SEGMENT_MODE)
            except OSError as refused:
                raise SegmentError(
                    f"instance {instance}: {path} cannot be written ({refused.strerror}): choose a run directory that this user may write"
                ) from refused
            if not _take(descriptor):
                os.close(descriptor)
                raise SegmentError(
                    f"instance {instance} is running (its lock {path} is held): "
                    f"stop it, or choose other ports (--grpc-port gives the name) or another --instance"
                )
            if _is_at(descriptor, path):
                for name in _recorded(descriptor)["segments"]:
                    unlink_segment(name)
                os.ftruncate(descriptor, 0)
                return cls(path, descriptor)
            os.close(descriptor)  # a sweep removed the file between open and lock
        raise SegmentError(f"instance {instance}: another process removed {path} {ACQUIRE_TRIES_MAX} times in a row; retry later")

    @property
    def written_at(self) -> float:
        """Returns when the file was last written, in seconds since 1970."""
        return os.fstat(self._descriptor).st_mtime

    def is_removed(self) -> bool:
        """Returns whether the file is gone, so that no other process can find the instance."""
        return os.fstat(self._descriptor).st_nlink == 0

    def record(self, **info: object) -> None:
        """Appends facts to the file. `segments` adds names of segments; other keys replace their former value.

        Raises SegmentError if the file cannot take the whole line.
        """
        _merge(self.info, info)
        line = json.dumps(info).encode() + b"\n"
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as refused:
            raise SegmentError(
                f"{self.path} cannot be written ({refused.strerror}): free some room there, or choose another run directory"
            ) from refused

    def release(self) -> None:
        """Removes the file and releases the lock. All children that inherited the lock must have ended."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._descriptor)


class Recorded(NamedTuple):
    """Holds the contents of an instance's file. They do not say whether the instance still runs."""

    name: str
    info: dict[str, Any]
    written_at: float  # seconds since 1970


def recorded(run_dir: str) -> list[Recorded]:
    """Returns the files of all instances in the run directory. No lock is taken, so a line that is being written may be missing.

    Skips other users' files; raises PermissionError if there are no others.
    """
    instances: list[Recorded] = []
    of_others: PermissionError | None = None
    for path in _instance_files(run_dir):
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        except PermissionError as refused:
            of_others = refused
            continue
        try:
            name = os.path.basename(path).removesuffix(INSTANCE_SUFFIX)
            instances.append(Recorded(name, _recorded(descriptor), os.fstat(descriptor).st_mtime))
        finally:
            os.close(descriptor)
    if of_others is not None and not instances:
        raise of_others
    return instances


def sweep(run_dir: str) -> list[str]:
    """Unlinks the segments and files of all dead instances (their lock is free), and returns the names. Skips other users' files."""
    removed: list[str] = []
    try:
        paths = list(_instance_files(run_dir))
    except OSError:  # another user's directory, or not a directory: `acquire` reports it when an instance starts in it
        return removed
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _take(descriptor) and _is_at(descriptor, path):
                    names = _recorded(descriptor)["segments"]
                    removed += [name for name in names if unlink_segment(name)]
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _recorded(descriptor: int) -> dict[str, Any]:
    info: dict[str, Any] = {"segments": []}
    for line in os.pread(descriptor, INSTANCE_FILE_BYTES_MAX, 0).splitlines():
        with contextlib.suppress(ValueError):  # a torn last line names only segments that do not exist yet
            _merge(info, json.loads(line))
    return info


def _merge(info: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if key == "segments":
            info["segments"] += [name for name in value if name not in info["segments"]]
        else:
            info[key] = value


def _instance_files(run_dir: str) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(os.listdir(run_dir)):
            if entry.endswith(INSTANCE_SUFFIX):
                yield os.path.join(run_dir, entry)
