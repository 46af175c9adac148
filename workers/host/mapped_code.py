"""Gives back the memory that a process maps from programs and libraries and needs only while it starts.

Imports run most code of a library once, and read its constants. These pages take about 20 MiB, of which a picker uses only a third once it
has started. A page that is given back stays in the page cache: if it is needed again, the kernel maps it again, with its neighbours, in
about a microsecond. Only pages that no process can have written are given back, because a written page has no other copy.

    parent   `note` after all imports, before the first fork: finds the mappings that nobody has written or can write
    all      `give_back` after the start. Python never unloads a library, so the addresses stay valid, also in forked children
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SMAPS: Final = Path("/proc/self/smaps")
READ_ONLY: Final = ("r--p", "r-xp")
MADV_DONTNEED: Final = 4
AFTER_START_S: Final = 2.0  # when a child gives back: its first scrapes and streams have run their code by then

_mappings: tuple[tuple[int, int], ...] = ()  # (first address, bytes)


def note() -> None:
    """Notes which pages this process and its children may give back. Notes no page if the kernel lists no mappings."""
    global _mappings
    try:
        _mappings = tuple(unwritten(SMAPS.read_text()))
    except OSError:
        _mappings = ()


def give_back() -> None:
    """Unmaps the pages of the noted mappings. Does nothing if the C library cannot unmap pages."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:
        for address, size in _mappings:
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_DONTNEED)


def unwritten(smaps: str) -> Iterator[tuple[int, int]]:
    """Yields each mapping of a file that is read-only and has no page of its own, such as one with relocated addresses."""
    mapping: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if line.startswith("Anonymous:"):
            if mapping is not None and line.split()[1] == "0":
                yield mapping
        elif not line.partition(" ")[0].endswith(":"):
            fields = line.split(maxsplit=5)
            is_file = len(fields) == 6 and fields[5].startswith("/") and not fields[5].endswith(" (deleted)")
            start, end = (int(address, 16) for address in fields[0].split("-"))
            mapping = (start, end - start) if is_file and fields[1] in READ_ONLY else None
