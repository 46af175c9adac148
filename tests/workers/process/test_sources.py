"""Tests of sources: options and configuration decide where endpoints and objects come from."""

from pathlib import Path

import pytest

from epp.config.load import load
from tests.workers.instances import options
from workers.process.sources import METRICS_BUDGET, Sources


@pytest.mark.parametrize(
    ("changes", "in_kubernetes", "asks_objects", "has_objects"),
    [
        ({}, False, False, False),
        ({"pool_given": True}, True, True, True),
        ({"endpoint_selector": "app=vllm"}, True, False, False),
        ({"endpoint_selector": "app=vllm", "objects_dir": "objects"}, True, False, True),
        ({"pool_given": True, "endpoints": "127.0.0.1:1"}, False, False, False),
        ({"endpoints": "127.0.0.1:1", "objects_dir": "objects"}, False, False, True),
    ],
)
def test_endpoints_and_objects_come_from_kubernetes_if_no_other_source_is_given(
    tmp_path: Path, changes: dict, in_kubernetes: bool, asks_objects: bool, has_objects: bool
) -> None:
    sources = Sources(options(tmp_path, **{"endpoints": "", **changes}), load(None, "test"))
    assert (sources.in_kubernetes, sources.asks_objects, sources.has_objects) == (in_kubernetes, asks_objects, has_objects)


SOURCE = """
plugins:
- {type: metrics-data-source, parameters: {%s}}
- type: core-metrics-extractor
dataLayer:
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
"""


@pytest.mark.parametrize(
    ("given", "parameters", "budget"),
    [
        ({}, "", METRICS_BUDGET),
        ({"refresh_metrics_interval": "--refresh-metrics-interval"}, "", None),
        ({}, "interval: 50ms", None),
        ({}, "metricsBudget: 0.05", 0.05),
        ({"refresh_metrics_interval": "--refresh-metrics-interval"}, "metricsBudget: 0.05", 0.05),
        ({}, "interval: 1s, metricsBudget: 0.05", 0.05),
    ],
)
def test_an_interval_that_somebody_has_set_is_fixed_unless_a_budget_is_set_too(
    tmp_path: Path, given: dict[str, str], parameters: str, budget: float | None
) -> None:
    sources = Sources(options(tmp_path, given=given), load(SOURCE % parameters, "test"))
    assert sources.pacing.budget == budget


@pytest.mark.parametrize(("scorer", "budget"), [("kv-cache-utilization-scorer", METRICS_BUDGET), ("lora-affinity-scorer", None)])
def test_pages_come_at_the_interval_if_a_plugin_reads_what_only_they_tell(tmp_path: Path, scorer: str, budget: float | None) -> None:
    text = f"plugins:\n- type: {scorer}\nschedulingProfiles: [{{name: p, plugins: [{{pluginRef: {scorer}}}]}}]"
    assert Sources(options(tmp_path), load(text, "test")).pacing.budget == budget


def test_the_built_in_configuration_reads_pages_within_the_budget(tmp_path: Path) -> None:
    assert Sources(options(tmp_path), load(None, "test")).pacing.budget == METRICS_BUDGET
