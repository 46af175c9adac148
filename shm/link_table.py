"""The table of links: it maps an engine's block hash, the key, to the key of the index of held blocks, the link. It has one writer and a
fixed size.

    buckets  | bucket 0: 8 keys | bucket 1: 8 keys | ...      one u64 each, 0 = empty
    links    | link of key 0 | ...                            one u64 each
    metas    | owner: 16 bits | held in tier 0: 8 bits | ... | tier 5: 8 bits |   one u64 each

- An entry takes 24 bytes. A key has two buckets, which its lower and its upper half determine, and goes to the emptier bucket. If both are
  full, a key in one of them moves to its own other bucket. So nine tenths of the table can be used before `store` refuses the first key.
- A tier is a kind of memory in which a model server caches blocks, such as GPU memory or host memory. The table counts the copies of
  a block in each tier.
- A key mixes the engine's hash with the owner, because two engines may use one hash for different blocks.
- The table lies in shared memory only so that a successor of its writer can go on. No other process reads it.
- Entries of owners that are not live are garbage. They are treated as empty, and `sweep_step` clears them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.layout import WORD, Layout, aligned
from shm.segment import Ints, Region

Hashes = npt.NDArray[np.uint64]

WAYS = 8
TIERS = 6
COUNT_BITS = 8
COUNT_MAX = (1 << COUNT_BITS) - 1
OWNER_BITS = 16
ENTRY_BYTES = 3 * WORD

_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1
_OWNER_MASK = (1 << OWNER_BITS) - 1
_SPREAD = 0x9E3779B97F4A7C15
_OWNER_SPREAD = 0xD6E8FEB86659FD93
_NONE = -1


class LinkSchema(Layout):
    """Lays out the table for a number of entries, rounded up to whole buckets."""

    def __init__(self, entries: int) -> None:
        self.buckets = max(1, -(-entries // WAYS))
        self.entries = self.buckets * WAYS
        self.bytes = aligned(self.entries * ENTRY_BYTES)
        super().__init__("links", "links 1", TIERS, entries=self.entries)


class Links(NamedTuple):
    """Holds some entries of the table as columns of equal length. `places`: where each entry is, counted from key 0 of bucket 0."""

    places: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint64]
    links: npt.NDArray[np.uint64]
    metas: npt.NDArray[np.uint64]


def owners_of(links: Links) -> Ints:
    """Returns the owner of each entry."""
    return (links.metas & np.uint64(_OWNER_MASK)).view(np.int64)


def held_in(links: Links, tier: int) -> npt.NDArray[np.bool_]:
    """Returns whether each entry's block is held in this tier."""
    counts: npt.NDArray[np.uint64] = links.metas >> np.uint64(OWNER_BITS + tier * COUNT_BITS) & np.uint64(COUNT_MAX)
    held: npt.NDArray[np.bool_] = counts != 0
    return held


def chosen(links: Links, which: npt.NDArray[np.bool_]) -> Links:
    """Returns the entries that `which` selects."""
    return Links(links.places[which], links.keys[which], links.links[which], links.metas[which])


class LinkTable:
    """Reads and writes the table. `live`: uint8, one per owner id; 1 says that the entries of that owner are valid."""

    def __init__(self, schema: LinkSchema, region: Region, live: npt.NDArray[np.uint8]) -> None:
        size = schema.entries
        self.schema = schema
        self._buckets = schema.buckets
        self._keys = region.words[:size]
        self._links = region.words[size : 2 * size]
        self._metas = region.words[2 * size : 3 * size]
        self._all: npt.NDArray[np.uint64] = region.array(np.uint64, 0, (3, size))
        self._live = live
        self._cursor = 0
        self.size = int(np.count_nonzero(self._all[0]))

    def link(self, hash_: int, owner: int) -> int | None:
        """Returns the link of a block that the owner holds or held, or None if the table does not know the block."""
        place = self._find(_mixed(hash_, owner), owner)
        return None if place == _NONE else self._links[place]

    def store(self, hashes: Hashes | Sequence[int], owner: int, tier: int, links: Hashes) -> tuple[Hashes, int]:
        """Counts one more copy of each block in a tier, and stores the blocks' links (one per hash).

        Returns the links of the blocks that the tier did not hold before, and the number of blocks for which the table has no room.
        """
        words = np.asarray(hashes, dtype=np.uint64)
        new, refused, added = kernels.store_links(self._all, self._live, words, owner, tier, links)
        self.size += added
        return new, refused

    def remove(self, hashes: Hashes | Sequence[int], owner: int, tier: int) -> tuple[Hashes, int, int]:
        """Counts one copy less of each block in a tier.

        Returns the links of the blocks that the tier does not hold any more, the number of blocks that the tier still holds, and the number
        of blocks of which it had no copy.
        """
        words = np.asarray(hashes, dtype=np.uint64)
        gone, held, unknown, removed = kernels.remove_links(self._all, self._live, words, owner, tier)
        self.size -= removed
        return gone, held, unknown

    def sweep_step(self, buckets: int) -> None:
        """Clears the entries of owners that are not live, in the next `buckets` buckets."""
        while buckets > 0:
            first = self._cursor
            steps = min(buckets, self._buckets - first)
            part = slice(first * WAYS, (first + steps) * WAYS)
            keys, metas = self._all[0, part], self._all[2, part]
            dead = np.flatnonzero((keys != 0) & (self._live[metas & np.uint64(_OWNER_MASK)] != 1))
            keys[dead] = 0
            self.size -= len(dead)
            self._cursor = (first + steps) % self._buckets
            buckets -= steps

    def copy(self) -> Links:
        """Returns the entries of live owners."""
        used = np.flatnonzero(self._all[0])
        used = used[self._live[self._all[2, used] & np.uint64(_OWNER_MASK)] == 1]
        return Links(used.astype(np.uint32), self._all[0, used], self._all[1, used], self._all[2, used])

    def load(self, links: Links) -> None:
        """Fills an empty table of the same size with what `copy` returned."""
        for row, column in enumerate(links[1:]):
            self._all[row, links.places] = column
        self.size = len(links.places)

    def clear(self) -> None:
        """Empties the whole table."""
        self._all[0] = 0
        self.size = 0

    def _find(self, key: int, owner: int) -> int:
        keys = self._keys
        for first in (((key & _HALF) * self._buckets >> 32) * WAYS, ((key >> 32) * self._buckets >> 32) * WAYS):
            bucket = keys[first : first + WAYS].tolist()
            if key in bucket:
                place = first + bucket.index(key)
                if self._metas[place] & _OWNER_MASK == owner:
                    return place
        return _NONE


def _mixed(hash_: int, owner: int) -> int:
    """Returns the key of an engine's hash. Keys are well spread over 64 bits, never 0, and differ between owners."""
    key = (hash_ ^ owner * _OWNER_SPREAD & _MASK) * _SPREAD & _MASK
    return (key ^ key >> 32) or 1
