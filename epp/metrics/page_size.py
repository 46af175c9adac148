"""Bounds the bytes that the series of a group take on the metrics page."""

from collections.abc import Callable
from typing import Final

from epp.metrics import PREFIX, Group, Metric
from epp.metrics.older_names import TWINS

VALUE_BYTES: Final = 24  # the most bytes of a number, with the blank before the number and the end of the line
BOUND_BYTES: Final = 24  # the most bytes of `,le="…"`, with `_bucket`
FURTHER_LINES: Final = 3  # lines of a histogram besides those of its bounds: +Inf, count, sum
ESCAPED: Final = ("\\", "\n", '"')  # characters that take two characters on the page

Labels = tuple[str, ...]


def weigher(group: Group) -> Callable[[Labels], int]:
    """Returns a function that says how many bytes one label tuple takes at most: all lines of all metrics and of their older names."""
    fixed = lines = 0
    for metric, further in _metrics(group):
        count = len(metric.buckets) + FURTHER_LINES if metric.kind == "histogram" else 1
        twin = TWINS.get(metric.name)
        for name, labels in ((PREFIX + metric.name, group.labels), *([(twin.name, twin.labels)] if twin else ())):
            named = sum(len(label) + len('="",') for label in labels) + further
            fixed += count * (len(name) + len("{}") + named + BOUND_BYTES + VALUE_BYTES)
            lines += count
    return lambda labels: fixed + lines * sum(map(_size, labels))


def _metrics(group: Group) -> list[tuple[Metric, int]]:
    """Returns all metrics of a group, each with the bytes of its further label."""
    plain = [(metric, 0) for metric in (*group.gauges, *group.counters)]
    return [*plain, *((each.metric, len(f',{each.label}="{each.value}"')) for each in group.histograms)]


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace")) + sum(text.count(character) for character in ESCAPED)
