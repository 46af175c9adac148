"""The kernels of the latency model in C against their references in Python."""

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled import kernels
from compiled.kernels import latency_reference as reference
from compiled.outlook import CELLS, ELAPSED, MEMORY, START, TIMES
from tests.cases import cases

native_only = pytest.mark.skipif(not kernels.NATIVE, reason="the kernels in C are not built")

COUNTS = (0, 1, 2, 8, 33, 1024)
NUMBER = st.floats(0.0, 1e6) | st.sampled_from([0.0, -1.0, 1.0, 8.0, 1e12, math.inf, math.nan])
POSITIVE = st.floats(1e-3, 1e3)
SLOTS = 40


def same(one: Any, other: Any) -> None:
    np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-9, atol=1e-12, equal_nan=True)


@st.composite
def arguments(draw: st.DrawFn) -> list[Any]:
    """Arguments of `first_tokens`: columns of a few drawn numbers, for slots of which some are not known."""
    size, rng = draw(st.sampled_from(COUNTS)), random.Random(draw(st.integers(0, 1 << 30)))

    def column(counted: bool = False) -> np.ndarray:
        few = draw(st.lists(st.integers(0, 1 << 40) if counted else NUMBER, min_size=1, max_size=6))
        return np.array([rng.choice(few) for _ in range(size)], dtype=np.int64 if counted else np.float64)

    parameters = [draw(st.floats(0.0, 10.0)) for _ in range(8)] + [draw(st.sampled_from([0.0, 1.0]))]
    parameters += [draw(st.floats(0.0, 2.0)), draw(st.floats(0.0, 2.0)), 8.0, draw(POSITIVE)]
    parameters += [draw(st.sampled_from([0.0, 8.0])), 1e-6, 3600.0, draw(st.floats(0.0, 2.0)), draw(st.floats(1.0, 4.0))]
    parameters += [draw(st.floats(0.0, 4.0)), draw(st.sampled_from([0.0, 2048.0])), draw(st.floats(0.0, 2.0))]
    parameters += [draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 1.0))]
    speeds = np.array([draw(POSITIVE) for _ in range(3)] * (SLOTS // 4))
    limits = np.array([draw(st.sampled_from([0.0, 1.0, 8.0, 256.0])) for _ in range(len(speeds))])
    computed = np.array([draw(st.sampled_from([0.0, 100.0, 1e5])) for _ in range(len(speeds))])
    starts = np.array([rng.choice([0.0, 5.0, 99.0, 101.0]) for _ in range(draw(st.integers(1, 3)) * CELLS * SLOTS)]).reshape(
        -1, CELLS, SLOTS
    )
    slots = np.array([rng.randrange(2 * SLOTS) for _ in range(size)], dtype=np.intp)
    held = draw(st.booleans())
    return [
        np.array(parameters), speeds, limits, computed, starts, 100.0, slots, draw(st.floats(0.0, 1e6)), column() if held else None,
        draw(st.sampled_from([0.0, 16.0, 64.0])), column(draw(st.booleans())), column(draw(st.booleans())), column(), column(), column(),
        column(), column(),
    ]  # fmt: skip


@native_only
@given(arguments())
def test_first_tokens_are_those_of_the_reference(given_: list[Any]) -> None:
    found = kernels.first_tokens(*given_)
    assert found.shape == (7, len(given_[6]))
    same(found, reference.first_tokens(*given_))


@native_only
def test_a_wait_for_memory_that_is_not_a_number_is_none() -> None:
    """A page says that an infinite part of the cache is taken, and answers end at once: 0 s * infinity."""
    parameters, n, starts = np.zeros(len(reference.PARAMETERS)), np.zeros(1), np.zeros((1, CELLS, 1))
    parameters[reference.PARAMETERS.index("most_s")], parameters[reference.PARAMETERS.index("apart")] = 3600.0, 1.0
    starts[0, START, 0] = 1.0
    one = np.ones(1)
    given_ = [parameters, one, n, n, starts, 100.0, np.array([0]), 0.0, None, 0.0, one, n, n, n, n, np.array([math.inf]), one]
    for first_tokens in (kernels.first_tokens, reference.first_tokens):
        with np.errstate(all="ignore"):
            found = first_tokens(*given_)
        assert found[[TIMES, ELAPSED, MEMORY], 0].tolist() == [0.0, 0.0, 0.0]


@native_only
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 3), st.booleans(), st.floats(0.0, 1e6)), max_size=12))
def test_follow_writes_what_the_reference_writes(steps: list[tuple[int, int, bool, float]]) -> None:
    first, second = np.zeros((2, CELLS, 3)), np.zeros((2, CELLS, 3))
    for now, (worker, slot, begins, tokens) in enumerate(steps, 1):
        refused = []
        for follow, starts in ((kernels.follow, first), (reference.follow, second)):
            if begins and worker >= 0 and worker < 2 and 0 <= slot < 3:
                starts[worker, START, slot] = now
            try:
                follow(starts, worker, slot, tokens)
            except IndexError as problem:
                refused.append(str(problem))
        assert len(refused) in (0, 2) and len(set(refused)) <= 1
        same(first, second)


READ_ONLY = np.zeros((2, CELLS, 3))
READ_ONLY.flags.writeable = False


@native_only
@pytest.mark.parametrize(
    ("starts", "problem"),
    [
        (np.zeros((2, CELLS + 1, 3)), ValueError),
        (np.zeros((CELLS, 3)), TypeError),
        (np.zeros((2, CELLS, 3), dtype=np.float32), TypeError),
        (np.zeros((2, CELLS, 6))[:, :, ::2], TypeError),
        ([[[0.0] * 3] * CELLS], TypeError),
        (READ_ONLY, TypeError),
    ],
)
def test_starts_of_another_kind_are_refused_as_the_reference_refuses_them(starts: Any, problem: type[Exception]) -> None:
    n = np.zeros(2)
    given_ = [np.ones(len(reference.PARAMETERS)), n, n, n, starts, 1.0, np.array([0, 1]), 1.0, None, 0.0, n, n, n, n, n, n, n]
    follows: list[Any] = [(module.follow, (starts, 0, 1, 5.0)) for module in (kernels, reference)]
    outlooks: list[Any] = [(module.first_tokens, given_) for module in (kernels, reference)]
    for both in (follows, outlooks) if starts is not READ_ONLY else (follows,):
        texts = []
        for kernel, arguments_ in both:
            with pytest.raises(problem) as raised:
                kernel(*arguments_)
            texts.append(str(raised.value))
        assert texts[0] == texts[1]


@native_only
@given(arguments(), POSITIVE, st.floats(0.0, 1e6))
def test_careful_costs_are_those_of_the_reference(given_: list[Any], point: float, prompt: float) -> None:
    inflight, before, scraped, running, usage, _ = given_[11:]
    with np.errstate(all="ignore"):
        outlook = kernels.first_tokens(*given_)
        costs = (point, 2.001, prompt, outlook, inflight, before, scraped, running, usage)
        same(kernels.careful(*costs), reference.careful(*costs))


@native_only
@given(arguments())
def test_the_column_of_a_candidate_is_that_of_the_reference(given_: list[Any]) -> None:
    outlook = kernels.first_tokens(*given_)
    size = outlook.shape[1]
    for index in range(min(size, 9)):
        same(kernels.column(outlook, index), reference.column(outlook, index))
        for row in range(7):
            same(kernels.cell(outlook, row, index), outlook[row, index])
            same(reference.cell(outlook, row, index), outlook[row, index])
    for index in (-1, size):
        for column in (kernels.column, reference.column):
            with pytest.raises(IndexError, match="there is no candidate"):
                column(outlook, index)
        for cell in (kernels.cell, reference.cell):
            with pytest.raises(IndexError, match="there is no candidate"):
                cell(outlook, 0, index)


@native_only
@given(st.lists(st.floats(0.0, 1e6), min_size=9, max_size=9).filter(lambda values: values[4] > 1e-6))
def test_features_are_those_of_the_reference(values: list[float]) -> None:
    same(kernels.features(*values), reference.features(*values))


@cases("features", [kernels.features, reference.features])
@cases("uncached", [0.0, 5e-324, 1e-320, 1e-300])
@cases("speed", [0.5, 1.0])
@cases("elapsed", [0.0, 2.0])
def test_an_endpoint_that_computes_in_no_time_divides_nothing_by_it(features: Any, uncached: float, speed: float, elapsed: float) -> None:
    """5e-324 s at half of the speed are 0 s, and 0 s / 0 s is not a number."""
    rest = features(uncached, 1.0, 0.05, 8.0, speed, 100.0, 500.0, elapsed, 3.0)[2]
    assert rest == 0.5


@native_only
@given(
    st.sampled_from(COUNTS),
    st.lists(st.floats(1e-6, 3600.0) | st.sampled_from([math.inf, math.nan]), min_size=1, max_size=9),
    st.booleans(),
    st.sampled_from([0.0, 0.001]),
)
def test_cheapest_is_that_of_the_reference(count: int, few: list[float], counted: bool, part: float) -> None:
    rng = random.Random(count)
    costs = np.array([rng.choice(few) for _ in range(count)])
    load = np.array([rng.randrange(50) for _ in range(count)], dtype=np.int64 if counted else np.float64)
    with np.errstate(all="ignore"):
        same(kernels.cheapest(costs, load, 0.1, 0.005, part), reference.cheapest(costs, load, 0.1, 0.005, part))


@native_only
@given(st.lists(st.tuples(st.lists(st.floats(0.0, 1e4), min_size=3, max_size=3), st.floats(1e-6, 100.0)), max_size=60))
def test_a_fit_is_that_of_the_reference(observations: list[tuple[list[float], float]]) -> None:
    prior = np.array([0.03, 0.1, 0.1])
    both = [np.concatenate((np.ones(3), np.zeros(12))) for _ in range(2)]
    for values, observed in observations:
        options = (observed, 0.02, 0.99, 3.0, 8.0, 0.003, 2, 1)
        found = [fit(sums, prior, values, *options) for fit, sums in zip((kernels.fit, reference.fit), both, strict=True)]
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6, atol=1e-9)
        both[0][:] = both[1]  # so that roundings do not add up


@pytest.mark.parametrize("wrong", [0, 1, 2, 3, 6, 10, 14, 16])
def test_columns_of_different_lengths_are_refused(wrong: int) -> None:
    n = np.zeros(2)
    starts = np.zeros((1, CELLS, 4))
    given_ = [np.ones(len(reference.PARAMETERS)), n, n, n, starts, 1.0, np.array([0, 1]), 1.0, None, 0.0, n, n, n, n, n, n, n]
    kernels.first_tokens(*given_)
    given_[wrong] = np.zeros(3, dtype=given_[wrong].dtype)
    with pytest.raises(ValueError, match="differ in length"):
        kernels.first_tokens(*given_)
    with pytest.raises(ValueError, match="differ in length"):
        kernels.cheapest(n, np.zeros(3), 0.1, 0.1, 0.1)
    with pytest.raises(ValueError, match="differ in length"):
        kernels.careful(1.0, 2.0, 3.0, np.zeros((7, 2)), n, n, np.zeros(3), n, n)
