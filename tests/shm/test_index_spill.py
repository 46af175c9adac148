"""Full buckets of an index of held blocks give entries to far buckets, and lose none while there is room."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import index_reference
from compiled.kernels.index_reference import far_bucket
from shm.held_blocks import HeldReader, HeldWriter, Owners, schemas
from shm.prefix_index import FAR_BUCKETS, FAR_MARK, OWNER_MASK, WAYS
from tests.examples import examples
from tests.shm.memory import region_for

BLOCKS = 1 << 14
WAYS_OF_WRITING = [
    "reference",
    pytest.param("kernel", marks=pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")),
]


class Held:
    """An index of held blocks with some owners, each of which is an endpoint. `way`: whether the kernels write it."""

    def __init__(self, way: str, owners: int, blocks: int = BLOCKS) -> None:
        index, links = schemas(blocks)
        region = region_for(index)
        self.writer = HeldWriter(index, region, links, region_for(links))
        self.reader = HeldReader(index, region)
        self.ids = [self.writer.new_owner() for _ in range(4 * owners)][::4]  # an endpoint has an id per tier
        self.insert = partial(self._by, way, self.writer.insert)
        self.forget = partial(self._by, way, self.writer.forget)
        self.owners = Owners(owners)
        for row, owner in enumerate(self.ids):
            self.owners.add(owner, row, 1)

    @staticmethod
    def _by(way: str, call: Callable[..., None], *args: object) -> None:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("insert", "forget") if way == "reference" else ():
                patch.setattr(kernels, name, getattr(index_reference, name))
            call(*args)

    def holders(self, key: np.uint64) -> set[int]:
        """The endpoints that hold a block, by both ways of looking it up."""
        hashes = np.array([key], np.uint64)
        held = self.reader.held(hashes, self.owners)[0]
        table, owners = self.reader._table, self.owners
        assert held == index_reference.held(table, hashes, owners.row_of, owners.weight_of, owners.rows)[0]
        return {row for row, blocks in enumerate(held) if blocks}

    @property
    def marks(self) -> int:
        return int(np.count_nonzero((self.writer._entries & np.uint64(OWNER_MASK)) == FAR_MARK))


def keys(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 2**63, count, dtype=np.uint64) << np.uint64(1) & ~np.uint64(1 << 16)


@pytest.mark.parametrize("way", WAYS_OF_WRITING)
@pytest.mark.parametrize(("holders", "lost_max"), [(1, 0.0), (4, 0.0), (8, 0.001), (24, 0.01)])
def test_a_full_index_loses_nearly_nothing_however_many_endpoints_hold_a_block(way: str, holders: int, lost_max: float) -> None:
    held = Held(way, holders)
    blocks = keys(BLOCKS // holders)
    for first in range(0, len(blocks), 64):
        for owner in held.ids:
            held.insert(blocks[first : first + 64], owner, first)
    entries = len(blocks) * holders
    lost = held.writer.evictions
    assert lost <= lost_max * entries
    assert sum(len(held.holders(key)) for key in blocks) >= entries - lost * (1 + holders)  # a lost mark hides its entries
    assert held.writer.size() - held.marks + lost >= entries


@pytest.mark.parametrize("way", WAYS_OF_WRITING)
@examples(30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200), st.integers(1, 60), st.integers(0, 29), st.integers(0, 3)), max_size=60))
def test_while_nothing_is_evicted_the_index_equals_a_dict(way: str, steps: list[tuple[bool, int, int, int, int]]) -> None:
    """In a table of 96 buckets, in which entries move all the time."""
    held = Held(way, 30, blocks=FAR_BUCKETS * 8)
    blocks, model = keys(260), dict[int, set[int]]()
    for adds, first, count, row, several in steps:
        part = blocks[first : first + count]
        rows = range(row, min(row + several + 1, 30))
        for each in rows:
            if adds:
                held.insert(part, held.ids[each], 1)
            else:
                held.forget(part, held.ids[each])
            for key in part.tolist():
                model.setdefault(key, set()).add(each) if adds else model.get(key, set()).discard(each)
        if held.writer.evictions:
            return
    for key in blocks:
        assert held.holders(key) == model.get(int(key), set())
    assert held.writer.size() - held.marks == sum(map(len, model.values()))
    assert [held.writer.held(owner) for owner in held.ids] == [sum(row in rows for rows in model.values()) for row in range(30)]
    assert held.writer.size() == np.count_nonzero(held.writer._entries)


@pytest.mark.parametrize("way", WAYS_OF_WRITING)
def test_a_far_mark_goes_with_the_last_of_its_far_entries(way: str) -> None:
    held = Held(way, 40)
    block = keys(1)
    for owner in held.ids:
        held.insert(block, owner, 1)
    assert held.marks in (1, 2)
    for owner in held.ids:
        held.insert(block, owner, 2)  # known entries, near or far, are only refreshed
    assert held.writer.size() == 40 + held.marks
    for owner in held.ids:
        held.forget(block, owner)
    assert (held.marks, held.writer.size(), held.writer.held(FAR_MARK)) == (0, 0, 0)


@pytest.mark.parametrize("step", range(1, 9))
def test_far_buckets_are_used_evenly_however_far_apart_the_ids_are(step: int) -> None:
    used = np.bincount(far_bucket(np.arange(2, 2 + 100 * step, step)), minlength=FAR_BUCKETS)
    assert used.max() <= WAYS
