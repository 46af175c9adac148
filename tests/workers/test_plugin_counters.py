"""Counters that plugins declare: from a worker's handle to the metrics page, and what plugins say in the log."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.errors import PluginFault
from epp.metrics import GROUPS, Group, LabelCaps, Metric, counter_groups
from epp.plugin import NoParams, Plugin
from shm.series import SeriesWriter
from tests.workers.instances import made
from workers.instance import Instance, StartError, families
from workers.series_page import SeriesText
from workers.services import WARN_EVERY_S, SeriesCount, Warnings, WorkerServices, unheard

DECIDED = Metric("decided_total", "counter", "Decisions.", labels=("model_name", "kind"))
BARE = Metric("bare_total", "counter", "Without labels of its own.")
CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: prefill-filter}
- {type: decode-filter}
- {type: always-disagg-pd-decider}
- {name: splits, type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}]}
"""


def writer(instance: Instance, group: Group, worker: int) -> SeriesWriter:
    series = instance.series_writer(group, worker, LabelCaps(models_max=1))
    series.take_over()
    return series


def page(instance: Instance) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    tables = [SeriesText(group, instance.series_reader(group), legacy=True) for group in instance.groups]
    text = "".join(line for table in tables for line in table.lines(table.totals(), openmetrics=False))
    return {(s.name, frozenset(s.labels.items())): s.value for f in parse_text(text) for s in f.samples}


def test_counters_of_all_workers_are_on_the_page_under_the_plugin_s_labels_and_the_older_name(tmp_path: Path) -> None:
    with made(tmp_path, CONFIG) as instance:
        plugin = instance.config.pipeline.plugins["splits"]
        decided = plugin.metrics[0]
        (group,) = [group for group in instance.counter_groups if group.name == decided.name]
        for worker in (0, 1):
            count = SeriesCount(writer(instance, group, worker), plugin, decided)
            count.add("llama", "prefill-decode")
            count.add("llama", "prefill-decode", n=2)
            count.add("other-model", "decode-only")  # one model more than there is room for
        labels = {"plugin_name": "splits", "plugin_type": "disagg-profile-handler"}
        shown = page(instance)
        first = labels | {"model_name": "llama", "decision_type": "prefill-decode"}
        late = labels | {"model_name": "other", "decision_type": "decode-only"}
        assert shown["llm_d_epp_disagg_decision_total", frozenset(first.items())] == 6
        assert shown["llm_d_epp_disagg_decision_total", frozenset(late.items())] == 2
        older = frozenset({("model_name", "llama"), ("decision_type", "prefill-decode")})
        assert shown["llm_d_inference_scheduler_disagg_decision_total", older] == 6


def test_a_successor_goes_on_with_the_counters(tmp_path: Path) -> None:
    with made(tmp_path, CONFIG) as instance:
        plugin = instance.config.pipeline.plugins["splits"]
        group = instance.counter_groups[0]
        for _ in range(2):
            SeriesCount(writer(instance, group, 0), plugin, plugin.metrics[0]).add("m", "decode-only")
        assert set(page(instance).values()) == {2.0}


def test_a_counter_that_several_plugins_declare_is_one_table_with_a_row_each() -> None:
    groups = counter_groups([DECIDED, BARE, DECIDED, *GROUPS[0].gauges])
    assert [(group.name, group.labels) for group in groups] == [
        ("decided_total", ("plugin_name", "plugin_type", "model_name", "kind")),
        ("bare_total", ("plugin_name", "plugin_type")),
    ]


def test_a_configuration_without_such_plugins_has_no_such_tables(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        assert instance.counter_groups == ()
        assert instance.groups[: len(GROUPS)] == GROUPS  # flow control has its own behind them


@pytest.mark.parametrize(
    "metric", [Metric("level", "gauge", "A level."), Metric("took", "histogram", "A time.", (1.0,), labels=("model",))]
)
def test_what_has_no_place_in_shared_memory_stops_the_start(metric: Metric) -> None:
    class Odd(Plugin):
        metrics = (metric,)

    pipeline = SimpleNamespace(plugins={"odd": Odd("odd", NoParams())})
    with pytest.raises(StartError, match="plugin 'odd' declares"):
        families(pipeline, timed=False)  # type: ignore[arg-type]


def test_a_plugin_says_something_every_ten_seconds_at_most_and_how_often_it_did_not() -> None:
    now = [100.0]
    warnings = Warnings(lambda: now[0])
    one, other = Plugin("one", NoParams()), Plugin("other", NoParams())
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            warnings.warn(one, "no prefill")
        warnings.warn(other, "no encode", error="TimeoutError")
        now[0] += WARN_EVERY_S
        warnings.warn(one, "no prefill")
    said = [(line["event"], line["plugin"], line["left_out"]) for line in lines]
    assert said == [("no prefill", "one", 0), ("no encode", "other", 0), ("no prefill", "one", 2)]
    assert lines[1]["error"] == "TimeoutError"


class Sweeper(Plugin):
    def sweep(self) -> None:
        raise RuntimeError("nothing to sweep")


def test_work_that_nobody_awaits_and_that_fails_is_logged_with_its_plugin() -> None:
    with pytest.raises(RuntimeError) as caught:
        Sweeper("broom", NoParams()).sweep()
    with structlog.testing.capture_logs() as lines:
        unheard(caught.value)
    (line,) = lines
    assert (line["event"], line["plugin"]) == ("work of a plugin failed", "broom")


def test_the_handle_of_a_metric_that_is_not_declared_is_refused_with_its_name() -> None:
    lane: Any = SimpleNamespace(tokens=[])
    index: Any = None
    services = WorkerServices(
        lane, index, prefix_seed=0, rng=random.Random(), measures={}, counters={}, now=lambda: 0.0
    )
    broom = Sweeper("broom", NoParams())
    with pytest.raises(PluginFault, match="'bare_total' is no counter of the `metrics` that class Sweeper declares"):
        services.count(broom, BARE)
    with pytest.raises(PluginFault, match="'took' is no histogram of the `metrics` that class Sweeper declares"):
        services.measure(broom, Metric("took", "histogram", "A time.", (1.0,)))
