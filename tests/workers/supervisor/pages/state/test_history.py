"""The history: its bounds, its steps, and what it says about pool and endpoints."""

import numpy as np
import pytest

from workers.supervisor.pages.state.history import (
    BYTES_MAX,
    ENDPOINT_FIGURES,
    KEPT_S,
    POOL_FIGURES,
    POOL_STEP_S,
    POOLS_BYTES,
    RECENT_S,
    RECENT_STEP_S,
    SAMPLES,
    History,
    PoolSample,
    Recent,
    Sample,
    key_of,
)

NOW = 5000.0


def sample(at: float, endpoints: int = 1, *, generation: int = 1, running: float = 1.0, **pool: float) -> Sample:
    cells = np.zeros((endpoints, len(ENDPOINT_FIGURES)), np.float32)
    cells[:, 0] = running
    return Sample(at, {}, pool, np.full(endpoints, generation, np.uint64), cells)


@pytest.mark.parametrize("endpoints", [1, 100, 1000, 4000])
def test_it_covers_15_minutes_in_at_most_4_mib_for_any_number_of_endpoints(endpoints: int) -> None:
    history, largest = History(), 0
    for second in range(2 * SAMPLES):
        history.add(sample(NOW + second, endpoints))
        largest = max(largest, history.bytes)
    assert largest <= BYTES_MAX
    ages, figures = history.endpoints.of(endpoints - 1, 1, NOW + 2 * SAMPLES)
    assert ages[0] >= KEPT_S - 2 * history.endpoints.step_s
    assert ages[-1] <= 2 * history.endpoints.step_s
    assert len(figures["running"]) == len(ages)
    assert len(history.together.of(0, 0, NOW + 2 * SAMPLES)[0]) >= SAMPLES - 1


def test_100_endpoints_have_a_row_each_second() -> None:
    history = History()
    for second in range(SAMPLES):
        history.add(sample(NOW + second, 100))
    assert history.endpoints.step_s == 1.0
    assert len(history.endpoints.of(5, 1, NOW + SAMPLES)[0]) == SAMPLES


def test_the_step_becomes_short_again_when_endpoints_leave() -> None:
    history = History()
    for second in range(SAMPLES):
        history.add(sample(NOW + second, 2000))
    assert history.endpoints.step_s > 1.0
    for second in range(SAMPLES, 3 * SAMPLES):
        history.add(sample(NOW + second, 10))
    assert history.endpoints.step_s == 1.0


def test_an_endpoint_has_no_figures_of_the_one_that_had_its_slot_before() -> None:
    history = History()
    history.add(sample(NOW, generation=1, running=7))
    history.add(sample(NOW + 1, generation=2, running=3))
    assert history.endpoints.of(0, 2, NOW + 1) == ([0.0], {"running": [3.0], "waiting": [0.0], "kv_cache_usage": [0.0], "in_flight": [0.0]})


def test_figures_that_are_unknown_are_not_numbers_and_old_samples_are_left_out() -> None:
    history = History()
    history.add(sample(NOW, requests_per_s=5.0))
    ages, figures = history.together.of(0, 0, NOW + 2)
    assert (ages, figures["requests_per_s"]) == ([2.0], [5.0])
    assert np.isnan(figures["waiting"]).all()
    assert history.together.of(0, 0, NOW + KEPT_S + 1)[0] == []


def pools(*names: str, running: float = 1.0) -> PoolSample:
    values = np.full((len(names), len(POOL_FIGURES)), running, np.float32)
    return PoolSample(np.array([key_of(name) for name in names], np.uint64), values)


@pytest.mark.parametrize("count", [2, 100, 1000])
def test_it_covers_15_minutes_of_any_number_of_pools_within_another_mib(count: int) -> None:
    history, largest = History(), 0
    names = [f"p{number}" for number in range(count)]
    for second in range(2 * SAMPLES):
        due = pools(*names) if second % POOL_STEP_S == 0 else None
        history.add(sample(NOW + second, 2000)._replace(pools=due))
        largest = max(largest, history.bytes)
    assert largest <= BYTES_MAX + POOLS_BYTES
    ages, figures = history.pools.of(count - 1, key_of(names[-1]), NOW + 2 * SAMPLES)
    assert ages[0] >= KEPT_S - 16 * POOL_STEP_S and set(figures["running"]) == {1.0}
    assert len(ages) >= (KEPT_S / POOL_STEP_S / 2 if count <= 100 else 10)


def test_a_pool_has_no_figures_of_the_one_that_had_its_place_before() -> None:
    history = History()
    history.add(sample(NOW)._replace(pools=pools("a", "b", running=7)))
    history.add(sample(NOW + 5)._replace(pools=pools("a", "c", running=3)))
    assert history.pools.of(1, key_of("c"), NOW + 5)[1]["running"] == [3.0]
    assert history.pools.of(0, key_of("a"), NOW + 5) == ([5.0, 0.0], {name: [7.0, 3.0] for name in POOL_FIGURES})


def test_only_what_has_grown_in_the_span_counts() -> None:
    recent = Recent()
    at = 0.0
    while at <= 2 * RECENT_S:
        recent.add(at, {"old": 5, "new": int(at)})
        at += 1.0
    assert recent.increases({"old": 5, "new": int(2 * RECENT_S)}) == {"new": int(RECENT_S)}


def test_the_first_minutes_count_from_the_first_sample() -> None:
    recent = Recent()
    assert recent.increases({"a": 3}) == {}
    recent.add(0.0, {"a": 3})
    recent.add(RECENT_STEP_S / 2, {"a": 4})
    assert recent.increases({"a": 6, "b": 1}) == {"a": 3, "b": 1}
