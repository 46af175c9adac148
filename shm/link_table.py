"""The table of links, from an engine's block hashes to keys of the index of held blocks: flat, of fixed size, with one writer.

    buckets  | bucket 0: 8 keys | bucket 1: 8 keys | ...      one u64 each, 0 = empty
    links    | link of key 0 | ...                            one u64 each
    metas    | owner: 16 bits | held in tier 0: 8 bits | ... | tier 5: 8 bits |   one u64 each

- An entry takes 24 bytes. A key has two buckets, by its lower and its upper half, and goes to the emptier one. If both are full, one of
  their keys moves to its other bucket. So nine tenths of the table can be used before `store` refuses the first key.
- A tier is a kind of memory in which a model server caches blocks, such as GPU memory or host memory. The table counts the copies of
  a block in each tier.
- A key mixes the engine's hash with the owner, because two engines may use one hash for different blocks.
- The C kernels store and remove many blocks at once. Without them, the same is done here, block by block.
- The table lies in shared memory only so that a successor of its writer can go on. No other process reads it.
- Entries of owners that are not live are garbage. They count as empty, and `sweep_step` clears them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.layout import WORD, aligned, layout_hash
from shm.segment import Region

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


class LinkSchema:
    """Lays out the table for a number of entries, rounded up to whole buckets."""

    def __init__(self, entries: int) -> None:
        self.buckets = max(1, -(-entries // WAYS))
        self.entries = self.buckets * WAYS
        self.bytes = aligned(self.entries * ENTRY_BYTES)
        self.layout_hash = layout_hash("links 1", self.entries, TIERS)

    def describe(self) -> dict[str, Any]:
        return {"kind": "links", "entries": self.entries}


class Links(NamedTuple):
    """Holds some entries of the table as columns of equal length. `places`: where each entry is, counted from key 0 of bucket 0."""

    places: npt.NDArray[np.uint32]
    keys: npt.NDArray[np.uint64]
    links: npt.NDArray[np.uint64]
    metas: npt.NDArray[np.uint64]


def owners_of(links: Links) -> npt.NDArray[np.int64]:
    """Returns the owner of each entry."""
    return (links.metas & np.uint64(_OWNER_MASK)).view(np.int64)


def held_in(links: Links, tier: int) -> npt.NDArray[np.bool_]:
    """Whether each entry's block is held in this tier."""
    counts: npt.NDArray[np.uint64] = links.metas >> np.uint64(OWNER_BITS + tier * COUNT_BITS) & np.uint64(COUNT_MAX)
    held: npt.NDArray[np.bool_] = counts != 0
    return held


def chosen(links: Links, which: npt.NDArray[np.bool_]) -> Links:
    """Returns the entries that `which` selects."""
    return Links(links.places[which], links.keys[which], links.links[which], links.metas[which])


class LinkTable:
    """Reads and writes the table. `live`: uint8, one per owner id; 1 says that the entries of that owner count."""

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
        """Returns the link of a block that the owner holds or held. None: the table does not know the block."""
        place = self._find(_mixed(hash_, owner), owner)
        return None if place == _NONE else self._links[place]

    def store(self, hashes: Hashes | Sequence[int], owner: int, tier: int, links: Hashes) -> tuple[Hashes, int]:
        """Counts one more copy of each block in a tier, and stores the blocks' links (one per hash).

        Returns the links of the blocks that the tier did not hold before, and the number of blocks for which the table has no room.
        """
        words = np.asarray(hashes, dtype=np.uint64)
        if not kernels.NATIVE:
            return self.reference_store(words, owner, tier, links)
        new, refused, added = kernels.store_links(self._all, self._live, words, owner, tier, links)
        self.size += added
        return new, refused

    def remove(self, hashes: Hashes | Sequence[int], owner: int, tier: int) -> tuple[Hashes, int, int]:
        """Counts one copy less of each block in a tier.

        Returns the links of the blocks that the tier does not hold any more, the number of blocks that it still holds, and the number of
        blocks of which no copy was counted before.
        """
        words = np.asarray(hashes, dtype=np.uint64)
        if not kernels.NATIVE:
            return self.reference_remove(words, owner, tier)
        gone, held, unknown, removed = kernels.remove_links(self._all, self._live, words, owner, tier)
        self.size -= removed
        return gone, held, unknown

    def reference_store(self, hashes: Hashes, owner: int, tier: int, links: Hashes) -> tuple[Hashes, int]:
        """Computes `store` in Python, without the C kernel."""
        new, refused = [], 0
        for hash_, link in zip(hashes.tolist(), links.tolist(), strict=True):
            outcome = self._store_one(hash_, owner, tier, link)
            if outcome:
                new.append(link)
            refused += outcome is None
        return np.array(new, dtype=np.uint64), refused

    def reference_remove(self, hashes: Hashes, owner: int, tier: int) -> tuple[Hashes, int, int]:
        """Computes `remove` in Python, without the C kernel."""
        gone, held, unknown = [], 0, 0
        for hash_ in hashes.tolist():
            found = self._remove_one(hash_, owner, tier)
            if found is None:
                unknown += 1
            elif found[1]:
                gone.append(found[0])
            else:
                held += 1
        return np.array(gone, dtype=np.uint64), held, unknown

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

    def _store_one(self, hash_: int, owner: int, tier: int, link: int) -> bool | None:
        """Counts one more copy of a block. Returns whether it is the first copy in this tier, or None if the table has no room."""
        key = _mixed(hash_, owner)
        place = self._find(key, owner)
        shift = OWNER_BITS + tier * COUNT_BITS
        if place == _NONE:
            place = self._room(key)
            if place == _NONE:
                return None
            self.size += self._keys[place] == 0
            self._metas[place] = owner | 1 << shift
            self._links[place] = link
            self._keys[place] = key
            return True
        meta = self._metas[place]
        held = meta >> shift & COUNT_MAX
        if held < COUNT_MAX:
            self._metas[place] = meta + (1 << shift)
        self._links[place] = link
        return held == 0

    def _remove_one(self, hash_: int, owner: int, tier: int) -> tuple[int, bool] | None:
        """Counts one copy less of a block. Returns its link, and whether this was the last copy in the tier; None: no copy was counted."""
        place = self._find(_mixed(hash_, owner), owner)
        if place == _NONE:
            return None
        shift = OWNER_BITS + tier * COUNT_BITS
        meta = self._metas[place]
        held = meta >> shift & COUNT_MAX
        if not held:
            return None
        meta -= 1 << shift
        self._metas[place] = meta
        if not meta >> OWNER_BITS:
            self._keys[place] = 0
            self.size -= 1
        return self._links[place], held == 1

    def _find(self, key: int, owner: int) -> int:
        keys = self._keys
        for first in (((key & _HALF) * self._buckets >> 32) * WAYS, ((key >> 32) * self._buckets >> 32) * WAYS):
            bucket = keys[first : first + WAYS].tolist()
            if key in bucket:
                place = first + bucket.index(key)
                if self._metas[place] & _OWNER_MASK == owner:
                    return place
        return _NONE

    def _room(self, key: int) -> int:
        """Returns a place for a new key in one of its two buckets. Returns _NONE if none can be made free.

        Takes an empty place of the emptier bucket. If both buckets are full, takes the place of an owner that is not live, or a place
        that `_moved` frees.
        """
        keys = self._keys
        one = ((key & _HALF) * self._buckets >> 32) * WAYS
        two = ((key >> 32) * self._buckets >> 32) * WAYS
        first, second = keys[one : one + WAYS].tolist(), keys[two : two + WAYS].tolist()
        empty_first, empty_second = first.count(0), second.count(0)
        if empty_first or empty_second:
            if empty_first >= empty_second:
                return one + first.index(0)
            return two + second.index(0)
        live, metas = self._live, self._metas
        for bucket in (one, two):
            for place in range(bucket, bucket + WAYS):
                if live[metas[place] & _OWNER_MASK] != 1:
                    return place
        return self._moved(one, two)

    def _moved(self, one: int, two: int) -> int:
        """Moves a key out of one of two full buckets to that key's other bucket. Returns the place that became empty.

        Returns _NONE if the other bucket of each key is full, too.
        """
        keys, links, metas = self._keys, self._links, self._metas
        for bucket in (one, two):
            for place in range(bucket, bucket + WAYS):
                key = keys[place]
                other = ((key & _HALF) * self._buckets >> 32) * WAYS
                if other == bucket:
                    other = ((key >> 32) * self._buckets >> 32) * WAYS
                row = keys[other : other + WAYS].tolist()
                if 0 in row:
                    to = other + row.index(0)
                    links[to], metas[to] = links[place], metas[place]
                    keys[to] = key
                    keys[place] = 0
                    return place
        return _NONE


def _mixed(hash_: int, owner: int) -> int:
    """Returns the key of an engine's hash. It is well spread over 64 bits, never 0, and differs between owners."""
    key = (hash_ ^ owner * _OWNER_SPREAD & _MASK) * _SPREAD & _MASK
    return (key ^ key >> 32) or 1
