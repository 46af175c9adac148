"""The limits of this process's cgroups, in version 1 and 2 of cgroups, and how many CPUs it may use.

The folders of all parent groups are read, too, because a parent may have the tighter limit. The number of CPUs is the smaller of the CPU
affinity and the CPU limit, rounded up, and at least one.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
OTHERS = 1  # CPUs for the supervisor and other programs
WORKERS_MAX = 8  # more workers are seldom needed, and each worker takes 9 MiB


def available(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """Returns the number of CPUs that this process may use; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    limit = cpu_limit(root, own)
    return max(1, allowed if limit is None else min(allowed, math.ceil(limit)))


def default_workers(cpus: int) -> int:
    """Returns one worker per CPU, minus OTHERS, but at least one and at most WORKERS_MAX."""
    return min(max(cpus - OTHERS, 1), WORKERS_MAX)


def cpu_limit(root: Path, own: Path) -> float | None:
    """Returns the number of CPUs that the tightest cgroup allows; None if there is no limit."""
    limits = [limit for folder in folders("cpu", root, own) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Returns how many CPUs one cgroup allows: its quota divided by its period. cgroup v2 has both in one file, v1 in two."""
    words = text(folder / "cpu.max").split()
    if not words:
        words = (text(folder / "cpu.cfs_quota_us") + " " + text(folder / "cpu.cfs_period_us")).split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", or there is no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def folders(controller: str, root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> Iterator[Path]:
    """Yields the folder of this process's cgroup for `controller` ("cpu", "memory"), then the folders of all its parents.

    A folder may be missing in this container.
    """
    for line in text(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:  # version 2 has one tree for all controllers
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield base / folder


def text(file: Path) -> str:
    """Returns the contents of a file; "" if it cannot be read."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
