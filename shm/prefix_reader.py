"""Looks up prompts in the prefix index (`shm.prefix_index` has the layout)."""

import numpy as np

from compiled import calls
from shm.prefix_index import WAYS, Hashes, IndexSchema
from shm.segment import Region


class IndexReader:
    """Looks up prompts in the prefix index. It never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self.schema = schema
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False

    def match(self, hashes: Hashes) -> dict[int, int]:
        """Returns, for each owner with a hit, how many leading blocks it is known to hold (its deepest hit + 1).

        `hashes`: uint64, one per block. A hit on block i proves blocks 0..i. The index evicts single entries by age, so a miss proves
        nothing: of a long prompt, an owner has no match only if all blocks miss that the kernel looks up first, every 32nd and the last.
        """
        return calls.match(self._table, hashes)
