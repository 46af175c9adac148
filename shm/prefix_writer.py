"""Writes the prefix index (`shm.prefix_index` has the layout). Only one process has a writer.

The writer drops an insert for an owner that is not live, because the sweep that frees a retired owner's entries could miss new entries.
`copy` and `load` preserve the index over a restart of the whole picker; `load` shifts all ages to the new clock.

`TieredWriter` is for owners with caches of several tiers, such as GPU memory and the memory of the host. Each owner may have an id per
tier; the ids of one owner have a fixed distance. So a tier of an owner has its own entries and its own limit. `new_owner` assigns only ids
of the first tier. The id of another tier is live from its first limit on, until the owner is retired.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.index_capacity import AGE_MASK, OWNER_IDS, Capacity
from shm.prefix_index import (
    BUCKETS,
    DROPPED,
    EVICTIONS,
    FAR_MARK,
    FIRST_OWNER,
    GONE,
    NEAR_OWNERS,
    OVER_CAPACITY,
    OWNER_FREE,
    OWNER_LIVE,
    OWNER_RETIRED,
    OWNER_WORD_MASK,
    TAKEN_BACK,
    WAYS,
    Hashes,
    IndexSchema,
)
from shm.segment import Region

Owners = int | npt.NDArray[Any] | tuple[dict[int, int], bytes, bytes]
News = tuple[list[int], list[int], bytes]


class OwnersExhausted(Exception):
    """Raised if every owner id is live, or retired and not yet swept."""


class IndexWriter:
    """Inserts and removes entries, and assigns owner ids."""

    def __init__(self, schema: IndexSchema, region: Region, *, near_owners: int = NEAR_OWNERS, spills: bool = False) -> None:
        """`near_owners`: how many owners of one hash may have entries in its near buckets; entries of further owners go to far buckets.

        `spills`: whether full near buckets give entries to far buckets before an entry is overwritten.
        """
        self.schema = schema
        self._near_owners = near_owners
        self._spills = spills
        self._buckets = schema.buckets
        self._words = region.words
        # Do not read an unused index below: each page of shared memory that is read takes memory.
        unused = not self._words[BUCKETS]
        self._words[BUCKETS] = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._entries = self._table.reshape(-1)
        self._ages: npt.NDArray[np.uint32] = region.array(np.uint32, schema.ages_at, (schema.buckets, WAYS))
        self._flat_ages = self._ages.reshape(-1)
        self._states: npt.NDArray[np.uint8] = region.array(np.uint8, schema.owners_at, OWNER_IDS)
        self._capacity = Capacity(self._entries, self._flat_ages)
        self._size = 0 if unused else self._capacity.count_present()
        self.changes = 0  # grows with each insert, removal and retirement of an owner
        self._cursor = 0
        self._swept = 0
        self._retired_at: dict[int, int] = dict.fromkeys(np.flatnonzero(self._states == OWNER_RETIRED).tolist(), 0)

    def size(self) -> int:
        """Returns the number of entries in use, including entries of retired owners and far marks."""
        return self._size

    def held(self, owner: int) -> int:
        """Returns the number of blocks that the index holds for one owner."""
        return self._capacity.held(owner)

    def limit(self, owner: int, blocks: int) -> None:
        """Limits the number of blocks that the index holds for this owner to about `blocks`, from the next insert on; 0 means no limit."""
        self._capacity.limit(owner, blocks)

    def owners(self) -> list[int]:
        """Returns the live owner ids. A successor retires the ids that it does not know."""
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

        If an entry exists already, only its age changes.
        """
        self._insert(np.ascontiguousarray(hashes), owners, age, None)

    def insert_named(self, hashes: bytes, owner_of: dict[int, int], names: bytes, counts: bytes, age: int) -> None:
        """Inserts blocks as `insert` does, for owners that the blocks name differently. `owner_of`: name -> owner.

        `names`, `counts`: the name (u64) of each run of blocks, and its number of blocks (u16). Runs with other names are skipped.
        """
        self._insert(hashes, (owner_of, names, counts), age, None)

    def insert_and_tell(self, hashes: Hashes, owners: int | npt.NDArray[Any], age: int, stale: int) -> News:
        """Inserts blocks as `insert` does. Returns the blocks that are new or were last inserted `stale` or more ticks ago: the owner of
        each run of blocks, the number of blocks of each run, and the bytes of all hashes (u64).
        """
        news = self._insert(np.ascontiguousarray(hashes), owners, age, stale)
        assert news is not None
        return news

    def forget(self, hashes: Hashes, owners: int | npt.NDArray[Any], before: int | None = None) -> None:
        """Removes the entries that say that owners hold these blocks. `owners`: one owner id for all hashes, or one per hash.

        `before`: keep the entries that were inserted or refreshed after this age; None to remove all entries.
        """
        freed = kernels.forget(self._table, self._ages, self._capacity.counts, hashes, owners, before)
        self._count_freed(freed, TAKEN_BACK)

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
        """Adds entries of another index of the same size to the buckets from `first` on, if these have room. Returns how many it added.

        `entries` and `ages`: shape (buckets, WAYS), with owners of this index; 0 is no entry. Skips entries of owners that are not live.
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

    @property
    def evictions(self) -> int:
        """Returns how many live entries were overwritten because their buckets were full."""
        return self._words[EVICTIONS]

    @property
    def over_capacity(self) -> int:
        """Returns how many entries were freed because they exceeded the capacity of their owner."""
        return self._words[OVER_CAPACITY]

    @property
    def dropped(self) -> int:
        """Returns how many blocks were not inserted because their owner was not live."""
        return self._words[DROPPED]

    def freed(self) -> dict[str, int]:
        """Returns cause -> how many entries were freed."""
        causes = (("full", EVICTIONS), ("capacity", OVER_CAPACITY), ("gone", GONE), ("taken_back", TAKEN_BACK))
        return {cause: self._words[word] for cause, word in causes}

    def _free_surplus(self, age: int) -> None:
        for owner in self._capacity.over():
            self._count_freed(self._capacity.free_surplus(owner, age), OVER_CAPACITY)
        self.changes += 1

    def _count_freed(self, entries: int, cause: int) -> None:
        self._size -= entries
        self._words[cause] += entries
        self.changes += 1

    def _insert(self, hashes: Hashes | bytes, owners: Owners, age: int, stale: int | None) -> News | None:
        """Inserts blocks. Returns the news, if `stale` is not None."""
        capacity = self._capacity
        added, evicted, gone, dropped, over, news = kernels.insert(
            self._table, self._ages, self._states, capacity.counts, capacity.limits, hashes, owners,
            age & AGE_MASK, self._near_owners, self._spills, bool(self._retired_at), stale,
        )  # fmt: skip
        for word, more in ((EVICTIONS, evicted), (GONE, gone), (DROPPED, dropped)):
            self._words[word] += more
        self._size += added
        if over or capacity.unchecked:
            self._free_surplus(age)
        else:
            self.changes += 1
        return news


TIERS: Final = 4
SPAN: Final = OWNER_IDS // TIERS  # the distance between the ids of one owner in two neighbouring tiers


def in_tier(owner: int, tier: int) -> int:
    """Returns the id of an owner in a tier, from 0 to TIERS - 1."""
    return owner + tier * SPAN


class TieredWriter(IndexWriter):
    """Inserts and removes entries, and assigns ids to owners. `limit`, `insert` and `forget` take ids of any tier."""

    def limit(self, owner: int, blocks: int) -> None:
        if self._states[owner] == OWNER_FREE and self._states[owner % SPAN] == OWNER_LIVE:
            self._states[owner] = OWNER_LIVE
        super().limit(owner, blocks)

    def owners(self) -> list[int]:
        return [owner for owner in super().owners() if owner < SPAN]

    def new_owner(self) -> int:
        owner = super().new_owner()
        if owner >= SPAN:
            super().retire(owner)
            raise OwnersExhausted(f"all {SPAN} owner ids are taken: retire owners that have left and run sweep_step")
        return owner

    def retire(self, owner: int) -> None:
        for tier in range(TIERS):
            super().retire(in_tier(owner, tier))

    def load(self, entries: Hashes, ages: npt.NDArray[np.uint32], owners: Sequence[int], later: int) -> None:
        used = set(np.unique(entries & OWNER_WORD_MASK).tolist())
        higher = (in_tier(owner, tier) for owner in owners for tier in range(1, TIERS))
        super().load(entries, ages, [*owners, *(owner for owner in higher if owner in used)], later)
