"""The layout of the prefix index: a hash table of fixed size that records which owner holds which block.

    control  | buckets | evictions | dropped | over capacity | gone | taken back |   one cache line
    owners   | state of owner 0 | ... | state of owner 65535 |                    one byte each
    entries  | bucket 0: 8 entries | bucket 1: 8 entries | ...                    one cache line per bucket
    ages     | age of entry 0 | age of entry 1 | ...                              one u32 each

    entry    | tag: upper 48 bits of the hash | owner: 16 bits |                  one u64, 0 = empty

- An entry is one aligned word, so a reader always sees the tag and the owner of the same store. The index needs no other memory order.
  Only the writer reads ages. They are ticks of a 32-bit clock that wraps, so only the distance to the current tick has a meaning.
- A hash has two *near* buckets. They take up to `NEAR_OWNERS` owners of one hash. So a block that all endpoints hold, such as a common
  system prompt, does not push other blocks out. Further owners of that hash go to its *far* buckets, 32 in a row; the owner id selects
  one of them (`far_bucket`). A *far mark*, a near entry with `FAR_MARK` as its owner, says that the hash has entries in far buckets; it
  has the age of the youngest of them. In an index of held blocks, full near buckets give entries to far buckets (`shm.index_spill`).
- Each hash covers its block and all blocks before it in the prompt. So a hit on block i proves blocks 0..i.
- The writer (`shm.prefix_writer`) assigns owner ids. It frees the entries of a retired owner step by step, and assigns its id again
  only after `sweep_step` has covered the whole table.
- An owner may have a capacity (`shm.index_capacity`). If it has more entries, the writer removes the oldest ones.
- The control words count entries that were freed or, `dropped`, never stored. `evictions`: live entries that were overwritten because
  their buckets were full. `over capacity`: entries beyond their owner's capacity. `gone`: entries of retired owners. `taken back`:
  entries that `forget` freed.
- Only one process writes the index. Its successor counts the entries and continues. The id of a retired owner then becomes free only
  after one more full sweep.

This module does not hash prompts. An entry does not guarantee that the block is still in its owner's cache.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm.index_capacity import OWNER_BITS, OWNER_IDS
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash

WAYS: Final = 8  # entries per bucket: one cache line
NEAR_WAYS: Final = 2 * WAYS
NEAR_OWNERS: Final = 12
FAR_BUCKETS: Final = 32
FAR_WAYS: Final = FAR_BUCKETS * WAYS
FAR_SPREAD: Final = 0x9E37  # the golden ratio in 16 bits
FAR_SHIFT: Final = 11

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
Ints = npt.NDArray[np.int64]

OWNER_WORD_MASK: Final = np.uint64(OWNER_MASK)
SAME_TAG: Final = np.uint64(OWNER_IDS)  # x ^ y is below this if and only if the tags are equal
_HALF: Final = np.uint64(32)
LOW_HALF: Final = (1 << 32) - 1
_MIDDLE: Final = np.uint64(OWNER_BITS)

assert WAYS * WORD == CACHE_LINE


class IndexSchema:
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
        self.layout_hash = layout_hash("prefix index 3", self.entries)

    def describe(self) -> dict[str, Any]:
        return {"kind": "index", "entries": self.entries}


def near_buckets(hashes: Hashes, buckets: int) -> Ints:
    """Returns both near buckets of each hash, shape (hashes, 2): its lower and its upper half, scaled to the number of buckets."""
    halves = np.ascontiguousarray(hashes).view(np.uint32).reshape(-1, 2)
    scaled = np.multiply(halves, np.uint64(buckets), dtype=np.uint64)
    scaled >>= _HALF
    return scaled.view(np.int64)


def first_far_buckets(hashes: Hashes, buckets: int) -> Ints:
    """Returns the first far bucket of each hash, shape (hashes,): its middle 32 bits, scaled to the number of buckets."""
    middle = (hashes >> _MIDDLE) & np.uint64(LOW_HALF)
    return ((middle * np.uint64(buckets - FAR_BUCKETS + 1)) >> _HALF).view(np.int64)


def far_bucket(owners: Ints) -> Ints:
    """Returns which of a hash's far buckets, from 0 to 31, takes the entries of each owner id.

    In an index of held blocks, each endpoint has one id per tier, and one more. So the ids of all endpoints in one tier can be, say,
    every fourth id. Such ids spread over all far buckets, too.
    """
    return owners * FAR_SPREAD >> FAR_SHIFT & (FAR_BUCKETS - 1)
