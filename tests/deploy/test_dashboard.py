"""The dashboards and the alerts use only metrics and labels that the picker exports."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from epp.metrics import PREFIX, Group, Metric
from epp.metrics.areas import WORKER_GAUGES
from epp.metrics.catalogue import MODULES
from tests.cases import cases
from tests.deploy.renderers import CHART, ROOT

OVERVIEW, EXPERTS = DASHBOARDS = [json.loads((ROOT / f"deploy/grafana/{name}.json").read_text()) for name in ("overview", "experts")]
PANELS = [panel for board in DASHBOARDS for panel in board["panels"] if panel["type"] != "row"]
OF_PANELS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
ALERTS = [rule for group in yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"] for rule in group["rules"]]
QUERIES = OF_PANELS + [(rule["alert"], rule["expr"]) for rule in ALERTS]
VARIABLES = [variable["query"]["query"] for board in DASHBOARDS for variable in board["templating"]["list"] if variable["type"] == "query"]
NAME = re.compile(rf"{PREFIX}\w+")
LABELS = re.compile(r"\bby \(([\w, ]+)\)|\{\{(\w+)\}\}|[{,](\w+)=")
OF_THE_SCRAPE = {"job", "namespace", "pod", "le"}
OF_THE_PAGE = {  # labels of metrics that are computed at the time of a scrape
    "worker", "streaming", "model_server_endpoint", "endpoint_name", "priority", "stage", "plugin_name", "cause", "outcome", "code",
}  # fmt: skip


WITHOUT_A_PANEL = {  # metric -> why
    "info": "its value is always 1",
    "certificate_expires_soon": "the panel of the ends of certificates shows when, and an alert uses it",
    "kv_cache_events_pool_capacity": "it is 1 while the picker reads events",
}


def declared() -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """All exported metrics of `epp.metrics`, with the labels of their group."""
    for value in (value for module in MODULES for value in vars(module).values()):
        for one in _flat(value):
            if isinstance(one, Metric) and one not in WORKER_GAUGES:  # the workers use those themselves
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
    """The series on the metrics page: names with their possible labels."""
    labels_by_name: dict[str, set[str]] = {}
    for metric, labels in declared():
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            labels_by_name.setdefault(f"{PREFIX}{metric.name}{suffix}", set()).update(labels)
    return labels_by_name


@cases(("title", "query"), QUERIES)
def test_a_query_uses_metrics_that_the_picker_exports(title: str, query: str) -> None:
    names = NAME.findall(query)
    assert names
    assert set(names) <= set(series()), title


def test_every_metric_has_a_panel_or_a_reason_to_have_none() -> None:
    shown = {name for _, query in OF_PANELS for name in NAME.findall(query)}
    without = {
        metric.name
        for metric, _ in declared()
        if not shown & {f"{PREFIX}{metric.name}{suffix}" for suffix in ("", "_bucket", "_sum", "_count")}
    }
    assert without == set(WITHOUT_A_PANEL), "add panels to deploy/grafana/experts.json"


def test_variables_use_metrics_that_the_picker_exports() -> None:
    assert VARIABLES
    for query in VARIABLES:
        assert set(NAME.findall(query)) <= set(series())


@cases(("title", "query"), QUERIES)
def test_a_query_groups_by_labels_that_its_metrics_have(title: str, query: str) -> None:
    known = OF_THE_SCRAPE | OF_THE_PAGE | set.union(*(series()[name] for name in NAME.findall(query)))
    used = {label.strip() for group in LABELS.findall(query) for part in group if part for label in part.split(",")}
    assert used <= known, title


def test_a_counter_is_shown_as_a_rate_and_a_gauge_is_not() -> None:
    kinds = {f"{PREFIX}{metric.name}": metric.kind for metric, _ in declared()}
    for title, query in QUERIES:
        for name in NAME.findall(query):
            counted = kinds.get(name) == "counter" or name.endswith("_bucket")
            assert counted == bool(re.search(rf"(rate|increase)\({name}[{{\[]", query)), (title, name)


def test_the_overview_fits_on_one_screen() -> None:
    assert len(OVERVIEW["panels"]) == 12
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in OVERVIEW["panels"]) <= 24


def test_a_panel_of_the_overview_is_also_among_those_for_experts() -> None:
    def without_place(panel: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in panel.items() if name not in ("id", "gridPos")}

    experts = [without_place(panel) for panel in EXPERTS["panels"]]
    assert all(without_place(panel) in experts for panel in OVERVIEW["panels"])


def test_every_alert_has_a_severity_and_says_what_is_wrong() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS) > 10
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["summary"].endswith(".")


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board["uid"])
def test_no_two_panels_overlap(board: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(cells) == len(set(cells))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def test_every_subject_has_a_row() -> None:
    rows = " ".join(panel["title"].lower() for panel in EXPERTS["panels"] if panel["type"] == "row")
    for subject in ("load", "first token", "queueing", "shedding", "prefix", "scrapes", "workers", "ejection", "kv events", "processes"):
        assert subject in rows


def test_all_queries_use_the_chosen_data_source() -> None:
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
