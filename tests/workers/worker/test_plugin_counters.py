"""Counters and gauges that plugins declare: from a worker's handle to the metrics page. Log lines of plugins."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families as parse_text

from epp.errors import PluginFault, blame
from epp.learning.local import LocalLearning
from epp.metrics import Group, Metric
from epp.metrics.catalogue import plugin_groups
from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import GROUPS
from epp.plugin import NoParams, Plugin
from shm.prefills import local_prefills
from shm.series import SeriesWriter
from tests.pair import areas
from tests.workers.instances import made
from workers.process import StartError
from workers.process.instance import Instance
from workers.process.names import families
from workers.supervisor.pages.exposition import SeriesText
from workers.worker.held import NoHeldBlocks
from workers.worker.plugin_handles import GAUGE_MAX, SeriesCount, SeriesGauge
from workers.worker.services import WARN_EVERY_S, Warnings, WorkerServices, work_failed

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
GAUGED = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {name: thunder, type: thunder-agent}
flowControl: {saturationDetector: {pluginRef: thunder}, defaultPriorityBand: {fairnessPolicyRef: thunder}}
"""
COMBINED = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: utilization-detector, name: u}
- {type: concurrency-detector, name: c}
- {type: max-saturation-detector, name: most, parameters: {detectors: [u, c]}}
flowControl: {saturationDetector: {pluginRef: most}}
"""


def writer(instance: Instance, group: Group, worker: int) -> SeriesWriter:
    caps = LabelCaps()
    caps.served("llama", "m", "")
    series = instance.memory.series_writer(group, worker, caps)
    series.take_over()
    return series


def page(instance: Instance) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    tables = [SeriesText(group, instance.memory.series_reader(group), legacy=True) for group in instance.layout.groups]
    text = "".join(line for table in tables for line in table.lines(table.totals(), openmetrics=False))
    return {(s.name, frozenset(s.labels.items())): s.value for f in parse_text(text) for s in f.samples}


def test_the_page_has_counters_of_all_workers_with_the_labels_of_the_plugin_and_the_older_name(tmp_path: Path) -> None:
    with made(tmp_path, CONFIG) as instance:
        plugin = instance.config.pipeline.plugins["splits"]
        decided = plugin.metrics[0]
        (group,) = [group for group in instance.layout.plugin_groups if group.name == decided.name]
        for worker in (0, 1):
            count = SeriesCount(writer(instance, group, worker), plugin, decided)
            count.add("llama", "prefill-decode")
            count.add("llama", "prefill-decode", n=2)
            count.add("other-model", "decode-only")  # a model that no server has served
        labels = {"plugin_name": "splits", "plugin_type": "disagg-profile-handler"}
        shown = page(instance)
        first = labels | {"model_name": "llama", "decision_type": "prefill-decode"}
        late = labels | {"model_name": "other", "decision_type": "decode-only"}
        assert shown["llm_d_epp_disagg_decision_total", frozenset(first.items())] == 6
        assert shown["llm_d_epp_disagg_decision_total", frozenset(late.items())] == 2
        older = frozenset({("model_name", "llama"), ("decision_type", "prefill-decode")})
        assert shown["llm_d_inference_scheduler_disagg_decision_total", older] == 6


def test_a_successor_continues_the_counters(tmp_path: Path) -> None:
    with made(tmp_path, CONFIG) as instance:
        plugin = instance.config.pipeline.plugins["splits"]
        group = instance.layout.plugin_groups[0]
        for _ in range(2):
            SeriesCount(writer(instance, group, 0), plugin, plugin.metrics[0]).add("m", "decode-only")
        assert set(page(instance).values()) == {2.0}


def test_a_counter_that_several_plugins_declare_is_one_table_with_a_row_per_plugin() -> None:
    groups = plugin_groups([DECIDED, BARE, DECIDED])
    assert [(group.name, group.labels) for group in groups] == [
        ("decided_total", ("plugin_name", "plugin_type", "model_name", "kind")),
        ("bare_total", ("plugin_name", "plugin_type")),
    ]


def test_a_configuration_without_such_plugins_has_no_such_tables(tmp_path: Path) -> None:
    with made(tmp_path) as instance:
        assert instance.layout.plugin_groups == ()
        assert instance.layout.groups[: len(GROUPS)] == GROUPS  # those of flow control come after them


def test_the_page_has_the_sum_of_a_gauge_over_all_workers_with_its_fraction(tmp_path: Path) -> None:
    with made(tmp_path, GAUGED, allow_experimental=True) as instance:
        plugin = instance.config.pipeline.plugins["thunder"]
        used = next(metric for metric in plugin.metrics if metric.name == "thunder_agent_pod_utilization")
        (group,) = [group for group in instance.layout.plugin_groups if group.name == used.name]
        for ordinal in (1, 2):
            instance.memory.areas.set_serving(ordinal, True)
        first, second = (SeriesGauge(writer(instance, group, worker), plugin, used) for worker in (0, 1))
        first.set(0.5, "a")
        first.set(0.125, "a")
        second.set(1.25, "a")
        second.set(float("nan"), "b")
        second.set(1e30, "c")
        labels = {"plugin_name": "thunder", "plugin_type": "thunder-agent"}
        shown = {
            dict(key)["pod"]: value
            for (name, key), value in page(instance).items()
            if name == "llm_d_epp_thunder_agent_pod_utilization" and labels.items() <= dict(key).items()
        }
        assert shown == {"a": 1.375, "b": 0.0, "c": GAUGE_MAX}


def test_the_page_has_the_weighted_mean_of_a_gauge_over_the_workers_that_set_it(tmp_path: Path) -> None:
    with made(tmp_path, COMBINED, allow_experimental=True) as instance:
        plugin = instance.config.pipeline.plugins["most"]
        (level,) = plugin.metrics
        (group,) = [group for group in instance.layout.plugin_groups if group.name == level.name]
        for ordinal in (1, 2):
            instance.memory.areas.set_serving(ordinal, True)
        first, second = (SeriesGauge(writer(instance, group, worker), plugin, level) for worker in (0, 1))
        first.set(0.5, "a", "")
        second.set(0.75, "a", "", weight=3.0)
        first.set(2.0, "b", "")
        first.set(1.0, "gone", "")
        first.set(0.0, "gone", "", weight=0.0)
        name = f"llm_d_epp_{level.name}"
        shown = {dict(key)["detector"]: value for (of, key), value in page(instance).items() if of == name}
        assert shown == {"a": 0.6875, "b": 2.0}, "(0.5 + 3 x 0.75) / 4"


def test_a_histogram_with_labels_does_not_fit_into_shared_memory_and_stops_the_start() -> None:
    class Odd(Plugin):
        metrics = (Metric("took", "histogram", "A time.", (1.0,), labels=("model",)),)

    pipeline = SimpleNamespace(plugins={"odd": Odd("odd", NoParams())})
    with pytest.raises(StartError, match="plugin 'odd' declares"):
        families(pipeline, timed=False)  # type: ignore[arg-type]


def test_a_plugin_logs_at_most_every_ten_seconds_with_the_number_of_lines_left_out() -> None:
    now = [100.0]
    warnings = Warnings(lambda: now[0])
    one, other = Plugin("one", NoParams()), Plugin("other", NoParams())
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            warnings.warn(one, "no prefill")
        warnings.warn(other, "no encode", error="TimeoutError")
        now[0] += WARN_EVERY_S
        warnings.warn(one, "no prefill")
    logged = [(line["event"], line["plugin"], line["left_out"]) for line in lines]
    assert logged == [("no prefill", "one", 0), ("no encode", "other", 0), ("no prefill", "one", 2)]
    assert lines[1]["error"] == "TimeoutError"


class Sweeper(Plugin):
    def sweep(self) -> None:
        raise RuntimeError("nothing to sweep")


def test_failed_work_without_a_waiter_is_logged_with_its_plugin() -> None:
    broom = Sweeper("broom", NoParams())
    with pytest.raises(RuntimeError) as caught:
        broom.sweep()
    blame(caught.value, broom)
    with structlog.testing.capture_logs() as lines:
        work_failed(caught.value)
    (line,) = lines
    assert (line["event"], line["plugin"]) == ("work of a plugin failed", "broom")


def test_an_undeclared_metric_gets_an_error_with_its_name_instead_of_a_handle() -> None:
    index: Any = None
    services = WorkerServices(
        areas().area(1),
        index,
        prefix_seed=0,
        held_blocks=NoHeldBlocks(),
        prefills=local_prefills(),
        learning=LocalLearning(),
        rng=random.Random(),
        measures={},
        labelled={},
        now=lambda: 0.0,
    )
    broom = Sweeper("broom", NoParams())
    with pytest.raises(PluginFault, match="'bare_total' is no counter in the `metrics` of class Sweeper"):
        services.count(broom, BARE)
    with pytest.raises(PluginFault, match="'bare_total' is no gauge in the `metrics` of class Sweeper"):
        services.gauge(broom, BARE)
    with pytest.raises(PluginFault, match="'took' is no histogram in the `metrics` of class Sweeper"):
        services.measure(broom, Metric("took", "histogram", "A time.", (1.0,)))
