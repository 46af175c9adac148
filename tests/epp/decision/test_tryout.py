"""Trying a candidate: who gets it, and when the sequential test calls it worse. All simulations are seeded."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from epp.decision.tryout import LEAST, WHOLE, Share, Side, Watch, evidence, slow_from, worse
from epp.metrics.buckets import TRYOUT_FIRST_TOKEN_S

BOUNDS = np.array(TRYOUT_FIRST_TOKEN_S)
TRIALS = 1000
FEWER = 200  # for further distributions: each trial takes 3 ms
LOOKS_PER_S = 2
SECONDS = 30
RATE = 100.0  # requests per second of the candidate, at which a regression of 25 % is found within SECONDS
USUAL_RATE = 400.0

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def exponential(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.exponential(0.2, count)


def lognormal(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return rng.lognormal(-1.5, 0.6, count)


def constant(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    return 0.3 + 0.01 * rng.random(count)


def sides(rng: np.random.Generator, per_s: float, draw: Draw, slower: float, errors: float) -> Iterable[Side]:
    """What was counted until each look: requests, errors, and first tokens per bucket."""
    arrivals = rng.poisson(per_s / LOOKS_PER_S, LOOKS_PER_S * SECONDS)
    total, looks, width = int(arrivals.sum()), len(arrivals), len(BOUNDS) + 1
    failed = rng.random(total) < errors
    buckets = BOUNDS.searchsorted(slower * draw(rng, total))
    look = np.arange(looks).repeat(arrivals)
    cells = (look * width + buckets)[~failed]
    counts = np.bincount(cells, minlength=looks * width).reshape(looks, width).cumsum(axis=0)
    failures = np.bincount(look[failed], minlength=looks).cumsum()
    for requests, wrong, first_token in zip(arrivals.cumsum().tolist(), failures.tolist(), counts.tolist(), strict=True):
        yield Side(requests, wrong, first_token=tuple(first_token))


def ended_after(
    seed: int, draw: Draw = exponential, *, slower: float = 1.0, errors: float = 0.01, more_errors: float = 0.0
) -> float | None:
    """After how many seconds the test takes the candidate back; None: it stays for SECONDS."""
    rng = np.random.default_rng(seed)
    usual = sides(rng, USUAL_RATE, draw, 1.0, errors)
    candidate = sides(rng, RATE, draw, slower, errors + more_errors)
    watch = Watch()
    for look, (in_force, tried) in enumerate(zip(usual, candidate, strict=True), 1):
        if watch.look(in_force, tried):
            return look / LOOKS_PER_S
    return None


def ended(trials: int, **how: object) -> int:
    """How many of so many candidates are taken back within SECONDS."""
    return sum(ended_after(seed, **how) is not None for seed in range(trials))  # type: ignore[arg-type]


@pytest.mark.parametrize(("errors", "trials"), [(0.01, TRIALS), (0.0, FEWER), (0.2, FEWER)])
def test_an_equal_candidate_is_taken_back_in_at_most_one_of_a_hundred_trials(errors: float, trials: int) -> None:
    assert ended(trials, errors=errors) <= trials // 100


@pytest.mark.parametrize(("draw", "trials"), [(exponential, TRIALS), (lognormal, FEWER), (constant, FEWER)])
def test_a_candidate_with_a_p95_that_is_25_percent_longer_is_taken_back_within_30_seconds(draw: Draw, trials: int) -> None:
    assert ended(trials, draw=draw, slower=1.25) >= 0.95 * trials


def test_a_candidate_that_fails_in_25_of_1000_requests_more_is_taken_back_within_30_seconds() -> None:
    assert ended(FEWER, more_errors=0.025) >= 0.95 * FEWER


def test_a_candidate_that_always_fails_is_taken_back_in_a_second() -> None:
    assert all((ended_after(seed, more_errors=0.99) or SECONDS) <= 1.0 for seed in range(100))


def test_a_faster_candidate_with_fewer_errors_stays() -> None:
    assert all(ended_after(seed, slower=0.8, errors=0.05, more_errors=-0.04) is None for seed in range(100))


@given(st.integers(0, LEAST - 1), st.integers(1, 10_000))
def test_few_requests_show_nothing(few: int, many: int) -> None:
    assert not worse((few, few), (0, many))


@given(st.integers(LEAST, 10_000), st.integers(LEAST, 10_000), st.data())
def test_a_share_that_is_not_larger_is_never_worse_and_more_events_are_more_evidence(
    requests: int, others: int, data: st.DataObject
) -> None:
    usual = data.draw(st.integers(0, others))
    events = data.draw(st.integers(0, requests))
    found = evidence((events, requests), (usual, others))
    if events / requests <= usual / others:
        assert found < 0
    if events < requests:
        assert evidence((events + 1, requests), (usual, others)) >= found or found < 0


@given(st.text(max_size=40), st.integers(0, 2**64 - 1), st.integers(0, WHOLE), st.integers(0, WHOLE))
def test_a_key_that_a_share_takes_stays_when_the_share_grows(key: str, seed: int, one: int, other: int) -> None:
    small, large = sorted((one, other))
    assert not Share(0).takes(key, seed)
    assert Share(WHOLE).takes(key, seed)
    assert Share(large).takes(key, seed) or not Share(small).takes(key, seed)


def test_a_share_takes_that_part_of_all_keys_and_other_keys_with_another_seed() -> None:
    share = Share(WHOLE // 20)
    taken = [{key for key in range(40_000) if share.takes(f"request-{key}", seed)} for seed in (1, 2)]
    assert [len(keys) / 40_000 for keys in taken] == [pytest.approx(0.05, rel=0.1)] * 2
    assert len(taken[0] & taken[1]) < 0.2 * len(taken[0])


@given(st.lists(st.integers(0, 50), min_size=len(BOUNDS) + 1, max_size=len(BOUNDS) + 1).filter(any))
def test_slow_begins_at_the_bound_whose_share_above_is_nearest_to_five_percent(counts: list[int]) -> None:
    shares = [sum(counts[bucket + 1 :]) / sum(counts) for bucket in range(len(BOUNDS))]
    assert abs(shares[slow_from(counts)] - 0.05) == min(abs(share - 0.05) for share in shares)


def test_what_was_counted_since_a_moment_and_its_quantiles() -> None:
    first = Side(10, 1, 100, 40, 10, 0.5, (10, *(0,) * len(BOUNDS)))
    both = Side(30, 2, 300, 140, 30, 1.5, (10, 0, 20, *(0,) * (len(BOUNDS) - 2)))
    new = both.since(first)
    assert (new.requests, new.errors, new.first_token[:3]) == (20, 1, (0, 0, 20))
    assert (new.error_share, new.cached_share, new.seconds_per_decision, new.computed_tokens) == (0.05, 0.5, 0.05, 5.0)
    assert (both.first_token_s(0.1), both.first_token_s(0.95)) == (BOUNDS[0], BOUNDS[2])
    empty = Side()
    assert (empty.error_share, empty.cached_share, empty.seconds_per_decision, empty.first_token_s(0.5)) == (None,) * 4
