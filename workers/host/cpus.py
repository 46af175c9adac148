"""The number of CPUs that this process may use, and the default number of workers.

The number of CPUs is the smaller of the CPU affinity and the cgroup's CPU limit, rounded up, and at least one. Both versions of cgroups
are read, with all limits up to the root, because a parent group may have the tighter one.
"""

import math
import os
from pathlib import Path

from workers.host.cgroup import CGROUP_ROOT, OWN_CGROUPS, folders, text

OTHERS = 1  # CPUs for the supervisor and what else runs beside the workers
WORKERS_MAX = 8  # more are seldom needed, and each takes 9 MiB


def available(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """The number of CPUs that this process may use; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    limit = cgroup_limit(root, own)
    return max(1, allowed if limit is None else min(allowed, math.ceil(limit)))


def default_workers(cpus: int) -> int:
    """One worker per CPU, except for OTHERS, but at least one and at most WORKERS_MAX."""
    return min(max(cpus - OTHERS, 1), WORKERS_MAX)


def cgroup_limit(root: Path, own: Path) -> float | None:
    """The number of CPUs that the tightest cgroup allows. None if there is no limit."""
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
