"""An index of held blocks: its writer, with the links from a model server's block hashes to the keys of this index, and its reader.

Index and links use the same owner ids, and an entry or a link is valid only while its owner is live. So `retire` drops all entries and
links of an owner at once. A sweep then frees them, before the id is assigned again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.index_capacity import OWNER_IDS
from shm.layout import aligned
from shm.link_table import Links, LinkSchema, LinkTable
from shm.prefix_index import FAR_BUCKETS, NEAR_WAYS, OWNER_LIVE, WAYS, Hashes, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Ints, Region

# A missing entry ends its owner's match too early, so the index must have room for every block. With a third of its entries in use it
# evicts no entry if each block has up to four owners, 1 of 10,000 with eight owners, 7 of 10,000 with 24, and 3 of 100 with 100.
INDEX_LOAD = 1 / 3
NEAR_OWNERS = NEAR_WAYS
LINKS_LOAD = 0.78


def schemas(blocks: int) -> tuple[IndexSchema, LinkSchema]:
    """Returns the layouts of an index and its links for a number of blocks. A block is counted once per endpoint and tier that holds it."""
    return IndexSchema(max(int(blocks / INDEX_LOAD), FAR_BUCKETS * WAYS)), LinkSchema(aligned(int(blocks / LINKS_LOAD) + 1, WAYS))


class HeldWriter(IndexWriter):
    """Inserts and removes held blocks, and keeps their links. Only one process has such a writer."""

    def __init__(self, index: IndexSchema, index_region: Region, links: LinkSchema, links_region: Region) -> None:
        super().__init__(index, index_region, near_owners=NEAR_OWNERS, spills=True)
        self.links = LinkTable(links, links_region, self._states)

    def sweep_both(self, share: float) -> None:
        """Frees entries and links of retired owners in the next part of both tables. `share`: the size of this part, from 0 to 1."""
        if not self._retired_at:
            return
        buckets = max(1, int(self.schema.buckets * share))
        self.links.sweep_step(-(-self.links.schema.buckets * buckets // self.schema.buckets))
        self.sweep_step(buckets)

    def sweep_all(self) -> None:
        """Frees the entries, links and ids of all retired owners at once. This takes some ten milliseconds for a million blocks."""
        self.links.sweep_step(self.links.schema.buckets)
        for _ in range(2):  # the first pass may begin in the middle of the table and ends at its last bucket
            self.sweep_step(self.schema.buckets)

    def restore(self, owners: Sequence[int], links: Links) -> None:
        """Makes `owners` live, and fills the table of links with `links`, which `LinkTable.copy` returned.

        The caller inserts the entries of the index afterwards. Raises ValueError if the index or the table of links is in use.
        """
        if self.size() or self.owners() or self._retired_at or self.links.size:
            raise ValueError("restore needs unused memory; this one has entries or owners")
        self._states[list(owners)] = OWNER_LIVE
        self.links.load(links)
        self.changes += 1

    def empty(self) -> None:
        """Retires every owner and drops all links."""
        for owner in self.owners():
            self.retire(owner)
        self.links.clear()


class Owners:
    """Maps owner ids to rows and weights. Call `add` for each id, then pass this object to `HeldReader.held`.

    A row is the number of an endpoint, from 0 to `rows` - 1; it may have several owner ids, one per cache tier. A weight is an integer
    above 0; a higher weight is better.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row_of: Ints = np.full(OWNER_IDS, rows, dtype=np.int64)  # `rows` if the id is not that of an endpoint
        self.weight_of: npt.NDArray[np.int32] = np.zeros(OWNER_IDS, dtype=np.int32)

    def add(self, owner: int, row: int, weight: int) -> None:
        """Records that blocks of this owner id belong to this row, with this weight."""
        self.row_of[owner] = row
        self.weight_of[owner] = weight


class HeldReader:
    """Looks up blocks in an index of held blocks. It never writes.

    The layout is that of the prefix index (`shm.prefix_index`). In the prefix index a hit on block i proves the blocks before it. In an
    index of held blocks, a hit proves only its own block, because a model server may drop any block. So every block of a prompt is looked
    up, until no row is left that holds all blocks so far. A row stands for an endpoint.
    """

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False

    def held(self, hashes: Hashes, owners: Owners) -> tuple[list[int], list[int]]:
        """Returns two lists with one number per row: how many leading blocks the row holds without a gap, and the sum of their weights.

        `hashes`: uint64, one per block of a prompt, first block first. A block that a row holds under several owner ids is counted once,
        with the best of their weights.
        """
        return kernels.held(self._table, hashes, owners.row_of, owners.weight_of, owners.rows)
