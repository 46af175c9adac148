"""What the supervisor knows about the values of pages under a real configuration."""

from pathlib import Path

from tests.workers.instances import made
from workers.supervisor.replication import limits_of

CONFIG = """
plugins:
- type: metrics-data-source
- type: core-metrics-extractor
  parameters:
    engineConfigs: [{name: mine, customMetrics: [{attributeKey: drift, metricSpec: drift}]}]
- type: queue-scorer
- type: endpoint-attribute-scorer
  parameters: {attributeKey: drift, algorithm: {type: linear_lower_is_better}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer}, {pluginRef: endpoint-attribute-scorer}]
dataLayer:
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
"""


def test_all_values_but_those_of_custom_metrics_have_limits(tmp_path: Path) -> None:
    with made(tmp_path, CONFIG, allow_experimental=True) as instance:
        names = [column.name for column in instance.layout.table_columns if column.type is not frozenset]
        limits = limits_of([instance])
    assert {"waiting_requests", "kv_cache_usage", "drift"} <= set(names)
    assert {names[at] for at in limits} == set(names) - {"drift"}
    assert {names[at] for at, most in limits.items() if most == 1.0} == {"kv_cache_usage"}
