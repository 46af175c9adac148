"""How many blocks the prefix index holds for each owner, and which leave when its cache takes no more.

An owner's cache takes a number of blocks, its *capacity*. The index may hold a twentieth more; then the oldest entries go, down to
a twentieth less, so that what it believes of an owner follows what the owner's own eviction leaves there. An entry counts for one
block, or for `WIDE_BLOCKS` where its hash says so: of long prompts not every block is stored.

To find an owner's oldest entries means to look at the whole table (1 ms for half a million entries). One look therefore lists the
older seven eighths of them, oldest first; the next time, those on the list that were not refreshed since go first.

Who: the index writer, in its own memory; a successor counts anew. What this does not do: write to the table.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

OWNER_BITS = 16
OWNER_IDS = 1 << OWNER_BITS
WIDE = 1 << OWNER_BITS  # the lowest bit of a hash that is part of its tag
WIDE_BLOCKS = 4
SLACK = 20  # a twentieth
AGE_MASK = (1 << 32) - 1
UNLIMITED = 1 << 62
OVER_MAX = 4  # owners at a time: each may cost a look at the whole table, and the writer has other work
LISTED_SHARE = 7 / 8  # the younger ones have time until the next look
LOOKED_MAX = 1 << 21  # entries at a time

Entries = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_OWNER_MASK = np.uint64(OWNER_IDS - 1)
_WIDE_SHIFT = np.uint64(OWNER_BITS)
_ONE = np.uint64(1)
_BLOCKS = np.array([1, WIDE_BLOCKS], dtype=np.int64)
_NOWHERE: Places = np.empty(0, dtype=np.int64)
_OWNER_LANES = 4  # 16-bit words in an entry; the lowest is the owner


def blocks_of(entries: Entries) -> Places:
    """How many blocks each entry stands for."""
    return _BLOCKS[((entries >> _WIDE_SHIFT) & _ONE).view(np.int64)]


class Capacity:
    """Counts by owner, over a table's entries and ages (both flat)."""

    def __init__(self, entries: Entries, ages: npt.NDArray[np.uint32]) -> None:
        self._entries = entries
        self._owners: npt.NDArray[Any] = entries.view(np.uint16)[::_OWNER_LANES]
        self._ages = ages
        self._held = np.zeros(OWNER_IDS, dtype=np.int64)
        self._most = np.full(OWNER_IDS, UNLIMITED, dtype=np.int64)  # from here on entries have to go
        self._kept = np.zeros(OWNER_IDS, dtype=np.int64)  # so many stay then
        self._top = 0  # no owner from here on is limited
        self._over_max = max(1, min(OVER_MAX, LOOKED_MAX // len(entries)))
        self._listed: dict[int, tuple[Places, int]] = {}  # owner -> oldest places, and when they were listed
        self.add(entries[entries != 0])

    def held(self, owner: int) -> int:
        """Blocks that the index holds for this owner."""
        return int(self._held[owner])

    def limit(self, owner: int, blocks: int) -> None:
        """The owner's cache takes so many blocks from now on; 0: nobody knows, all may stay."""
        self._most[owner] = blocks + blocks // SLACK if blocks else UNLIMITED
        self._kept[owner] = max(blocks - blocks // SLACK, 1)
        self._top = max(self._top, owner + 1)

    def add(self, entries: Entries) -> None:
        """These were written; none is empty."""
        counts = self._count(entries)
        self._held[: len(counts)] += counts

    def remove(self, entries: Entries) -> None:
        """These are gone; none is empty."""
        counts = self._count(entries)
        self._held[: len(counts)] -= counts

    def leave(self, owner: int) -> None:
        """The owner has gone: no limit any more."""
        self._most[owner] = UNLIMITED
        self._listed.pop(owner, None)

    def clear(self, owner: int) -> None:
        """None of its entries is left."""
        self._held[owner] = 0

    def over(self) -> list[int]:
        """Owners for whom too much is held: those with the most beyond their capacity, a few at a time."""
        held, most = self._held[: self._top], self._most[: self._top]
        found: list[int] = np.flatnonzero(held > most).tolist()
        if len(found) > self._over_max:
            found.sort(key=lambda owner: int(most[owner]) / int(held[owner]))
        return found[: self._over_max]

    def surplus(self, owner: int, age: int) -> Places:
        """The places of the owner's oldest entries that are too many; they are to be emptied at once. `age` is now."""
        excess = int(self._held[owner] - self._kept[owner])
        listed, since = self._listed.pop(owner, (_NOWHERE, 0))
        freed = [_NOWHERE]
        while excess > 0 and len(listed):
            first, listed = listed[:excess], listed[excess:]  # the rest of the list is looked at when its turn comes
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
        """The older LISTED_SHARE of its entries, and at least `excess` of them, oldest first."""
        mine = self._owners == owner
        mine[without] = False
        places = np.flatnonzero(mine)
        ages = self._ages[places] - np.uint32((age + 1) & AGE_MASK)  # the present is the highest, whatever has wrapped
        count = max(int(len(places) * LISTED_SHARE), min(excess, len(places)))
        if count < len(places):
            older = ages.argpartition(count)[:count]
            places, ages = places[older], ages[older]
        return places[ages.argsort()]

    def _split(self, places: Places, excess: int) -> tuple[Places, Places, int]:
        """As many of the first as stand for `excess` blocks, the others, and how many blocks are still too many."""
        blocks = blocks_of(self._entries[places]).cumsum()
        cut = int(blocks.searchsorted(excess)) + 1
        if cut > len(blocks):
            return places, places[:0], excess - int(blocks[-1]) if len(blocks) else excess
        return places[:cut], places[cut:], 0

    def _count(self, entries: Entries) -> Places:
        owners = (entries & _OWNER_MASK).view(np.int64)
        return np.bincount(owners, weights=blocks_of(entries)).astype(np.int64)
