"""Look-ups in the prefix index (`shm.prefix_index` has the layout).

`match` returns the deepest hit of each owner, because a hit on block i proves blocks 0..i. It first probes every 32nd block and the last
one, and then searches between an owner's last probe that hit and the next probe. The index may lack single entries, because it evicts
them by age. So a miss proves nothing: an owner has no match only if all probes miss.
"""

import struct
from typing import Final

import numpy as np

from compiled import calls
from shm.index_capacity import OWNER_BITS
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

PROBE_STRIDE: Final = 32
DENSE_BLOCKS: Final = 64  # the writer may store only every fourth block of a prompt with more blocks than this
ENDS_MAX: Final = 4096
BISECTED_GAPS_MAX: Final = 2
BISECTED_OWNERS_MAX: Final = 12
SCALAR_PROBES_MAX: Final = 6  # probes; up to this number, single look-ups are cheaper than one NumPy gather
SCALAR_BLOCKS_MAX: Final = 7

_UNPACK: Final = struct.Struct(f"={NEAR_WAYS}Q").unpack
_FAR_STEPS: Final = np.arange(FAR_BUCKETS, dtype=np.int64)


class IndexReader:
    """Looks up prompts in the prefix index. It never writes."""

    def __init__(self, schema: IndexSchema, region: Region) -> None:
        self.schema = schema
        self._buckets = schema.buckets
        self._table: Hashes = region.array(np.uint64, schema.entries_at, (schema.buckets, WAYS))
        self._table.flags.writeable = False
        # Hash of a prompt's first block -> how many blocks the last match of such a prompt had.
        self._ends: dict[int, int] = {}
        self._bytes = region.part(schema.entries_at, schema.entries * WORD).bytes.toreadonly()

    def match(self, hashes: Hashes) -> dict[int, int]:
        """Returns, for each owner with a hit, how many leading blocks it is known to hold (its deepest hit + 1).

        `hashes`: uint64, one per block.
        """
        if calls.match is not None:
            return calls.match(self._table, hashes)
        return self.reference_match(hashes)

    def reference_match(self, hashes: Hashes) -> dict[int, int]:
        """Computes `match` in Python, without the C kernel. It may find less than the kernel where middle blocks were evicted."""
        count = len(hashes)
        if count > DENSE_BLOCKS:
            return self._match_long(hashes, count)
        if count == 0:
            return {}
        holders = self._holders
        first = hashes.item(0)
        owners = holders(first)
        end = self._ends.get(first, count)
        if 0 < end < count and not holders(hashes.item(end)) and set(owners) == set(holders(hashes.item(end - 1))):
            # A guess, checked above: all matches end where the last match with this first block ended.
            found = dict.fromkeys(owners, end)
        elif count > PROBE_STRIDE + 1:
            return self._match_long(hashes, count)
        else:
            found = dict.fromkeys(owners, 1)
            if count > 1:
                found |= dict.fromkeys(holders(hashes.item(count - 1)), count)
            if found:
                self._end(hashes, count, found)
        found.pop(0, None)
        found.pop(FAR_MARK, None)
        return found

    def _match_long(self, hashes: Hashes, count: int) -> dict[int, int]:
        """Computes `match` without the short cut for prompts that share their first block."""
        probes = [*range(0, count - 1, PROBE_STRIDE), count - 1]
        if len(probes) <= SCALAR_PROBES_MAX:
            found = self._scan(hashes, probes)
        else:
            at = np.array(probes)
            found = self._gather(hashes[at], at)
        if found:
            self._end(hashes, count, found)
        found.pop(0, None)  # an all-zero tag equals an empty entry
        found.pop(FAR_MARK, None)  # near and far buckets of one hash may overlap
        return found

    def _end(self, hashes: Hashes, count: int, found: dict[int, int]) -> None:
        """Raises each owner's number in `found` from its last probe that hit to the end of its match."""
        open_ends = set(found.values())
        open_ends.discard(count)
        if open_ends:
            self._refine(hashes, sorted(open_ends), found)

    def _refine(self, hashes: Hashes, depths: list[int], found: dict[int, int]) -> None:
        """Searches between each deepest hit and the next probe, and updates `found`. `depths`: the numbers in `found`, ascending."""
        last = len(hashes) - 1
        gaps = [range(d, min(d - 1 + PROBE_STRIDE, last)) for d in depths]
        if len(gaps) <= BISECTED_GAPS_MAX and len(found) <= BISECTED_OWNERS_MAX and gaps[-1].stop <= DENSE_BLOCKS:
            for depth, gap in zip(depths, gaps, strict=True):
                owners = {owner for owner, deepest in found.items() if deepest == depth}
                self._bisect(hashes, gap.start, gap.stop, owners, found)
            return
        if sum(map(len, gaps)) <= SCALAR_BLOCKS_MAX:
            closer = self._scan(hashes, [block for gap in gaps for block in gap])
        elif len(gaps) == 1:
            first, stop = gaps[0].start, gaps[0].stop
            closer = self._gather(hashes[first:stop], np.arange(first, stop))
        else:
            at = np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps])
            closer = self._gather(hashes[at], at)
        _deepen(found, closer)

    def _bisect(self, hashes: Hashes, low: int, high: int, owners: set[int], found: dict[int, int]) -> None:
        """Bisects in [low, high) for the first block that each of `owners` does not hold. All of them hold every block before `low`.

        The search starts where the last match with the same first block ended, because such prompts often share equally many blocks.
        """
        first = hashes.item(0)
        expected = self._ends.get(first, 0)
        hints = [expected - 1, expected]
        while low < high:
            middle = hints.pop() if hints else -1
            if not low <= middle < high:
                middle = (low + high) >> 1
            deeper = owners.intersection(self._holders(hashes.item(middle)))
            if not deeper:
                high = middle
                continue
            for owner in deeper:
                found[owner] = middle + 1
            if len(deeper) < len(owners):
                self._bisect(hashes, low, middle, owners - deeper, found)
            low, owners = middle + 1, deeper
        if len(self._ends) >= ENDS_MAX:
            self._ends.clear()
        self._ends[first] = low

    def _scan(self, hashes: Hashes, blocks: list[int]) -> dict[int, int]:
        """Returns owner -> deepest hit + 1 among these blocks (ascending), with one look-up per block."""
        found: dict[int, int] = {}
        for block in blocks:
            for owner in self._holders(hashes.item(block)):
                found[owner] = block + 1
        return found

    def _holders(self, hash_: int) -> list[int]:
        """Returns the owners of one block. Copies its buckets first, so that no entry changes during the search."""
        table, buckets = self._bytes, self._buckets
        one = ((hash_ & LOW_HALF) * buckets >> 32) * CACHE_LINE
        two = ((hash_ >> 32) * buckets >> 32) * CACHE_LINE
        near = table[one : one + CACHE_LINE].tobytes() + table[two : two + CACHE_LINE]
        tag = hash_ >> OWNER_BITS
        if tag.to_bytes(6, "little") not in near:
            return []
        found = [entry & OWNER_MASK for entry in _UNPACK(near) if entry >> OWNER_BITS == tag]
        if FAR_MARK in found:
            owners = [owner for owner in found if owner != FAR_MARK]
            return owners + self._far_holders(hash_, tag.to_bytes(6, "little"))
        return found

    def _far_holders(self, hash_: int, tag: bytes) -> list[int]:
        first = (hash_ >> OWNER_BITS & LOW_HALF) * (self._buckets - FAR_BUCKETS + 1) >> 32
        far = bytes(self._bytes[first * CACHE_LINE : (first + FAR_BUCKETS) * CACHE_LINE])
        if tag not in far:
            return []
        entries = np.frombuffer(far, dtype=np.uint64)
        held = entries[(entries ^ np.uint64(hash_)) < SAME_TAG]
        owners: list[int] = (held & OWNER_WORD_MASK).tolist()
        return owners

    def _gather(self, chosen: Hashes, blocks: Ints) -> dict[int, int]:
        """Returns owner -> deepest hit + 1 among these blocks (ascending), with one NumPy look-up for all. `chosen`: their hashes."""
        near = self._table.take(near_buckets(chosen, self._buckets), axis=0).reshape(-1, NEAR_WAYS)
        same = (near ^ chosen[:, None]) < SAME_TAG
        at = np.flatnonzero(same)
        if not len(at):
            return {}
        owners = (near.reshape(-1)[at] & OWNER_WORD_MASK).view(np.int64)
        found = _deepest(owners, blocks[at >> 4])
        if found.pop(FAR_MARK, 0):
            marked = at[owners == FAR_MARK] >> 4
            _deepen(found, self._gather_far(chosen[marked], blocks[marked]))
        return found

    def _gather_far(self, hashes: Hashes, blocks: Ints) -> dict[int, int]:
        buckets = first_far_buckets(hashes, self._buckets)[:, None] + _FAR_STEPS
        far = self._table.take(buckets, axis=0).reshape(-1, FAR_WAYS)
        at = np.flatnonzero((far ^ hashes[:, None]) < SAME_TAG)
        owners = (far.reshape(-1)[at] & OWNER_WORD_MASK).view(np.int64)
        return _deepest(owners, blocks[at // FAR_WAYS])


def _deepest(owners: Ints, blocks: Ints) -> dict[int, int]:
    """Returns owner -> its last (deepest) block + 1. `owners` and `blocks` have one element per hit; blocks ascend."""
    if len(owners) <= 64:
        return dict(zip(owners.tolist(), (blocks + 1).tolist(), strict=True))
    deepest = np.zeros(int(owners.max()) + 1, dtype=np.int64)
    deepest[owners] = blocks + 1  # the last of several assignments to one index wins
    present = np.flatnonzero(deepest)
    return dict(zip(present.tolist(), deepest[present].tolist(), strict=True))


def _deepen(found: dict[int, int], closer: dict[int, int]) -> None:
    for owner, depth in closer.items():
        if depth > found.get(owner, 0):
            found[owner] = depth
