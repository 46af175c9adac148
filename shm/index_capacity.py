"""Capacity limits per owner: how many blocks the prefix index holds for an owner, and which entries to remove beyond its capacity.

An owner's *capacity* is the number of blocks that its cache holds. The index may hold 5 % more. If it holds more than that, the oldest
entries are removed until it holds 5 % less than the capacity. So the index follows the eviction in the owner's cache. An entry counts
as one block, or as `WIDE_BLOCKS` if its hash says so, because the writer does not store every block of a long prompt.

To find an owner's oldest entries, the code must scan the whole table (1 ms for half a million entries). So one scan lists seven eighths
of the owner's entries, oldest first. Later removals take entries from that list first, except those refreshed since the scan.

The index writer keeps these counts and lists in its own memory. Its successor counts again. This module does not write to the table.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

OWNER_BITS: Final = 16
OWNER_IDS: Final = 1 << OWNER_BITS
# The lowest bit of a hash that is part of its tag: 1 for a hash that stands for `WIDE_BLOCKS` blocks.
WIDE: Final = 1 << OWNER_BITS
WIDE_BLOCKS: Final = 4
SLACK: Final = 20  # how far the held blocks may deviate from the capacity: a twentieth of it
AGE_MASK: Final = (1 << 32) - 1
UNLIMITED: Final = 1 << 62
# The most owners that one call of `over` returns: each may need a scan of the whole table, and the writer has other work.
OVER_MAX: Final = 4
# Share of an owner's entries that a scan lists; the youngest eighth can wait for the next scan.
LISTED_SHARE: Final = 7 / 8
SCANNED_MAX: Final = 1 << 21  # entries that are scanned at a time

Entries = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_OWNER_MASK: Final = np.uint64(OWNER_IDS - 1)
_WIDE_SHIFT: Final = np.uint64(OWNER_BITS)
_ONE: Final = np.uint64(1)
_BLOCKS: Final = np.array([1, WIDE_BLOCKS], dtype=np.int64)
_NOWHERE: Places = np.empty(0, dtype=np.int64)
_OWNER_STRIDE: Final = 4  # 16-bit words per entry; the lowest is the owner


def blocks_of(entries: Entries) -> Places:
    """The number of blocks that each entry represents: int64, shape of `entries`."""
    return _BLOCKS[((entries >> _WIDE_SHIFT) & _ONE).view(np.int64)]


class Capacity:
    """Counts the blocks of each owner, and finds the entries that exceed an owner's limit.

    Takes the entries (uint64) and ages (uint32) of an index, both as flat arrays.
    """

    def __init__(self, entries: Entries, ages: npt.NDArray[np.uint32]) -> None:
        self._entries = entries
        self._owners: npt.NDArray[Any] = entries.view(np.uint16)[::_OWNER_STRIDE]
        self._ages = ages
        self._held = np.zeros(OWNER_IDS, dtype=np.int64)  # zeros take no memory until they are written
        self._most = np.zeros(
            OWNER_IDS, dtype=np.int64
        )  # owner -> number of blocks above which it loses its oldest entries; filled for ids below `_top`
        self._kept = np.zeros(OWNER_IDS, dtype=np.int64)  # the number of blocks that remain after the removal
        self._top = 0  # all owners with a limit have lower ids
        self._over_max = max(1, min(OVER_MAX, SCANNED_MAX // len(entries)))
        # owner -> the places of its oldest entries in the table, and the age at which they were listed
        self._listed: dict[int, tuple[Places, int]] = {}

    def count_present(self) -> int:
        """Count the blocks of the entries that are in the table already.

        Call this before any other method. Return the number of entries.
        """
        used = self._entries[self._entries != 0]
        self.add(used)
        return len(used)

    def held(self, owner: int) -> int:
        """Blocks that the index holds for this owner."""
        return int(self._held[owner])

    def limit(self, owner: int, blocks: int) -> None:
        """Set the owner's capacity in blocks. 0 means unknown: there is no limit."""
        if owner >= self._top:
            self._most[self._top : owner] = UNLIMITED
            self._top = owner + 1
        self._most[owner] = blocks + blocks // SLACK if blocks else UNLIMITED
        self._kept[owner] = max(blocks - blocks // SLACK, 1)

    def add(self, entries: Entries) -> None:
        """Count entries that the writer has stored. None of them may be 0."""
        counts = self._count(entries)
        self._held[: len(counts)] += counts

    @property
    def counts(self) -> Places:
        """The number of blocks of each owner: int64, shape (OWNER_IDS,). A C kernel that writes entries updates it in place."""
        return self._held

    def remove(self, entries: Entries) -> None:
        """Subtract entries that the writer has removed. None of them may be 0."""
        counts = self._count(entries)
        self._held[: len(counts)] -= counts

    def leave(self, owner: int) -> None:
        """Drop the limit of an owner that has left."""
        self._most[owner] = UNLIMITED
        self._listed.pop(owner, None)

    def clear(self, owner: int) -> None:
        """Set the owner's count to 0, because none of its entries is left."""
        self._held[owner] = 0

    def over(self) -> list[int]:
        """Return owners that exceed their limit: at most OVER_MAX, those that exceed it by the largest factor."""
        held, most = self._held[: self._top], self._most[: self._top]
        exceeded = held > most
        if not exceeded.any():
            return []
        owners: list[int] = np.flatnonzero(exceeded).tolist()
        if len(owners) > self._over_max:
            owners.sort(key=lambda owner: int(most[owner]) / int(held[owner]))
        return owners[: self._over_max]

    def surplus(self, owner: int, age: int) -> Places:
        """Return the places in the table of the oldest entries by which the owner exceeds its limit. `age`: the current age.

        The caller must empty these places at once.
        """
        excess = int(self._held[owner] - self._kept[owner])
        listed, since = self._listed.pop(owner, (_NOWHERE, 0))
        freed = [_NOWHERE]
        while excess > 0 and len(listed):
            first, listed = listed[:excess], listed[excess:]  # check only as many places as may be needed
            old = (self._ages[first] - np.uint32(since)).view(np.int32) < 0
            taken, rest, excess = self._split(first[old & (self._owners[first] == owner)], excess)
            freed.append(taken)
            if len(rest):
                listed = np.concatenate((rest, listed))
        if excess > 0:
            oldest = self._oldest(owner, np.concatenate(freed), excess, age)
            taken, listed, excess = self._split(oldest, excess)
            freed.append(taken)
            since = age & AGE_MASK
        self._listed[owner] = listed, since
        return np.concatenate(freed)

    def _oldest(self, owner: int, without: Places, excess: int, age: int) -> Places:
        """Return the places of the owner's oldest entries, oldest first: LISTED_SHARE of all its entries, or `excess` if that is more.

        `without`: places to leave out. `age`: the current age.
        """
        mine = self._owners == owner
        mine[without] = False
        places = np.flatnonzero(mine)
        # Shift the ages so that the current age becomes the largest, even if the clock has wrapped.
        ages = self._ages[places] - np.uint32((age + 1) & AGE_MASK)
        count = max(int(len(places) * LISTED_SHARE), min(excess, len(places)))
        if count < len(places):
            older = ages.argpartition(count)[:count]
            places, ages = places[older], ages[older]
        return places[ages.argsort()]

    def _split(self, places: Places, excess: int) -> tuple[Places, Places, int]:
        """Split `places` after the first entries that together represent `excess` blocks.

        Return the places before the split, those after it, and by how many blocks the owner still exceeds its limit.
        """
        blocks = blocks_of(self._entries[places]).cumsum()
        cut = int(blocks.searchsorted(excess)) + 1
        if cut > len(blocks):
            return places, places[:0], excess - int(blocks[-1]) if len(blocks) else excess
        return places[:cut], places[cut:], 0

    def _count(self, entries: Entries) -> Places:
        owners = (entries & _OWNER_MASK).view(np.int64)
        return np.bincount(owners, weights=blocks_of(entries)).astype(np.int64)
