"""Writes an index of held blocks, and the links that lead from a model server's block hashes to the keys of this index.

Index and links use the same owner ids: an entry or a link counts only while its owner is live. So `retire` drops everything of an owner
at once. A sweep then frees its entries and links, before the id is assigned again.
"""

from collections.abc import Sequence

from shm.layout import aligned
from shm.link_table import Links, LinkSchema, LinkTable
from shm.prefix_index import FAR_BUCKETS, NEAR_WAYS, OWNER_LIVE, WAYS, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region

# A missing entry ends its owner's match too early, so the index must have room for every block. With a third of its entries in use it
# evicts no entry if each block has up to four owners, 1 of 10,000 with eight owners, 7 of 10,000 with 24, and 3 of 100 with 100.
INDEX_LOAD = 1 / 3
NEAR_OWNERS = NEAR_WAYS
LINKS_LOAD = 0.78


def schemas(blocks: int) -> tuple[IndexSchema, LinkSchema]:
    """Returns the layouts of an index and its links for a number of blocks. A block counts once per endpoint and tier that holds it."""
    return IndexSchema(max(int(blocks / INDEX_LOAD), FAR_BUCKETS * WAYS)), LinkSchema(aligned(int(blocks / LINKS_LOAD) + 1, WAYS))


class HeldWriter(IndexWriter):
    """Inserts and removes held blocks, and keeps their links. Only one process has such a writer."""

    def __init__(self, index: IndexSchema, index_region: Region, links: LinkSchema, links_region: Region) -> None:
        super().__init__(index, index_region, near_owners=NEAR_OWNERS, spills=True)
        self.links = LinkTable(links, links_region, self._states)

    def sweep_both(self, share: float) -> None:
        """Frees entries and links of retired owners in the next part of both tables. `share`: the size of that part, from 0 to 1."""
        if not self._retired_at:
            return
        buckets = max(1, int(self.schema.buckets * share))
        self.links.sweep_step(-(-self.links.schema.buckets * buckets // self.schema.buckets))
        self.sweep_step(buckets)

    def sweep_all(self) -> None:
        """Frees the entries, links and ids of all retired owners at once. Takes some ten milliseconds for a million blocks."""
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
