"""Look-ups in an index of held blocks, in which blocks in the middle of a chain may be missing.

The layout is that of the prefix index (`shm.prefix_index`). In the prefix index a hit on block i proves the blocks before it. In an
index of held blocks it does not, because a model server may drop any block. So every block of a prompt is looked up, until no row is
left that holds all blocks so far. A row stands for an endpoint.
"""

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.index_capacity import OWNER_IDS
from shm.prefix_index import WAYS, Hashes, IndexSchema, Ints
from shm.segment import Region


class Owners:
    """Maps owner ids to rows and weights. Call `add` for each id, then pass this object to `HeldReader.held`.

    A row is the number of an endpoint, from 0 to `rows` - 1; it may have several owner ids, one per cache tier. A weight is an integer
    above 0; a higher one is better.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row_of: Ints = np.full(OWNER_IDS, rows, dtype=np.int64)  # `rows`: the owner belongs to no endpoint
        self.weight_of: npt.NDArray[np.int32] = np.zeros(OWNER_IDS, dtype=np.int32)

    def add(self, owner: int, row: int, weight: int) -> None:
        """Records that blocks of this owner id count for this row, with this weight."""
        self.row_of[owner] = row
        self.weight_of[owner] = weight


class HeldReader:
    """Looks up blocks in an index of held blocks. It never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False

    def held(self, hashes: Hashes, owners: Owners) -> tuple[list[int], list[int]]:
        """Returns two lists with one number per row: how many leading blocks the row holds without a gap, and the sum of their weights.

        `hashes`: uint64, one per block of a prompt, first block first. A block that a row holds under several owner ids counts once, with
        the best of their weights.
        """
        return kernels.held(self._table, hashes, owners.row_of, owners.weight_of, owners.rows)
