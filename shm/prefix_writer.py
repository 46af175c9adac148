"""Writes the prefix index (`shm.prefix_index` has the layout). Only one process has a writer.

The C kernel inserts one entry after the other. Without it, NumPy inserts a batch in rounds; in one round a bucket takes one entry.

The writer drops an insert for an owner that is not live, because the sweep that frees a retired owner's entries could miss new entries.
`copy` and `load` preserve the index over a restart of the whole picker; `load` shifts all ages to the new clock.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.index_capacity import AGE_MASK, OWNER_IDS, Capacity
from shm.index_counts import Counts
from shm.index_search import News, far_buckets, found, reference_news
from shm.index_spill import orphaned_marks, relieve
from shm.named_blocks import owned_blocks, owners_of_runs
from shm.prefix_index import (
    BUCKETS,
    DROPPED,
    EVICTIONS,
    FAR_MARK,
    FIRST_OWNER,
    GONE,
    NEAR_OWNERS,
    NEAR_WAYS,
    OVER_CAPACITY,
    OWNER_FREE,
    OWNER_LIVE,
    OWNER_RETIRED,
    OWNER_WORD_MASK,
    SAME_TAG,
    TAKEN_BACK,
    WAYS,
    Hashes,
    IndexSchema,
    Ints,
    near_buckets,
)
from shm.segment import Region

ROUNDS_MAX: Final = 64
CHUNK: Final = 512  # blocks per round: few enough for the intermediate arrays to fit into the CPU's cache

Owners = int | npt.NDArray[Any]
Named = tuple[dict[int, int], bytes, bytes]  # the last arguments of `insert_named`, but the age
NO_NEWS: Final[News] = ([], [], b"")

_TAG_MASK: Final = np.uint64(~(OWNER_IDS - 1) & ((1 << 64) - 1))
_ONE: Final = np.uint64(1)
_BYTE_ONES: Final = np.uint64(0x0101010101010101)
_TOP_BYTE: Final = np.uint64(56)


class OwnersExhausted(Exception):
    """Says that every owner id is live, or retired and not yet swept."""


class IndexWriter(Counts):
    """Inserts and removes entries, and assigns owner ids."""

    def __init__(
        self, schema: IndexSchema, region: Region, *, near_owners: int = NEAR_OWNERS, spills: bool = False
    ) -> None:
        """`near_owners`: how many owners of one hash may have entries in its near buckets; entries of further owners go to far buckets.

        `spills`: whether full near buckets give entries to far buckets (`shm.index_spill`) before an entry is overwritten.
        """
        self.schema = schema
        self._near_owners = near_owners
        self._spills = spills
        self._buckets = schema.buckets
        super().__init__(region.words)
        # Do not read an unused index below: each page of shared memory that is read takes memory.
        unused = not self._words[BUCKETS]
        self._words[BUCKETS] = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._entries = self._table.reshape(-1)
        self._ages: npt.NDArray[np.uint32] = region.array(np.uint32, schema.ages_at, (schema.buckets, WAYS))
        self._flat_ages = self._ages.reshape(-1)
        self._states: npt.NDArray[np.uint8] = region.array(np.uint8, schema.owners_at, OWNER_IDS)
        self._claims = np.zeros(schema.buckets, dtype=np.int32)  # bucket -> index of the entry that writes to it
        self._capacity = Capacity(self._entries, self._flat_ages)
        self._size = 0 if unused else self._capacity.count_present()
        self.changes = 0  # grows with each insert, removal and retirement of an owner
        self._cursor = 0
        self._swept = 0
        self._retired_at: dict[int, int] = dict.fromkeys(np.flatnonzero(self._states == OWNER_RETIRED).tolist(), 0)

    def size(self) -> int:
        """Returns the number of entries in use, with those of retired owners and far marks (which only say that a hash has far entries)."""
        return self._size

    def held(self, owner: int) -> int:
        """Returns the number of blocks that the index holds for one owner."""
        return self._capacity.held(owner)

    def limit(self, owner: int, blocks: int) -> None:
        """Limits the number of blocks that the index holds for this owner to about `blocks`, from the next insert on. 0: no limit."""
        self._capacity.limit(owner, blocks)

    def owners(self) -> list[int]:
        """Returns the live owner ids. A successor retires those that it does not know."""
        live: list[int] = np.flatnonzero(self._states == OWNER_LIVE).tolist()
        return live

    def new_owner(self) -> int:
        """Assigns the lowest free id; never 0 or `FAR_MARK`. Raises OwnersExhausted."""
        free = int((self._states[FIRST_OWNER:] == OWNER_FREE).argmax()) + FIRST_OWNER
        if self._states[free] != OWNER_FREE:
            raise OwnersExhausted(
                f"all {OWNER_IDS - FIRST_OWNER} owner ids are taken, {len(self._retired_at)} wait for the "
                f"sweep: retire owners that have left and run sweep_step"
            )
        self._states[free] = OWNER_LIVE
        return free

    def retire(self, owner: int) -> None:
        """Marks an owner that has left. A full sweep then frees its entries and its id."""
        if self._states[owner] == OWNER_LIVE:
            self._states[owner] = OWNER_RETIRED
            self._retired_at[owner] = self._swept
            self._capacity.leave(owner)
            self.changes += 1

    def sweep_step(self, buckets: int) -> None:
        """Frees retired owners' entries in the next `buckets` buckets."""
        if not self._retired_at:
            return
        first = self._cursor * WAYS
        steps = min(buckets, self._buckets - self._cursor)
        part = self._entries[first : first + steps * WAYS]
        dead = np.flatnonzero(self._states[part & OWNER_WORD_MASK] == OWNER_RETIRED)
        part[dead] = 0
        self._size -= len(dead)
        self._words[GONE] += len(dead)
        self._cursor = (self._cursor + steps) % self._buckets
        self._swept += steps
        for owner, since in list(self._retired_at.items()):
            if self._swept - since >= self._buckets:
                del self._retired_at[owner]
                self._capacity.clear(owner)
                self._states[owner] = OWNER_FREE

    def insert(self, hashes: Hashes, owners: int | npt.NDArray[Any], age: int) -> None:
        """Records that owners hold these blocks, at the time `age`. `owners`: one owner id for all hashes, or one per hash.

        An entry that exists already only gets the new age. Blocks of one batch do not evict each other while their buckets have room.
        """
        if kernels.NATIVE:
            self._insert_native(np.ascontiguousarray(hashes), owners, age, None)
        else:
            self.reference_insert(hashes, owners, age)

    def insert_named(self, hashes: bytes, owner_of: dict[int, int], names: bytes, counts: bytes, age: int) -> None:
        """Inserts blocks as `insert` does, for owners that have other names elsewhere. `owner_of`: name -> owner.

        `names`, `counts`: the name (u64) of each run of blocks, and its number of blocks (u16). Runs of other names are left out.
        """
        if kernels.NATIVE:
            self._insert_native(hashes, (owner_of, names, counts), age, None)
        else:
            self.reference_insert(*owned_blocks(hashes, owner_of, names, counts), age)

    def insert_and_tell(self, hashes: Hashes, owners: int | npt.NDArray[Any], age: int, stale: int) -> News:
        """Inserts blocks as `insert` does. Returns those that are new, and those that were last inserted `stale` or more ticks ago."""
        hashes = np.ascontiguousarray(hashes)
        if kernels.NATIVE:
            return self._insert_native(hashes, owners, age, stale)
        news = self.reference_news(hashes, owners, age, stale)
        self.reference_insert(hashes, owners, age)
        return news

    def reference_news(self, hashes: Hashes, owners: int | npt.NDArray[Any], age: int, stale: int) -> News:
        """Computes in Python what `insert_and_tell` would return."""
        ids = np.full(len(hashes), owners, np.uint16) if isinstance(owners, int) else owners
        live = self._states[ids] == OWNER_LIVE
        return reference_news(self._table, self._ages, hashes[live], ids[live], age, stale)

    def reference_insert(self, hashes: Hashes, owners: int | npt.NDArray[Any], age: int) -> None:
        """Computes `insert` in Python, without the C kernel: in rounds, in each of which a bucket takes one entry."""
        if len(hashes):
            hashes, entries = self._accepted(hashes, owners)
            for first in range(0, len(hashes), CHUNK):
                chunk = slice(first, first + CHUNK)
                self._insert_chunk(hashes[chunk], entries[chunk], age & AGE_MASK)
        self._free_surplus(age)

    def forget(self, hashes: Hashes, owners: int | npt.NDArray[Any], before: int | None = None) -> None:
        """Removes the entries that say that owners hold these blocks. `owners`: one owner id for all hashes, or one per hash.

        `before`: keep the entries that were inserted or refreshed after this age; None: remove all.
        """
        if kernels.NATIVE:
            freed = kernels.forget(self._table, self._ages, self._capacity.counts, hashes, owners, before)
            self._count_freed(freed, TAKEN_BACK)
        else:
            self.reference_forget(hashes, owners, before)

    def reference_forget(self, hashes: Hashes, owners: int | npt.NDArray[Any], before: int | None = None) -> None:
        """Computes `forget` in Python, without the C kernel."""
        places, in_far = found(self._table, self._ages, np.ascontiguousarray(hashes), owners, before)
        self._free(places, TAKEN_BACK)
        self._free(orphaned_marks(self._table, in_far), TAKEN_BACK)

    def copy(self, first: int, buckets: int) -> tuple[bytes, bytes]:
        """Returns the raw entries and ages of `buckets` buckets, starting at bucket `first`."""
        part = slice(first, first + buckets)
        return self._table[part].tobytes(), self._ages[part].tobytes()

    def load(self, entries: Hashes, ages: npt.NDArray[np.uint32], owners: Sequence[int], later: int) -> None:
        """Fills an unused index with the entries and ages that `copy` returned for all buckets. Raises ValueError if the index is in use.

        Makes `owners` live, and skips entries of other owners. `later`: added to all ages, because the clock moved since the copy.
        """
        if self._size or self.owners() or self._retired_at:
            raise ValueError("load needs an unused index, this one has entries or owners")
        known = np.zeros(OWNER_IDS, dtype=np.bool_)
        known[list(owners)] = True
        known[FAR_MARK] = True
        self._entries[:] = np.where(known[(entries & OWNER_WORD_MASK).view(np.int64)], entries, np.uint64(0))
        self._flat_ages[:] = ages + np.uint32(later & AGE_MASK)
        self._states[list(owners)] = OWNER_LIVE
        self._size = self._capacity.count_present()

    def merge(self, first: int, entries: Hashes, ages: npt.NDArray[np.uint32]) -> int:
        """Adds entries of another index of the same size to the buckets from `first` on, where there is room. Returns how many were added.

        `entries` and `ages`: shape (buckets, WAYS), with owners of this index; 0 is no entry. Owners that are not live are left out.
        """
        part, own_ages = self._table[first : first + len(entries)], self._ages[first : first + len(entries)]
        owners = (entries & OWNER_WORD_MASK).view(np.int64)
        wanted = (entries != 0) & ((self._states[owners] == OWNER_LIVE) | (owners == FAR_MARK))
        wanted &= ~(entries[:, :, None] == part[:, None, :]).any(axis=2)
        at = np.nonzero(wanted & (part == 0))
        added = entries[at]
        part[at] = added
        own_ages[at] = ages[at]
        self._capacity.add(added)
        self._size += len(added)
        self.changes += 1
        return len(added)

    def _free_surplus(self, age: int) -> None:
        for owner in self._capacity.over():
            self._count_freed(self._capacity.free_surplus(owner, age), OVER_CAPACITY)
        self.changes += 1

    def _free(self, places: Ints, cause: int) -> None:
        self._capacity.remove(self._entries[places])
        self._entries[places] = 0
        self._count_freed(len(places), cause)

    def _count_freed(self, entries: int, cause: int) -> None:
        self._size -= entries
        self._words[cause] += entries
        self.changes += 1

    def _accepted(self, hashes: Hashes, owners: int | npt.NDArray[Any]) -> tuple[Hashes, Hashes]:
        hashes = np.ascontiguousarray(hashes)
        if isinstance(owners, int):
            if self._states[owners] != OWNER_LIVE:
                self._words[DROPPED] += len(hashes)
                return hashes[:0], hashes[:0]
            return hashes, (hashes & _TAG_MASK) | np.uint64(owners)
        entries: Hashes = (hashes & _TAG_MASK) | owners.astype(np.uint64)
        live = self._states[owners] == OWNER_LIVE
        if live.all():
            return hashes, entries
        self._words[DROPPED] += len(hashes) - int(np.count_nonzero(live))
        return hashes[live], entries[live]

    def _insert_native(self, hashes: Hashes | bytes, owners: Owners | Named, age: int, stale: int | None) -> News:
        """Inserts with the C kernel, which fills near buckets only, and the rest in Python. Returns the news, if `stale` is not None."""
        capacity = self._capacity
        added, evicted, gone, dropped, over, left, news = kernels.insert(
            self._table, self._ages, self._states, capacity.counts, capacity.limits, hashes, owners,
            age & AGE_MASK, self._near_owners, self._spills, bool(self._retired_at), stale,
        )  # fmt: skip
        for word, more in ((EVICTIONS, evicted), (GONE, gone), (DROPPED, dropped)):
            self._words[word] += more
        self._size += added
        if len(left):
            blocks = np.frombuffer(hashes, "<u8") if isinstance(hashes, bytes) else hashes
            ids = owners_of_runs(*owners) if isinstance(owners, tuple) else owners
            self.reference_insert(blocks[left], ids if isinstance(ids, int) else ids[left], age)
        elif over or capacity.unchecked:
            self._free_surplus(age)
        else:
            self.changes += 1
        return news or NO_NEWS

    def _insert_chunk(self, hashes: Hashes, entries: Hashes, age: int) -> None:
        for _ in range(ROUNDS_MAX):
            left = self._insert_round(hashes, entries, age)
            if not len(left):
                return
            hashes, entries = hashes[left], entries[left]
        self._words[DROPPED] += len(hashes)

    def _insert_round(self, hashes: Hashes, entries: Hashes, age: int) -> Ints:
        """Refreshes the entries that exist, and writes new ones, one per bucket. Returns the indices of the entries that got no bucket."""
        pairs = near_buckets(hashes, self._buckets)
        near = self._table.take(pairs, axis=0).reshape(-1, NEAR_WAYS)
        difference = near ^ entries[:, None]
        tagged = np.flatnonzero(difference < SAME_TAG)
        if not len(tagged):
            return self._place(pairs, near, entries, age)
        row, way = tagged >> 4, tagged & (NEAR_WAYS - 1)
        known = difference.reshape(-1)[tagged] == 0
        self._flat_ages[(pairs[row, way >> 3] * WAYS + (way & 7))[known]] = age
        tags = np.bincount(row, minlength=len(hashes))
        tags[row[known]] = -1
        marked = row[(near.reshape(-1)[tagged] & OWNER_WORD_MASK) == np.uint64(FAR_MARK)]
        marked = marked[tags[marked] >= 0]
        if len(marked):
            far_known = marked[~self._unknown_far(hashes[marked], entries[marked], age)]
            self._mark_far(hashes[far_known], pairs[far_known], age)
            tags[far_known] = -1
        left = new = np.flatnonzero((tags >= 0) & (tags < self._near_owners))
        if len(new):
            left = new[self._place(pairs[new], near[new], entries[new], age)]
        crowded = np.flatnonzero(tags >= self._near_owners)
        if len(crowded):
            far = self._insert_far(hashes[crowded], entries[crowded], age)
            self._mark_far(hashes[crowded], pairs[crowded], age)
            left = np.concatenate((left, crowded[far]))
        return left

    def _mark_far(self, hashes: Hashes, pairs: Ints, age: int) -> None:
        """Writes or refreshes the far marks of these hashes. A mark that gets no bucket now is written by a later insert."""
        marks = (hashes & _TAG_MASK) | np.uint64(FAR_MARK)
        near = self._table.take(pairs, axis=0).reshape(-1, NEAR_WAYS)
        row, way = (near == marks[:, None]).nonzero()
        self._flat_ages[pairs[row, way >> 3] * WAYS + (way & 7)] = age
        new = np.ones(len(hashes), dtype=np.bool_)
        new[row] = False
        if new.any():
            self._place(pairs[new], near[new], marks[new], age)

    def _insert_far(self, hashes: Hashes, entries: Hashes, age: int) -> Ints:
        """Does in far buckets what `_insert_round` does in near ones, for hashes whose near buckets have enough owners already."""
        at = np.flatnonzero(self._unknown_far(hashes, entries, age))
        buckets = far_buckets(hashes[at], entries[at], self._buckets)
        return at[self._place(buckets, self._table.take(buckets, axis=0).reshape(-1, WAYS), entries[at], age)]

    def _unknown_far(self, hashes: Hashes, entries: Hashes, age: int) -> npt.NDArray[np.bool_]:
        """Refreshes those entries that are in their far bucket already. Returns a mask of the other entries."""
        buckets = far_buckets(hashes, entries, self._buckets)
        row, way = (self._table.take(buckets[:, 0], axis=0) == entries[:, None]).nonzero()
        self._flat_ages[buckets[row, 0] * WAYS + way] = age
        unknown = np.ones(len(hashes), dtype=np.bool_)
        unknown[row] = False
        return unknown

    def _place(self, buckets: Ints, seen: Hashes, entries: Hashes, age: int) -> Ints:
        """Writes each entry to an empty way of its emptiest bucket, or over the oldest entry of its full buckets.

        `buckets`: shape (n, 1) or (n, 2), the possible buckets of each entry. `seen`: their contents. If several entries choose the same
        bucket, one of them gets it. Returns the indices of the entries that got none.
        """
        rows = np.arange(len(entries))
        if self._spills and buckets.shape[1] == 2:
            full = np.flatnonzero(~self._is_empty(seen).any(axis=1))
            marks = relieve(self._table, self._ages, buckets, seen, full.tolist(), age)
            self._capacity.add(marks)
            self._size += len(marks)
        empty = self._is_empty(seen).view(np.uint64)  # one byte per way, one word per bucket
        bucket, ways = buckets[:, 0], empty[:, 0]
        if empty.shape[1] == 2:
            room = _bytes_set(empty)
            other = room[:, 1] > room[:, 0]
            bucket = np.where(other, buckets[:, 1], bucket)
            ways = np.where(other, empty[:, 1], ways)
        way = _lowest_byte_set(ways)
        full = np.flatnonzero(ways == 0)
        if len(full):
            ages = self._ages.take(buckets[full], axis=0).reshape(len(full), -1)
            oldest = (ages - np.uint32((age + 1) & AGE_MASK)).argmin(axis=1)
            bucket[full] = buckets[full, oldest >> 3]
            way[full] = oldest & 7
        self._claims[bucket] = rows
        won = self._claims[bucket] == rows
        places = bucket * WAYS
        places += way
        if won.all():
            return self._store(places, entries, age, rows[:0])
        return self._store(places[won], entries[won], age, np.flatnonzero(~won))

    def _store(self, places: Ints, entries: Hashes, age: int, left: Ints) -> Ints:
        before = self._entries[places]
        self._entries[places] = entries
        self._flat_ages[places] = age
        self._capacity.add(entries)
        used = int(np.count_nonzero(before))
        self._size += len(before) - used
        if used:
            self._capacity.remove(before[before != 0])
            evicted = len(before) - int(np.count_nonzero(self._is_empty(before)))
            self._words[EVICTIONS] += evicted
            self._words[GONE] += used - evicted
        return left

    def _is_empty(self, entries: Hashes) -> npt.NDArray[np.bool_]:
        empty: npt.NDArray[np.bool_] = entries == 0
        if self._retired_at:
            empty |= self._states[entries & OWNER_WORD_MASK] == OWNER_RETIRED
        return empty


def _bytes_set(words: Hashes) -> Hashes:
    """Returns, for each word, how many of its bytes are 1. Every byte must be 0 or 1."""
    return (words * _BYTE_ONES) >> _TOP_BYTE


def _lowest_byte_set(words: Hashes) -> Ints:
    """Returns, for each word, the index of its lowest byte that is 1; 8: no byte is 1. Every byte must be 0 or 1."""
    below = (words & (~words + _ONE)) - _ONE  # all bits below the lowest set bit are 1
    return _bytes_set(below & _BYTE_ONES).view(np.int64)
