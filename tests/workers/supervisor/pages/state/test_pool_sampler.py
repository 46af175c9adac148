"""The samples of the history of each of several pools, with a real instance that the test fills."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from epp.config.load import load
from epp.metrics.request_series import (
    ATTEMPTS,
    ERROR,
    PREDICTED_TOKENS,
    PREDICTION,
    PREDICTION_PROMPT_TOKENS,
    REPORTED_TOKENS,
    REQUEST_ERRORS,
    REQUEST_FIGURES,
    SCHEDULER_ATTEMPTS,
    TTFT_STREAMING,
    TTFT_WHOLE,
)
from epp.request.pool_choice import PoolChoice
from tests.workers.instances import options, removed
from tests.workers.supervisor.pages.state.test_source import World
from workers.process import pool_views
from workers.process.generations import Given
from workers.process.places import Pool
from workers.supervisor.pages.state.history import ENDPOINT_FIGURES, POOL_FIGURES, POOL_STEP_S, Floats, key_of
from workers.supervisor.pages.state.sampler import PoolSampler

NAMES = ("busy", "quiet", "idle")
REQUEST = ("m", "m", "f", "0")


class Sampled:
    """A picker of three pools and its samples."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sampler = PoolSampler(world.source)
        self.now = 1000.0
        self.cells = np.full((12, len(ENDPOINT_FIGURES)), np.nan, np.float32)

    def requests(self, pool: str, count: int, *, first_token_s: float = 0.1, whole: bool = False, failed: int = 0, worker: int = 0) -> None:
        memory = self.world.instance.memory
        attempts, errors, figures = (memory.series_writer(group, worker) for group in (ATTEMPTS, ERROR, REQUEST_FIGURES))
        routed = attempts.block(("success", "m", pool, "default", "8000", pool))
        attempts.words[routed + attempts.counter_at[SCHEDULER_ATTEMPTS.name]] += count
        errors.words[errors.block((*REQUEST, "Internal", pool)) + errors.counter_at[REQUEST_ERRORS.name]] += failed
        for _ in range(count):
            figures.observe(figures.block((*REQUEST, pool)), TTFT_WHOLE if whole else TTFT_STREAMING, first_token_s)

    def of(self, pool: str, found: Floats) -> dict[str, float]:
        return dict(zip(POOL_FIGURES, found[NAMES.index(pool)].tolist(), strict=True))

    def take(self, later_s: float = POOL_STEP_S) -> Floats:
        self.now += later_s
        found = self.sampler.sample(self.now, self.cells)
        assert found is not None
        assert found.keys.tolist() == [key_of(name) for name in NAMES]
        return found.values


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Sampled]:
    given = [Pool(name, Given(None, "", {}), load(None, ""), "127.0.0.1:1", 4) for name in NAMES]
    with removed(pool_views.create(options(tmp_path, max_endpoints=12), given, PoolChoice([]), {})) as instance:
        world = World(instance)
        yield Sampled(world)
        world.source.close()


def test_rates_and_times_to_the_first_token_are_those_of_each_pool_since_the_sample_before(sampled: Sampled) -> None:
    sampled.requests("busy", 100, first_token_s=9.0)
    first = sampled.of("busy", sampled.take())
    assert np.isnan([first["requests_per_s"], first["first_token_p50_s"]]).all()
    sampled.requests("busy", 40, first_token_s=0.02)
    sampled.requests("busy", 10, first_token_s=0.02, whole=True, worker=1)
    sampled.requests("quiet", 1, first_token_s=2.0, failed=5)
    found = sampled.take()
    busy, quiet, idle = (sampled.of(name, found) for name in NAMES)
    assert busy["requests_per_s"] == 10.0 and busy["errors_per_s"] == 0.0 and busy["first_token_p95_s"] < 0.05
    assert (quiet["requests_per_s"], quiet["errors_per_s"]) == (pytest.approx(0.2), 1.0) and quiet["first_token_p50_s"] > 1.0
    assert idle["requests_per_s"] == 0.0 and np.isnan(idle["first_token_p50_s"])


def test_cached_shares_are_those_of_each_pool(sampled: Sampled) -> None:
    sampled.take()
    writer = sampled.world.instance.memory.series_writer(PREDICTION, 0)
    block = writer.block(("a", "default", "8000", "quiet"))
    for metric, count in ((PREDICTION_PROMPT_TOKENS, 100), (PREDICTED_TOKENS, 60), (REPORTED_TOKENS, 50)):
        writer.words[block + writer.counter_at[metric.name]] += count
    found = sampled.take()
    quiet = sampled.of("quiet", found)
    assert (quiet["predicted_share"], quiet["reported_share"]) == (pytest.approx(0.6), pytest.approx(0.5))
    assert np.isnan(sampled.of("busy", found)["predicted_share"])


def test_load_is_summed_over_the_endpoints_of_each_pool(sampled: Sampled) -> None:
    slots = [sampled.world.endpoint(name, pool=pool).slot for name, pool in (("a", 0), ("b", 1), ("c", 1))]
    for slot, cells in zip(slots, ((4, 1, 0.5, 3), (2, np.nan, 0.2, 1), (3, 1, np.nan, 2)), strict=True):
        sampled.cells[slot] = cells
    found = sampled.take()
    busy, quiet, idle = (sampled.of(name, found) for name in NAMES)
    assert [busy[name] for name in ENDPOINT_FIGURES] == [4.0, 1.0, 0.5, 3.0]
    assert [quiet[name] for name in ENDPOINT_FIGURES] == [5.0, 1.0, pytest.approx(0.2), 3.0]
    assert idle["running"] == 0.0 and np.isnan(idle["kv_cache_usage"]) and idle["queued"] == 0.0


def test_a_sample_is_taken_once_in_a_step(sampled: Sampled) -> None:
    sampled.take()
    assert sampled.sampler.sample(sampled.now + 1.0, sampled.cells) is None
    sampled.take()
