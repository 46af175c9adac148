"""The dashboard asks for metrics, and labels, that the picker has."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from epp import metrics
from epp.metrics import PREFIX, Group, Metric
from tests.deploy.renderers import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "endpoint-picker.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
VARIABLES = [variable["query"]["query"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
NAME = re.compile(rf"{PREFIX}\w+")
LABELS = re.compile(r"\bby \(([\w, ]+)\)|\{\{(\w+)\}\}|[{,](\w+)=")
OF_THE_SCRAPE = {"job", "namespace", "pod", "le"}
OF_THE_PAGE = {  # of metrics that are computed when they are read
    "worker", "streaming", "model_server_endpoint", "endpoint_name", "priority", "stage", "plugin_name", "cause", "outcome",
}  # fmt: skip


def declared() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """All metrics of `epp.metrics` that are exported, with the labels of their group."""
    for value in vars(metrics).values():
        for one in _flat(value):
            if isinstance(one, Metric) and one not in metrics.WORKER_GAUGES:  # those are for the workers themselves
                yield one, one.labels
            elif isinstance(one, Group):
                for metric in (*one.gauges, *one.counters, *(labelled.metric for labelled in one.histograms)):
                    yield metric, one.labels


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (Metric, Group)):
        yield value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (tuple, list)):
        yield from value


def series() -> dict[str, set[str]]:
    """What stands on the page: names, with the labels that they may have."""
    found: dict[str, set[str]] = {}
    for metric, labels in declared():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            found.setdefault(f"{PREFIX}{metric.name}{suffix}", set()).update(labels)
    return found


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_names_metrics_that_the_picker_exports(title: str, query: str) -> None:
    names = NAME.findall(query)
    assert names
    assert set(names) <= set(series()), title


def test_the_variables_do_too() -> None:
    assert VARIABLES
    for query in VARIABLES:
        assert set(NAME.findall(query)) <= set(series())


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_a_query_groups_by_labels_that_its_metrics_have(title: str, query: str) -> None:
    known = OF_THE_SCRAPE | OF_THE_PAGE | set.union(*(series()[name] for name in NAME.findall(query)))
    asked = {label.strip() for group in LABELS.findall(query) for part in group if part for label in part.split(",")}
    assert asked <= known, title


def test_a_counter_is_shown_as_a_rate_and_a_gauge_is_not() -> None:
    kinds = {f"{PREFIX}{metric.name}": metric.kind for metric, _ in declared()}
    for title, query in QUERIES:
        for name in NAME.findall(query):
            counted = kinds.get(name) == "counter" or name.endswith("_bucket")
            assert counted == bool(re.search(rf"(rate|increase)\({name}\{{", query)), (title, name)


def test_no_two_panels_lie_on_each_other() -> None:
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_every_subject_has_a_row() -> None:
    rows = " ".join(panel["title"].lower() for panel in DASHBOARD["panels"] if panel["type"] == "row")
    for subject in ("load", "first token", "queueing", "shedding", "prefix", "scrapes", "workers"):
        assert subject in rows


def test_the_queries_are_all_by_the_data_source_that_is_chosen() -> None:
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
