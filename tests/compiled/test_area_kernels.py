"""The kernels that sum words over areas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from tests.pair import areas

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")


@native_only
@given(st.lists(st.booleans(), min_size=1, max_size=5), st.integers(0, 16))
def test_sums_over_areas_count_the_areas_that_serve(serving: list[bool], slots: int) -> None:
    every = areas(16, workers=len(serving))
    expected = np.zeros(slots, np.int64)
    for index, serves in enumerate(serving, start=1):
        every.set_serving(index, serves)
        words = every.area(index).inflight
        for slot in range(16):
            words[slot] = index * 100 + slot
        if serves:
            expected += index * 100 + np.arange(slots)
        tokens = every.area(index).tokens
        for slot in range(16):
            tokens[slot] = (1 << 40) * index + slot
    assert every.inflight(slots).tolist() == expected.tolist()
    requests, tokens_there = every.loads(slots)
    assert requests.tolist() == expected.tolist()
    assert tokens_there.tolist() == every.tokens(slots).tolist()
    assert (requests.dtype, tokens_there.dtype) == (np.int64, np.float64)


@native_only
@given(st.lists(st.tuples(st.booleans(), st.integers(-(1 << 40), 1 << 40)), min_size=1, max_size=5), st.integers(-1, 5))
def test_the_total_of_a_word_counts_the_areas_that_serve_but_one(areas_: list[tuple[bool, int]], skipped: int) -> None:
    words = np.array([[0, word, 0] for _, word in areas_], np.int64)
    serving = np.array([serves for serves, _ in areas_], np.int64)
    counted = [word for index, (serves, word) in enumerate(areas_) if serves and index != skipped]
    assert kernels.area_total(words, serving, 1, skipped) == sum(counted)


@native_only
def test_words_outside_the_areas_are_refused() -> None:
    words, serving = np.zeros((2, 16), np.int64), np.ones(2, np.int64)
    for at, slots in ((10, 7), (-1, 2), (0, -1), (1 << 62, 1 << 62)):
        with pytest.raises(ValueError, match="outside"):
            kernels.area_sums(words, serving, at, slots, None)
        for both in ((0, at), (at, 0)):
            with pytest.raises(ValueError, match="outside"):
                kernels.area_loads(words, serving, *both, slots, None, None)
    for at in (-1, 16):
        with pytest.raises(ValueError, match="outside"):
            kernels.area_total(words, serving, at, -1)
    with pytest.raises(ValueError, match="3 words are fewer than 4 slots"):
        kernels.area_sums(words, serving, 0, 4, np.ones(3, np.int64))
    with pytest.raises(ValueError, match="2 areas have 3 serving words"):
        kernels.area_total(words, np.ones(3, np.int64), 0, -1)
