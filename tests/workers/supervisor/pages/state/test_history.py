"""The history: its bounds, its steps, and what it says about pool and endpoints."""

import numpy as np
import pytest

from workers.supervisor.pages.state.history import BYTES_MAX, ENDPOINT_FIGURES, KEPT_S, SAMPLES, History, Sample

NOW = 5000.0


def sample(at: float, endpoints: int = 1, *, generation: int = 1, running: float = 1.0, **pool: float) -> Sample:
    cells = np.zeros((endpoints, len(ENDPOINT_FIGURES)), np.float32)
    cells[:, 0] = running
    return Sample(at, pool, np.full(endpoints, generation, np.uint64), cells)


@pytest.mark.parametrize("endpoints", [1, 100, 1000, 4000])
def test_it_covers_15_minutes_in_at_most_4_mib_for_any_number_of_endpoints(endpoints: int) -> None:
    history, largest = History(), 0
    for second in range(2 * SAMPLES):
        history.add(sample(NOW + second, endpoints))
        largest = max(largest, history.bytes)
    assert largest <= BYTES_MAX
    ages, figures = history.endpoint(endpoints - 1, 1, NOW + 2 * SAMPLES)
    assert ages[0] >= KEPT_S - 2 * history.step_s
    assert ages[-1] <= 2 * history.step_s
    assert len(figures["running"]) == len(ages)
    assert len(history.pool(NOW + 2 * SAMPLES)[0]) >= SAMPLES - 1


def test_100_endpoints_have_a_row_each_second() -> None:
    history = History()
    for second in range(SAMPLES):
        history.add(sample(NOW + second, 100))
    assert history.step_s == 1.0
    assert len(history.endpoint(5, 1, NOW + SAMPLES)[0]) == SAMPLES


def test_the_step_becomes_short_again_when_endpoints_leave() -> None:
    history = History()
    for second in range(SAMPLES):
        history.add(sample(NOW + second, 2000))
    assert history.step_s > 1.0
    for second in range(SAMPLES, 3 * SAMPLES):
        history.add(sample(NOW + second, 10))
    assert history.step_s == 1.0


def test_an_endpoint_has_no_figures_of_the_one_that_had_its_slot_before() -> None:
    history = History()
    history.add(sample(NOW, generation=1, running=7))
    history.add(sample(NOW + 1, generation=2, running=3))
    assert history.endpoint(0, 2, NOW + 1) == ([0.0], {"running": [3.0], "waiting": [0.0], "kv_cache_usage": [0.0], "in_flight": [0.0]})


def test_figures_that_are_unknown_are_not_numbers_and_old_samples_are_left_out() -> None:
    history = History()
    history.add(sample(NOW, requests_per_s=5.0))
    ages, figures = history.pool(NOW + 2)
    assert (ages, figures["requests_per_s"]) == ([2.0], [5.0])
    assert np.isnan(figures["waiting"]).all()
    assert history.pool(NOW + KEPT_S + 1)[0] == []
