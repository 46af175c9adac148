"""The prefix index: which owner holds which block, as a hash table of fixed size.

    control  | buckets | evictions | dropped | over capacity | gone | taken back |   one cache line
    owners   | state of owner 0 | ... | state of owner 65535 |                    one byte each
    entries  | bucket 0: 8 entries | bucket 1: 8 entries | ...                    a line per bucket
    ages     | age of entry 0 | age of entry 1 | ...                              one u32 each

    entry    | tag: upper 48 bits of the hash | owner: 16 bits |                  one u64, 0 = empty

- An entry is one aligned word: a reader sees tag and owner of the same store or not at all. That
  is all the order the index needs; ages are advisory and read by the writer only. They are ticks
  of a clock of 32 bits that wraps: only how far they lie back counts.
- A hash has two *near* buckets. They take up to `NEAR_OWNERS` owners of one hash, so that a block
  that everybody holds (a common system prompt) does not drive other blocks out. Further owners of
  that hash go to its *far* buckets, 32 in a row, to the one that the owner id selects; an entry
  with owner `FAR_MARK` near says so, and is as young as the youngest far entry.
- Hashes are chained: a hit on block i proves blocks 0..i. So `match` reports the deepest hit, and
  needs to look at every 32nd block and the last before it looks closer. Entries get lost (age
  eviction), so several probes are made; a clean miss of all of them ends it.
- Owner ids are handed out by the writer. A retired owner's entries are freed by and by; its id is
  handed out again only after `sweep_step` has walked the whole table since. An insert for an owner
  that is not live is dropped, or it would outlive the sweep.
- An owner may have a capacity (`shm.index_capacity`): of its entries the oldest leave when there
  are more. `evictions` counts live entries that were overwritten because their buckets were full,
  `over capacity` those, `gone` the entries of retired owners, `taken back` what `forget` freed.
- `copy` and `load` are for keeping the index over a restart of the machine's processes; ages move
  with the clock.
- The writer is the only one who writes anything here. A successor counts and goes on; a retired
  owner then waits for one whole sweep more.

What this does not do: hash prompts, or promise that a block is still in its owner's cache.
"""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shm.index_capacity import AGE_MASK, OWNER_BITS, OWNER_IDS, Capacity
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

WAYS = 8  # entries per bucket: one cache line
NEAR_WAYS = 2 * WAYS
NEAR_OWNERS = 12
FAR_BUCKETS = 32
FAR_WAYS = FAR_BUCKETS * WAYS

OWNER_MASK = OWNER_IDS - 1
FAR_MARK = 1  # low, so that arrays indexed by owner stay short
FIRST_OWNER = 2
OWNER_FREE, OWNER_LIVE, OWNER_RETIRED = range(3)

PROBE_STRIDE = 32
DENSE_BLOCKS = 64  # beyond these a writer may leave out blocks between every fourth
ENDS_MAX = 4096
BISECTED_GAPS_MAX = 2
BISECTED_OWNERS_MAX = 12
SCALAR_PROBES_MAX = 6  # up to here single look-ups are cheaper than one NumPy gather
SCALAR_BLOCKS_MAX = 7
ROUNDS_MAX = 64
CHUNK = 512  # blocks per round: its intermediate arrays stay in the CPU's cache

BUCKETS, EVICTIONS, DROPPED, OVER_CAPACITY, GONE, TAKEN_BACK = range(6)

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_OWNER_MASK = np.uint64(OWNER_MASK)
_UNPACK = struct.Struct(f"={NEAR_WAYS}Q").unpack
_TAG_MASK = np.uint64(~(OWNER_IDS - 1) & ((1 << 64) - 1))
_SAME_TAG = np.uint64(OWNER_IDS)  # x ^ y is below this when the tags are equal
_HALF = np.uint64(32)
_LOW_HALF = (1 << 32) - 1
_MIDDLE = np.uint64(OWNER_BITS)
_ONE = np.uint64(1)
_BYTE_ONES = np.uint64(0x0101010101010101)
_TOP_BYTE = np.uint64(56)
_FAR_STEPS = np.arange(FAR_BUCKETS, dtype=np.int64)

assert WAYS * WORD == CACHE_LINE


class OwnersExhausted(Exception):
    """All owner ids are live or wait for the sweep."""


class IndexSchema:
    """How many entries the index has; 12 bytes each."""

    def __init__(self, entries: int) -> None:
        if entries < FAR_WAYS:
            raise ValueError(f"an index needs at least {FAR_WAYS} entries, not {entries}")
        self.buckets = -(-entries // WAYS)
        self.entries = self.buckets * WAYS
        self.owners_at = CACHE_LINE
        self.entries_at = self.owners_at + OWNER_IDS
        self.ages_at = self.entries_at + self.entries * WORD
        self.bytes = aligned(self.ages_at + self.entries * 4)
        self.layout_hash = layout_hash("prefix index 2", self.entries)

    def describe(self) -> dict[str, Any]:
        return {"kind": "index", "entries": self.entries}


def _near(hashes: Hashes, buckets: int) -> Ints:
    """Both near buckets of each hash: its lower and upper half, scaled to the table."""
    halves = np.ascontiguousarray(hashes).view(np.uint32).reshape(-1, 2)
    scaled = np.multiply(halves, np.uint64(buckets), dtype=np.uint64)
    scaled >>= _HALF
    return scaled.view(np.int64)


def _far(hashes: Hashes, buckets: int) -> Ints:
    """The first far bucket of each hash: its middle 32 bits, scaled."""
    middle = (hashes >> _MIDDLE) & np.uint64(_LOW_HALF)
    return ((middle * np.uint64(buckets - FAR_BUCKETS + 1)) >> _HALF).view(np.int64)


def _bytes_set(words: Hashes) -> Hashes:
    """How many of a word's bytes are 1; all are 0 or 1."""
    return (words * _BYTE_ONES) >> _TOP_BYTE


def _lowest_byte_set(words: Hashes) -> Ints:
    """The index of the lowest byte that is 1; 8 when there is none."""
    below = (words & (~words + _ONE)) - _ONE  # ones in all bits below the lowest that is set
    return _bytes_set(below & _BYTE_ONES).view(np.int64)


class IndexWriter:
    """The only writer."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self.schema = schema
        self._buckets = schema.buckets
        self._words = region.words
        self._words[BUCKETS] = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._entries = self._table.reshape(-1)
        ages = region.array(np.uint32, schema.ages_at, (schema.buckets, WAYS))
        self._ages: npt.NDArray[np.uint32] = ages
        self._flat_ages = ages.reshape(-1)
        self._states: npt.NDArray[np.uint8] = region.array(np.uint8, schema.owners_at, OWNER_IDS)
        self._claims = np.zeros(schema.buckets, dtype=np.int32)  # who writes a bucket this round
        self._size = int(np.count_nonzero(self._entries))
        self._capacity = Capacity(self._entries, self._flat_ages)
        self.changes = 0  # moves with everything that is learned or freed
        self._cursor = 0
        self._swept = 0
        retired = np.flatnonzero(self._states == OWNER_RETIRED).tolist()
        self._retired_at = dict.fromkeys(retired, 0)

    @property
    def evictions(self) -> int:
        """Live entries that were overwritten since the index was made: their buckets were full."""
        return self._words[EVICTIONS]

    @property
    def over_capacity(self) -> int:
        """Entries freed because their owner's cache takes no more."""
        return self._words[OVER_CAPACITY]

    @property
    def gone(self) -> int:
        """Entries freed because their owner has left."""
        return self._words[GONE]

    @property
    def taken_back(self) -> int:
        """Entries that `forget` freed."""
        return self._words[TAKEN_BACK]

    @property
    def dropped(self) -> int:
        """Blocks that were not taken: owner not live, or no round left."""
        return self._words[DROPPED]

    def freed(self) -> dict[str, int]:
        """How many entries left, by cause."""
        return {
            "full": self.evictions,
            "capacity": self.over_capacity,
            "gone": self.gone,
            "taken_back": self.taken_back,
        }

    def size(self) -> int:
        """Entries in use, far marks and those of retired owners included."""
        return self._size

    def held(self, owner: int) -> int:
        """Blocks that are held for one owner."""
        return self._capacity.held(owner)

    def limit(self, owner: int, blocks: int) -> None:
        """From its next insert on, the index holds about as many blocks for this owner; 0 is no limit."""
        self._capacity.limit(owner, blocks)

    def owners(self) -> list[int]:
        """Ids that are live; a successor retires those it does not know."""
        found: list[int] = np.flatnonzero(self._states == OWNER_LIVE).tolist()
        return found

    def new_owner(self) -> int:
        """The lowest id that is free; 0 and `FAR_MARK` are nobody's."""
        free = int((self._states[FIRST_OWNER:] == OWNER_FREE).argmax()) + FIRST_OWNER
        if self._states[free] != OWNER_FREE:
            raise OwnersExhausted(
                f"all {OWNER_IDS - FIRST_OWNER} owner ids are taken, {len(self._retired_at)} wait for the "
                f"sweep: retire owners that have left and run sweep_step"
            )
        self._states[free] = OWNER_LIVE
        return free

    def retire(self, owner: int) -> None:
        """The owner has left; its entries and, after a whole sweep, its id become free."""
        if self._states[owner] == OWNER_LIVE:
            self._states[owner] = OWNER_RETIRED
            self._retired_at[owner] = self._swept
            self._capacity.leave(owner)
            self.changes += 1

    def sweep_step(self, buckets: int) -> None:
        """Free retired owners' entries in the next `buckets` buckets."""
        if not self._retired_at:
            return
        first = self._cursor * WAYS
        steps = min(buckets, self._buckets - self._cursor)
        part = self._entries[first : first + steps * WAYS]
        dead = np.flatnonzero(self._states[part & _OWNER_MASK] == OWNER_RETIRED)
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
        """Learn that each hash is held by its owner; what is known only gets its age refreshed.

        One bucket takes one entry per round, so blocks of one batch find each other's places
        taken and do not evict each other while there is room.
        """
        hashes, entries = self._accepted(hashes, owners)
        for first in range(0, len(hashes), CHUNK):
            chunk = slice(first, first + CHUNK)
            self._insert_chunk(hashes[chunk], entries[chunk], age & AGE_MASK)
        for owner in self._capacity.over():
            self._free(self._capacity.surplus(owner, age), OVER_CAPACITY)
        self.changes += 1

    def forget(self, hashes: Hashes, owner: int) -> None:
        """Take back that these blocks are held by this owner."""
        hashes = np.ascontiguousarray(hashes)
        entries = (hashes & _TAG_MASK) | np.uint64(owner)
        far = _far(hashes, self._buckets) + owner % FAR_BUCKETS
        buckets = np.column_stack((_near(hashes, self._buckets), far))
        found = self._table[buckets] == entries[:, None, None]
        row, column, way = found.nonzero()
        self._free(np.unique(buckets[row, column] * WAYS + way), TAKEN_BACK)

    def copy(self, first: int, buckets: int) -> tuple[bytes, bytes]:
        """Entries and ages of some buckets."""
        part = slice(first, first + buckets)
        return self._table[part].tobytes(), self._ages[part].tobytes()

    def load(self, entries: Hashes, ages: npt.NDArray[np.uint32], owners: Sequence[int], later: int) -> None:
        """What `copy` gave of all buckets, into an index that nobody has used; `owners` become live, entries of others stay out.

        `later` is added to all ages: the clock has gone on meanwhile, or began anew.
        """
        if self._size or self.owners() or self._retired_at:
            raise ValueError("an index that is in use takes no copy")
        known = np.zeros(OWNER_IDS, dtype=np.bool_)
        known[list(owners)] = True
        known[FAR_MARK] = True
        self._entries[:] = np.where(known[(entries & _OWNER_MASK).view(np.int64)], entries, np.uint64(0))
        self._flat_ages[:] = ages + np.uint32(later & AGE_MASK)
        self._states[list(owners)] = OWNER_LIVE
        self._size = int(np.count_nonzero(self._entries))
        self._capacity = Capacity(self._entries, self._flat_ages)

    def _free(self, places: Ints, cause: int) -> None:
        self._capacity.remove(self._entries[places])
        self._entries[places] = 0
        self._size -= len(places)
        self._words[cause] += len(places)
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

    def _insert_chunk(self, hashes: Hashes, entries: Hashes, age: int) -> None:
        for _ in range(ROUNDS_MAX):
            left = self._insert_round(hashes, entries, age)
            if not len(left):
                return
            hashes, entries = hashes[left], entries[left]
        self._words[DROPPED] += len(hashes)

    def _insert_round(self, hashes: Hashes, entries: Hashes, age: int) -> Ints:
        """Refresh what is known, place what finds a bucket; the indices of what is left."""
        pairs = _near(hashes, self._buckets)
        near = self._table.take(pairs, axis=0).reshape(-1, NEAR_WAYS)
        difference = near ^ entries[:, None]
        tagged = np.flatnonzero(difference < _SAME_TAG)
        if not len(tagged):
            return self._place(pairs, near, entries, age)
        row, way = tagged >> 4, tagged & (NEAR_WAYS - 1)
        known = difference.reshape(-1)[tagged] == 0
        self._flat_ages[(pairs[row, way >> 3] * WAYS + (way & 7))[known]] = age
        tags = np.bincount(row, minlength=len(hashes))
        tags[row[known]] = -1
        left = new = np.flatnonzero((tags >= 0) & (tags < NEAR_OWNERS))
        if len(new):
            left = new[self._place(pairs[new], near[new], entries[new], age)]
        crowded = np.flatnonzero(tags >= NEAR_OWNERS)
        if len(crowded):
            far = self._insert_far(hashes[crowded], entries[crowded], age)
            self._mark_far(hashes[crowded], pairs[crowded], age)
            left = np.concatenate((left, crowded[far]))
        return left

    def _mark_far(self, hashes: Hashes, pairs: Ints, age: int) -> None:
        """Tell readers that these hashes have far entries; what finds no bucket waits."""
        marks = (hashes & _TAG_MASK) | np.uint64(FAR_MARK)
        near = self._table.take(pairs, axis=0).reshape(-1, NEAR_WAYS)
        row, way = (near == marks[:, None]).nonzero()
        self._flat_ages[pairs[row, way >> 3] * WAYS + (way & 7)] = age
        new = np.ones(len(hashes), dtype=np.bool_)
        new[row] = False
        if new.any():
            self._place(pairs[new], near[new], marks[new], age)

    def _insert_far(self, hashes: Hashes, entries: Hashes, age: int) -> Ints:
        """As `_insert_round`, for hashes whose near buckets hold enough owners."""
        select = (entries & np.uint64(FAR_BUCKETS - 1)).view(np.int64)
        buckets = (_far(hashes, self._buckets) + select)[:, None]
        far = self._table.take(buckets, axis=0).reshape(-1, WAYS)
        row, way = (far == entries[:, None]).nonzero()
        self._flat_ages[buckets[row, 0] * WAYS + way] = age
        new = np.ones(len(hashes), dtype=np.bool_)
        new[row] = False
        at = np.flatnonzero(new)
        return at[self._place(buckets[at], far[at], entries[at], age)]

    def _place(self, buckets: Ints, seen: Hashes, entries: Hashes, age: int) -> Ints:
        """Write each entry to an empty way of its emptiest bucket, or over its oldest entry.

        `buckets` are each entry's candidates (one or two), `seen` what they hold. Where several
        entries choose one bucket, one gets it; the indices of the others are returned.
        """
        rows = np.arange(len(entries))
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
            empty |= self._states[entries & _OWNER_MASK] == OWNER_RETIRED
        return empty


class IndexReader:
    """Looks up; never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self.schema = schema
        self._buckets = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False
        self._ends: dict[int, int] = {}  # first block -> where the last match that began with it ended
        self._bytes = region.part(schema.entries_at, schema.entries * WORD).bytes.toreadonly()

    def match(self, hashes: Hashes) -> dict[int, int]:
        """Per owner, how many leading blocks it is known to hold: its deepest hit + 1."""
        count = len(hashes)
        if count > DENSE_BLOCKS:
            return self._match_long(hashes, count)
        if count == 0:
            return {}
        holders = self._holders
        first = hashes.item(0)
        owners = holders(first)
        end = self._ends.get(first, count)
        if 0 < end < count and not holders(hashes.item(end)) and set(owners) == set(holders(hashes.item(end - 1))):
            found = dict.fromkeys(owners, end)  # for all where the last prompt with this beginning ended
        elif count > PROBE_STRIDE + 1:
            return self._match_long(hashes, count)
        else:
            found = dict.fromkeys(owners, 1)
            if count > 1:
                found |= dict.fromkeys(holders(hashes.item(count - 1)), count)
            if found:
                self._end(hashes, count, found)
        found.pop(0, None)
        found.pop(FAR_MARK, None)
        return found

    def _match_long(self, hashes: Hashes, count: int) -> dict[int, int]:
        """By probes alone."""
        probes = [*range(0, count - 1, PROBE_STRIDE), count - 1]
        if len(probes) <= SCALAR_PROBES_MAX:
            found = self._scan(hashes, probes)
        else:
            at = np.array(probes)
            found = self._gather(hashes[at], at)
        if found:
            self._end(hashes, count, found)
        found.pop(0, None)  # an all-zero tag equals an empty entry
        found.pop(FAR_MARK, None)  # near and far buckets of one hash may overlap
        return found

    def _end(self, hashes: Hashes, count: int, found: dict[int, int]) -> None:
        """From the probes that were hit to where each owner's match ends."""
        open_ends = set(found.values())
        open_ends.discard(count)
        if open_ends:
            self._refine(hashes, sorted(open_ends), found)

    def _refine(self, hashes: Hashes, depths: list[int], found: dict[int, int]) -> None:
        """Look at the blocks between a deepest hit and the next probe."""
        last = len(hashes) - 1
        gaps = [range(d, min(d - 1 + PROBE_STRIDE, last)) for d in depths]
        if len(gaps) <= BISECTED_GAPS_MAX and len(found) <= BISECTED_OWNERS_MAX and gaps[-1].stop <= DENSE_BLOCKS:
            for depth, gap in zip(depths, gaps, strict=True):
                owners = {owner for owner, deepest in found.items() if deepest == depth}
                self._bisect(hashes, gap.start, gap.stop, owners, found)
            return
        if sum(map(len, gaps)) <= SCALAR_BLOCKS_MAX:
            closer = self._scan(hashes, [block for gap in gaps for block in gap])
        elif len(gaps) == 1:
            first, stop = gaps[0].start, gaps[0].stop
            closer = self._gather(hashes[first:stop], np.arange(first, stop))
        else:
            at = np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps])
            closer = self._gather(hashes[at], at)
        _deepen(found, closer)

    def _bisect(self, hashes: Hashes, low: int, high: int, owners: set[int], found: dict[int, int]) -> None:
        """Where each of `owners`, who hold what is before block `low`, stops holding, below `high`.

        Prompts that share their first block often share as much as the last ones did: that place is looked at first.
        """
        first = hashes.item(0)
        expected = self._ends.get(first, 0)
        hints = [expected - 1, expected]
        while low < high:
            middle = hints.pop() if hints else -1
            if not low <= middle < high:
                middle = (low + high) >> 1
            deeper = owners.intersection(self._holders(hashes.item(middle)))
            if not deeper:
                high = middle
                continue
            for owner in deeper:
                found[owner] = middle + 1
            if len(deeper) < len(owners):
                self._bisect(hashes, low, middle, owners - deeper, found)
            low, owners = middle + 1, deeper
        if len(self._ends) >= ENDS_MAX:
            self._ends.clear()
        self._ends[first] = low

    def _scan(self, hashes: Hashes, blocks: list[int]) -> dict[int, int]:
        """Deepest hit + 1 per owner among these blocks (ascending), one by one."""
        found: dict[int, int] = {}
        for block in blocks:
            for owner in self._holders(hashes.item(block)):
                found[owner] = block + 1
        return found

    def _holders(self, hash_: int) -> list[int]:
        """Owners of one block. The buckets are copied first: a word must not change under it."""
        table, buckets = self._bytes, self._buckets
        one = ((hash_ & _LOW_HALF) * buckets >> 32) * CACHE_LINE
        two = ((hash_ >> 32) * buckets >> 32) * CACHE_LINE
        near = table[one : one + CACHE_LINE].tobytes() + table[two : two + CACHE_LINE]
        tag = hash_ >> OWNER_BITS
        if tag.to_bytes(6, "little") not in near:
            return []
        found = [entry & OWNER_MASK for entry in _UNPACK(near) if entry >> OWNER_BITS == tag]
        if FAR_MARK in found:
            owners = [owner for owner in found if owner != FAR_MARK]
            return owners + self._far_holders(hash_, tag.to_bytes(6, "little"))
        return found

    def _far_holders(self, hash_: int, tag: bytes) -> list[int]:
        first = (hash_ >> OWNER_BITS & _LOW_HALF) * (self._buckets - FAR_BUCKETS + 1) >> 32
        far = bytes(self._bytes[first * CACHE_LINE : (first + FAR_BUCKETS) * CACHE_LINE])
        if tag not in far:
            return []
        entries = np.frombuffer(far, dtype=np.uint64)
        held = entries[(entries ^ np.uint64(hash_)) < _SAME_TAG]
        owners: list[int] = (held & _OWNER_MASK).tolist()
        return owners

    def _gather(self, chosen: Hashes, blocks: Ints) -> dict[int, int]:
        """Deepest hit + 1 per owner, given some hashes and their places (ascending), at once."""
        near = self._table.take(_near(chosen, self._buckets), axis=0).reshape(-1, NEAR_WAYS)
        same = (near ^ chosen[:, None]) < _SAME_TAG
        at = np.flatnonzero(same)
        if not len(at):
            return {}
        owners = (near.reshape(-1)[at] & _OWNER_MASK).view(np.int64)
        found = _deepest(owners, blocks[at >> 4])
        if found.pop(FAR_MARK, 0):
            marked = at[owners == FAR_MARK] >> 4
            _deepen(found, self._gather_far(chosen[marked], blocks[marked]))
        return found

    def _gather_far(self, hashes: Hashes, blocks: Ints) -> dict[int, int]:
        buckets = _far(hashes, self._buckets)[:, None] + _FAR_STEPS
        far = self._table.take(buckets, axis=0).reshape(-1, FAR_WAYS)
        at = np.flatnonzero((far ^ hashes[:, None]) < _SAME_TAG)
        owners = (far.reshape(-1)[at] & _OWNER_MASK).view(np.int64)
        return _deepest(owners, blocks[at // FAR_WAYS])


def _deepest(owners: Ints, blocks: Ints) -> dict[int, int]:
    """The last (= deepest) block + 1 of each owner; blocks ascend."""
    if len(owners) <= 64:
        return dict(zip(owners.tolist(), (blocks + 1).tolist(), strict=True))
    deepest = np.zeros(int(owners.max()) + 1, dtype=np.int64)
    deepest[owners] = blocks + 1  # of equal indices the last assignment stays
    present = np.flatnonzero(deepest)
    return dict(zip(present.tolist(), deepest[present].tolist(), strict=True))


def _deepen(found: dict[int, int], closer: dict[int, int]) -> None:
    for owner, depth in closer.items():
        if depth > found.get(owner, 0):
            found[owner] = depth
