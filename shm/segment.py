"""Named shared memory: create, attach, release, and the sweeping of what a dead instance left.

A segment is reserved in full before it is used: a sparse segment on a full /dev/shm would end in
SIGBUS at the first write, a reserved one ends in a `SegmentError` at start. `check_room` says so
of all segments at once, before the first is made. The creator writes the
header's magic last, so whoever attaches sees a finished header or is refused.

An instance is known by a file in the run directory that holds an exclusive `flock`. Forked
children inherit the lock with the open file, so it can be taken only when the whole process tree
is gone, and then its segments may be unlinked. (A process id proves nothing: two containers that
share /dev/shm have the same ids.) Segment names are recorded in that file *before* the segments
are created, so a kill at any point leaves nothing unknown.

What this module does not do: say what lies in the payload, or restart anybody.
"""

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import posix_ipc

from shm import fence
from shm.layout import (
    DESCRIPTION_BYTES_MAX,
    H_CHECK,
    H_DESCRIPTION,
    H_GENERATION,
    H_LAYOUT,
    H_MAGIC,
    H_PAYLOAD,
    H_SIZE,
    HEADER_BYTES,
    MAGIC,
    Plan,
    aligned,
)

SHM_DIRECTORY = "/dev/shm"
SEGMENT_MODE = 0o600
INSTANCE_SUFFIX = ".instance"
ACQUIRE_TRIES_MAX = 8
INSTANCE_FILE_BYTES_MAX = 1 << 20
SEGMENT_NAME = re.compile(r"/[A-Za-z0-9._-]{1,254}")

fence.check_machine()


class SegmentError(Exception):
    """A segment cannot be made or used; the text names the segment, the rule and the fix."""


class Region:
    """A run of shared bytes, seen as bytes, as 8-byte words or as NumPy arrays without a copy."""

    def __init__(self, buffer: memoryview) -> None:
        self.bytes = buffer
        self.words: memoryview = buffer.cast("Q")

    @property
    def size(self) -> int:
        return self.bytes.nbytes

    def part(self, offset: int, size: int) -> "Region":
        """A smaller region of the same memory; offset and size are whole words."""
        if offset < 0 or offset + size > self.bytes.nbytes:
            raise ValueError(f"part {offset}+{size} leaves a region of {self.bytes.nbytes} bytes")
        return Region(self.bytes[offset : offset + size])

    def array(self, dtype: npt.DTypeLike, offset_bytes: int, shape: int | tuple[int, ...]) -> npt.NDArray[Any]:
        """A view of this memory; it cannot be written where the segment cannot."""
        count = shape if isinstance(shape, int) else int(np.prod(shape))
        flat = np.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset_bytes)
        return flat.reshape(shape)


class Segment(Region):
    """One named piece of shared memory; the region is its payload, behind the header."""

    def __init__(self, name: str, mapping: mmap.mmap, header: tuple[int, ...]) -> None:
        self.name = name
        self.layout_hash = header[H_LAYOUT]
        self.generation = header[H_GENERATION]
        self._mapping = mapping
        self._whole = memoryview(mapping)
        start = header[H_PAYLOAD]
        self.description = bytes(self._whole[HEADER_BYTES:][: header[H_DESCRIPTION]])
        super().__init__(self._whole[start : start + header[H_SIZE]])

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        layout_hash: int,
        description: bytes = b"",
        generation: int = 1,
    ) -> Self:
        """Reserve and map a new segment of `size` payload bytes, zeroed, writable, mode 0600."""
        if size <= 0 or len(description) > DESCRIPTION_BYTES_MAX:
            raise SegmentError(f"segment {name}: needs a size above 0 and a short description")
        size = aligned(size)
        start = HEADER_BYTES + aligned(len(description))
        mapping = _reserve(name, start + size)
        header = [0, layout_hash, size, generation, start, len(description), 0]
        header[H_CHECK] = _check(header)
        mapping[HEADER_BYTES : HEADER_BYTES + len(description)] = description
        with memoryview(mapping) as whole, whole.cast("Q") as words:
            for index, value in enumerate(header):
                words[index] = value
            words[H_MAGIC] = MAGIC  # last: before it, nobody can attach
        return cls(name, mapping, tuple(header))

    @classmethod
    def create_planned(cls, name: str, plan: Plan, generation: int = 1) -> Self:
        """A segment with the size, hash and description of a plan."""
        return cls.create(name, plan.bytes, plan.layout_hash, plan.description, generation)

    @classmethod
    def attach(cls, name: str, layout_hash: int | None, *, writable: bool) -> Self:
        """Map an existing segment; None takes any layout (for looking at, not for working with)."""
        _refuse_name(name)
        try:
            handle = posix_ipc.SharedMemory(name, read_only=not writable)
        except posix_ipc.ExistentialError as gone:
            raise SegmentError(f"segment {name} does not exist: start the instance that creates it first") from gone
        except posix_ipc.PermissionsError as refused:
            raise SegmentError(
                f"segment {name} cannot be opened ({refused}): it belongs to its creator's user; run as that user"
            ) from refused
        try:
            header = _checked_header(name, handle.fd, layout_hash)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(handle.fd, header[H_PAYLOAD] + header[H_SIZE], access=access)
        finally:
            handle.close_fd()
        return cls(name, mapping, header)

    def planned(self, plan: Plan, part: str) -> Region:
        """The region that a plan gives to one of its parts."""
        return self.part(plan.offsets[part], plan.sizes[part])

    def close(self) -> None:
        """Unmap as far as no array or view of this memory is alive; those unmap it when they go."""
        for view in (self.words, self.bytes, self._whole):
            with contextlib.suppress(BufferError):
                view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()

    def unlink(self) -> None:
        """Remove the name; mappings live on until they are closed."""
        _unlink(self.name)


class InstanceLock:
    """The file by which an instance is known to be alive, and what it owns.

    Each `record` is one appended JSON line: a kill in the middle leaves a torn last line, and what
    that line would have named does not exist yet.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self.info: dict[str, Any] = {"segments": []}

    @classmethod
    def acquire(cls, run_dir: str, instance: str) -> Self:
        """Become `instance`; refused while another process tree is; leftovers are removed."""
        if not instance or "/" in instance:
            raise SegmentError(f"instance {instance!r}: the name must be a plain file name")
        path = os.path.join(run_dir, instance + INSTANCE_SUFFIX)
        for _ in range(ACQUIRE_TRIES_MAX):
            try:
                os.makedirs(run_dir, mode=0o700, exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, SEGMENT_MODE)
            except OSError as refused:
                raise SegmentError(
                    f"instance {instance}: {path} cannot be written ({refused.strerror}): "
                    f"choose a run directory that this user may write"
                ) from refused
            if not _take(descriptor):
                os.close(descriptor)
                raise SegmentError(
                    f"instance {instance} is running (its lock {path} is held): "
                    f"stop it, or choose another instance name"
                )
            if _is_at(descriptor, path):
                for name in _recorded(descriptor)["segments"]:
                    _unlink(name)
                os.ftruncate(descriptor, 0)
                return cls(path, descriptor)
            os.close(descriptor)  # a sweep removed the file between open and lock
        raise SegmentError(f"instance {instance}: {path} is removed again and again; retry later")

    def record(self, **info: object) -> None:
        """Write facts behind the earlier ones; `segments` adds names, other keys replace."""
        _merge(self.info, info)
        os.write(self._descriptor, json.dumps(info).encode() + b"\n")

    def release(self) -> None:
        """Remove the file and let go of the lock; children that hold it must be gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        os.close(self._descriptor)


class Recorded(NamedTuple):
    """What an instance's file says; not whether the instance still runs."""

    name: str
    info: dict[str, Any]
    written_at: float  # wall clock


def recorded(run_dir: str) -> list[Recorded]:
    """All instances that have a file; read without a lock, so a line that is being written may be missing."""
    found: list[Recorded] = []
    for path in _instance_files(run_dir):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                name = os.path.basename(path).removesuffix(INSTANCE_SUFFIX)
                found.append(Recorded(name, _recorded(descriptor), os.fstat(descriptor).st_mtime))
            finally:
                os.close(descriptor)
    return found


def sweep(run_dir: str) -> list[str]:
    """Unlink the segments and files of all instances whose lock is free; what was removed. Other users' are left alone."""
    removed: list[str] = []
    try:
        paths = list(_instance_files(run_dir))
    except OSError:  # another user's, or no directory: `acquire` tells whoever wants to be an instance there
        return removed
    for path in paths:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            descriptor = os.open(path, os.O_RDWR)
            try:
                if _take(descriptor) and _is_at(descriptor, path):
                    names = _recorded(descriptor)["segments"]
                    removed += [name for name in names if _unlink(name)]
                    os.unlink(path)
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed


def _refuse_name(name: str) -> None:
    if not SEGMENT_NAME.fullmatch(name):  # posix_ipc crashes on a name with a zero byte
        raise SegmentError(f"segment {name!r}: a name is '/' and 1 to 254 letters, digits, '.', '_' or '-'")


def _reserve(name: str, total: int) -> mmap.mmap:
    _refuse_name(name)
    try:
        handle = posix_ipc.SharedMemory(name, posix_ipc.O_CREX, mode=SEGMENT_MODE)
    except posix_ipc.ExistentialError as exists:
        raise SegmentError(
            f"segment {name} exists already: another instance uses this name, or one died; "
            f"choose another instance name, or sweep the run directory"
        ) from exists
    except (posix_ipc.Error, OSError) as refused:
        raise SegmentError(
            f"segment {name} cannot be created ({refused}): {SHM_DIRECTORY} must be writable"
        ) from refused
    try:
        os.posix_fallocate(handle.fd, 0, total)
        return mmap.mmap(handle.fd, total)
    except (OSError, OverflowError, ValueError, MemoryError) as failure:
        _unlink(name)
        raise SegmentError(_does_not_fit(name, total, failure)) from failure
    finally:
        handle.close_fd()


def footprint(plan: Plan) -> int:
    """Bytes of memory that a segment of this plan takes, in whole pages."""
    return aligned(HEADER_BYTES + aligned(len(plan.description)) + aligned(plan.bytes), mmap.PAGESIZE)


def check_room(needs: Mapping[str, int], fewer: str) -> None:
    """Before the first segment is made: raises SegmentError unless all of them fit. `fewer` says how to need less."""
    disk = os.statvfs(SHM_DIRECTORY)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    total = sum(needs.values())
    if total <= free or not size:  # a tmpfs without a limit says that it has no size
        return
    enough = aligned(round(1.1 * (total + size - free)), 16 << 20) >> 20
    parts = ", ".join(f"{part} {_mib(need)}" for part, need in needs.items())
    raise SegmentError(
        f"shared memory does not fit into {SHM_DIRECTORY}: {_mib(total)} needed ({parts}), {_mib(free)} free of {_mib(size)}; "
        f"give it {enough} MiB (Kubernetes: an emptyDir with medium: Memory and sizeLimit: {enough}Mi mounted on {SHM_DIRECTORY}, "
        f"which counts towards the container's memory; docker run --shm-size={enough}m), or {fewer}"
    )


def _does_not_fit(name: str, total: int, failure: Exception) -> str:
    reason = errno.errorcode.get(getattr(failure, "errno", None) or 0, type(failure).__name__)
    disk = os.statvfs(SHM_DIRECTORY)
    free = disk.f_bavail * disk.f_frsize
    return (
        f"segment {name} does not fit into {SHM_DIRECTORY} ({reason}): {_mib(total)} needed, "
        f"{_mib(free)} free; give it more (Kubernetes: an emptyDir with medium: Memory and a "
        f"larger sizeLimit on {SHM_DIRECTORY}; docker run --shm-size) or configure a smaller table "
        f"or index"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _check(header: list[int]) -> int:
    text = ",".join(str(value) for value in header[H_LAYOUT:H_CHECK])
    return zlib.crc32(text.encode())


def _checked_header(name: str, descriptor: int, layout_hash: int | None) -> tuple[int, ...]:
    raw = os.pread(descriptor, HEADER_BYTES, 0)
    if len(raw) < HEADER_BYTES:
        raise SegmentError(f"segment {name} has no header: its creator died early; sweep it")
    header = list(memoryview(raw).cast("Q"))[: H_CHECK + 1]
    if header[H_MAGIC] != MAGIC:
        raise SegmentError(f"segment {name} is not one of ours, or unfinished: magic differs")
    if header[H_CHECK] != _check(header):
        raise SegmentError(f"segment {name}: the header's check differs; create it anew")
    if layout_hash is not None and header[H_LAYOUT] != layout_hash:
        raise SegmentError(
            f"segment {name} has layout {header[H_LAYOUT]:016x}, this process expects "
            f"{layout_hash:016x}: both must run the same version and configuration"
        )
    actual = os.fstat(descriptor).st_size
    if actual != header[H_PAYLOAD] + header[H_SIZE]:
        raise SegmentError(
            f"segment {name} has {actual} bytes, its header says {header[H_PAYLOAD] + header[H_SIZE]}: create it anew"
        )
    return tuple(header)


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
        with contextlib.suppress(ValueError):  # a torn last line names nothing that exists
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


def _unlink(name: str) -> bool:
    if not SEGMENT_NAME.fullmatch(name):
        return False
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True
