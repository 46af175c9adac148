"""Looks at the shared memory of a real instance, which the test fills."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from epp.config.load import load
from epp.metrics.request_series import ATTEMPTS, ISOLATION, PLUGIN_LEFT_OUT, PREDICTION, SCHEDULER_ATTEMPTS, USAGE_BEYOND_BOUNDS
from epp.plugins.producers.tokenizer import WITHOUT_TOKENS
from epp.prefix.divergence import Sums
from loadtest.demo.ports import free_ports
from shm import observe
from shm.documents import DocumentWriter
from shm.prefix_writer import IndexWriter
from shm.segment import Segment, SegmentError
from shm.table import State, TableWriter
from tests.workers.instances import made, options, removed
from workers.process.generations import Given
from workers.process.instance import Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import create_places, tell_assigned
from workers.shared.documents import ENDPOINTS, EndpointRecord, Placed, encode
from workers.supervisor.pages.state.source import GONE_S, Source
from workers.worker.plugin_handles import SeriesCount

NOW = 1000.0


class World:
    """An instance with its writers, and a source that takes looks at it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.run_dir = instance.options.run_dir
        self.index = IndexWriter(instance.layout.index, instance.memory.index)
        self._table = TableWriter(instance.layout.table, instance.memory.table)
        self._documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self._records: list[EndpointRecord] = []
        instance.memory.areas.area(1).take_over()
        instance.memory.areas.set_serving(1, True)
        instance.memory.areas.area(1).heartbeat(time.monotonic())
        self.seen = observe.find(self.run_dir, name=instance.options.instance)
        self.source = Source(self.seen, self.run_dir)

    def endpoint(self, name: str, host: str = "10.0.0.1", pool: int = 0, **scraped: float) -> EndpointRecord:
        owner = self.index.new_owner()
        handle = self._table.take(owner, lambda slot: True)
        assert handle is not None
        columns = self.instance.layout.table.columns
        present = sum(1 << columns.index(column) for column in scraped)
        values = [scraped.get(column, 0.0) for column in columns]
        self._table.write(handle, state=State.FRESH, flags=0, updated_at=NOW - 0.5, inflight_at_scrape=0, values=values, present=present)
        record = EndpointRecord("default", name, host, 8000, {}, *handle, owner, pool=pool)
        self._records.append(record)
        self._documents.write(ENDPOINTS, encode(self._records))
        return record


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path) as instance:
        world = World(instance)
        yield world
        world.source.close()


def test_the_counters_name_endpoints_whose_reported_usage_is_implausible(world: World) -> None:
    writer = world.instance.memory.series_writer(PREDICTION, 0)
    writer.words[writer.block(("a", "default", "8000")) + writer.counter_at[USAGE_BEYOND_BOUNDS.name]] += 3
    writer.block(("b", "default", "8000"))
    counters = world.source.look(NOW).counters
    assert {name: n for name, n in counters.items() if name.startswith(USAGE_BEYOND_BOUNDS.name)} == {"usage_beyond_bounds_total@a": 3}


def test_the_counters_name_servers_that_give_no_tokens_and_the_reason(tmp_path: Path) -> None:
    text = "plugins: [{type: token-producer, parameters: {modelName: m}}, {type: precise-prefix-cache-producer}]"
    with made(tmp_path, text) as instance:
        world = World(instance)
        plugin = instance.config.pipeline.plugins["token-producer"]
        (group,) = [group for group in instance.layout.plugin_groups if group.name == WITHOUT_TOKENS.name]
        for worker in (0, 1):
            count = SeriesCount(instance.memory.series_writer(group, worker), plugin, WITHOUT_TOKENS)
            count.add("render:80", "403 from /render: fix it", n=2)
        counters = world.source.look(NOW).counters
        world.source.close()
    assert {name: n for name, n in counters.items() if name.startswith(WITHOUT_TOKENS.name)} == {
        "requests_without_tokens_total@render:80 403 from /render: fix it": 4
    }


def test_a_look_has_the_values_and_the_load_of_an_endpoint(world: World) -> None:
    record = world.endpoint("a", waiting_requests=3, kv_cache_usage=0.5)
    area = world.instance.memory.areas.area(1)
    area.inflight[record.slot] = 2
    area.tokens[record.slot] = 700
    world.index.insert(np.array([2**40, 2**50], dtype=np.uint64), record.owner, 1)
    (seen,) = world.source.look(NOW).endpoints
    assert (seen.name, seen.address, seen.state, seen.age_s) == ("a", "10.0.0.1:8000", State.FRESH, 0.5)
    assert seen.scraped == {"waiting_requests": 3.0, "kv_cache_usage": 0.5}
    assert (seen.inflight_requests, seen.inflight_tokens, seen.index_entries) == (2, 700, 2)


def test_an_ipv6_address_is_in_brackets(world: World) -> None:
    world.endpoint("a", host="::1")
    assert world.source.look(NOW).endpoints[0].address == "[::1]:8000"


def test_an_endpoint_is_left_out_if_another_one_has_its_slot_now(world: World) -> None:
    record = world.endpoint("a")
    writer = TableWriter(world.instance.layout.table, world.instance.memory.table)
    (handle,) = writer.taken()
    assert handle == (record.slot, record.generation)
    writer.release(handle)
    writer.take(9, lambda slot: True)
    assert world.source.look(NOW).endpoints == ()


def test_decisions_are_counted_per_endpoint_over_all_models_and_workers(world: World) -> None:
    world.endpoint("a")
    world.endpoint("b")
    for index, model, count in ((0, "x", 3), (0, "y", 4), (1, "x", 5)):
        series = world.instance.memory.series_writer(ATTEMPTS, index)
        block = series.block(("success", model, "a", "default", "8000"))
        series.words[block + series.counter_at[SCHEDULER_ATTEMPTS.name]] += count
    assert [endpoint.picks for endpoint in world.source.look(NOW).endpoints] == [12, 0]


def test_predicted_and_reported_tokens_are_summed_per_endpoint_over_all_workers(world: World) -> None:
    world.endpoint("a")
    world.endpoint("b")
    counts = {"checked_requests": 1, "checked_prompt_tokens": 100, "predicted_tokens": 60, "reported_tokens": 50}
    for index in (0, 1):
        series = world.instance.memory.series_writer(PREDICTION, index)
        block = series.block(("a", "default", "8000"))
        for name, count in counts.items():
            series.words[block + series.counter_at[f"prefix_{name}_total"]] += count
    seen = [endpoint.cached for endpoint in world.source.look(NOW).endpoints]
    assert seen == [Sums(requests=2, prompt=200, predicted=120, reported=100), None]


def test_a_look_has_the_counters_of_every_area(world: World) -> None:
    area = world.instance.memory.areas.area(1)
    area.add(area.schema.counter["picks_total"], 5)
    area.scalars[area.schema.scalar["streams"]] = 4
    look = world.source.look(time.monotonic())
    assert len(look.areas) == world.instance.layout.ordinals
    seen = look.areas[1]
    assert (seen.serving, seen.starts, seen.gauges["streams"], seen.counters["picks_total"]) == (True, 1, 4, 5)
    assert look.counters["picks_total"] == 5
    assert [area.starts for area in look.areas[2:]] == [0] * (world.instance.layout.ordinals - 2)


def test_a_large_index_is_counted_in_part_and_marked_as_estimated(world: World) -> None:
    record = world.endpoint("a")
    hashes = np.random.default_rng(1).integers(1, 2**63, 2000, dtype=np.uint64)
    world.index.insert(hashes, record.owner, 1)
    whole = world.source.look(NOW)
    assert (whole.index.used, whole.index.estimated) == (world.index.size(), False)
    assert whole.endpoints[0].index_entries == world.index.size()
    sampling = Source(world.seen, world.run_dir, counted_buckets=256)
    part = sampling.look(NOW)
    sampling.close()
    assert part.index.estimated
    assert part.index.used == pytest.approx(world.index.size(), rel=0.1)
    assert part.endpoints[0].index_entries == part.index.used


def test_a_look_changes_nothing_in_shared_memory(world: World) -> None:
    world.endpoint("a", waiting_requests=3)
    before = [bytes(segment.bytes) for segment in world.instance.memory.segments.values()]
    world.source.look(NOW)
    world.source.ended(time.monotonic())
    assert [bytes(segment.bytes) for segment in world.instance.memory.segments.values()] == before


def test_the_end_of_an_instance_is_detected(world: World) -> None:
    now = time.monotonic()
    assert world.source.ended(now) == ""
    world.instance.unlink()
    assert world.source.ended(now) == "", "its processes still heartbeat: another program may have removed its file"
    assert world.source.ended(now + 2 * GONE_S) == f"{world.seen.name} (pid {world.seen.pid}) has stopped"


def test_the_death_of_an_instance_is_detected_by_its_silence(world: World) -> None:
    gone = world.seen._replace(pid=1 << 30)
    world.instance.lock.record(pid=gone.pid)
    source = Source(gone, world.run_dir)
    assert source.ended(time.monotonic()) == ""
    assert source.ended(time.monotonic() + 60.0) == f"{gone.name} (pid {gone.pid}) has died"
    source.close()


def test_without_a_parent_a_second_of_silence_is_death(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    now = max(time.monotonic(), min(world.instance.memory.areas.ages(0.0)) * -1)
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: exists(path) and path != f"/proc/{world.seen.pid}")
    assert world.source.ended(now + 0.1) == ""
    assert "has died" in world.source.ended(now + 3.0)


def test_another_instance_with_the_same_name_is_detected(world: World) -> None:
    world.instance.lock.record(pid=1)
    assert "has stopped; another one runs under its name" in world.source.ended(time.monotonic())


def test_an_incomplete_instance_is_an_error_with_its_name(world: World) -> None:
    incomplete = world.seen._replace(segments=world.seen.segments[:1])
    with pytest.raises(SegmentError, match=f"instance {world.seen.name} .* is not complete: no AreaSchema"):
        Source(incomplete, world.run_dir)


def test_a_missing_segment_is_an_error_with_its_name(world: World) -> None:
    Segment.attach(world.seen.segments[2], None, writable=False).unlink()
    with pytest.raises(SegmentError, match=f"segment {world.seen.segments[2]} does not exist"):
        Source(world.seen, world.run_dir)


def test_endpoints_that_cannot_be_decoded_are_an_error_about_the_version(world: World) -> None:
    writer = DocumentWriter(world.instance.layout.documents, world.instance.memory.documents)
    writer.write(ENDPOINTS, b"\xc1")
    with pytest.raises(SegmentError, match=r"the endpoints of .* cannot be read .* it runs another version"):
        world.source.look(NOW)


def test_a_look_has_the_number_of_workers_that_leave_out_each_plugin(world: World) -> None:
    writer = world.instance.memory.series_writer(ISOLATION, 0)
    at = writer.gauge_at[PLUGIN_LEFT_OUT.name]
    writer.words[writer.block(("mine", "my-scorer")) + at] = 1
    writer.words[writer.block(("well", "my-scorer")) + at] = 0
    assert world.source.look(NOW).left_out == {"mine": 1}


def test_a_look_has_the_pools_that_the_picker_has_found_by_then(tmp_path: Path) -> None:
    default = Pool(DEFAULT, Given(None, "", {}), load(None, ""), "", 4)
    places = Places({DEFAULT: default}, free_ports(3), service="epp")
    with removed(create_places(options(tmp_path, max_endpoints=12, pool_given=True), places)) as instance:
        world = World(instance)
        assert [each.name for each in world.source.look(NOW).pools] == ["", "", ""]
        tell_assigned(instance, {2: Placed("llama", places.ports[2])})
        world.endpoint("a", pool=2)
        look = world.source.look(NOW)
        assert [each.name for each in look.pools] == ["", "", "llama"]
        assert [(each.name, each.pool) for each in look.endpoints] == [("a", "llama")]
        world.source.close()
