"""How many CPUs this process may use: the default number of workers.

The smaller of the CPU affinity and the cgroup's CPU limit, rounded up; at least one. Both versions
of cgroups are read, each limit up to the root, since a parent group may be the tighter one.
"""

import math
import os
from pathlib import Path

from workers.cgroup import CGROUP_ROOT, OWN_CGROUPS, folders, text


def available(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int:
    """CPUs to plan with."""
    allowed = len(os.sched_getaffinity(0))
    limit = cgroup_limit(root, own)
    return max(1, allowed if limit is None else min(allowed, math.ceil(limit)))


def cgroup_limit(root: Path, own: Path) -> float | None:
    """CPUs that the tightest group allows, or None where nothing limits them."""
    limits = [limit for folder in folders("cpu", root, own) if (limit := _limit(folder)) is not None]
    return min(limits, default=None)


def _limit(folder: Path) -> float | None:
    """Quota over period; v2 has both in one file, v1 in two."""
    words = text(folder / "cpu.max").split()
    if not words:
        words = (text(folder / "cpu.cfs_quota_us") + " " + text(folder / "cpu.cfs_period_us")).split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # `max`, or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None
