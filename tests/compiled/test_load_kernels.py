"""The kernel in C that carries loads on, against its reference in NumPy."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import loads_reference
from compiled.kernels.loads_reference import KNOWN
from tests.examples import examples

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")

SLOTS = 6
SHOWN = st.sampled_from([0.0, 1.0, 2.0, 7.0, 0.25, -1.0, math.nan, math.inf, -math.inf]) | st.floats(0, 1e6)
TIMES = st.sampled_from([0.0, 1.0, 1.05, 1.2, 2.0])


@st.composite
def calls(draw: st.DrawFn) -> list[Any]:
    """The arguments of one call but the first one, for some of the slots."""
    slots = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))

    def column(values: st.SearchStrategy[Any], dtype: Any = np.float64) -> np.ndarray:
        wide = np.zeros(2 * len(slots), dtype)
        wide[::2] = draw(st.lists(values, min_size=len(slots), max_size=len(slots)))
        return wide[::2] if draw(st.booleans()) else wide[::2].copy()

    inflight = column(st.integers(0, 9), draw(st.sampled_from([np.int64, np.float64])))
    return [
        np.array(slots, np.intp),
        column(st.integers(1, 2), np.uint64),
        column(TIMES),
        *(column(SHOWN) for _ in range(3)),
        column(st.integers(0, 9).map(float)),
        inflight,
        draw(TIMES),
        0.1,
    ]


@native_only
@given(st.lists(calls(), max_size=6))
@examples(300)
def test_loads_are_carried_as_by_the_reference(every: list[list[Any]]) -> None:
    ours, theirs = np.zeros((SLOTS, KNOWN)), np.zeros((SLOTS, KNOWN))
    with np.errstate(all="ignore"):
        for arguments in every:
            found, expected = kernels.carry(ours, *arguments), loads_reference.carry(theirs, *arguments)
            assert (found is None) == (expected is None)
            for one, other in zip(found or (), expected or (), strict=True):
                np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(ours, theirs)


@native_only
def test_slots_outside_the_table_and_arrays_of_other_lengths_are_refused() -> None:
    one, known = np.ones(1), np.zeros((SLOTS, KNOWN))
    columns = [np.ones(1, np.uint64), *[one] * 5, one, 1.0, 0.1]
    for slot in (-1, SLOTS):
        with pytest.raises(IndexError, match=f"there is no slot {slot}"):
            kernels.carry(known, np.array([slot]), *columns)
    with pytest.raises(ValueError, match="differ in length"):
        kernels.carry(known, np.array([0, 1]), *columns)
    with pytest.raises(ValueError, match="a row has 7 numbers"):
        kernels.carry(np.zeros((SLOTS, KNOWN - 1)), np.array([0]), *columns)
    with pytest.raises(TypeError):
        kernels.carry(known, np.array([0.0]), *columns)
    with pytest.raises(TypeError):
        kernels.carry(known, np.array([0]), *columns[:-1])
    assert not known.any()
