"""A metric with its rows (a *family*), and its lines on a metrics page."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from workers.supervisor.pages.series import go_float, header, pairs

Value = float | tuple[list[int], float]  # a histogram has cumulative counts and a sum
Row = tuple[tuple[str, ...], Value]


class Family(NamedTuple):
    """One metric on the page, with its rows."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    rows: Sequence[Row]
    bounds: tuple[float, ...] = ()


def lines_of(family: Family, *, openmetrics: bool) -> Iterator[str]:
    """Yields the lines of a metric. Adds values with the same labels, because Prometheus refuses a page with duplicate labels."""
    yield header(family.name, family.kind, family.help, openmetrics=openmetrics)
    merged: dict[tuple[str, ...], list[Value]] = {}
    for values, value in family.rows:
        merged.setdefault(values, []).append(value)
    order = sorted(range(len(family.labels)), key=family.labels.__getitem__)
    names = [family.labels[place] for place in order]
    for values, found in merged.items():
        labels = pairs(names, [values[place] for place in order])
        if family.kind == "histogram":
            yield _histogram(family, labels, [part for part in found if isinstance(part, tuple)])
        else:
            total = sum(part for part in found if not isinstance(part, tuple))
            yield f"{family.name}{_braced(labels)} {go_float(total)}\n"


def _histogram(family: Family, labels: str, parts: Sequence[tuple[list[int], float]]) -> str:
    name, before, braced = family.name, f"{labels}," if labels else "", _braced(labels)
    counts = [sum(column) for column in zip(*(counts for counts, _ in parts), strict=True)]
    bounds = [*map(go_float, family.bounds), "+Inf"]
    lines = [f'{name}_bucket{{{before}le="{bound}"}} {go_float(count)}\n' for bound, count in zip(bounds, counts, strict=True)]
    total = sum(total for _, total in parts)
    return "".join((*lines, f"{name}_count{braced} {go_float(counts[-1])}\n", f"{name}_sum{braced} {go_float(total)}\n"))


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""
