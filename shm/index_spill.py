"""Makes room in two full near buckets of an index: entries of one hash move to its far buckets, and a far mark stays.

In an index of held blocks a lost entry ends a match, so full buckets must not cost entries. Near buckets are full mostly because many
endpoints hold one block: its entries share two near buckets. So the hash that can give away most entries of the two buckets is chosen.
Each of its entries moves to the far bucket of its owner, if that bucket has an empty place. A reader that looks at the same moment sees a
moved entry at its old place, its new place or both. The C kernel `insert` does the same.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from shm.prefix_index import (
    FAR_BUCKETS,
    FAR_MARK,
    OWNER_MASK,
    OWNER_WORD_MASK,
    SAME_TAG,
    WAYS,
    Hashes,
    Ints,
    far_bucket,
    first_far_buckets,
    near_buckets,
)

_TAG_MASK = ((1 << 64) - 1) ^ OWNER_MASK


def relieve(
    table: Hashes, ages: npt.NDArray[np.uint32], pairs: Ints, seen: Hashes, full: list[int], age: int
) -> Hashes:
    """Makes room in pairs of near buckets that are full. Returns the new far marks, as entries.

    `pairs`: shape (n, 2), the buckets of each pair. `seen`: shape (n, 16), the contents of each pair; updated here. `full`: the rows of
    `pairs` in which both buckets are full.
    """
    marks = []
    for row in full:
        if mark := spill(table, ages, pairs[row].tolist(), age):
            marks.append(mark)
        seen[row] = table[pairs[row]].reshape(-1)
    return np.array(marks, dtype=np.uint64)


def orphaned_marks(table: Hashes, hashes: Hashes) -> Ints:
    """Returns the places of far marks that are of no use: those of the given hashes whose far buckets have no entry of the hash."""
    places = [np.empty(0, dtype=np.int64)]
    for place, first in enumerate(first_far_buckets(hashes, len(table)).tolist()):
        hash_ = hashes[place]
        far = table[first : first + FAR_BUCKETS]
        if not (((far ^ hash_) < SAME_TAG) & ((far & OWNER_WORD_MASK) != FAR_MARK)).any():
            near = np.unique(near_buckets(hashes[place : place + 1], len(table)))
            bucket, way = (table[near] == (hash_ & np.uint64(_TAG_MASK) | np.uint64(FAR_MARK))).nonzero()
            places.append(near[bucket] * WAYS + way)
    return np.concatenate(places)


def spill(table: Hashes, ages: npt.NDArray[np.uint32], pair: list[int], age: int) -> int | None:
    """Moves entries of one hash out of the two full near buckets `pair`. Returns the entry of the new far mark.

    Returns 0 if the hash had a far mark before, and None if no entry could move. `table` and `ages`: shape (buckets, 8). `age`: the
    current age, which the new mark gets.
    """
    places = [(bucket, way) for bucket in dict.fromkeys(pair) for way in range(WAYS)]
    entries: list[int] = [int(table[place]) for place in places]
    best, chosen, marked = 0, -1, False
    for tag in dict.fromkeys(entry & _TAG_MASK for entry in entries):
        mark = tag | FAR_MARK in entries
        gain = mark - 1
        gain += sum(_far_way(table, place[0], entry) is not None for place, entry in _of(tag, places, entries))
        if gain > best:
            best, chosen, marked = gain, tag, mark
    if chosen < 0:
        return None
    moved = []
    for place, entry in _of(chosen, places, entries):
        to = _far_way(table, place[0], entry)
        if to is not None:
            ages[to] = ages[place]
            table[to] = entry
            moved.append(place)
    if not marked:
        first = moved.pop(0)
        table[first] = chosen | FAR_MARK
        ages[first] = age
    for place in moved:
        table[place] = 0
    return 0 if marked else chosen | FAR_MARK


def _of(tag: int, places: list[tuple[int, int]], entries: list[int]) -> list[tuple[tuple[int, int], int]]:
    """Returns the entries with this tag and their places, without the tag's far mark."""
    pairs = zip(places, entries, strict=True)
    return [(place, entry) for place, entry in pairs if entry & _TAG_MASK == tag and entry != tag | FAR_MARK]


def _far_way(table: Hashes, bucket: int, entry: int) -> tuple[int, Any] | None:
    """Returns an empty place, as (bucket, way), in the far bucket of an entry that is now in `bucket`.

    Returns None if its far bucket is full, or is `bucket` itself.
    """
    first = int(first_far_buckets(np.array([entry], dtype=np.uint64), len(table))[0])
    far = first + int(far_bucket(np.array([entry & OWNER_MASK]))[0])
    empty = np.flatnonzero(table[far] == 0)
    return (far, int(empty[0])) if far != bucket and len(empty) else None
