"""The kernels that list and free the oldest entries of owners have the same results as their references in Python."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import index_reference
from shm.index_capacity import OWNER_IDS, WIDE

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")

AGE = st.sampled_from([0, 1, 2, 5, 1 << 31, (1 << 32) - 2, (1 << 32) - 1])
TABLE = st.lists(st.tuples(st.sampled_from([0, 2, 3, 7, OWNER_IDS - 1]), st.booleans(), st.integers(0, 1 << 40), AGE), max_size=40)


def table(rows: list[tuple[int, bool, int, int]]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The entries and ages of an index. Owner 0 makes an empty entry."""
    entries = [owner and tag << 17 | wide * WIDE | owner for owner, wide, tag, _ in rows]
    return np.array(entries, np.uint64), np.array([age for *_, age in rows], np.uint32)


@native_only
@given(TABLE, st.lists(st.sampled_from([2, 3, 7, 9, OWNER_IDS - 1]), unique=True, min_size=1).map(sorted), AGE)
def test_the_entries_of_owners_are_listed_alike(rows: list[Any], owners: list[int], newest: int) -> None:
    entries, ages = table(rows)
    keys, ends = kernels.owned(entries, ages, owners, newest)
    other_keys, other_ends = index_reference.owned(entries, ages, owners, newest)
    assert ends.tolist() == other_ends.tolist()
    for begin, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
        assert sorted(keys[begin:end].tolist()) == sorted(other_keys[begin:end].tolist())


@native_only
@given(TABLE, st.lists(st.integers(0, 39), max_size=40), st.integers(0, 5), AGE, st.integers(-1, 60))
def test_the_same_entries_are_freed(rows: list[Any], places: list[int], first: int, before: int, excess: int) -> None:
    entries, ages = table(rows)
    listed = np.array([place for place in dict.fromkeys(places) if place < len(rows)], np.uint32)
    results = []
    for free in (kernels.free_oldest, index_reference.free_oldest):
        held, own = np.full(OWNER_IDS, 1000, np.int64), entries.copy()
        freed, at = free(own, ages, held, listed, first, before, 3, excess)
        results.append((freed, own.tolist(), held[3], np.count_nonzero(held != 1000)))
        assert first <= at <= max(first, len(listed))
    assert results[0] == results[1]


@native_only
def test_arguments_that_do_not_fit_are_refused() -> None:
    entries, ages, held = np.zeros(4, np.uint64), np.zeros(4, np.uint32), np.zeros(OWNER_IDS, np.int64)
    for owners in ([3, 3], [4, 3], [-1], [OWNER_IDS]):
        with pytest.raises(ValueError, match="not a larger owner"):
            kernels.owned(entries, ages, owners, 0)
    with pytest.raises(ValueError, match="not those of one index"):
        kernels.owned(entries, ages[:3], [2], 0)
    with pytest.raises(ValueError, match="no place 4"):
        kernels.free_oldest(entries, ages, held, np.array([4], np.uint32), 0, 0, 2, 1)
    with pytest.raises(ValueError, match="not those of one index"):
        kernels.free_oldest(entries, ages, held[:9], np.array([0], np.uint32), 0, 0, 2, 1)
