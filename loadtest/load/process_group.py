"""Measures CPU time and memory of a process group from /proc: what a picker costs, in total and by process."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Member(NamedTuple):
    """A live process: its folder under /proc, its short name, and the fields of its stat file after the name."""

    folder: Path
    name: str
    fields: list[str]


def _members(group: int) -> Iterator[_Member]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, behind = stat.read_text().rpartition(")")
        except OSError:
            continue  # the process has just ended
        fields = behind.split()
        if int(fields[2]) == group:
            yield _Member(stat.parent, before.partition("(")[2], fields)


def cpu_seconds(group: int) -> dict[str, float]:
    """Returns CPU seconds (user and system) by process name, including the time of children that a process has reaped.

    Numbers at the end of names are left out, so that all workers are added up.
    """
    ticks: Counter[str] = Counter()
    for member in _members(group):
        ticks[member.name.rstrip("-0123456789 ")] += sum(map(int, member.fields[11:15]))
    rate = os.sysconf("SC_CLK_TCK")
    return {name: spent / rate for name, spent in ticks.items()}


def memory_mib(group: int) -> float:
    """Returns the sum of the proportional set sizes in MiB. Pages that processes of the group share are counted once."""
    kib = 0
    for member in _members(group):
        try:
            lines = (member.folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kib / 1024
