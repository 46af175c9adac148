"""The layout of the prefix index: a hash table of fixed size that records which owner holds which block.

    control  | buckets | evictions | dropped | over capacity | gone | taken back |   one cache line
    owners   | state of owner 0 | ... | state of owner 65535 |                    one byte each
    entries  | bucket 0: 8 entries | bucket 1: 8 entries | ...                    one cache line per bucket
    ages     | age of entry 0 | age of entry 1 | ...                              one u32 each

    entry    | tag: upper 48 bits of the hash | owner: 16 bits |                  one u64, 0 = empty

- An entry is one aligned word, so a reader always sees the tag and the owner of the same store. The order of stores to different words does
  not matter. Only the writer reads ages. They are ticks of a 32-bit clock that wraps, so only the distance to the current tick has a
  meaning.
- A hash has two *near* buckets. They take up to `NEAR_OWNERS` owners of one hash. So a block that all endpoints hold, such as a common
  system prompt, does not push other blocks out. Further owners of that hash go to its *far* buckets, 32 in a row; the owner id selects
  one bucket. A *far mark*, a near entry with `FAR_MARK` as its owner, says that the hash has entries in far buckets; it has the age of
  the youngest far entry. In an index of held blocks, full near buckets give entries of one hash to its far buckets before an entry is
  overwritten.
- Each hash covers its block and all blocks before it in the prompt. So a hit on block i proves blocks 0..i.
- The writer (`shm.prefix_writer`) assigns owner ids. It frees the entries of a retired owner step by step, and assigns its id again
  only after `sweep_step` has covered the whole table.
- An owner may have a capacity (`shm.index_capacity`). If an owner has more entries, the writer removes its oldest entries.
- The control words count entries. `dropped`: entries that were never stored. The other words count freed entries. `evictions`: live
  entries that were overwritten because their buckets were full. `over capacity`: entries beyond their owner's capacity. `gone`: entries
  of retired owners. `taken back`: entries that `forget` freed.
- Only one process writes the index. Its successor counts the entries and continues. The id of a retired owner then becomes free only
  after one more full sweep.

This module does not hash prompts. An entry does not guarantee that the block is still in its owner's cache.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from compiled import calls
from shm.index_capacity import OWNER_IDS
from shm.layout import CACHE_LINE, WORD, Layout, aligned
from shm.segment import Region

WAYS: Final = 8  # entries per bucket: one cache line
NEAR_WAYS: Final = 2 * WAYS
NEAR_OWNERS: Final = 12
FAR_BUCKETS: Final = 32
FAR_WAYS: Final = FAR_BUCKETS * WAYS

OWNER_MASK: Final = OWNER_IDS - 1
FAR_MARK: Final = 1  # the owner id of far marks; it is low, so that arrays with one element per owner stay short
FIRST_OWNER: Final = 2
OWNER_FREE: Final = 0
OWNER_LIVE: Final = 1
OWNER_RETIRED: Final = 2

BUCKETS: Final = 0
EVICTIONS: Final = 1
DROPPED: Final = 2
OVER_CAPACITY: Final = 3
GONE: Final = 4
TAKEN_BACK: Final = 5

Hashes = npt.NDArray[np.uint64]

OWNER_WORD_MASK: Final = np.uint64(OWNER_MASK)

assert WAYS * WORD == CACHE_LINE


class IndexSchema(Layout):
    """Lays out an index for a number of entries, rounded up to whole buckets. An entry takes 12 bytes with its age."""

    def __init__(self, entries: int) -> None:
        if entries < FAR_WAYS:
            raise ValueError(f"an index needs at least {FAR_WAYS} entries, not {entries}")
        self.buckets = -(-entries // WAYS)
        self.entries = self.buckets * WAYS
        self.owners_at = CACHE_LINE
        self.entries_at = self.owners_at + OWNER_IDS
        self.ages_at = self.entries_at + self.entries * WORD
        self.bytes = aligned(self.ages_at + self.entries * 4)
        super().__init__("index", "prefix index 3", entries=self.entries)


class IndexReader:
    """Looks up prompts in the prefix index. It never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self.schema = schema
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False

    def match(self, hashes: Hashes) -> dict[int, int]:
        """Returns, for each owner with a hit, how many leading blocks it is known to hold (its deepest hit + 1).

        `hashes`: uint64, one per block. A hit on block i proves blocks 0..i. The index evicts single entries by age, so a miss proves
        nothing. An owner has no match with a long prompt only if it misses all blocks that the kernel looks up first, which are every 32nd
        and the last.
        """
        return calls.match(self._table, hashes)
