"""Sizes that follow from the constants: the cost of a load, the number of workers, warnings and flags."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.load import load
from loadtest.sizing import model as sizing
from loadtest.sizing.model import COSTS, Load, busy_share, enough_workers, index_entries, power_of_two, size
from shm.held_blocks import schemas
from shm.prefix_index import IndexSchema
from tests.workers.instances import made, options
from workers.process.layout import Layout

SHARED_MEMORY = Path("/dev/shm")
LOADS = st.builds(
    Load,
    requests=st.floats(0, 20_000),
    prompt_kb=st.floats(0, 2_000),
    endpoints=st.integers(1, 5_000),
    chunks=st.floats(0, 1e6),
    cache_tokens=st.integers(1, 10**8),
)
BIG = Load(requests=300, prompt_kb=220, endpoints=100, chunks=5_000)


def test_the_index_of_held_blocks_has_room_for_all_caches() -> None:
    load = Load(requests=10, endpoints=100, cache_tokens=160_000, kv_events=True)
    with_events, without = size(load), size(Load(requests=10, endpoints=100, cache_tokens=160_000))
    assert with_events.kv_index_blocks >= 100 * 10_000
    assert f"--kv-index-blocks={with_events.kv_index_blocks}" in with_events.flags()
    added = with_events.kv_index_blocks * sizing.HELD_BLOCK_BYTES / sizing.MIB
    assert with_events.shared_mib == pytest.approx(without.shared_mib + added)
    assert with_events.memory_mib == pytest.approx(without.memory_mib + added)
    assert (without.kv_index_blocks, without.flags()) == (0, ["--workers=2"])
    held = {"kv-index-blocks": with_events.kv_index_blocks}
    assert sizing.shared_memory_mib(2, held) >= sizing.shared_memory_mib(2, {}) + added


def test_a_held_block_takes_what_is_reckoned() -> None:
    blocks = 1 << 20
    index, links = schemas(blocks)
    assert index.bytes + links.bytes == pytest.approx(blocks * sizing.HELD_BLOCK_BYTES, rel=0.05)


def test_every_constant_names_the_command_that_measures_it() -> None:
    for cost in COSTS.values():
        assert cost.source.startswith("python -m tests.bench.")
        assert bool(cost.mib) != bool(cost.each)


def test_requests_cost_more_at_low_rates_than_at_high_rates() -> None:
    cost = COSTS["request"]
    alone, together = (1e6 * cost.cores(rate) / rate for rate in (0.01, 1e6))
    assert alone == pytest.approx(cost.each + 1e6 * cost.most / cost.half, rel=0.01)
    assert together == pytest.approx(cost.each, rel=0.01)


@given(LOADS)
def test_the_recommended_workers_are_not_busier_than_the_target(load: Load) -> None:
    workers = enough_workers(load)
    if workers < sizing.WORKERS_MAX:
        assert busy_share(load, workers) <= sizing.WORKER_SHARE
        assert workers <= sizing.WORKERS_MIN or busy_share(load, workers - 1) > sizing.WORKER_SHARE


@given(LOADS)
def test_a_larger_load_never_needs_less(load: Load) -> None:
    more = Load(load.requests * 2, load.prompt_kb, load.endpoints * 2, load.chunks * 2, cache_tokens=load.cache_tokens)
    before, after = size(load), size(more)
    assert after.workers >= before.workers
    assert after.memory_mib >= before.memory_mib
    assert after.shared_mib >= before.shared_mib
    assert after.scrape_interval_s >= before.scrape_interval_s
    assert after.index_entries >= before.index_entries


def test_a_small_load_needs_only_the_flag_for_workers() -> None:
    found = size(Load(requests=10))
    assert found.flags() == [f"--workers={sizing.WORKERS_MIN}"]
    assert found.warnings == ()


def test_a_load_beyond_the_defaults_needs_more_flags() -> None:
    found = size(Load(requests=10, prompt_kb=50_000, endpoints=2_000, cache_tokens=10**7))
    names = {flag.partition("=")[0] for flag in found.flags()}
    assert names == {"--workers", "--refresh-metrics-interval", "--max-endpoints", "--index-entries", "--body-limit"}


def test_the_memory_of_the_index_is_that_of_its_entries() -> None:
    load = Load(requests=1, endpoints=1_000, cache_tokens=10**6)
    entries = index_entries(load)
    assert IndexSchema(entries).bytes == pytest.approx(entries * sizing.ENTRY_BYTES, rel=0.05)
    assert size(load).shared_mib > IndexSchema(entries).bytes / sizing.MIB


@pytest.mark.parametrize(("workers", "endpoints"), [(1, 100), (4, 1_500)])
def test_the_shared_memory_is_that_of_a_real_instance(tmp_path: Path, workers: int, endpoints: int) -> None:
    found = size(Load(requests=1, endpoints=endpoints, workers=workers))
    changes = {"workers": workers, "max_endpoints": found.max_endpoints, "index_entries": found.index_entries}
    with made(tmp_path, **changes) as instance:
        segments = sum((SHARED_MEMORY / segment.name.strip("/")).stat().st_size for segment in instance.memory.segments.values())
    assert found.shared_mib == pytest.approx(segments / sizing.MIB, rel=0.15)


@pytest.mark.parametrize("text", [None, "featureGates: [flowControl]"])
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_the_recommended_size_of_dev_shm_is_enough_with_objects_and_flow_control(tmp_path: Path, workers: int, text: str | None) -> None:
    found = size(Load(requests=1, workers=workers))
    changes = {"workers": workers, "max_endpoints": found.max_endpoints, "index_entries": found.index_entries}
    layout = Layout(options(tmp_path, objects_dir="objects", **changes), load(text, "test"))
    needed = sum(layout.needs().values())
    assert needed / sizing.MIB <= found.shared_mib <= 1.15 * needed / sizing.MIB


def test_the_warning_about_too_few_workers_has_the_number_that_is_enough() -> None:
    heavy = Load(requests=10_000, workers=1)
    (text, *_) = size(heavy).warnings
    assert text == f"1 worker cannot carry this load: use {enough_workers(heavy)}"
    busy = Load(requests=0.7e6 / COSTS["request"].each, workers=1)
    assert "bursts will wait" in size(busy).warnings[0]


def test_a_load_beyond_the_maximum_of_workers_gets_the_advice_to_split() -> None:
    (text, *_) = size(Load(requests=10**9)).warnings
    assert text == "256 workers, the maximum, are too few: split the pool over several pickers"


def test_the_scrape_interval_leaves_the_supervisor_spare_time() -> None:
    found = size(Load(requests=1, endpoints=5_000))
    assert found.scrape_interval_s > sizing.SCRAPE_S_MIN
    assert found.supervisor_cores <= sizing.SUPERVISOR_SHARE * 1.01
    assert "only the load in flight is known" in found.warnings[0]


def test_prompts_that_one_supervisor_cannot_learn_get_a_warning() -> None:
    assert any("several pickers" in text for text in size(Load(requests=20_000, prompt_kb=400)).warnings)


def test_streams_are_given_or_derived_from_requests_and_chunks() -> None:
    assert Load(requests=100, streams=7).open_streams == 7
    assert Load(requests=1, chunks=5_000).open_streams == 200
    assert Load(requests=300, chunks=5_000).open_streams == 600


def test_the_cpu_request_and_limit_leave_spare_room() -> None:
    found = size(BIG)
    assert found.cores < found.cpu_request < found.cpu_limit


@given(LOADS)
def test_the_cpu_request_is_not_above_the_limit(load: Load) -> None:
    found = size(load)
    assert found.cpu_request <= found.cpu_limit


@pytest.mark.parametrize(("count", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (1025, 2048)])
def test_powers_of_two_are_not_below(count: int, power: int) -> None:
    assert power_of_two(count) == power
