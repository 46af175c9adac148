"""Limits the memory of a worker: decides when a worker makes room for a successor.

If a container runs out of memory, the kernel kills all its processes, because Kubernetes asks for this with cgroup v2. So a worker that
uses more than its share leaves by itself, well below the container's limit, and without losing a stream.

    limit    80 % of the cgroup's limit, divided by the number of workers plus one. The extra share is for the supervisor, and for a
             successor that runs while its predecessor drains. The tightest cgroup up to the root decides, in both versions of cgroups
    usage    the proportional set size (PSS): private pages, plus this process's part of shared pages
    turn     one worker leaves at a time. It publishes in its area that it wants to leave, checks the other areas later, and yields to a
             worker in a lower ordinal that also wants to leave. Each worker publishes before it checks, so one of two always sees the other

This module does not drain (`workers.worker.leaving`), and does not choose a successor's ordinal (`workers.process.restart`).
"""

import ctypes
import enum
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.host.cgroup import CGROUP_ROOT, OWN_CGROUPS, folders, text

LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # cgroup version 2, version 1
STATM = Path("/proc/self/statm")
ROLLUP = Path("/proc/self/smaps_rollup")
UNLIMITED = 1 << 60  # version 1 reports a number near 2**63 if there is no limit
SHARE = 0.8
LOOK_S = 2.0
AGE_MIN_S = 60.0  # a younger worker does not leave: if a new worker already needs this much memory, a restart does not help
TRIM_EVERY_S = 60.0
BURST_BYTES = 64 << 20
BURST_EVERY_S = 10.0
M_TRIM_THRESHOLD = -1  # of mallopt
M_MMAP_THRESHOLD = -3
KEEP_BLOCKS_UP_TO = 4 << 20
KEEP_AT_MOST = 16 << 20  # bytes of free memory at the end of the heap


class Leaving(enum.IntEnum):
    """The values of the gauge `leaving` in a worker's area."""

    STAYS = 0
    WAITS = 1  # the worker uses more than its limit, and waits for its turn to leave
    LEAVES = 2  # the worker accepts no more streams. The value stays after the process has ended if no successor follows
    DRAINS = 3  # the picker stops, and this worker ends together with all others


def share(configured: int | None, limit: int | None, workers: int) -> int:
    """Returns the bytes that one worker may use; 0 means no limit.

    `configured`: the value of --worker-memory-limit in bytes, or None if not set. `limit`: the cgroup's limit in bytes, or None
    without a limit.
    """
    if configured is not None:
        return configured
    return int(SHARE * limit / (workers + 1)) if limit is not None else 0


def cgroup_limit(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int | None:
    """Returns the limit of the tightest cgroup in bytes; None if there is no limit."""
    files = (folder / name for folder in folders("memory", root, own) for name in LIMIT_FILES)
    limits = [limit for file in files if (limit := _number(file)) is not None]
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


class MemoryUsage:
    """Measures the memory that this process uses.

    The exact figure (PSS) is read only near a limit, because the kernel walks the page tables for it.
    """

    def __init__(self, statm: Path = STATM, rollup: Path = ROLLUP, page: int = os.sysconf("SC_PAGE_SIZE")) -> None:
        self._statm, self._rollup, self._page = statm, rollup, page
        self._resident_enough = 0  # up to this resident size, the exact figure cannot exceed the limit

    def over(self, limit: int) -> int:
        """Returns the used bytes if they exceed `limit`, else 0."""
        resident = self.resident()
        if resident <= max(limit, self._resident_enough):
            return 0
        exact = self._proportional(resident)
        if exact > limit:
            return exact
        self._resident_enough = resident + limit - exact
        return 0

    def resident(self) -> int:
        """Returns the resident bytes, including shared pages."""
        return int((text(self._statm).split() or ("0", "0"))[1]) * self._page

    def _proportional(self, resident: int) -> int:
        """Returns the PSS in bytes. If the kernel has no file with it, returns `resident`, which is never smaller."""
        for line in text(self._rollup).splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return resident


class Bursts:
    """Returns memory to the system after a burst of large bodies. Otherwise the C library keeps freed blocks that lie between used ones.

    Call `look` every `LOOK_S`. A burst is over when the resident size has stopped growing.
    """

    def __init__(self, resident: Callable[[], int], trim: Callable[[], None], now: float) -> None:
        self._resident, self._trim = resident, trim
        self._last = self._floor = resident()
        self._trimmed = now - BURST_EVERY_S

    def look(self, now: float) -> None:
        """Trims if the process is `BURST_BYTES` larger than its smallest size since the last trim, at most every `BURST_EVERY_S`."""
        resident = self._resident()
        self._floor = min(self._floor, resident)
        over = resident - self._floor > BURST_BYTES and resident <= self._last
        if over and now - self._trimmed >= BURST_EVERY_S:
            self._trim()
            self._trimmed, self._floor = now, self._resident()
        self._last = resident


class MemoryWatch:
    """Decides whether this worker must leave. Call `look` every `LOOK_S`; it publishes the state in the worker's area."""

    def __init__(
        self,
        ordinal: int,
        *,
        now: float,
        over: Callable[[int], int],
        trim: Callable[[], None],
        say: Callable[[Leaving], None],
        others: Callable[[], Mapping[int, int]],
    ) -> None:
        """`over`: as `MemoryUsage.over`. `trim`: like the function of this module. `say`: publishes the state of this worker.

        `others`: returns ordinal -> state (`Leaving`) of the other serving workers.
        """
        self._ordinal = ordinal
        self._born = now
        self._trimmed = now
        self._over, self._trim, self._say, self._others = over, trim, say, others
        self._state = Leaving.STAYS

    def look(self, now: float, limit: int) -> int:
        """Returns the used bytes if this worker must leave now, else 0. `limit` is in bytes; 0 means no limit."""
        used = self._over(limit) if limit else 0
        if used and now - self._trimmed >= TRIM_EVERY_S:
            self._trimmed = now
            self._trim()
            used = self._over(limit)
        if not used or now - self._born < AGE_MIN_S:
            self._become(Leaving.STAYS)
            return 0
        first = min((ordinal for ordinal, state in self._others().items() if state), default=None)
        if self._state is Leaving.STAYS:
            if first is None:
                self._become(Leaving.WAITS)
        elif first is None:
            self._become(Leaving.LEAVES)
            return used
        elif first < self._ordinal:
            self._become(Leaving.STAYS)
        return 0

    def _become(self, state: Leaving) -> None:
        if state is not self._state:
            self._state = state
            self._say(state)


def trim() -> None:
    """Returns freed memory to the system. This alone may bring the process below its limit."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def _number(file: Path) -> int | None:
    try:
        return int(text(file))
    except ValueError:  # "max", or there is no such file
        return None


def keep_freed_memory() -> bool:
    """Makes glibc keep freed memory. Returns whether glibc accepted the settings. Does not change any other C library.

    By default, glibc returns freed blocks over 128 KiB to the kernel at once. Then every copy of a long prompt causes a page fault per
    4 KiB, and these faults take half of the CPU time of a 400 KB request. Children inherit the thresholds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEEP_BLOCKS_UP_TO) and mallopt(M_TRIM_THRESHOLD, KEEP_AT_MOST))
