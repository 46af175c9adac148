"""Capacity limits per owner: how many blocks the prefix index holds for an owner, and which entries are removed beyond its capacity.

An owner's *capacity* is the number of blocks that its cache holds. The index may hold 5 % more. If it holds more than that, the writer
removes the oldest entries until the index holds 5 % less than the capacity. So the index follows the eviction in the owner's cache. An
entry stands for one block, or for `WIDE_BLOCKS` blocks if its hash has the bit WIDE, because the writer does not store every block of a
long prompt.

To find an owner's oldest entries, the code must scan the whole table (0.6 ms for half a million entries). So one scan lists the entries
of all owners that are nearly at their limit. Later removals take seven eighths of an owner's entries from its list, oldest first,
except entries refreshed since the scan.

The index writer keeps these counts and lists in its own memory. Its successor counts the entries again.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from compiled import kernels

OWNER_BITS: Final = 16
OWNER_IDS: Final = 1 << OWNER_BITS
# The lowest bit of a hash that is part of its tag: 1 for a hash that stands for `WIDE_BLOCKS` blocks.
WIDE: Final = 1 << OWNER_BITS
WIDE_BLOCKS: Final = 4
SLACK: Final = 20  # how far the held blocks may deviate from the capacity: a twentieth of the capacity
AGE_MASK: Final = (1 << 32) - 1
UNLIMITED: Final = 1 << 62
# The most owners that one call of `over` returns: each may need a scan of the whole table, and the writer has other work.
OVER_MAX: Final = 4
# Share of an owner's entries that a scan lists; the youngest eighth can wait for the next scan.
LISTED_SHARE: Final = 7 / 8
NEARLY: Final = 3  # an owner is nearly at its limit if one 2**NEARLY-th more would exceed what a removal leaves
SHORT_LIST: Final = 4  # a list is short if the owner has this many times more blocks
SCANNED_MAX: Final = 1 << 21  # entries that are scanned at a time

Entries = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]

_OWNER_MASK: Final = np.uint64(OWNER_IDS - 1)
_WIDE_SHIFT: Final = np.uint64(OWNER_BITS)
_ONE: Final = np.uint64(1)
_BLOCKS: Final = np.array([1, WIDE_BLOCKS], dtype=np.int64)


def blocks_of(entries: Entries) -> Places:
    """Returns the number of blocks that each entry represents: int64, shape of `entries`."""
    return _BLOCKS[((entries >> _WIDE_SHIFT) & _ONE).view(np.int64)]


class Listed:
    """The entries of one owner, as one scan found them."""

    def __init__(self, keys: Entries, since: int) -> None:
        """`keys`: what the kernel `owned` returns for one owner. `since`: the age at the time of the scan."""
        self._keys: Entries | None = keys
        self.since = since
        self.places: npt.NDArray[np.uint32] = np.empty(0, dtype=np.uint32)  # oldest first
        self.first = 0  # the index in `places` of the entry to remove next

    def sort(self, least: int) -> None:
        """Fills `places` at the first call: with LISTED_SHARE of the entries, but with at least `least` entries, if there are so many."""
        if self._keys is not None:
            self._keys.sort()
            count = max(int(len(self._keys) * LISTED_SHARE), least)
            self.places = self._keys[:count].astype(np.uint32)  # the lower half of each key
            self._keys = None

    def left(self) -> int:
        """Returns how many entries of the list are left, at most."""
        return len(self.places) - self.first if self._keys is None else len(self._keys)


class Capacity:
    """Counts the blocks of each owner, and finds the entries that exceed an owner's limit.

    Takes the entries (uint64) and ages (uint32) of an index, both as flat arrays.
    """

    def __init__(self, entries: Entries, ages: npt.NDArray[np.uint32]) -> None:
        self._entries = entries
        self._ages = ages
        self._held = np.zeros(OWNER_IDS, dtype=np.int64)  # zeros take no memory until they are written
        # owner -> number of blocks above which it loses its oldest entries; filled for ids below `_top`
        self._most = np.zeros(OWNER_IDS, dtype=np.int64)
        self._kept = np.zeros(OWNER_IDS, dtype=np.int64)  # the number of blocks that remain after the removal
        self._top = 0  # all owners with a limit have lower ids
        self._over_max = max(1, min(OVER_MAX, SCANNED_MAX // len(entries)))
        self._listed: dict[int, Listed] = {}
        self.unchecked = True  # whether owners that the kernel has not named may exceed their limits

    def count_present(self) -> int:
        """Counts the blocks of the entries that the table already has. Call this before any other method. Returns the number of entries."""
        used = self._entries[self._entries != 0]
        self.add(used)
        return len(used)

    def held(self, owner: int) -> int:
        """Returns the number of blocks that the index holds for this owner."""
        return int(self._held[owner])

    def limit(self, owner: int, blocks: int) -> None:
        """Sets the owner's capacity in blocks; 0 means that the capacity is unknown, so there is no limit."""
        if owner >= self._top:
            self._most[self._top : owner] = UNLIMITED
            self._top = owner + 1
        self._most[owner] = blocks + blocks // SLACK if blocks else UNLIMITED
        self._kept[owner] = max(blocks - blocks // SLACK, 1)
        self.unchecked = True

    def add(self, entries: Entries) -> None:
        """Counts entries that the writer has stored. No entry may be 0."""
        counts = self._count(entries)
        self._held[: len(counts)] += counts
        self.unchecked = True

    @property
    def counts(self) -> Places:
        """Returns the number of blocks of each owner: int64, shape (OWNER_IDS,). A C kernel that writes entries updates these numbers in
        place.
        """
        return self._held

    @property
    def limits(self) -> Places:
        """Returns the number of blocks above which an owner loses its oldest entries: int64, shape (OWNER_IDS,); 0 if not known."""
        return self._most

    def remove(self, entries: Entries) -> None:
        """Subtracts entries that the writer has removed. No entry may be 0."""
        counts = self._count(entries)
        self._held[: len(counts)] -= counts

    def leave(self, owner: int) -> None:
        """Drops the limit of an owner that has left."""
        self._most[owner] = UNLIMITED
        self._listed.pop(owner, None)

    def clear(self, owner: int) -> None:
        """Sets the owner's count to 0, because no entry of the owner is left."""
        self._held[owner] = 0

    def over(self) -> list[int]:
        """Returns at most OVER_MAX owners that exceed their limits: those that exceed them by the largest factor."""
        held, most = self._held[: self._top], self._most[: self._top]
        owners: list[int] = np.flatnonzero(held > most).tolist()
        self.unchecked = bool(owners)
        if len(owners) > self._over_max:
            owners.sort(key=lambda owner: int(most[owner]) / int(held[owner]))
        return owners[: self._over_max]

    def free_surplus(self, owner: int, age: int) -> int:
        """Frees an owner's oldest entries until 5 % less than its capacity is left. Returns how many it freed. `age`: the current age."""
        listed = self._listed.get(owner)
        freed = 0 if listed is None else self._free_listed(owner, listed, listed.since)
        if self._held[owner] > self._kept[owner]:
            self._list(owner, age)
            freed += self._free_listed(owner, self._listed[owner], age + 1)
        return freed

    def _free_listed(self, owner: int, listed: Listed, before: int) -> int:
        """Frees listed entries that were last inserted or refreshed before the age `before`. Returns how many it freed."""
        excess = int(self._held[owner] - self._kept[owner])
        listed.sort(excess)
        freed, listed.first = kernels.free_oldest(self._entries, self._ages, self._held, listed.places, listed.first, before, owner, excess)
        return freed

    def _list(self, owner: int, age: int) -> None:
        """Lists the entries of this owner, and of all others that are nearly at their limits and have a short list or no list."""
        held, most, kept = self._held[: self._top], self._most[: self._top], self._kept[: self._top]
        near: list[int] = np.flatnonzero((held + (held >> NEARLY) > kept) & (most < UNLIMITED)).tolist()
        owners = [other for other in near if other == owner or self._is_short(other)]
        keys, ends = kernels.owned(self._entries, self._ages, owners, age)
        begin = 0
        for other, end in zip(owners, ends.tolist(), strict=True):
            self._listed[other] = Listed(keys[begin:end].copy(), age & AGE_MASK)
            begin = end

    def _is_short(self, owner: int) -> bool:
        listed = self._listed.get(owner)
        return listed is None or listed.left() * SHORT_LIST < int(self._held[owner])

    def _count(self, entries: Entries) -> Places:
        owners = (entries & _OWNER_MASK).view(np.int64)
        return np.bincount(owners, weights=blocks_of(entries)).astype(np.int64)
