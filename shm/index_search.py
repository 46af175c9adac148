"""Finds entries of the prefix index without the C kernel."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shm.index_capacity import AGE_MASK, OWNER_IDS
from shm.prefix_index import OWNER_WORD_MASK, WAYS, Hashes, Ints, far_bucket, first_far_buckets, near_buckets

# The owner of each run of blocks, the number of blocks of each run, and the bytes of all hashes (u64).
News = tuple[list[int], list[int], bytes]

_TAG_MASK = np.uint64(~(OWNER_IDS - 1) & ((1 << 64) - 1))


def reference_news(
    table: Hashes, all_ages: npt.NDArray[np.uint32], hashes: Hashes, owners: npt.NDArray[Any], age: int, stale: int
) -> News:
    """Returns the blocks of an insert that are news: new ones, and those last inserted `stale` or more ticks before `age`.

    `owners`: one per hash, all live.
    """
    ids = owners.astype(np.uint16)
    entries = (hashes & _TAG_MASK) | ids.astype(np.uint64)
    far = first_far_buckets(hashes, len(table)) + far_bucket(ids.astype(np.int64))
    buckets = np.column_stack((near_buckets(hashes, len(table)), far))
    ticks = np.uint32(age & AGE_MASK) - all_ages[buckets]
    told = ~((table[buckets] == entries[:, None, None]) & (ticks < stale)).any(axis=(1, 2))
    first = np.zeros(len(hashes), np.bool_)
    first[np.unique(entries, return_index=True)[1]] = True  # the second time, an entry is fresh
    told &= first
    told_ids = ids[told]
    ends = np.flatnonzero(np.append(told_ids[1:] != told_ids[:-1], True)[: len(told_ids)])
    return told_ids[ends].tolist(), np.diff(ends, prepend=-1).tolist(), hashes[told].astype("<u8", copy=False).tobytes()


def far_buckets(hashes: Hashes, entries: Hashes, buckets: int) -> Ints:
    """Returns the far bucket of each entry, shape (entries, 1)."""
    owners = (entries & OWNER_WORD_MASK).view(np.int64)
    return (first_far_buckets(hashes, buckets) + far_bucket(owners))[:, None]


def found(
    table: Hashes,
    ages: npt.NDArray[np.uint32],
    hashes: Hashes,
    owners: int | npt.NDArray[Any],
    before: int | None,
) -> tuple[Ints, Hashes]:
    """Finds the entries that say that these owners hold these blocks. Returns their places, and the hashes with one in a far bucket.

    `before`: leave out entries that were inserted or refreshed after this age; None: leave out none.
    """
    ids = np.full(len(hashes), owners) if isinstance(owners, int) else owners
    entries = (hashes & _TAG_MASK) | ids.astype(np.uint64)
    buckets = np.column_stack((near_buckets(hashes, len(table)), far_buckets(hashes, entries, len(table))))
    row, column, way = (table[buckets] == entries[:, None, None]).nonzero()
    places = buckets[row, column]
    if before is not None:
        kept = (ages[places, way] - np.uint32(before & AGE_MASK)).view(np.int32) <= 0
        row, column, way, places = row[kept], column[kept], way[kept], places[kept]
    return np.unique(places * WAYS + way), hashes[np.unique(row[column == 2])]
