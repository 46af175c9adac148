"""Look-ups in an index of held blocks, in which blocks in the middle of a chain may be missing.

The layout is that of the prefix index (`shm.prefix_index`). In the prefix index a hit on block i proves the blocks before it. In an
index of held blocks it does not, because a model server may drop any block. So every block of a prompt is looked up, until no row is
left that holds all blocks so far. A row stands for an endpoint.
"""

import numpy as np
import numpy.typing as npt

from compiled import kernels
from shm.index_capacity import OWNER_BITS, OWNER_IDS
from shm.layout import CACHE_LINE, WORD
from shm.prefix_index import (
    FAR_BUCKETS,
    FAR_MARK,
    FAR_WAYS,
    LOW_HALF,
    NEAR_WAYS,
    OWNER_MASK,
    OWNER_WORD_MASK,
    SAME_TAG,
    WAYS,
    Hashes,
    IndexSchema,
    Ints,
    first_far_buckets,
    near_buckets,
)
from shm.segment import Region

# The number of blocks of the first look-up if no endpoint holds the last block of the prompt. Each further look-up takes GROWTH times
# as many, up to BLOCKS_MAX.
FIRST_BLOCKS = 64
GROWTH = 4
BLOCKS_MAX = 2048  # blocks to look up together at most
OWNER_BITS_MASK = np.int64(OWNER_MASK)

_FAR_STEPS = np.arange(FAR_BUCKETS, dtype=np.int64)


class Owners:
    """Maps owner ids to rows and weights. Call `add` for each id, then pass this object to `HeldReader.held`.

    A row is the number of an endpoint, from 0 to `rows` - 1; it may have several owner ids, one per cache tier. A weight is an integer
    above 0; a higher one is better.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.row_of: Ints = np.full(OWNER_IDS, rows, dtype=np.int64)  # `rows`: the owner belongs to no endpoint
        self.weight_of: npt.NDArray[np.int32] = np.zeros(OWNER_IDS, dtype=np.int32)
        self.weights: list[int] = []

    def add(self, owner: int, row: int, weight: int) -> None:
        """Records that blocks of this owner id count for this row, with this weight."""
        self.row_of[owner] = row
        self.weight_of[owner] = weight
        self.weights = sorted({*self.weights, weight})


class HeldReader:
    """Looks up blocks in an index of held blocks. It never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self._buckets = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False
        self._bytes = region.part(schema.entries_at, schema.entries * WORD).bytes.toreadonly()
        self._near: Hashes = np.empty((BLOCKS_MAX, 2, WAYS), dtype=np.uint64)  # working memory
        self._differ: Hashes = np.empty((BLOCKS_MAX, NEAR_WAYS), dtype=np.uint64)

    def held(self, hashes: Hashes, owners: Owners) -> tuple[list[int], list[int]]:
        """Returns two lists with one number per row: how many leading blocks the row holds without a gap, and the sum of their weights.

        `hashes`: uint64, one per block of a prompt, first block first. A block that a row holds under several owner ids counts once, with
        the best of their weights.
        """
        if kernels.NATIVE:
            return kernels.held(self._table, hashes, owners.row_of, owners.weight_of, owners.rows)
        return self.reference_held(hashes, owners)

    def reference_held(self, hashes: Hashes, owners: Owners) -> tuple[list[int], list[int]]:
        """Computes `held` in Python, without the C kernel."""
        rows, count = owners.rows, len(hashes)
        blocks, weighted = [0] * rows, [0] * rows
        start, size = 0, BLOCKS_MAX
        if count > FIRST_BLOCKS and not self._known(hashes.item(count - 1)):
            size = FIRST_BLOCKS
        while start < count:
            stop = min(start + size, count)
            if not self._extend(hashes[start:stop], start, owners, blocks, weighted):
                break
            start, size = stop, min(size * GROWTH, BLOCKS_MAX)
        return blocks, weighted

    def _extend(self, hashes: Hashes, start: int, owners: Owners, blocks: list[int], weighted: list[int]) -> bool:
        """Looks up `hashes`, the blocks from `start` on. Updates `blocks` and `weighted` of each row that holds all blocks before `start`.

        Returns whether any such row also holds all of these blocks.
        """
        best = self._best(hashes, owners)
        if best is None:
            return False
        count, further = len(hashes), False
        present = best.tobytes()
        only = owners.weights[0] if len(owners.weights) == 1 else 0
        for row, before in enumerate(blocks):
            if before != start:
                continue
            missing = present.find(0, row * count, (row + 1) * count)
            depth = count if missing < 0 else missing - row * count
            further |= missing < 0
            blocks[row] = start + depth
            if only:
                weighted[row] += depth * only
            elif depth:
                levels = np.bincount(best[row * count : row * count + depth]).tolist()
                weighted[row] += sum(owners.weights[level - 1] * n for level, n in enumerate(levels) if n)
        return further

    def _best(self, hashes: Hashes, owners: Owners) -> npt.NDArray[np.uint8] | None:
        """Returns the best weight per row and block, as 1 + its place in `owners.weights`; 0: the row does not hold the block.

        The result is a flat array of (rows + 1) * blocks numbers, row by row. The last row is for owner ids that belong to no endpoint.
        Returns None if the index has no entry for any of the blocks.
        """
        count = len(hashes)
        table = self._table.take(near_buckets(hashes, self._buckets), axis=0, out=self._near[:count], mode="clip")
        near = table.reshape(-1, NEAR_WAYS)
        differ = np.bitwise_xor(near, hashes[:, None], out=self._differ[:count])
        at = np.flatnonzero(differ < SAME_TAG)
        if not len(at):
            return None
        found = near.reshape(-1).take(at).view(np.int64)
        found &= OWNER_BITS_MASK
        block = at >> 4
        marks = found == FAR_MARK
        if marks.any():
            far_found, far_block = self._far(hashes, np.unique(block[marks]))
            found, block = np.concatenate((found, far_found)), np.concatenate((block, far_block))
        place = owners.row_of.take(found)
        place *= count
        place += block
        best = np.zeros((owners.rows + 1) * count, dtype=np.uint8)
        if len(owners.weights) == 1:
            best[place] = 1
        else:
            weight = owners.weight_of[found]
            for level, value in enumerate(owners.weights):  # a better weight replaces a worse one
                best[place[weight == value]] = level + 1
        return best

    def _far(self, hashes: Hashes, blocks: Ints) -> tuple[Ints, Ints]:
        chosen = hashes[blocks]
        buckets = first_far_buckets(chosen, self._buckets)[:, None] + _FAR_STEPS
        far = self._table.take(buckets, axis=0).reshape(-1, FAR_WAYS)
        at = np.flatnonzero((far ^ chosen[:, None]) < SAME_TAG)
        found = (far.reshape(-1)[at] & OWNER_WORD_MASK).view(np.int64)
        return found, blocks[at // FAR_WAYS]

    def _known(self, hash_: int) -> bool:
        """Returns whether the near buckets have an entry that looks like this block's; a chance match of bytes counts too."""
        table, buckets = self._bytes, self._buckets
        one = ((hash_ & LOW_HALF) * buckets >> 32) * CACHE_LINE
        two = ((hash_ >> 32) * buckets >> 32) * CACHE_LINE
        near = table[one : one + CACHE_LINE].tobytes() + table[two : two + CACHE_LINE]
        return (hash_ >> OWNER_BITS).to_bytes(6, "little") in near
