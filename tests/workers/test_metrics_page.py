"""The metrics page against lanes, table and index that the test fills; read back by prometheus_client."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from shm.documents import DocumentReader, DocumentWriter
from shm.table import State, TableReader, TableWriter
from tests.workers.instances import made
from workers.admin import Request
from workers.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode
from workers.instance import Instance
from workers.metrics_page import IndexFigures, MetricsPage, Pool

NOW = 1000.0
FRESH_FOR_S = 0.2


class World:
    """A page over an instance, and the writers of everything on it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.now = NOW
        self.table = TableWriter(instance.table_schema, instance.table)
        self.documents = DocumentWriter(instance.document_schema, instance.documents)
        self.records: list[EndpointRecord] = []
        reader = EndpointsView(DocumentReader(instance.document_schema, instance.documents))
        pool = Pool(TableReader(instance.table_schema, instance.table), reader, name="pool-a", fresh_for_s=FRESH_FOR_S)
        self.page = MetricsPage(
            instance.lanes,
            instance.families,
            pool,
            IndexFigures(lambda: 42, lambda: 7, lambda: 3, lambda: 2),
            source_type="metrics-data-source",
            extractor_type="core-metrics-extractor",
            now=lambda: self.now,
        )

    def endpoint(self, name: str, *, kv: float, waiting: float, at: float = NOW, state: State = State.FRESH) -> None:
        handle = self.table.claim(1, lambda slot: True)
        assert handle is not None
        present = 0b11 if state != State.UNKNOWN else 0
        self.table.write(
            handle, state=state, flags=0, updated_at=at, inflight_at_scrape=0, values=(kv, waiting), present=present
        )
        self.records.append(EndpointRecord("default", name, "10.0.0.1", 8000, {}, *handle, 1))
        self.documents.write(ENDPOINTS, encode(self.records))
        self.table.publish()

    def text(self, accept: str = "") -> str:
        return self.page.page(Request("GET", "/metrics", accept, True)).body.decode()

    def samples(self) -> dict[tuple[str, frozenset], float]:
        """(name, labels) -> value."""
        found = {}
        for family in parse_text(self.text()):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        return found

    def value(self, name: str, /, **labels: str) -> float | None:
        return self.samples().get((f"llm_d_epp_{name}", frozenset(labels.items())))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with made(tmp_path) as instance:
        yield World(instance)


def test_counters_are_sums_over_all_lanes(world: World) -> None:
    picks = world.instance.lanes.schema.counter["picks_total"]
    for seat, count in ((1, 5), (2, 7)):
        world.instance.lanes.lane(seat).add(picks, count)
    assert world.value("picks_total") == 12


def test_counters_do_not_fall_when_a_worker_is_followed(world: World) -> None:
    lane = world.instance.lanes.lane(1)
    lane.add(lane.schema.counter["picks_total"], 5)
    before = world.samples()
    successor = world.instance.lanes.lane(1)
    successor.take_over()
    after = world.samples()
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))
    assert world.value("worker_starts_total", worker="0") == 1


def test_histograms_are_summed_and_cumulative(world: World) -> None:
    index = world.instance.lanes.schema.histogram["scheduler_e2e_duration_seconds"]
    for seat, values in ((1, (0.00005, 0.003)), (2, (0.003, 99.0))):
        for value in values:
            world.instance.lanes.lane(seat).observe(index, value)
    samples = world.samples()
    name = "llm_d_epp_scheduler_e2e_duration_seconds"
    buckets = {dict(labels)["le"]: value for (sample, labels), value in samples.items() if sample == f"{name}_bucket"}
    assert [buckets[le] for le in ("0.0001", "0.002", "0.005", "0.1", "+Inf")] == [1, 1, 3, 3, 4]
    assert samples[f"{name}_count", frozenset()] == 4
    assert samples[f"{name}_sum", frozenset()] == pytest.approx(99.00605)


def test_a_plugins_histogram_has_its_labels(world: World) -> None:
    index = world.instance.measures["approx-prefix-cache-producer", "prefix_indexer_hit_ratio"]
    world.instance.lanes.lane(1).observe(index, 0.5)
    labels = {"plugin_name": "approx-prefix-cache-producer", "plugin_type": "approx-prefix-cache-producer"}
    assert world.value("prefix_indexer_hit_ratio_count", **labels) == 1
    assert world.value("prefix_indexer_hit_ratio_bucket", le="0.4", **labels) == 0
    assert world.value("prefix_indexer_hit_ratio_bucket", le="0.5", **labels) == 1
    assert world.value("prefix_indexer_size", **labels) == 42
    assert world.value("bus_corrupt_frames_total") == 2


def test_averages_and_sample_deviations_are_over_fresh_endpoints_with_two_decimals(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=1)
    world.endpoint("b", kv=0.75, waiting=2)
    world.endpoint("c", kv=0.1, waiting=6)
    world.endpoint("old", kv=1.0, waiting=100, at=NOW - 1)
    world.endpoint("never", kv=0.0, waiting=0, state=State.UNKNOWN)
    assert world.value("ready_endpoints", name="pool-a") == 3
    assert world.value("average_queue_size", name="pool-a") == 3.0
    assert world.value("std_dev_queue_size", name="pool-a") == 2.65
    assert world.value("average_kv_cache_utilization", name="pool-a") == 0.45
    assert world.value("std_dev_kv_cache_utilization", name="pool-a") == 0.33


def test_of_one_endpoint_the_deviation_is_zero(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=1)
    assert world.value("std_dev_queue_size", name="pool-a") == 0.0


def test_averages_stay_and_ready_endpoints_is_zero_while_none_is_fresh(world: World) -> None:
    assert world.value("ready_endpoints", name="pool-a") == 0
    assert world.value("average_queue_size", name="pool-a") is None
    world.endpoint("a", kv=0.5, waiting=4)
    assert world.value("average_queue_size", name="pool-a") == 4.0
    world.now += 10
    assert world.value("ready_endpoints", name="pool-a") == 0
    assert world.value("average_queue_size", name="pool-a") == 4.0


def test_queue_sizes_are_per_endpoint_stale_ones_included_unknown_ones_not(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    world.endpoint("stale", kv=0.5, waiting=9, at=NOW - 60, state=State.STALE)
    world.endpoint("never", kv=0.0, waiting=0, state=State.UNKNOWN)
    shown = [
        (dict(labels), v) for (name, labels), v in world.samples().items() if name.endswith("per_endpoint_queue_size")
    ]
    found = {labels["model_server_endpoint"]: value for labels, value in shown}
    assert found == {"a": 4, "stale": 9}


def test_an_endpoint_whose_slot_has_another_owner_by_now_is_left_out(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    record = world.records[0]
    world.table.release(world.table.claimed()[0])
    again = world.table.claim(2, lambda slot: True)
    assert again is not None and again.slot == record.slot
    world.table.write(
        again, state=State.FRESH, flags=0, updated_at=NOW, inflight_at_scrape=0, values=(0.1, 1), present=3
    )
    assert world.value("ready_endpoints", name="pool-a") == 0


def test_workers_have_a_label(world: World) -> None:
    lane = world.instance.lanes.lane(2)
    lane.scalars[lane.schema.scalar["streams"]] = 17
    lane.beat(NOW - 0.25)
    world.instance.lanes.set_serving(2, True)
    assert [world.value("streams_open", worker="1"), world.value("streams_open", worker="0")] == [17, 0]
    assert [world.value("worker_serving", worker="1"), world.value("worker_serving", worker="0")] == [1, 0]
    assert world.value("worker_beat_age_seconds", worker="1") == 0.25


def test_errors_of_the_data_layer_name_their_source_and_extractor(world: World) -> None:
    lane = world.instance.lanes.lane(0)
    lane.add(lane.schema.counter["datalayer_poll_errors_total"], 3)
    lane.add(lane.schema.counter["datalayer_extract_errors_total"], 2)
    assert world.value("datalayer_poll_errors_total", source_type="metrics-data-source") == 3
    assert (
        world.value(
            "datalayer_extract_errors_total", source_type="metrics-data-source", extractor_type="core-metrics-extractor"
        )
        == 2
    )


def test_text_by_default_openmetrics_when_asked_for(world: World) -> None:
    world.endpoint('quo"te\n', kv=0.5, waiting=4)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    answer = world.page.page(Request("GET", "/metrics", accept, True))
    assert answer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    types = {family.name: family.type for family in parse_openmetrics(answer.body.decode())}
    assert types["llm_d_epp_picks"] == "counter"
    assert types["llm_d_epp_scheduler_e2e_duration_seconds"] == "histogram"
    assert types["llm_d_epp_ready_endpoints"] == "gauge"
    plain = world.page.page(Request("GET", "/metrics", "*/*", True))
    assert plain.content_type.startswith("text/plain; version=")
