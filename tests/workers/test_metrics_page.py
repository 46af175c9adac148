"""The metrics page against lanes, table and index that the test fills; read back by prometheus_client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.metrics import ATTEMPTS, GROUPS, PREFIX, REQUEST, STREAM_COUNTERS, TWINS
from shm.documents import DocumentReader, DocumentWriter
from shm.table import State, TableReader, TableWriter
from tests.workers.instances import made
from workers.admin import Request
from workers.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode
from workers.instance import Instance
from workers.metrics_page import IndexFigures, MetricsPage, Pool
from workers.series_page import PIECE_SIZE

NOW = 1000.0
FRESH_FOR_S = 0.2


class World:
    """A page over an instance, and the writers of everything on it."""

    def __init__(self, instance: Instance, **options: Any) -> None:
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
            IndexFigures(lambda: 42, lambda: 7, lambda: 3, lambda: 2, lambda: {"full": 7, "capacity": 5}),
            source_type="metrics-data-source",
            extractor_type="core-metrics-extractor",
            now=lambda: self.now,
            series=[(group, instance.series_reader(group)) for group in GROUPS],
            producer_name="inflight",
            scrape_seconds=lambda: {"a": 0.003},
            **options,
        )

    def endpoint(self, name: str, *, kv: float, waiting: float, at: float = NOW, state: State = State.FRESH) -> None:
        handle = self.table.claim(1, lambda slot: True)
        assert handle is not None
        scraped = {"kv_cache_usage": kv, "waiting_requests": waiting}
        columns = self.instance.table_schema.columns
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
        return b"".join(self.page.page(Request("GET", "/metrics", accept, True)).body).decode()

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
    values = [0.1] * len(world.instance.table_schema.columns)
    world.table.write(again, state=State.FRESH, flags=0, updated_at=NOW, inflight_at_scrape=0, values=values, present=3)
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
    types = {family.name: family.type for family in parse_openmetrics(b"".join(answer.body).decode())}
    assert types["llm_d_epp_picks"] == "counter"
    assert types["llm_d_epp_scheduler_e2e_duration_seconds"] == "histogram"
    assert types["llm_d_epp_ready_endpoints"] == "gauge"
    plain = world.page.page(Request("GET", "/metrics", "*/*", True))
    assert plain.content_type.startswith("text/plain; version=")


def test_calls_of_plugins_are_shown_by_where_and_what_they_are(world: World) -> None:
    point, name = next(key for key in world.instance.timers if key[1] == "approx-prefix-cache-producer")
    world.instance.lanes.lane(1).observe(world.instance.timers[point, name], 0.0003)
    labels = {"extension_point": point, "plugin_type": name, "plugin_name": name}
    assert world.value("plugin_duration_seconds_count", **labels) == 1
    assert world.value("plugin_duration_seconds_bucket", le="0.0002", **labels) == 0
    twin = "inference_extension_plugin_duration_seconds_sum", frozenset(labels.items())
    assert world.samples()[twin] == 0.0003


def test_labelled_metrics_are_on_the_page_in_both_formats(world: World) -> None:
    writer = world.instance.series_writer(REQUEST, 1)
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


def test_requests_run_only_on_workers_that_serve_and_their_counts_stay(world: World) -> None:
    for index in (0, 1):
        writer = world.instance.series_writer(REQUEST, index)
        block = writer.block(("m", "m", "", "0"))
        writer.words[block + writer.gauge_at["request_running"]] += 1
        writer.words[block + writer.counter_at["request_total"]] += 1
    world.instance.lanes.set_serving(2, True)
    labels = {"model_name": "m", "target_model_name": "m", "fairness_id": "", "priority": "0"}
    assert world.value("request_running", **labels) == 1
    assert world.value("request_total", **labels) == 2


def test_older_names_follow_with_the_same_values_and_can_be_turned_off(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4)
    lane = world.instance.lanes.lane(0)
    lane.add(lane.schema.counter["datalayer_poll_errors_total"], 3)
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
        writer = world.instance.series_writer(group, 0)
        block = writer.block(tuple("x" for _ in group.labels))
        for at in (*writer.gauge_at.values(), *writer.counter_at.values()):
            writer.words[block + at] += 1
        for index in writer.histogram_index.values():
            writer.observe(block, index, 1.0)
    full = World(world.instance, leads={"epp-ns-pool.llm-d.ai": lambda: True})
    shown = {family.name for family in parse_text(full.text())}
    missing = {twin.name for name, twin in TWINS.items() if not name.startswith("flow_control_")}  # see test_flow_page
    missing -= {*shown, *(f"{name}_total" for name in shown)}
    assert missing == {  # a column that no plugin here reads, and counters of plugins that are not configured here
        "inference_pool_average_running_requests",
        "llm_d_inference_scheduler_disagg_decision_total",
        "llm_d_inference_scheduler_pd_decision_total",
    }


def test_who_leads_is_shown_where_there_is_an_election_under_both_names(world: World) -> None:
    assert not any("leader" in name for name, _ in world.samples())
    leading = True
    elected = World(world.instance, leads={"epp-ns-pool.llm-d.ai": lambda: leading})
    assert elected.value("leader", name="epp-ns-pool.llm-d.ai") == 1
    leading = False
    assert elected.value("leader", name="epp-ns-pool.llm-d.ai") == 0
    assert "leader_election_master_status{" in elected.text()


def test_streams_by_their_end_are_shown_when_asked_for(world: World) -> None:
    lanes = world.instance.lanes
    lanes.set_serving(1, True)
    for seat in (1, 2):
        lane = lanes.lane(seat)
        lane.scalars[lane.schema.scalar["extproc_streams_inflight"]] = 7
        lane.add(lane.schema.counter[STREAM_COUNTERS[1]], 2)
        lane.observe(lane.schema.histogram["extproc_stream_duration_seconds"], 0.02)
    assert not any("extproc" in name for name, _ in world.samples())
    asked = World(world.instance, stream_metrics=True)
    assert asked.value("extproc_streams_inflight") == 7
    assert asked.value("extproc_streams_total", code="Canceled") == 4
    assert asked.value("extproc_streams_total", code="OK") == 0
    assert asked.value("extproc_stream_duration_seconds_bucket", le="0.05") == 2


def test_load_is_shown_per_endpoint_as_the_workers_count_it(world: World) -> None:
    for name in ("a", "b"):
        world.endpoint(name, kv=0.5, waiting=4)
    lanes = world.instance.lanes
    for seat, slot, requests in ((1, 0, 2), (2, 0, 3), (2, 1, 4)):
        lanes.set_serving(seat, True)
        lane = lanes.lane(seat)
        lane.inflight[slot] += requests
        lane.tokens[slot] += 100 * requests
    labels = {"namespace": "default", "producer_name": "inflight", "fairness_id": "", "priority": ""}
    assert [world.value("inflight_requests", endpoint_name=name, **labels) for name in ("a", "b")] == [5, 4]
    assert [world.value("inflight_tokens", endpoint_name=name, **labels) for name in ("a", "b")] == [500, 400]


def test_how_old_an_endpoints_values_are_and_how_long_its_scrape_took(world: World) -> None:
    world.endpoint("a", kv=0.5, waiting=4, at=NOW - 0.5)
    world.endpoint("never", kv=0.0, waiting=0, at=0.0, state=State.UNKNOWN)
    labels = {"name": "pool-a", "model_server_endpoint": "a"}
    assert world.value("endpoint_values_age_seconds", **labels) == 0.5
    assert world.value("endpoint_scrape_seconds", **labels) == 0.003
    assert world.value("endpoint_values_age_seconds", **(labels | {"model_server_endpoint": "never"})) is None


def test_two_endpoints_of_one_name_do_not_spoil_the_page(world: World) -> None:
    for waiting in (4, 5):
        world.endpoint("same", kv=0.5, waiting=waiting)
    assert world.value("per_endpoint_queue_size", name="pool-a", model_server_endpoint="same") == 9


def test_workers_are_shown_by_their_lag_and_their_share_of_connections(world: World) -> None:
    for seat, connections in ((1, 30), (2, 10)):
        lane = world.instance.lanes.lane(seat)
        lane.beat(NOW)
        lane.add(lane.schema.counter["connections_total"], connections)
        lane.scalars[lane.schema.scalar["loop_lag_us"]] = 1500 * seat
    assert [world.value("worker_accepted_share", worker=w) for w in "01"] == [0.75, 0.25]
    assert [world.value("worker_loop_lag_seconds", worker=w) for w in "01"] == [0.0015, 0.003]


def test_seats_that_never_had_a_worker_are_left_out(world: World) -> None:
    assert world.value("worker_serving", worker="0") is None
    world.instance.lanes.lane(1).take_over()
    assert world.value("worker_serving", worker="0") == 0
    assert world.value("worker_serving", worker="1") is None


def test_the_page_says_what_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_COMMIT", "abc")
    monkeypatch.setenv("EPP_BUILD_REF", "v1")
    assert world.value("info", commit="abc", build_ref="v1") == 1


def test_with_a_thousand_label_tuples_the_page_has_each_once(world: World) -> None:
    writers = [world.instance.series_writer(ATTEMPTS, index) for index in (0, 1)]
    at = writers[0].counter_at["scheduler_attempts_total"]
    for index in range(2500):
        writer = writers[index % 2]
        writer.words[writer.block(("success", f"m{index}", f"pod-{index % 40}", "ns", "8000")) + at] += 1
    shown = {key: value for key, value in world.samples().items() if key[0] == "llm_d_epp_scheduler_attempts_total"}
    assert len(shown) <= ATTEMPTS.blocks + 1
    assert sum(shown.values()) == 2500


def observed(world: World, count: int, *, tenant: str = "gold") -> None:
    """`count` requests of a second each, and as many decisions."""
    writer = world.instance.series_writer(REQUEST, 0)
    block = writer.block(("m", "m-v2", tenant, "0"))
    lane = world.instance.lanes.lane(1)
    for _ in range(count):
        writer.observe(block, writer.histogram_index["request_duration_seconds"], 1.0)
        lane.observe(lane.schema.histogram["scheduler_e2e_duration_seconds"], 1.0)
        lane.add(lane.schema.counter["picks_total"])


def test_what_adds_up_is_of_one_moment_whatever_is_counted_while_the_page_is_sent(world: World) -> None:
    observed(world, 3)
    pieces = world.page.page(Request("GET", "/metrics", "", True)).body
    assert isinstance(pieces, Iterator)
    before = next(filter(None, pieces))  # by now all is read
    observed(world, 4)
    observed(world, 4, tenant="tin")
    text = b"".join((before, *pieces))
    found = {(s.name, s.labels.get("le")): s.value for f in parse_text(text.decode()) for s in f.samples}
    assert {
        value
        for (name, le), value in found.items()
        if "request_duration_seconds" in name and (le is None or float(le) >= 1)
    } == {3}
    e2e = {value for (name, le), value in found.items() if "scheduler_e2e" in name and le in (None, "+Inf")}
    assert e2e == {3}
    assert found["llm_d_epp_picks_total", None] == 3


def test_a_page_of_many_label_tuples_is_made_in_small_pieces_and_empty_ones(world: World) -> None:
    writer = world.instance.series_writer(REQUEST, 0)
    for index in range(150):
        block = writer.block((f"m{index % 5}", "m", f"t{index}", "0"))
        for histogram in writer.histogram_index.values():
            writer.observe(block, histogram, 1.0)
    body = world.page.page(Request("GET", "/metrics", "", True)).body
    pieces = list(body)
    assert max(map(len, pieces)) < 1.1 * PIECE_SIZE
    assert sum(map(len, pieces)) > 10 * PIECE_SIZE
    assert pieces.count(b"") > 10


def test_both_formats_say_the_same(world: World) -> None:
    world.endpoint('quo"te\n', kv=0.5, waiting=4)
    observed(world, 2)
    plain = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_text(world.text())
        for sample in family.samples
    }
    open_ = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in parse_openmetrics(world.text("application/openmetrics-text; version=1.0.0"))
        for sample in family.samples
    }
    assert plain == open_
    assert len(plain) > 500
