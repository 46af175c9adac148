"""Finds out without the C kernel which blocks of an insert are news: those that the prefix index does not have, or that are old."""

from typing import Any

import numpy as np
import numpy.typing as npt

from shm.index_capacity import AGE_MASK, OWNER_IDS
from shm.prefix_index import Hashes, far_bucket, first_far_buckets, near_buckets

# The owner of each run of blocks, the number of blocks of each run, and the bytes of all hashes (u64).
News = tuple[list[int], list[int], bytes]

_TAG_MASK = np.uint64(~(OWNER_IDS - 1) & ((1 << 64) - 1))


def reference_news(
    table: Hashes, all_ages: npt.NDArray[np.uint32], hashes: Hashes, owners: npt.NDArray[Any], age: int, stale: int
) -> News:
    """Return the blocks that are new, or were last inserted `stale` or more ticks before `age`. `owners`: one per hash, all live."""
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
