"""Lists all metric families: the names that plugins may not use, and groups for the counters and gauges that plugins declare."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from epp.metrics import PLUGIN_LABELS, Group, Metric, areas, computed, flow_control, kv_events, replicas, request_series

MODULES: Final = (areas, computed, request_series, flow_control, kv_events, replicas)


def _declared(values: Iterable[object]) -> Iterator[Metric]:
    """Yields all metrics among the values, including those inside groups, tuples and mappings."""
    for value in values:
        if isinstance(value, Metric):
            yield value
        elif isinstance(value, (tuple, Mapping)):
            yield from _declared(value.values() if isinstance(value, Mapping) else value)


# Names that plugins may not use. Some gauges of workers appear on the page as `<name>_open`, because a counter has the same name.
TAKEN: Final = frozenset(
    (
        *(metric.name for module in MODULES for metric in _declared(vars(module).values())),
        *(f"{gauge.name}_open" for gauge in areas.WORKER_GAUGES),
    )
)


GAUGE_PARTS: Final = 1_000_000
WEIGHT: Final = "@weight"
PLUGIN_BLOCKS: Final = 512
PLUGIN_PAGE_BYTES: Final = 150_000


def plugin_groups(declared: Iterable[Metric]) -> tuple[Group, ...]:
    """Returns one group per counter or gauge that plugins declare. Several plugins may declare the same metric."""
    return tuple(map(_plugin_group, dict.fromkeys(metric for metric in declared if metric.kind != "histogram")))


def _plugin_group(metric: Metric) -> Group:
    group = Group(metric.name, (*PLUGIN_LABELS, *metric.labels), blocks=PLUGIN_BLOCKS, page_bytes=PLUGIN_PAGE_BYTES, ages=True)
    if metric.kind == "counter":
        return group._replace(counters=(metric,))
    if metric.over_workers == "mean":
        weight = metric._replace(name=metric.name + WEIGHT)
        return group._replace(gauges=(metric, weight), parts=GAUGE_PARTS, weighed=True)
    return group._replace(gauges=(metric,), parts=GAUGE_PARTS)
