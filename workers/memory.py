"""What a worker may use of memory, and when it makes way for a successor.

A container that runs out of memory is killed as a whole: with cgroup v2 Kubernetes has one process's excess end all of them.
So a worker that has outgrown its share leaves by itself, well below the container's limit, and loses no stream.

    limit    80 % of the cgroup's limit, divided among the workers and one more (the supervisor, and a successor that runs
             beside the worker it follows); the tightest group up to the root, of both versions of cgroups
    usage    the proportional set: private pages, and of shared ones this process's part
    turn     one worker at a time: it says in its lane that it wishes to leave, looks again later, and gives way to a lower seat
             that wishes the same. Each says so before it looks, so that of two at least one sees the other

What this does not do: leave (`workers.drain`), or choose a successor's seat (`workers.restart`).
"""

import ctypes
import enum
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from workers.cgroup import CGROUP_ROOT, OWN_CGROUPS, folders, text

LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")  # of version 2, of version 1
STATM = Path("/proc/self/statm")
ROLLUP = Path("/proc/self/smaps_rollup")
UNLIMITED = 1 << 60  # version 1 says so by the largest number of pages
SHARE = 0.8
LOOK_S = 2.0
AGE_MIN_S = 60.0  # of a worker that leaves: a need that a successor has as well ends nothing
TRIM_EVERY_S = 60.0


class Leaving(enum.IntEnum):
    """What a worker says in its lane, as the gauge `leaving`."""

    STAYS = 0
    WISHES = 1  # it is over its limit and waits for its turn
    LEAVES = 2  # it will accept no more


def share(given: int | None, limit: int | None, workers: int) -> int:
    """Bytes that one of so many workers may use; 0: as many as there are. `given` by a flag, `limit` of the cgroup."""
    if given is not None:
        return given
    return int(SHARE * limit / (workers + 1)) if limit is not None else 0


def cgroup_limit(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int | None:
    """Bytes that the tightest group allows, or None where nothing limits them."""
    files = (folder / name for folder in folders("memory", root, own) for name in LIMIT_FILES)
    limits = [limit for file in files if (limit := _number(file)) is not None]
    return min((limit for limit in limits if limit < UNLIMITED), default=None)


class Usage:
    """How much this process uses. The exact figure costs a walk through its page tables, so it is asked for only near a limit."""

    def __init__(self, statm: Path = STATM, rollup: Path = ROLLUP, page: int = os.sysconf("SC_PAGE_SIZE")) -> None:
        self._statm, self._rollup, self._page = statm, rollup, page
        self._resident_enough = 0  # the resident size up to which the exact figure cannot be over the limit

    def over(self, limit: int) -> int:
        """The bytes used if they are more than `limit`, else 0."""
        resident = int((text(self._statm).split() or ("0", "0"))[1]) * self._page
        if resident <= max(limit, self._resident_enough):
            return 0
        exact = self._proportional(resident)
        if exact > limit:
            return exact
        self._resident_enough = resident + limit - exact
        return 0

    def _proportional(self, resident: int) -> int:
        """The kernel may be built without that file; resident pages are never fewer."""
        for line in text(self._rollup).splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
        return resident


class Watch:
    """Whether this worker is to leave: asked every `LOOK_S`, it says in the lane what it is up to."""

    def __init__(
        self,
        seat: int,
        *,
        now: float,
        over: Callable[[int], int],
        trim: Callable[[], None],
        say: Callable[[Leaving], None],
        others: Callable[[], Mapping[int, int]],
    ) -> None:
        """`others`: what the other serving workers say, by seat."""
        self._seat = seat
        self._born = now
        self._trimmed = now
        self._over, self._trim, self._say, self._others = over, trim, say, others
        self._state = Leaving.STAYS

    def look(self, now: float, limit: int) -> int:
        """The bytes used if it is to leave now because of them, else 0."""
        used = self._over(limit) if limit else 0
        if used and now - self._trimmed >= TRIM_EVERY_S:
            self._trimmed = now
            self._trim()
            used = self._over(limit)
        if not used or now - self._born < AGE_MIN_S:
            self._become(Leaving.STAYS)
            return 0
        first = min((seat for seat, said in self._others().items() if said), default=None)
        if self._state is Leaving.STAYS:
            if first is None:
                self._become(Leaving.WISHES)
        elif first is None:
            self._become(Leaving.LEAVES)
            return used
        elif first < self._seat:
            self._become(Leaving.STAYS)
        return 0

    def _become(self, state: Leaving) -> None:
        if state is not self._state:
            self._state = state
            self._say(state)


def trim() -> None:
    """Give back to the system what was freed: it may be all that is too much."""
    gc.collect()
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back is not None:
        give_back(0)


def _number(file: Path) -> int | None:
    try:
        return int(text(file))
    except ValueError:  # `max`, or no such file
        return None
