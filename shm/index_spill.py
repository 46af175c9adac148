"""Makes room in two full buckets of an index: entries of one hash move to its far buckets, and a far mark stays.

In an index of held blocks a lost entry ends a match, so full buckets must not cost entries. They are full because the holders of one block
share its two near buckets. So the entries of the hash with most of them there move. They go to empty places only, each to the far bucket of
its owner. Readers, who may look at the same moment, see a moved entry in one of its two places or in both. The C kernel `insert` does the
same.
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
    """Make room in pairs of full buckets. Return the entries of the new far marks.

    `pairs`: shape (n, 2). `seen`: the contents of each pair, shape (n, 16), which follow. `full`: the full ones.
    """
    marks = []
    for row in full:
        if mark := spill(table, ages, pairs[row].tolist(), age):
            marks.append(mark)
        seen[row] = table[pairs[row]].reshape(-1)
    return np.array(marks, dtype=np.uint64)


def orphaned_marks(table: Hashes, hashes: Hashes) -> Ints:
    """The places of the far marks of those hashes that have no entries in their far buckets."""
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
    """Move entries out of the full buckets `pair`. Return the entry of the new far mark, 0 if there was a mark; None: nothing moved.

    `table`: shape (buckets, 8). `ages`: of the same shape. `age`: the present one.
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
    """The entries of a tag that are no far mark, with their places."""
    pairs = zip(places, entries, strict=True)
    return [(place, entry) for place, entry in pairs if entry & _TAG_MASK == tag and entry != tag | FAR_MARK]


def _far_way(table: Hashes, bucket: int, entry: int) -> tuple[int, Any] | None:
    """An empty place in the far bucket of an entry that is in `bucket`; None if there is none, or if that is the far bucket."""
    first = int(first_far_buckets(np.array([entry], dtype=np.uint64), len(table))[0])
    far = first + int(far_bucket(np.array([entry & OWNER_MASK]))[0])
    empty = np.flatnonzero(table[far] == 0)
    return (far, int(empty[0])) if far != bucket and len(empty) else None
