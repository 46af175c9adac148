"""The kernels of the prefix index in C against their references in Python."""

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import index_reference
from shm.prefix_index import FAR_WAYS, NEAR_OWNERS, IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from tests.shm.memory import region_for

pytestmark = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")


class Index:
    def __init__(self, entries: int = FAR_WAYS, *, spills: bool = False) -> None:
        schema = IndexSchema(entries)
        region = region_for(schema)
        self.writer, self.reader = IndexWriter(schema, region, spills=spills), IndexReader(schema, region)
        self.owners = [self.writer.new_owner() for _ in range(2 * NEAR_OWNERS)]


@contextmanager
def by_reference() -> Iterator[None]:
    """Lets writers use the references."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forget", "free_oldest", "insert", "owned"):
            patch.setattr(kernels, name, getattr(index_reference, name))
        yield


def assert_equal(one: Index, other: Index) -> None:
    assert one.writer.copy(0, one.writer.schema.buckets) == other.writer.copy(0, one.writer.schema.buckets)
    assert (one.writer.size(), one.writer.freed()) == (other.writer.size(), other.writer.freed())
    assert [one.writer.held(o) for o in one.owners] == [other.writer.held(o) for o in other.owners]


STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 130), st.integers(0, 2 * NEAR_OWNERS - 1), st.integers(0, 2**32 + 5)), max_size=12
)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("entries", [FAR_WAYS, 40_000])
@given(STEPS, st.integers(0, 5), st.integers(0, 130), st.none() | st.integers(0, 2 * NEAR_OWNERS - 1))
def test_the_kernels_write_and_find_what_their_references_write_and_find(
    entries: int, spills: bool, steps: list[tuple[int, int, int, int]], asked: int, count: int, leaves: int | None
) -> None:
    one, other = Index(entries, spills=spills), Index(entries, spills=spills)
    chains = [np.random.default_rng(seed).integers(1 << 16, 2**64, 130, dtype=np.uint64) for seed in range(6)]
    for number, (seed, length, owner, age) in enumerate(steps):
        hashes = chains[seed][:length]
        one.writer.insert(hashes, one.owners[owner], age)
        with by_reference():
            other.writer.insert(hashes, other.owners[owner], age)
        if leaves is not None and number == len(steps) // 2:
            for index in (one, other):
                index.writer.retire(index.owners[leaves])
        assert_equal(one, other)
    hashes = chains[asked][:count]
    assert one.reader.match(hashes) == index_reference.match(one.reader._table, hashes)


NAMES = 1 << 62  # the name of an owner elsewhere, less its id


def runs_of(owners: np.ndarray[Any, Any]) -> tuple[dict[int, int], bytes, bytes]:
    """Returns the names of the owners, and the name and length of each run."""
    runs = [(owner, len(list(run))) for owner, run in groupby(owners.tolist())]
    names, counts = array("Q", [NAMES + owner for owner, _ in runs]), array("H", [length for _, length in runs])
    return {NAMES + owner: owner for owner, _ in runs}, names.tobytes(), counts.tobytes()


@given(STEPS, st.integers(1, 8))
def test_an_insert_tells_of_the_same_news_with_and_without_the_kernel(steps: list[tuple[int, int, int, int]], stale: int) -> None:
    one, other = Index(40_000), Index(40_000)
    chains = [np.random.default_rng(seed).integers(1 << 16, 2**64, 130, dtype=np.uint64) for seed in range(6)]
    for seed, length, owner, age in steps:
        hashes = np.concatenate((chains[seed][:length], chains[seed - 1][: length // 2]))
        owners = np.full(len(hashes), one.owners[owner], np.uint16)
        owners[length // 2 :] = one.owners[owner - 1]
        told = one.writer.insert_and_tell(hashes, owners, age, stale)
        assert sum(told[1]) * 8 == len(told[2])
        with by_reference():
            assert told == other.writer.insert_and_tell(hashes, owners, age, stale)
            other.writer.insert_named(hashes.tobytes(), *runs_of(owners), age)
        assert one.writer.insert_and_tell(hashes, owners, age, stale) == ([], [], b"")
        one.writer.insert_named(hashes.tobytes(), *runs_of(owners), age)
    assert_equal(one, other)


@pytest.mark.parametrize("kernel", [True, False])
def test_runs_of_an_unknown_name_are_left_out_and_wrong_lengths_are_refused(kernel: bool) -> None:
    with nullcontext() if kernel else by_reference():
        unknown_and_wrong_runs()


def unknown_and_wrong_runs() -> None:
    index, hashes = Index(), np.arange(1, 7, dtype=np.uint64) << np.uint64(20)
    owner = index.owners[0]
    known, names, counts = runs_of(np.array([owner, owner, 9, 9, 9, owner]))
    del known[NAMES + 9]
    index.writer.insert_named(hashes.tobytes(), known, names, counts, 1)
    assert (index.writer.size(), index.writer.dropped) == (3, 0)
    for wrong in ((names, counts[2:]), (names[8:], counts), (names, array("H", [2, 3, 2]).tobytes())):
        with pytest.raises(ValueError, match="differ in length"):
            index.writer.insert_named(hashes.tobytes(), known, *wrong, 1)
    with pytest.raises(ValueError, match="no such owner"):
        index.writer.insert_named(hashes.tobytes(), dict.fromkeys(known, 1 << 16), names, counts, 1)


@given(STEPS, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 129), st.integers(1, 40)), max_size=4))
def test_where_blocks_are_missing_the_kernel_finds_what_a_look_at_every_block_finds(
    steps: list[tuple[int, int, int, int]], gaps: list[tuple[int, int, int]]
) -> None:
    index = Index(40_000)
    chains = [np.random.default_rng(seed).integers(1 << 16, 2**64, 130, dtype=np.uint64) for seed in range(6)]
    held: dict[tuple[int, int], set[int]] = {}
    for seed, length, owner, age in steps:
        index.writer.insert(chains[seed][:length], index.owners[owner], age)
        held.setdefault((seed, index.owners[owner]), set()).update(range(length))
    for seed, first, length in gaps:
        for (chain, owner), blocks in held.items():
            if chain == seed:
                index.writer.forget(chains[seed][first : first + length], owner)
                blocks.difference_update(range(first, first + length))
    for seed, hashes in enumerate(chains):
        exact = {o: max(b) + 1 for (chain, o), b in held.items() if chain == seed and b and max(b) < 64}
        found = index.reader.match(hashes[:64])
        assert {o: d for o, d in found.items() if o in exact} == exact


@given(STEPS, STEPS, st.booleans(), st.none() | st.integers(0, 2**32 + 5))
def test_the_kernel_forgets_what_the_reference_forgets(
    steps: list[tuple[int, int, int, int]], forgotten: list[tuple[int, int, int, int]], each: bool, before: int | None
) -> None:
    one, other = Index(40_000), Index(40_000)
    chains = [np.random.default_rng(seed).integers(1 << 16, 2**64, 130, dtype=np.uint64) for seed in range(6)]
    for seed, length, owner, age in steps:
        for index in (one, other):
            index.writer.insert(chains[seed][:length], index.owners[owner], age)
    for seed, length, owner, _ in forgotten:
        hashes = chains[seed][:length]
        owners = np.full(length, one.owners[owner], np.uint16) if each else one.owners[owner]
        one.writer.forget(hashes, owners, before)
        with by_reference():
            other.writer.forget(hashes, owners, before)
        assert_equal(one, other)


def test_the_arrays_of_another_index_are_refused() -> None:
    entries, ages = np.zeros((32, 8), np.uint64), np.zeros((32, 8), np.uint32)
    states, held, hashes = np.ones(1 << 16, np.uint8), np.zeros(1 << 16, np.int64), np.full(3, 1 << 20, np.uint64)
    limits = np.zeros(1 << 16, np.int64)
    good = (entries, ages, states, held, limits, hashes, 2, 1, NEAR_OWNERS, False, False, None)
    assert kernels.insert(*good)[:5] == (1, 0, 0, 0, False)
    held[2], limits[2] = 7, 7
    assert kernels.insert(*good)[4] is False, "nothing new"
    assert kernels.insert(*good[:5], hashes << np.uint64(1), *good[6:])[4] is True
    for place, bad in enumerate((entries[:31], ages[:31], states[:9], held[:9], limits[:9])):
        with pytest.raises(ValueError, match=r"not those of one index"):
            kernels.insert(*good[:place], bad, *good[place + 1 :])
    for place, bad in enumerate((entries[::2], ages.astype(np.int64), states.tolist(), held.astype(np.int32))):
        with pytest.raises(TypeError, match="contiguous"):
            kernels.insert(*good[:place], bad, *good[place + 1 :])
    with pytest.raises(ValueError, match="differ in length"):
        kernels.insert(*good[:6], np.zeros(2, np.uint16), *good[7:])
    with pytest.raises(ValueError, match="differ in length"):
        kernels.forget(entries, ages, held, hashes, np.zeros(2, np.uint16), None)
    with pytest.raises(ValueError, match="not those of one index"):
        kernels.forget(entries, ages[:31], held, hashes, 2, None)
    with pytest.raises(TypeError, match="takes 12 arguments, not 2"):
        kernels.insert(entries, ages)
    for table in (np.zeros((31, 8), np.uint64), np.zeros((32, 7), np.uint64)):
        with pytest.raises(ValueError, match="at least 32 buckets of 8"):
            kernels.match(table, hashes)
