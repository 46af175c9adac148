"""Counts the entries of the prefix index: in a large one, those of an evenly spread sample of the buckets."""

from typing import NamedTuple

import numpy as np

from shm.prefix_index import DROPPED, EVICTIONS, FAR_MARK, OWNER_LIVE, OWNER_MASK, OWNER_RETIRED, WAYS, IndexSchema
from shm.segment import Region
from workers.supervisor.pages.state.look import IndexLook


class Counted(NamedTuple):
    """The entries in the counted buckets of the prefix index. `factor`: all buckets divided by counted buckets."""

    used: int
    by_owner: list[int]
    factor: float


class IndexCounts:
    """Counts in one prefix index. `buckets_max`: how many buckets are counted at most."""

    def __init__(self, schema: IndexSchema, region: Region, buckets_max: int) -> None:
        self._schema = schema
        self._region = region
        self._buckets_max = buckets_max

    def counted(self) -> Counted:
        """Counts the entries per owner, in all buckets or in every n-th bucket."""
        schema = self._schema
        buckets = self._region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        step = -(-schema.buckets // self._buckets_max)
        part = buckets[::step]
        owners = np.bincount((part[part != 0] & np.uint64(OWNER_MASK)).astype(np.intp), minlength=FAR_MARK + 1)
        return Counted(int(owners.sum()), owners.tolist(), schema.buckets / len(part))

    def look(self, counted: Counted) -> IndexLook:
        """Returns the figures of the whole index. `counted`: the result of `counted`."""
        schema, words = self._schema, self._region.words
        states = self._region.array(np.uint8, schema.owners_at, schema.entries_at - schema.owners_at)
        used = round(counted.used * counted.factor)
        return IndexLook(
            entries=schema.entries,
            used=used,
            used_share=used / schema.entries,
            estimated=counted.factor > 1,
            owners_live=int(np.count_nonzero(states == OWNER_LIVE)),
            owners_retired=int(np.count_nonzero(states == OWNER_RETIRED)),
            evictions=words[EVICTIONS],
            dropped=words[DROPPED],
        )
