"""Gives back the memory that a process maps from programs and libraries and needs only while it starts.

Imports run most code of a library once, and read its constants. These pages take about 20 MiB, of which a picker at work touches a third. A
page that is given back stays in the page cache: if it is needed again, the kernel maps it again, with its neighbours, in about a
microsecond. Only pages that no process can have written are given back, because a written page has no other copy.

    parent   `note` after all imports, before the first fork: finds the mappings that nobody has written or can write
    all      `give_back` after the start: only mappings that `note` has found, and that are still the same
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MAPS: Final = Path("/proc/self/maps")
SMAPS: Final = Path("/proc/self/smaps")
READ_ONLY: Final = ("r--p", "r-xp")
MADV_DONTNEED: Final = 4
AFTER_START_S: Final = 2.0  # when a child gives back: its first scrapes and streams have run their code by then

_unwritten: frozenset[str] = frozenset()  # lines of MAPS


def note() -> None:
    """Notes which mappings may be given back, in this process and in those that it forks. If the kernel has no such list, notes none."""
    global _unwritten
    try:
        _unwritten = frozenset(unwritten(SMAPS.read_text()))
    except OSError:
        _unwritten = frozenset()


def give_back() -> None:
    """Unmaps the pages of the noted mappings. If the C library cannot do that, does nothing."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or not _unwritten:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in MAPS.read_text().splitlines():
        if line in _unwritten:
            start, end = (int(address, 16) for address in line.partition(" ")[0].split("-"))
            madvise(start, end - start, MADV_DONTNEED)


def unwritten(smaps: str) -> Iterator[str]:
    """Yields the head of each mapping of a file that is read-only and has no page of its own, such as one with relocated addresses."""
    head = ""
    for line in smaps.splitlines():
        if line.startswith("Anonymous:"):
            if head and line.split()[1] == "0":
                yield head
        elif not line.partition(" ")[0].endswith(":"):
            fields = line.split(maxsplit=5)
            is_file = len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)")
            head = line if is_file and fields[1] in READ_ONLY else ""
