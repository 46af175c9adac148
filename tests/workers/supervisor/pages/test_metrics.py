"""The metrics page of areas, table and index that the test fills, read by the parsers of prometheus_client."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from compiled.finder import choose
from epp.metrics import PREFIX
from epp.metrics.areas import STREAM_COUNTERS
from epp.metrics.older_names import TWINS
from epp.metrics.request_series import ATTEMPTS, GROUPS, REQUEST, REQUEST_FIGURES
from shm.documents import DocumentReader, DocumentWriter
from shm.table import State, TableReader, TableWriter
from tests.workers.instances import made
from workers.process.instance import Instance
from workers.process.layout import REPLICAS_NEEDED
from workers.shared.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode
from workers.supervisor.pages.exposition import PIECE_SIZE
from workers.supervisor.pages.metrics import NO_ELECTION, Content, IndexFigures, MetricsPage, Readings
from workers.supervisor.pages.page import Request
from workers.supervisor.pages.pool_gauges import PoolGauges
from workers.supervisor.pages.sections import Sections

NOW = 1000.0
FRESH_FOR_S = 0.2
INDEX: Any = SimpleNamespace(size=lambda: 42, evictions=7, dropped=3, freed=lambda: {"full": 7, "capacity": 5})


class World:
    """The page of an instance, and the writers of the values on it."""

    def __init__(
        self,
        instance: Instance,
        *,
        further: Sequence[tuple[str, str]] = (),
        sections: Sections = Sections(),  # noqa: B008 - it never changes
        leads: Mapping[str, Callable[[], bool]] = NO_ELECTION,
        **content: Any,
    ) -> None:
        self.instance = instance
        self.now = NOW
        self.table = TableWriter(instance.layout.table, instance.memory.table)
        self.documents = DocumentWriter(instance.layout.documents, instance.memory.documents)
        self.records: list[EndpointRecord] = []
        self.seconds: dict[tuple[int, str], float] = {}
        self.failing: dict[tuple[int, str, str], float] = {}
        reader = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents))
        pool = PoolGauges(TableReader(instance.layout.table, instance.memory.table), reader, name="pool-a", fresh_for_s=FRESH_FOR_S)
        self.page = MetricsPage(
            instance.memory.areas,
            Content(
                instance.layout.families,
                [(group, instance.memory.series_reader(group)) for group in GROUPS],
                producer_name="inflight",
                **content,
            ),
            [pool],
            IndexFigures(INDEX, lambda: 2),
            Readings(
                [("metrics-data-source", "core-metrics-extractor"), *further],
                lambda: {(0, "a"): 0.003, **self.seconds},
                lambda: {(0, "a", "404"): 1.0, (0, "b", "empty answers"): 0.4, **self.failing},
            ),
            sections,
            now=lambda: self.now,
            leads=leads,
        )

    def endpoint(self, name: str, *, kv: float, waiting: float, at: float = NOW, state: State = State.FRESH) -> None:
        handle = self.table.take(1, lambda slot: True)
        assert handle is not None
        scraped = {"kv_cache_usage": kv, "waiting_requests": waiting}
        columns = self.instance.layout.table.columns
        reported = sum(1 << place for place, name in enumerate(columns) if name in scraped)
        self.table.write(
            handle,
            state=state,
            flags=0,
            updated_at=at,
            inflight_at_scrape=0,
            values=[scraped.get(name, 0.0) for name in columns],
            present=reported if state != State.UNKNOWN else 0,
        )
        self.records.append(EndpointRecord("default", name, "10.0.0.1", 8000, {}, *handle, 1))
        self.documents.write(ENDPOINTS, encode(self.records))
        self.table.publish()

    def text(self, accept: str = "") -> str:
        return b"".join(self.page.page(Request("GET", "/metrics", accept)).body).decode()

    def samples(self) -> dict[tuple[str, frozenset], float]:
        """The value of each name with labels."""
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


def test_counters_are_sums_over_all_areas(world: World) -> None:
    picks = world.instance.memory.areas.schema.counter["picks_total"]
    for ordinal, count in ((1, 5), (2, 7)):
        world.instance.memory.areas.area(ordinal).add(picks, count)
    assert world.value("picks_total") == 12


def test_counters_do_not_fall_when_a_successor_takes_over_an_area(world: World) -> None:
    area = world.instance.memory.areas.area(1)
    area.add(area.schema.counter["picks_total"], 5)
    before = world.samples()
    successor = world.instance.memory.areas.area(1)
    successor.take_over()
    after = world.samples()
    assert all(after[key] >= value for key, value in before.items() if key[0].endswith("_total"))
    assert world.value("worker_starts_total", worker="0") == 1


def test_histograms_are_summed_and_cumulative(world: World) -> None:
    index = world.instance.memory.areas.schema.histogram["scheduler_e2e_duration_seconds"]
    for ordinal, values in ((1, (0.00005, 0.003)), (2, (0.003, 99.0))):
        for value in values:
            world.instance.memory.areas.area(ordinal).observe(index, value)
    samples = world.samples()
    name = "llm_d_epp_scheduler_e2e_duration_seconds"
    buckets = {dict(labels)["le"]: value for (sample, labels), value in samples.items() if sample == f"{name}_bucket"}
    assert [buckets[le] for le in ("0.0001", "0.002", "0.005", "0.1", "+Inf")] == [1, 1, 3, 3, 4]
    assert samples[f"{name}_count", frozenset()] == 4
    assert samples[f"{name}_sum", frozenset()] == pytest.approx(99.00605)


def test_the_histogram_of_a_plugin_has_the_labels_of_the_plugin(world: World) -> None:
    index = world.instance.layout.measures["approx-prefix-cache-producer", "prefix_indexer_hit_ratio"]
    world.instance.memory.areas.area(1).observe(index, 0.5)
    labels = {"plugin_name": "approx-prefix-cache-producer", "plugin_type": "approx-prefix-cache-producer"}
    assert world.value("prefix_indexer_hit_ratio_count", **labels) == 1
    assert world.value("prefix_indexer_hit_ratio_bucket", le="0.4", **labels) == 0
    assert world.value("prefix_indexer_hit_ratio_bucket", le="0.5", **labels) == 1
    assert world.value("prefix_indexer_size", **labels) == 42
    assert world.value("prefix_indexer_freed_total", cause="full") == 7
    assert world.value("prefix_indexer_freed_total", cause="capacity") == 5
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


def test_the_deviation_of_a_single_endpoint_is_zero(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=1)
    assert world.value("std_dev_queue_size", name="pool-a") == 0.0


def test_averages_stay_and_ready_endpoints_is_zero_while_no_endpoint_is_fresh(world: World) -> None:
    assert world.value("ready_endpoints", name="pool-a") == 0
    assert world.value("average_queue_size", name="pool-a") is None
    world.endpoint("a", kv=0.5, waiting=4)
    assert world.value("average_queue_size", name="pool-a") == 4.0
    world.now += 10
    assert world.value("ready_endpoints", name="pool-a") == 0
    assert world.value("average_queue_size", name="pool-a") == 4.0


def test_queue_sizes_are_shown_for_fresh_and_stale_endpoints_but_not_for_unknown_ones(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    world.endpoint("stale", kv=0.5, waiting=9, at=NOW - 60, state=State.STALE)
    world.endpoint("never", kv=0.0, waiting=0, state=State.UNKNOWN)
    shown = [(dict(labels), v) for (name, labels), v in world.samples().items() if name.endswith("per_endpoint_queue_size")]
    found = {labels["model_server_endpoint"]: value for labels, value in shown}
    assert found == {"a": 4, "stale": 9}


def test_an_endpoint_is_left_out_if_another_one_has_its_slot_now(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    record = world.records[0]
    world.table.release(world.table.taken()[0])
    again = world.table.take(2, lambda slot: True)
    assert again is not None and again.slot == record.slot
    values = [0.1] * len(world.instance.layout.table.columns)
    world.table.write(again, state=State.FRESH, flags=0, updated_at=NOW, inflight_at_scrape=0, values=values, present=3)
    assert world.value("ready_endpoints", name="pool-a") == 0


def test_metrics_of_workers_have_the_label_worker(world: World) -> None:
    area = world.instance.memory.areas.area(2)
    area.scalars[area.schema.scalar["streams"]] = 17
    area.heartbeat(NOW - 0.25)
    world.instance.memory.areas.set_serving(2, True)
    assert [world.value("streams_open", worker="1"), world.value("streams_open", worker="0")] == [17, 0]
    assert [world.value("worker_serving", worker="1"), world.value("worker_serving", worker="0")] == [1, 0]
    assert world.value("worker_beat_age_seconds", worker="1") == 0.25


def test_errors_of_the_data_layer_have_source_and_extractor_as_labels(world: World) -> None:
    area = world.instance.memory.areas.area(0)
    area.add(area.schema.counter["datalayer_poll_errors_total"], 3)
    area.add(area.schema.counter["datalayer_extract_errors_total"], 2)
    assert world.value("datalayer_poll_errors_total", source_type="metrics-data-source") == 3
    assert world.value("datalayer_extract_errors_total", source_type="metrics-data-source", extractor_type="core-metrics-extractor") == 2


def test_errors_of_further_data_sources_have_their_own_labels_and_those_of_one_type_are_added(world: World, tmp_path: Path) -> None:
    further = [("dcgm-data-source", "dcgm-extractor"), ("metrics-data-source", "core-metrics-extractor")]
    world = World(world.instance, further=further)
    area = world.instance.memory.areas.area(0)
    for name, count in (("total", 3), ("total@1", 5), ("total@2", 7)):
        area.add(area.schema.counter[f"datalayer_poll_errors_{name}"], count)
        area.add(area.schema.counter[f"datalayer_extract_errors_{name}"], 10 * count)
    assert world.value("datalayer_poll_errors_total", source_type="dcgm-data-source") == 5
    assert world.value("datalayer_poll_errors_total", source_type="metrics-data-source") == 10
    dcgm = {"source_type": "dcgm-data-source", "extractor_type": "dcgm-extractor"}
    assert world.value("datalayer_extract_errors_total", **dcgm) == 50
    older = frozenset({("source_type", "dcgm-data-source")})
    assert world.samples()["llm_d_inference_scheduler_datalayer_poll_errors_total", older] == 5


def test_the_page_is_text_by_default_and_openmetrics_on_request(world: World) -> None:
    world.endpoint('quo"te\n', kv=0.5, waiting=4)
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    answer = world.page.page(Request("GET", "/metrics", accept))
    assert answer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    types = {family.name: family.type for family in parse_openmetrics(b"".join(answer.body).decode())}
    assert types["llm_d_epp_picks"] == "counter"
    assert types["llm_d_epp_scheduler_e2e_duration_seconds"] == "histogram"
    assert types["llm_d_epp_ready_endpoints"] == "gauge"
    plain = world.page.page(Request("GET", "/metrics", "*/*"))
    assert plain.content_type.startswith("text/plain; version=")


def test_calls_of_plugins_are_shown_by_extension_point_type_and_name(world: World) -> None:
    point, name = next(key for key in world.instance.layout.timers if key[1] == "approx-prefix-cache-producer")
    world.instance.memory.areas.area(1).observe(world.instance.layout.timers[point, name], 0.0003)
    labels = {"extension_point": point, "plugin_type": name, "plugin_name": name}
    assert world.value("plugin_duration_seconds_count", **labels) == 1
    assert world.value("plugin_duration_seconds_bucket", le="0.0002", **labels) == 0
    twin = "inference_extension_plugin_duration_seconds_sum", frozenset(labels.items())
    assert world.samples()[twin] == 0.0003


def test_metrics_with_labels_are_on_the_page_in_both_formats(world: World) -> None:
    writer = world.instance.memory.series_writer(REQUEST, 1)
    block = writer.block(("m", "m-v2", "gold", "0"))
    writer.words[block + writer.counter_at["request_total"]] += 3
    labels = {"model_name": "m", "target_model_name": "m-v2", "fairness_id": "gold", "priority": "0"}
    assert world.value("request_total", **labels) == 3
    assert world.value("series_blocks_used", group="request", worker="1") == 1
    assert world.value("series_overflow_total", group="request") == 0
    text = world.text("application/openmetrics-text; version=1.0.0")
    assert text.endswith("# EOF\n")
    samples = [sample for family in parse_openmetrics(text) for sample in family.samples]
    assert [s.value for s in samples if s.name == "llm_d_epp_request_total"] == [3]


def test_running_requests_count_on_serving_workers_only_but_totals_on_all(world: World) -> None:
    for index in (0, 1):
        writer = world.instance.memory.series_writer(REQUEST, index)
        block = writer.block(("m", "m", "", "0"))
        writer.words[block + writer.gauge_at["request_running"]] += 1
        writer.words[block + writer.counter_at["request_total"]] += 1
    world.instance.memory.areas.set_serving(2, True)
    labels = {"model_name": "m", "target_model_name": "m", "fairness_id": "", "priority": "0"}
    assert world.value("request_running", **labels) == 1
    assert world.value("request_total", **labels) == 2


def test_a_worker_that_was_removed_on_purpose_has_no_gauges(world: World) -> None:
    areas = world.instance.memory.areas
    areas.area(2).take_over()
    areas.area(2).heartbeat(1.0)
    at = areas.schema.scalar["leaving"]
    assert world.value("worker_serving", worker="1") == 0
    areas.area(2).scalars[at] = 2
    shown = {name for name, labels in world.samples() if ("worker", "1") in labels and "worker_" in name}
    assert shown == {f"{PREFIX}worker_starts_total"}
    areas.set_serving(2, True)  # it still drains
    assert world.value("worker_serving", worker="1") == 1


def test_older_names_have_the_same_values_and_can_be_turned_off(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    area = world.instance.memory.areas.area(0)
    area.add(area.schema.counter["datalayer_poll_errors_total"], 3)
    samples = world.samples()
    assert samples["inference_pool_ready_pods", frozenset({("name", "pool-a")})] == 1
    pod = frozenset({("name", "pool-a"), ("model_server_pod", "a")})
    assert samples["inference_pool_per_pod_queue_size", pod] == 4
    source = frozenset({("source_type", "metrics-data-source")})
    assert samples["llm_d_inference_scheduler_datalayer_poll_errors_total", source] == 3
    assert samples["inference_extension_prefix_indexer_size", frozenset()] == 42
    off = World(world.instance, legacy_names=False)
    assert {name for name, _ in off.samples()} == {name for name, _ in samples if name.startswith(PREFIX)}


def test_every_older_name_is_on_a_full_page(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    for group in GROUPS:
        writer = world.instance.memory.series_writer(group, 0)
        block = writer.block(tuple("x" for _ in group.labels))
        for at in (*writer.gauge_at.values(), *writer.counter_at.values()):
            writer.words[block + at] += 1
        for index in writer.histogram_index.values():
            writer.observe(block, index, 1.0)
    supervisor = world.instance.memory.areas.area(0)
    supervisor.scalars[supervisor.schema.scalar[REPLICAS_NEEDED]] = 3
    full = World(world.instance, leads={"epp-ns-pool.llm-d.ai": lambda: True})
    shown = {family.name for family in parse_text(full.text())}
    missing = {twin.name for name, twin in TWINS.items() if not name.startswith("flow_control_")}  # see test_flow
    missing -= {*shown, *(f"{name}_total" for name in shown)}
    assert missing == {  # a column that no plugin reads, and counters of plugins that are not configured
        "inference_pool_average_running_requests",
        "llm_d_inference_scheduler_disagg_decision_total",
        "llm_d_inference_scheduler_pd_decision_total",
    }


def test_leadership_is_shown_under_both_names_if_there_is_an_election(world: World) -> None:
    assert not any("leader" in name for name, _ in world.samples())
    leading = True
    elected = World(world.instance, leads={"epp-ns-pool.llm-d.ai": lambda: leading})
    assert elected.value("leader", name="epp-ns-pool.llm-d.ai") == 1
    leading = False
    assert elected.value("leader", name="epp-ns-pool.llm-d.ai") == 0
    assert "leader_election_master_status{" in elected.text()


def test_streams_are_shown_by_their_end_if_stream_metrics_are_on(world: World) -> None:
    areas = world.instance.memory.areas
    areas.set_serving(1, True)
    for ordinal in (1, 2):
        area = areas.area(ordinal)
        area.scalars[area.schema.scalar["extproc_streams_inflight"]] = 7
        area.add(area.schema.counter[STREAM_COUNTERS[1]], 2)
        area.observe(area.schema.histogram["extproc_stream_duration_seconds"], 0.02)
    assert not any("extproc" in name for name, _ in world.samples())
    with_streams = World(world.instance, stream_metrics=True)
    assert with_streams.value("extproc_streams_inflight") == 7
    assert with_streams.value("extproc_streams_total", code="Canceled") == 4
    assert with_streams.value("extproc_streams_total", code="OK") == 0
    assert with_streams.value("extproc_stream_duration_seconds_bucket", le="0.05") == 2


def test_load_in_flight_is_shown_per_endpoint_as_a_sum_over_workers(world: World) -> None:
    for name in ("a", "b"):
        world.endpoint(name, kv=0.5, waiting=4)
    areas = world.instance.memory.areas
    for ordinal, slot, requests in ((1, 0, 2), (2, 0, 3), (2, 1, 4)):
        areas.set_serving(ordinal, True)
        area = areas.area(ordinal)
        area.inflight[slot] += requests
        area.tokens[slot] += 100 * requests
    labels = {"namespace": "default", "producer_name": "inflight", "fairness_id": "", "priority": ""}
    assert [world.value("inflight_requests", endpoint_name=name, **labels) for name in ("a", "b")] == [5, 4]
    assert [world.value("inflight_tokens", endpoint_name=name, **labels) for name in ("a", "b")] == [500, 400]


def test_the_age_of_an_endpoints_values_and_the_duration_of_its_scrape_are_shown(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4, at=NOW - 0.5)
    world.endpoint("never", kv=0.0, waiting=0, at=0.0, state=State.UNKNOWN)
    labels = {"name": "pool-a", "model_server_endpoint": "a"}
    assert world.value("endpoint_values_age_seconds", **labels) == 0.5
    assert world.value("endpoint_scrape_seconds", **labels) == 0.003
    assert world.value("endpoint_values_age_seconds", **(labels | {"model_server_endpoint": "never"})) is None


def test_endpoints_that_fail_their_requests_are_named_with_the_cause(world: World) -> None:
    labels = {"name": "pool-a", "model_server_endpoint": "a", "cause": "404"}
    assert world.value("endpoint_failing_share", **labels) == 1.0
    labels |= {"model_server_endpoint": "b", "cause": "empty answers"}
    assert world.value("endpoint_failing_share", **labels) == 0.4


def test_endpoints_of_a_pool_that_the_page_does_not_know_yet_are_left_out(world: World) -> None:
    before = world.samples().keys()
    world.seconds, world.failing = {(1, "new"): 0.1}, {(1, "new", "404"): 1.0}
    assert world.samples().keys() == before


def test_values_of_two_endpoints_with_the_same_name_are_summed(world: World) -> None:
    for waiting in (4, 5):
        world.endpoint("same", kv=0.5, waiting=waiting)
    assert world.value("per_endpoint_queue_size", name="pool-a", model_server_endpoint="same") == 9


def test_workers_show_their_loop_lag_and_their_share_of_connections(world: World) -> None:
    for ordinal, connections in ((1, 30), (2, 10)):
        area = world.instance.memory.areas.area(ordinal)
        area.heartbeat(NOW)
        area.add(area.schema.counter["connections_total"], connections)
        area.scalars[area.schema.scalar["loop_lag_us"]] = 1500 * ordinal
    assert [world.value("worker_accepted_share", worker=w) for w in "01"] == [0.75, 0.25]
    assert [world.value("worker_loop_lag_seconds", worker=w) for w in "01"] == [0.0015, 0.003]


def test_ordinals_that_never_had_a_worker_are_left_out(world: World) -> None:
    assert world.value("worker_serving", worker="0") is None
    world.instance.memory.areas.area(1).take_over()
    assert world.value("worker_serving", worker="0") == 0
    assert world.value("worker_serving", worker="1") is None


def test_the_page_shows_the_build(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_COMMIT", "abc")
    monkeypatch.setenv("EPP_BUILD_REF", "v1")
    assert world.value("info", commit="abc", build_ref="v1", code=str(choose()), config_hash="") == 1


def test_a_page_with_a_thousand_label_tuples_has_each_once(world: World) -> None:
    writers = [world.instance.memory.series_writer(ATTEMPTS, index) for index in (0, 1)]
    at = writers[0].counter_at["scheduler_attempts_total"]
    for index in range(2500):
        writer = writers[index % 2]
        writer.words[writer.block(("success", f"m{index}", f"pod-{index % 40}", "ns", "8000")) + at] += 1
    shown = {key: value for key, value in world.samples().items() if key[0] == "llm_d_epp_scheduler_attempts_total"}
    assert len(shown) <= ATTEMPTS.blocks + 1
    assert sum(shown.values()) == 2500


def observed(world: World, count: int, *, tenant: str = "gold") -> None:
    """Counts `count` requests of a second each, and as many decisions."""
    writer = world.instance.memory.series_writer(REQUEST_FIGURES, 0)
    block = writer.block(("m", "m-v2", tenant, "0"))
    area = world.instance.memory.areas.area(1)
    for _ in range(count):
        writer.observe(block, writer.histogram_index["request_duration_seconds"], 1.0)
        area.observe(area.schema.histogram["scheduler_e2e_duration_seconds"], 1.0)
        area.add(area.schema.counter["picks_total"])


def test_counters_and_histograms_agree_even_if_they_grow_while_the_page_is_sent(world: World) -> None:
    observed(world, 3)
    pieces = world.page.page(Request("GET", "/metrics", "")).body
    assert isinstance(pieces, Iterator)
    before = next(filter(None, pieces))  # all sums are read by now
    observed(world, 4)
    observed(world, 4, tenant="tin")
    text = b"".join((before, *pieces))
    found = {(s.name, s.labels.get("le")): s.value for f in parse_text(text.decode()) for s in f.samples}
    assert {value for (name, le), value in found.items() if "request_duration_seconds" in name and (le is None or float(le) >= 1)} == {3}
    e2e = {value for (name, le), value in found.items() if "scheduler_e2e" in name and le in (None, "+Inf")}
    assert e2e == {3}
    assert found["llm_d_epp_picks_total", None] == 3


def test_a_page_with_many_label_tuples_is_generated_in_small_and_empty_pieces(world: World) -> None:
    writer = world.instance.memory.series_writer(REQUEST_FIGURES, 0)
    for index in range(60):
        block = writer.block((f"m{index}", "m", "default-flow", "0"))
        for histogram in writer.histogram_index.values():
            writer.observe(block, histogram, 1.0)
    body = world.page.page(Request("GET", "/metrics", "")).body
    pieces = list(body)
    assert max(map(len, pieces)) < 1.1 * PIECE_SIZE
    assert sum(map(len, pieces)) > 10 * PIECE_SIZE
    assert pieces.count(b"") > 10


def test_both_formats_have_the_same_values(world: World) -> None:
    world.endpoint('quo"te\n', kv=0.5, waiting=4)
    observed(world, 2)
    plain = {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in parse_text(world.text()) for sample in family.samples
    }
    open_ = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_openmetrics(world.text("application/openmetrics-text; version=1.0.0"))
        for sample in family.samples
    }
    assert plain == open_
    assert len(plain) > 500
