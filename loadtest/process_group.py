"""CPU time and memory of a process group, as Linux counts them: what a picker costs with all its processes."""

import os
from collections.abc import Iterator
from pathlib import Path


def _members(group: int) -> Iterator[tuple[Path, list[str]]]:
    """(/proc/PID, the fields of its stat behind the name) of every live process of the group."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[2]) == group:
            yield stat.parent, fields


def cpu_seconds(group: int) -> float:
    """User and system time of the group's processes, reaped children included."""
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in _members(group))
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_mib(group: int) -> float:
    """Proportional set size: pages that processes share are counted once over the group."""
    kib = 0
    for process, _ in _members(group):
        try:
            lines = (process / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024
