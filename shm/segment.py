"""Named shared memory: create and attach segments.

The creator reserves all memory of a segment before it is used. A write to a sparse segment on a full
/dev/shm would end the process by SIGBUS; a failed reservation is a `SegmentError` at start instead.
`check_room` checks all segments at once, before the first is created. The creator writes the magic of
the header last, so a process that attaches sees a complete header or gets an error.

This module does not know what the payload means, and restarts no process.
"""

import contextlib
import errno
import mmap
import os
import re
import weakref
import zlib
from collections.abc import Mapping
from typing import Any, Self

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
SEGMENT_NAME = re.compile(r"/[A-Za-z0-9_-][A-Za-z0-9._-]{0,253}")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

fence.check_machine()


class SegmentError(Exception):
    """Raised if a segment cannot be created or used. The text names the segment, the rule and the fix."""


class Region:
    """Gives access to a range of shared memory, without a copy, as bytes, as 8-byte words or as NumPy arrays."""

    def __init__(self, buffer: memoryview) -> None:
        self.bytes = buffer
        self.words: memoryview = buffer.cast("Q")

    @property
    def size(self) -> int:
        return self.bytes.nbytes

    def part(self, offset: int, size: int) -> "Region":
        """Returns a part of this region; offset and size are in bytes, multiples of 8. Raises ValueError if the part is not inside."""
        if offset < 0 or offset + size > self.bytes.nbytes:
            raise ValueError(f"part {offset}+{size} is outside a region of {self.bytes.nbytes} bytes")
        return Region(self.bytes[offset : offset + size])

    def array(self, dtype: npt.DTypeLike, offset_bytes: int, shape: int | tuple[int, ...]) -> npt.NDArray[Any]:
        """Returns a NumPy view of this memory. It is read-only if the segment is mapped read-only."""
        count = shape if isinstance(shape, int) else int(np.prod(shape))
        flat = np.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset_bytes)
        return flat.reshape(shape)


class Segment(Region):
    """Creates or attaches one named piece of shared memory. The region is its payload, which follows the header."""

    def __init__(self, name: str, descriptor: int, mapping: mmap.mmap, header: tuple[int, ...]) -> None:
        """`descriptor`: a descriptor of the shared memory, for uses after its name is gone. The segment closes the descriptor."""
        self.name = name
        self._descriptor = descriptor
        self._close_descriptor = weakref.finalize(self, os.close, descriptor)
        self.layout_hash = header[H_LAYOUT]
        self.generation = header[H_GENERATION]
        self._mapping = mapping
        self._whole = memoryview(mapping)
        start = header[H_PAYLOAD]
        self.description = bytes(self._whole[HEADER_BYTES:][: header[H_DESCRIPTION]])
        super().__init__(self._whole[start : start + header[H_SIZE]])

    @classmethod
    def create(cls, name: str, size: int, layout_hash: int, description: bytes = b"", generation: int = 1) -> Self:
        """Reserves and maps a new segment of `size` payload bytes: zeroed, writable, mode 0600. Raises SegmentError."""
        if size <= 0 or len(description) > DESCRIPTION_BYTES_MAX:
            raise SegmentError(f"segment {name}: the size must be above 0 and the description at most {DESCRIPTION_BYTES_MAX} bytes")
        size = aligned(size)
        start = HEADER_BYTES + aligned(len(description))
        descriptor, mapping = _reserve(name, start + size)
        header = [0, layout_hash, size, generation, start, len(description), 0]
        header[H_CHECK] = _check(header)
        mapping[HEADER_BYTES : HEADER_BYTES + len(description)] = description
        with memoryview(mapping) as whole, whole.cast("Q") as words:
            for index, value in enumerate(header):
                words[index] = value
            words[H_MAGIC] = MAGIC  # last: until then no process can attach
        return cls(name, descriptor, mapping, tuple(header))

    @classmethod
    def create_planned(cls, name: str, plan: Plan, generation: int = 1) -> Self:
        """Creates a segment with the size, hash and description of a plan. Raises SegmentError."""
        return cls.create(name, plan.bytes, plan.layout_hash, plan.description, generation)

    @classmethod
    def attach(cls, name: str, layout_hash: int | None, *, writable: bool) -> Self:
        """Maps an existing segment. `layout_hash` None accepts any layout, for tools that only read. Raises SegmentError."""
        _refuse_name(name)
        try:
            descriptor = _opened(name, read_only=not writable)
        except posix_ipc.ExistentialError as gone:
            raise SegmentError(f"segment {name} does not exist: start the instance that creates it first") from gone
        except (posix_ipc.Error, OSError) as refused:
            raise SegmentError(f"segment {name} cannot be opened ({refused}): run as the user that created it") from refused
        try:
            header = _checked_header(name, descriptor, layout_hash)
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapping = mmap.mmap(descriptor, header[H_PAYLOAD] + header[H_SIZE], access=access)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(name, descriptor, mapping, header)

    def private_copy(self) -> Region:
        """Maps the payload a second time, copy-on-write: no other process sees what this process writes into the copy.

        The system copies a page when this process first writes to it. Until then, the page shows what other processes write.
        """
        mapping = mmap.mmap(self._descriptor, len(self._mapping), access=mmap.ACCESS_COPY)
        start = len(mapping) - self.size
        return Region(memoryview(mapping)[start:])

    def planned(self, plan: Plan, part: str) -> Region:
        """Returns the region that a plan assigns to one of its parts."""
        return self.part(plan.offsets[part], plan.sizes[part])

    def is_truncated(self) -> bool:
        """Returns whether the segment has become shorter than its mapping, so that the next access may end this process by SIGBUS."""
        return self._mapping.size() < len(self._mapping)

    def is_removed(self) -> bool:
        """Returns whether the name is gone, so that no other process can attach."""
        return os.fstat(self._descriptor).st_nlink == 0

    def close(self) -> None:
        """Unmaps the memory. Arrays and views that are still alive keep it mapped until they are freed."""
        for view in (self.words, self.bytes, self._whole):
            with contextlib.suppress(BufferError):
                view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()
        self._close_descriptor()

    def unlink(self) -> None:
        """Removes the name. Existing mappings remain until they are closed."""
        unlink_segment(self.name)


def _refuse_name(name: str) -> None:
    if not SEGMENT_NAME.fullmatch(name):
        raise SegmentError(
            f"segment {name!r}: the name must be '/' and 1 to 254 letters, digits, '.', '_' or '-', and '.' is not the first of them"
        )


def _opened(name: str, flags: int = 0, *, read_only: bool = False) -> int:
    """Opens shared memory by its name. Returns the descriptor, which children inherit and other programs do not.

    Raises posix_ipc.Error and OSError.
    """
    descriptor: int = posix_ipc.SharedMemory(name, flags, mode=SEGMENT_MODE, read_only=read_only).fd
    return descriptor


def _reserve(name: str, total: int) -> tuple[int, mmap.mmap]:
    _refuse_name(name)
    try:
        descriptor = _opened(name, posix_ipc.O_CREX)
    except posix_ipc.ExistentialError as exists:
        raise SegmentError(
            f"segment {name} exists already: another instance uses this name, or left it when it died; "
            f"choose another instance name, or remove {SHM_DIRECTORY}{name} if no instance uses it"
        ) from exists
    except (posix_ipc.Error, OSError) as refused:
        raise SegmentError(f"segment {name} cannot be created ({refused}): {SHM_DIRECTORY} must be writable") from refused
    try:
        os.posix_fallocate(descriptor, 0, total)
        return descriptor, mmap.mmap(descriptor, total)
    except (OSError, OverflowError, ValueError, MemoryError) as failure:
        os.close(descriptor)
        unlink_segment(name)
        raise SegmentError(_does_not_fit(name, total, failure)) from failure


def footprint(plan: Plan) -> int:
    """Returns the memory that a segment of this plan takes, in bytes; a multiple of the page size."""
    return aligned(HEADER_BYTES + aligned(len(plan.description)) + aligned(plan.bytes), mmap.PAGESIZE)


def check_room(needs: Mapping[str, int], fewer: str) -> None:
    """Raises SegmentError unless all segments fit into /dev/shm.

    `needs`: name of a segment -> its size in bytes. `fewer`: text at the end of the error, which says how the user can reduce the
    sizes. Call this before the first segment is created.
    """
    disk = os.statvfs(SHM_DIRECTORY)
    free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    total = sum(needs.values())
    if total <= free or not size:  # a tmpfs without a limit reports size 0
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
        raise SegmentError(f"segment {name} has no header: its creator died early; start the instance again")
    header = list(memoryview(raw).cast("Q"))[: H_CHECK + 1]
    if header[H_MAGIC] != MAGIC:
        raise SegmentError(f"segment {name} was not created by this program, or is incomplete (wrong magic): start the instance again")
    if header[H_CHECK] != _check(header):
        raise SegmentError(f"segment {name}: the header's checksum is wrong; start the instance again")
    if layout_hash is not None and header[H_LAYOUT] != layout_hash:
        raise SegmentError(
            f"segment {name} has layout {header[H_LAYOUT]:016x}, this process expects "
            f"{layout_hash:016x}: creator and reader must run the same version and configuration"
        )
    actual = os.fstat(descriptor).st_size
    if actual != header[H_PAYLOAD] + header[H_SIZE]:
        raise SegmentError(
            f"segment {name} has {actual} bytes, its header says {header[H_PAYLOAD] + header[H_SIZE]}: start the instance again"
        )
    return tuple(header)


def unlink_segment(name: str) -> bool:
    """Removes the name of a segment. Returns whether the name existed."""
    if not SEGMENT_NAME.fullmatch(name):
        return False
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    except posix_ipc.PermissionsError as refused:
        raise PermissionError(errno.EACCES, str(refused), name) from refused
    return True
