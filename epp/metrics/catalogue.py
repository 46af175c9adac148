"""Lists all metric families: the names that plugins may not use, and groups for the counters and gauges that plugins declare."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from epp.metrics import (
    PLUGIN_LABELS,
    Group,
    Metric,
    computed,
    flow_control,
    kv_events,
    lanes,
    learning,
    replicas,
    scaling,
    series,
)

MODULES: Final = (lanes, computed, series, flow_control, kv_events, learning, replicas, scaling)


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
        *(f"{gauge.name}_open" for gauge in lanes.WORKER_GAUGES),
    )
)


GAUGE_PARTS: Final = 1_000_000
WEIGHT: Final = "@weight"


def plugin_groups(declared: Iterable[Metric]) -> tuple[Group, ...]:
    """Returns one group per counter or gauge that plugins declare. Several plugins may declare the same one."""
    groups = []
    for metric in dict.fromkeys(metric for metric in declared if metric.kind != "histogram"):
        labels = (*PLUGIN_LABELS, *metric.labels)
        if metric.kind == "gauge" and metric.over_workers == "mean":
            weight = metric._replace(name=metric.name + WEIGHT)
            groups.append(Group(metric.name, labels, gauges=(metric, weight), parts=GAUGE_PARTS, weighed=True))
        elif metric.kind == "gauge":
            groups.append(Group(metric.name, labels, gauges=(metric,), parts=GAUGE_PARTS))
        else:
            groups.append(Group(metric.name, labels, counters=(metric,)))
    return tuple(groups)
