"""The text of metrics with labels, compared with the encoders and parsers of prometheus_client."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from epp.metrics import PREFIX, Group, Labelled, Metric
from epp.metrics.label_caps import LabelCaps
from epp.metrics.older_names import TWINS
from epp.metrics.request_series import GROUPS, REQUEST, REQUEST_FIGURES
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from tests.shm.memory import region_for
from workers.process.layout import series_schema_of
from workers.supervisor.pages.exposition import Rows, SeriesText, go_float, pairs, pieces

WAIT = Metric("wait_seconds", "histogram", "Time that a request waited.", (0.1, 1.0, 2.5))
GROUP = Group(
    "things",
    ("model", "tenant"),
    gauges=(Metric("things_running", "gauge", "Things that run."),),
    counters=(Metric("things_total", "counter", "Things that were."),),
    histograms=(
        Labelled(Metric("size_bytes", "histogram", "How large.", (64.0, 1048576.0))),
        Labelled(WAIT, "streaming", "true"),
        Labelled(WAIT, "streaming", "false"),
    ),
    blocks=16,
)
MODELS = ('a "quoted" one', "back\\slash\nand line feed", "100%d %s {x}")


class World:
    """The areas of one group of metrics, and a reader."""

    def __init__(self, group: Group, areas: int = 2) -> None:
        schema = series_schema_of(group, areas=areas)
        region = region_for(schema)
        self.group = group
        self.serving = dict.fromkeys(range(areas), True)
        self.writers = [SeriesWriter(schema, schema.area(region, area)) for area in range(areas)]
        self.reader = SeriesReader(schema, region, serving=self.serving.__getitem__)

    def add(self, area: int, labels: tuple[str, ...], name: str, count: int = 1) -> None:
        writer = self.writers[area]
        at = {**writer.gauge_at, **writer.counter_at}[name]
        writer.words[writer.block(labels) + at] += count

    def observe(self, area: int, labels: tuple[str, ...], name: str, value: float) -> None:
        writer = self.writers[area]
        writer.observe(writer.block(labels), writer.histogram_index[name], value)

    def text(self, *, openmetrics: bool = False, legacy: bool = True) -> str:
        text = SeriesText(self.group, self.reader, legacy=legacy)
        return "".join(text.lines(text.totals(), openmetrics=openmetrics))

    def samples(self, **options: bool) -> dict[tuple[str, frozenset], float]:
        found: dict[tuple[str, frozenset], float] = {}
        for family in parse_text(self.text(**options)):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in found
                found[key] = sample.value
        return found


@pytest.fixture
def filled() -> World:
    world = World(GROUP)
    for place, model in enumerate(MODELS):
        labels = (model, f"t{place}")
        world.add(place % 2, labels, "things_running", place)
        world.add(place % 2, labels, "things_total", 10**place)
        for value in (0.05, 2.5, 1e9 / 3):
            world.observe(place % 2, labels, "size_bytes", value)
            world.observe(place % 2, labels, "wait_seconds@true", value)
    world.observe(0, ("", ""), "wait_seconds@false", 0.5)
    return world


class Oracle(Collector):
    """The same values, as families of prometheus_client."""

    def __init__(self, world: World) -> None:
        self.world = world

    def collect(self) -> Iterator[Any]:
        group, rows = self.world.group, self.world.reader.rows()
        names = group.labels
        gauge = GaugeMetricFamily(f"{PREFIX}things_running", "Things that run.", labels=names)
        counter = CounterMetricFamily(f"{PREFIX}things_total", "Things that were.", labels=names)
        for labels, values in rows.items():
            gauge.add_metric(labels, values.gauges[0])
            if values.counters[0]:
                counter.add_metric(labels, values.counters[0])
        yield gauge
        yield counter
        families: dict[str, HistogramMetricFamily] = {}
        for index, member in enumerate(group.histograms):
            metric = member.metric
            extra = (member.label,) if member.label else ()
            family = families.setdefault(metric.name, HistogramMetricFamily(PREFIX + metric.name, metric.help, labels=(*names, *extra)))
            bounds = [*map(go_float, metric.buckets), "+Inf"]
            for labels, values in rows.items():
                counts, total = values.histograms[index]
                if sum(counts):
                    more = (member.value,) if member.label else ()
                    family.add_metric((*labels, *more), list(zip(bounds, accumulate(counts), strict=True)), total)
        yield from families.values()


@pytest.mark.parametrize(
    ("accept", "parse"), [("text/plain", parse_text), ("application/openmetrics-text; version=1.0.0", parse_openmetrics)]
)
def test_the_text_is_equivalent_to_that_of_prometheus_client(filled: World, accept: str, parse: Any) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Oracle(filled))
    encoder, _ = choose_encoder(accept)
    expected = encoder(registry).decode()
    text = filled.text(openmetrics="openmetrics" in accept) + ("# EOF\n" if "openmetrics" in accept else "")
    assert list(parse(text)) == list(parse(expected))
    assert len(text) == len(expected)  # only the order of labels differs


def test_the_openmetrics_text_is_valid(filled: World) -> None:
    families = {family.name: family for family in parse_openmetrics(filled.text(openmetrics=True) + "# EOF\n")}
    assert families[f"{PREFIX}things"].type == "counter"
    assert {sample.labels["model"] for sample in families[f"{PREFIX}things"].samples} == set(MODELS)


def test_the_text_is_empty_before_anything_is_counted() -> None:
    assert World(GROUP).text() == ""


def test_a_gauge_is_shown_at_zero_but_a_counter_and_a_histogram_only_after_a_count() -> None:
    world = World(GROUP)
    world.add(0, ("m", "t"), "things_running", 1)
    world.add(0, ("m", "t"), "things_running", -1)
    assert world.samples() == {(f"{PREFIX}things_running", frozenset({("model", "m"), ("tenant", "t")})): 0}


def test_the_gauge_of_an_area_that_does_not_serve_is_not_counted() -> None:
    world = World(GROUP)
    for area in (0, 1):
        world.add(area, ("m", "t"), "things_running", 4)
    world.serving[1] = False
    assert world.samples() == {(f"{PREFIX}things_running", frozenset({("model", "m"), ("tenant", "t")})): 4}


def requests(*, legacy: bool = True) -> dict[tuple[str, frozenset], float]:
    """The samples of two tenants with one model on two workers, and of one tenant with another model."""
    counted, measured = World(REQUEST), World(REQUEST_FIGURES)
    for area, model, tenant, count in ((0, "a", "gold", 2), (1, "a", "tin", 3), (1, "b", "gold", 5)):
        labels = (model, f"{model}-v2", tenant, "0")
        counted.add(area, labels, "request_total", count)
        counted.add(area, labels, "request_running", count)
        measured.observe(area, labels, "request_duration_seconds", float(count))
        measured.observe(area, labels, "request_ttft_seconds@true", 0.3)
        measured.observe(area, labels, "request_ttft_seconds@false", 0.3)
    return counted.samples(legacy=legacy) | measured.samples(legacy=legacy)


def test_a_twin_is_the_sum_over_the_labels_that_it_lacks() -> None:
    samples = requests()
    both = {"model_name": "a", "target_model_name": "a-v2"}

    def value(name: str, **labels: str) -> float:
        return samples[name, frozenset(labels.items())]

    assert value("inference_objective_request_total", **both, priority="0") == 5
    assert value("inference_objective_running_requests", model_name="a") == 5
    assert value("inference_objective_running_requests", model_name="b") == 5
    assert value("inference_objective_request_duration_seconds_bucket", **both, le="2.0") == 1
    assert value("inference_objective_request_duration_seconds_bucket", **both, le="3.0") == 2
    assert value("inference_objective_request_duration_seconds_count", **both) == 2
    assert value("inference_objective_request_duration_seconds_sum", **both) == 5
    assert value("llm_d_epp_request_total", **both, fairness_id="tin", priority="0") == 3
    assert value("llm_d_epp_request_ttft_seconds_count", **both, fairness_id="tin", priority="0", streaming="true") == 1


def test_without_legacy_names_there_are_no_twins() -> None:
    names = {name for name, _ in requests(legacy=False)}
    assert names
    assert all(name.startswith(PREFIX) for name in names)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_every_metric_of_a_group_is_shown_and_so_is_its_twin(group: Group) -> None:
    world = World(group)
    labels = tuple(f"v{place}" for place in range(len(group.labels)))
    for metric in (*group.gauges, *group.counters):
        world.add(0, labels, metric.name)
    for histogram in group.histograms:
        world.observe(0, labels, histogram.key, 1.0)
    shown = {family.name for family in parse_text(world.text())}
    metrics = [*group.gauges, *group.counters, *(histogram.metric for histogram in group.histograms)]
    expected = {PREFIX + metric.name for metric in metrics}
    expected |= {TWINS[metric.name].name for metric in metrics if metric.name in TWINS}
    assert shown == {name.removesuffix("_total") for name in expected}


def test_names_that_no_server_has_served_become_other() -> None:
    schema = series_schema_of(GROUPS[0], areas=1)
    region = region_for(schema)
    caps = LabelCaps()
    caps.served("m0", "m0", "t0")
    writer = SeriesWriter(schema, region, names=caps.names(GROUPS[0].labels))
    for index in range(50):
        block = writer.block((f"m{index}", f"m{index}", f"t{index % 2}", "0"))
        writer.words[block + writer.counter_at["request_total"]] += 1
    rows = SeriesReader(schema, region, serving=lambda _: True).rows()
    assert {labels[:3]: values.counters[0] for labels, values in rows.items()} == {
        ("m0", "m0", "t0"): 1,
        ("other", "other", "t0"): 24,
        ("other", "other", "other"): 25,
    }


def test_new_label_tuples_appear_on_the_next_page() -> None:
    world = World(GROUP)
    text = SeriesText(GROUP, world.reader, legacy=True)
    world.add(0, ("m0", "t"), "things_running", 1)
    pages = []
    for index in range(1, 4):
        pages.append(text.lines(text.totals(), openmetrics=False))
        next(pages[-1])
        world.add(index % 2, (f"m{index}", "t"), "things_running", 1)
        world.add(index % 2, (f"m{index}", "t"), "things_total", 1)
    last = text.lines(text.totals(), openmetrics=False)
    found = [{sample.labels["model"] for f in parse_text("".join(p)) for sample in f.samples} for p in (last, *pages)]
    assert found == [{f"m{index}" for index in range(count)} for count in (4, 1, 2, 3)]


def test_the_tuple_other_and_its_twin_are_shown_after_their_first_count() -> None:
    world = World(GROUPS[0])
    running = ("llm_d_epp_request_running", "inference_objective_running_requests")
    world.add(0, ("m", "m", "t", "0"), "request_running", 1)
    assert {dict(labels)["model_name"] for (name, labels) in world.samples() if name in running} == {"m"}
    world.add(0, ("other", "other", "t", "0"), "request_running", 1)
    shown = {(name, dict(labels)["model_name"]): value for (name, labels), value in world.samples().items()}
    assert [shown[name, "other"] for name in running] == [1, 1]
    world.add(0, ("other",) * 4, "request_total", 1)
    both = [value for (name, labels), value in world.samples().items() if dict(labels).get("fairness_id") == "other"]
    assert sorted(both) == [0, 1]


def test_parts_are_joined_to_pieces_by_size_and_empty_parts_become_empty_pieces() -> None:
    assert list(pieces(["ab", "", "c", "de", "\u00e4" * 5, "f"], size=4)) == [b"", b"abcde", "\u00e4".encode() * 5, b"f"]
    assert list(pieces([])) == [b""]


@given(st.lists(st.tuples(st.text("ab\n", max_size=2), st.text("xy", max_size=2)), max_size=40), st.integers(1, 40))
def test_sums_do_not_depend_on_when_label_tuples_were_added(labels: list[tuple[str, str]], cut: int) -> None:
    labels = list(dict.fromkeys(labels))
    at_once, in_two_parts = Rows(("a",), (0,)), Rows(("a",), (0,))
    for part in (labels[:cut], labels):
        list(in_two_parts.know(part))
    list(at_once.know(labels))
    values = np.arange(1, len(labels) + 1)
    assert at_once.texts == in_two_parts.texts
    assert at_once.summed(values).tolist() == in_two_parts.summed(values).tolist()
    assert at_once.summed(values).sum() == values.sum()
    assert at_once.of(values > 1).tolist() == [
        any(at_once.texts[i] == pairs(("a",), (a,)) for a, _ in labels[1:]) for i in range(len(at_once.texts))
    ]
