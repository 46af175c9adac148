"""The kernels of the prefix index in plain Python, entry by entry. They define what `index.c`, `held.c` and `capacity.c` compute, and run
where those are not built. `shm.prefix_index` has the layout and the terms.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

WAYS: Final = 8
FAR_BUCKETS: Final = 32
FAR_SPREAD: Final = 0x9E37  # the golden ratio in 16 bits
FAR_SHIFT: Final = 11
OWNER: Final = (1 << 16) - 1
FAR_MARK: Final = 1
LIVE: Final = 1
RETIRED: Final = 2
PROBE_STRIDE: Final = 32
DENSE_BLOCKS: Final = 64
WIDE_BLOCKS: Final = 4
HALF: Final = (1 << 32) - 1

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]
Ages = NDArray[np.uint32]
Owners = int | NDArray[Any] | tuple[dict[int, int], bytes, bytes]
Place = tuple[int, int]  # bucket and way
News = tuple[list[int], list[int], bytes]


def match(entries: Hashes, hashes: Hashes) -> dict[int, int]:
    """Returns, for each owner with a hit, 1 + the position of its deepest block in the chain. `entries`: shape (buckets, 8).

    In a short chain, looks up every block. In a long chain, looks up every 32nd block and the last one, and then all blocks between an
    owner's deepest hit and the next block so looked up.
    """
    chain, last = hashes.tolist(), len(hashes) - 1
    deepest: dict[int, int] = {}

    def look_up(blocks: Iterable[int]) -> None:
        for block in blocks:
            for owner in _holders(entries, chain[block]):
                deepest[owner] = max(deepest.get(owner, 0), block + 1)

    if last < DENSE_BLOCKS:
        look_up(range(last + 1))
    else:
        look_up((*range(0, last, PROBE_STRIDE), last))
        for begin in {(depth - 1) // PROBE_STRIDE * PROBE_STRIDE for depth in deepest.values() if depth <= last}:
            look_up(range(begin + 1, min(begin + PROBE_STRIDE, last)))
    # A tag of only zeros equals an empty entry, and near and far buckets of one hash may overlap.
    return {owner: depth for owner, depth in deepest.items() if owner not in (0, FAR_MARK)}


def held(entries: Hashes, hashes: Hashes, row_of: Ints, weight_of: NDArray[np.int32], rows: int) -> tuple[list[int], list[int]]:
    """Returns two lists with a number per row: how many leading blocks the row holds without a gap, and the sum of their best weights.

    `row_of`, `weight_of`: one element per owner id; an owner whose row is outside 0 ... rows - 1 is ignored.
    """
    blocks, weighted = [0] * rows, [0] * rows
    for block, hash_ in enumerate(hashes.tolist()):
        best: dict[int, int] = {}
        for owner in _holders(entries, hash_):
            row, weight = int(row_of[owner]), int(weight_of[owner])
            if owner != FAR_MARK and 0 <= row < rows and blocks[row] == block:
                best[row] = max(best.get(row, 0), weight)
        further = {row: weight for row, weight in best.items() if weight > 0}
        for row, weight in further.items():
            blocks[row] += 1
            weighted[row] += weight
        if not further:
            break
    return blocks, weighted


class _Insert:
    """One call of `insert`."""

    def __init__(
        self, entries: Hashes, ages: Ages, states: NDArray[np.uint8], held: Ints, limits: Ints,
        age: int, near_owners: int, spills: bool, retired: bool, stale: int | None,
    ) -> None:  # fmt: skip
        self.entries, self.ages, self.states, self.held, self.limits = entries, ages, states, held, limits
        self.age, self.near_owners, self.spills, self.retired = age, near_owners, spills, retired
        self.stale = HALF if stale is None else stale
        self.added = self.evicted = self.gone = 0
        self.over = False

    def block(self, hash_: int, entry: int) -> bool:
        """Refreshes an entry, or stores it. Returns whether the entry is new, or was last refreshed `stale` or more ticks ago."""
        near, far = _near(self.entries, hash_), _far_places(self.entries, hash_, entry & OWNER)
        words = self._words(near)
        if entry in words:
            return self._refresh(near[words.index(entry)])
        tagged = [place for place, word in zip(near, words, strict=True) if word >> 16 == hash_ >> 16]
        marks = [place for place, word in zip(near, words, strict=True) if word == entry & ~OWNER | FAR_MARK]
        crowded, in_far = len(tagged) >= self.near_owners, self._words(far)
        known = (marks or crowded) and entry in in_far
        if not known and not crowded:
            self._store_near(near, entry)
            return True
        stale = not known or self._refresh(far[in_far.index(entry)])
        if not known:
            self._store(next((to for to, word in zip(far, in_far, strict=True) if self._is_empty(word)), self._oldest(far)), entry)
        if marks:
            self.ages[marks[-1]] = self.age
        else:
            self._store_near(near, entry & ~OWNER | FAR_MARK)
        return stale

    def _words(self, places: list[Place]) -> list[int]:
        return [word for bucket, _ in places[::WAYS] for word in self.entries[bucket].tolist()]

    def _refresh(self, place: Place) -> bool:
        stale = self.age - int(self.ages[place]) & HALF >= self.stale
        self.ages[place] = self.age
        return stale

    def _is_empty(self, word: int) -> bool:
        return word == 0 or (self.retired and bool(self.states[word & OWNER] == RETIRED))

    def _oldest(self, places: list[Place]) -> Place:
        # Makes the current age the largest, even after the counter has wrapped.
        return min(places, key=lambda place: int(self.ages[place]) - self.age - 1 & HALF)

    def _store_near(self, near: list[Place], entry: int) -> None:
        """Stores the entry in an empty place of the emptier near bucket. If both near buckets are full, makes room (`_spill`), or
        overwrites the oldest entry.
        """
        words = self._words(near)
        empty = [[place for place, word in zip(near[at:], words[at : at + WAYS], strict=False) if self._is_empty(word)] for at in (0, WAYS)]
        room = max(empty, key=len)
        place = room[0] if room else self._spill(near, words) if self.spills else None
        self._store(place or self._oldest(near), entry)

    def _store(self, place: Place, entry: int) -> None:
        before, owner = int(self.entries[place]), entry & OWNER
        self.entries[place], self.ages[place] = entry, self.age
        self.held[owner] += _blocks(entry)
        self.over |= bool(0 < self.limits[owner] < self.held[owner])
        if before == 0:
            self.added += 1
            return
        self.held[before & OWNER] -= _blocks(before)
        gone = self._is_empty(before)
        self.gone += gone
        self.evicted += not gone

    def _spill(self, near: list[Place], words: list[int]) -> Place | None:
        """Moves entries of one hash from two full near buckets to its far buckets, and leaves a far mark. Returns a place that became
        empty, or None.

        Chooses the hash that frees most places; if several free equally many, the first of them.
        """
        word_at = dict(zip(near, words, strict=True))  # both buckets may be the same
        movable: dict[int, list[Place]] = {word >> 16: [] for word in word_at.values()}
        for place, word in word_at.items():
            if self._far_way(place, word) is not None:
                movable[word >> 16].append(place)
        gains = {tag: len(places) - 1 + (tag << 16 | FAR_MARK in words) for tag, places in movable.items()}
        chosen = max(gains, key=gains.__getitem__)
        if gains[chosen] <= 0:
            return None
        freed, mark = [], chosen << 16 | FAR_MARK
        for place in movable[chosen]:
            to = self._far_way(place, word_at[place])  # None if the entries before this one have filled its far bucket
            if to is not None:
                self.entries[to], self.ages[to] = word_at[place], self.ages[place]
                freed.append(place)
        if mark not in words:
            place, *freed = freed
            self.entries[place], self.ages[place] = mark, self.age
            self.held[FAR_MARK] += _blocks(mark)
            self.added += 1
        for place in freed:
            self.entries[place] = 0
        return freed[0] if freed else None

    def _far_way(self, place: Place, entry: int) -> Place | None:
        """Returns an empty place in the far bucket of an entry; None if the bucket is full or has the entry, or the entry is a far mark."""
        far = _far_places(self.entries, entry, entry & OWNER)
        if entry & OWNER == FAR_MARK or far[0][0] == place[0]:
            return None
        return next((to for to in far if self.entries[to] == 0), None)


def insert(
    entries: Hashes, ages: Ages, states: NDArray[np.uint8], held: Ints, limits: Ints, hashes: Hashes | bytes, owners: Owners,
    age: int, near_owners: int, spills: bool, retired: bool, stale: int | None,
) -> tuple[int, int, int, int, bool, News | None]:  # fmt: skip
    """Records that owners hold these blocks.

    `hashes`: an array or bytes. `owners`: one for all hashes, one per hash, or for runs of hashes a dict name -> owner, the name (u64) of
    each run, and its length (u16); runs whose name is not in the dict are left out. `spills`: whether full near buckets give entries to far
    buckets before one is overwritten. `retired`: whether there are retired owners; their entries are treated as empty. `stale`: if not
    None, an entry that is refreshed after this number of ticks or more is reported as news, like a new entry.

    Returns how many entries were added, how many live entries were evicted, how many entries of retired owners were replaced, how many
    blocks were dropped because their owner is not live, whether the owner of a new entry has more blocks than its limit, and the news, or
    None: the owner of each run of blocks, the number of blocks of each run, and the bytes of all hashes.
    """
    words = np.frombuffer(hashes, np.uint64) if isinstance(hashes, bytes) else hashes
    call = _Insert(entries, ages, states, held, limits, age, near_owners, spills, retired, stale)
    dropped, news = 0, []
    for hash_, owner in zip(words.tolist(), _owner_of_each(owners, len(words), "insert"), strict=True):
        if owner == 0 and isinstance(owners, tuple):
            continue
        if states[owner] != LIVE:
            dropped += 1
        elif call.block(hash_, hash_ & ~OWNER | owner):
            news.append((owner, hash_))
    told = None
    if stale is not None:
        runs = [(owner, len(list(run))) for owner, run in groupby(owner for owner, _ in news)]
        told = ([owner for owner, _ in runs], [size for _, size in runs], np.array([h for _, h in news], np.uint64).tobytes())
    return call.added, call.evicted, call.gone, dropped, call.over, told


def forget(entries: Hashes, ages: Ages, held: Ints, hashes: Hashes, owners: int | NDArray[Any], before: int | None) -> int:
    """Removes the entries that say that owners hold these blocks, and the far marks of those hashes that have no far entries any more.

    `owners`: one for all hashes, or one per hash. `before`: None, or an age; entries that were inserted or refreshed after it stay. Returns
    the number of removed entries.
    """
    freed = 0

    def remove(places: Iterable[Place], entry: int, before: int | None) -> int:
        found = [
            place
            for place in dict.fromkeys(places)
            if int(entries[place]) == entry and (before is None or _signed(int(ages[place]) - before) <= 0)
        ]
        for place in found:
            entries[place] = 0
            held[entry & OWNER] -= _blocks(entry)
        return len(found)

    for hash_, owner in zip(hashes.tolist(), _owner_of_each(owners, len(hashes), "forget"), strict=True):
        near = _near(entries, hash_)
        in_far = remove(_far_places(entries, hash_, owner), hash_ & ~OWNER | owner, before)
        freed += in_far + remove(near, hash_ & ~OWNER | owner, before)
        if in_far and not set(_far_holders(entries, hash_)) - {FAR_MARK}:
            freed += remove(near, hash_ & ~OWNER | FAR_MARK, None)
    return freed


def owned(entries: Hashes, ages: Ages, owners: list[int], newest: int) -> tuple[Hashes, Ints]:
    """Finds the entries of some owners, whose ids are in ascending order. `entries`, `ages`: flat. Returns the keys of all entries, those
    of the first owner first, and where the keys of each owner end.

    A key is the age of an entry, relative to `newest` so that older entries have smaller keys, times 2^32, plus its place.
    """
    owner_of, keys = entries & np.uint64(OWNER), []
    for owner in owners:
        places = np.flatnonzero(owner_of == owner)
        relative = ages[places] - np.uint32(newest + 1 & HALF)
        keys.append(relative.astype(np.uint64) << np.uint64(32) | places.astype(np.uint64))
    return np.concatenate(keys), np.cumsum([len(own) for own in keys])


def free_oldest(
    entries: Hashes, ages: Ages, held: Ints, places: NDArray[np.uint32], first: int, before: int, owner: int, excess: int
) -> tuple[int, int]:
    """Frees entries of an owner until it holds `excess` blocks fewer. `entries`, `ages`: flat. `places`: where a scan found the owner's
    entries.

    Goes through `places` from index `first` on. Leaves out entries that have another owner now, and entries that were last inserted or
    refreshed at the age `before` or later. Returns how many entries were freed, and the index of the next place.
    """
    freed = 0
    for place in places[first:].tolist():
        if excess <= 0:
            break
        first += 1
        entry = int(entries[place])
        if entry and entry & OWNER == owner and _signed(int(ages[place]) - before) < 0:
            entries[place] = 0
            held[owner] -= _blocks(entry)
            excess -= _blocks(entry)
            freed += 1
    return freed, first


def _owner_of_each(owners: Owners, hashes: int, kernel: str) -> list[int]:
    """Returns the owner of each hash; 0 if no owner has the name of its run."""
    if isinstance(owners, tuple):
        owner_of, names, counts = owners
        ids = [owner_of.get(name, 0) for name in np.frombuffer(names, np.uint64).tolist()]
        lengths = np.frombuffer(counts, np.uint16).tolist()
        found = [owner for owner, length in zip(ids, lengths, strict=False) for _ in range(length)]
        fits = len(ids) == len(lengths) and len(found) == hashes
        if not all(0 <= owner <= OWNER for owner in ids):
            raise ValueError(f"{kernel}: there is no such owner")
    else:
        found = [owners] * hashes if isinstance(owners, int) else owners.tolist()
        fits = len(found) == hashes
    if not fits:
        raise ValueError(f"{kernel}: hashes and owners differ in length")
    return found


def _signed(distance: int) -> int:
    """Returns the distance of two ages as a signed number of 32 bits, because ages wrap."""
    return (distance + (1 << 31) & HALF) - (1 << 31)


def _blocks(entry: int) -> int:
    return WIDE_BLOCKS if entry >> 16 & 1 else 1


def near_buckets(hash_: int, buckets: int) -> tuple[int, int]:
    """Returns both near buckets of a hash: its lower and its upper half, scaled to the number of buckets."""
    return (hash_ & HALF) * buckets >> 32, (hash_ >> 32) * buckets >> 32


def first_far_bucket(hash_: int, buckets: int) -> int:
    """Returns the first far bucket of a hash: its middle 32 bits, scaled to the number of buckets."""
    return (hash_ >> 16 & HALF) * (buckets - FAR_BUCKETS + 1) >> 32


def far_bucket(owner: int) -> int:
    """Returns which of a hash's far buckets, from 0 to 31, takes the entries of an owner id.

    In an index of held blocks, each endpoint has one id per tier, and one more id. So the ids of all endpoints in one tier can be, say,
    every fourth id. Such ids spread over all far buckets, too.
    """
    return owner * FAR_SPREAD >> FAR_SHIFT & FAR_BUCKETS - 1


def _near(entries: Hashes, hash_: int) -> list[Place]:
    return [(bucket, way) for bucket in near_buckets(hash_, len(entries)) for way in range(WAYS)]


def _far_places(entries: Hashes, hash_: int, owner: int) -> list[Place]:
    bucket = first_far_bucket(hash_, len(entries)) + far_bucket(owner)
    return [(bucket, way) for way in range(WAYS)]


def _far_holders(entries: Hashes, hash_: int) -> list[int]:
    first = first_far_bucket(hash_, len(entries))
    buckets = [entries[bucket].tolist() for bucket in range(first, first + FAR_BUCKETS)]
    return [entry & OWNER for bucket in buckets for entry in bucket if entry >> 16 == hash_ >> 16]


def _holders(entries: Hashes, hash_: int) -> list[int]:
    """Returns the owners of one block. Reads each entry only once, because another process writes the entries."""
    one, two = near_buckets(hash_, len(entries))
    near = [*entries[one].tolist(), *entries[two].tolist()]
    found = [entry & OWNER for entry in near if entry >> 16 == hash_ >> 16]
    return found + _far_holders(entries, hash_) if FAR_MARK in found else found
