"""Exposition text: families -> lines, label tuples of series tables in columns.

A table has up to a thousand label tuples with eleven histograms each, a quarter of a million lines. Sums are made for whole
columns at once, and lines are put together here: 0.5 us a line, where prometheus_client needs 8. It says what
its encoders would say (`test_the_text_says_what_prometheus_client_would_say`).

A histogram or counter is shown for a label tuple once something was counted there, a gauge as soon as the tuple is known. A
twin with fewer labels is the sum over those it lacks.

Text comes bit by bit, so that a page can be made while it is sent: `pieces` gathers it. Now and then there is an empty bit: who
makes the page has worked for a millisecond without one, and the event loop may turn. All bits of a page say the same `Totals`.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client.utils import floatToGoString

from epp.metrics import PREFIX, TWINS, Group, Labelled, Metric, older_name
from shm.series import Labels, SeriesReader, Totals

Ints = NDArray[np.int64]
LABELS = "\n\n"  # in no label: line feeds are escaped
PIECE_SIZE = 256 << 10
LABELS_AT_ONCE = 128
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Rows:
    """Label tuples as they are written, and which of them each row of a table belongs to.

    Kept from page to page: a reader's label tuples get more, but those that it has stay where they are.
    """

    def __init__(self, names: Sequence[str], places: Sequence[int]) -> None:
        self._names = names
        self._places = places
        self._merged: dict[Labels, int] = {}
        self._of: list[int] = []
        self.texts: list[str] = []

    def know(self, labels: Sequence[Labels]) -> Iterator[str]:
        """Take in those that are new: some, then an empty bit."""
        while len(self._of) < len(labels):  # another page may do some meanwhile
            for row in labels[len(self._of) :][:LABELS_AT_ONCE]:
                values = tuple(row[place] for place in self._places)
                text = self._merged.setdefault(values, len(self.texts))
                if text == len(self.texts):
                    self.texts.append(pairs(self._names, values))
                self._of.append(text)
            yield ""

    def summed(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of a table's rows -> values of these label tuples."""
        if len(self.texts) == len(self._of):
            return values
        found = np.zeros((len(self.texts), *values.shape[1:]), values.dtype)
        np.add.at(found, self._of[: len(values)], values)
        return found

    def of(self, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which label tuples have one of these rows."""
        found = np.zeros(len(self.texts), np.bool_)
        found[np.array(self._of[: len(rows)], np.intp)[rows]] = True
        return found


class SeriesText:
    """The text of one group. `legacy`: older names too."""

    def __init__(self, group: Group, reader: SeriesReader, *, legacy: bool) -> None:
        self._group = group
        self._schema = reader.schema
        self._legacy = legacy
        self._rows: dict[tuple[str, ...], Rows] = {}
        self.totals, self.reading = reader.totals, reader.reading

    def lines(self, totals: Totals, *, openmetrics: bool) -> Iterator[str]:
        """Every family and its twin."""
        group, schema = self._group, self._schema
        known = np.ones(len(totals.labels), np.bool_)
        known[0] = totals.ints[0].any()  # the tuple of `other` is in every table
        if not known.any():
            return
        for metric in (*group.gauges, *group.counters):
            at = {**schema.gauge_at, **schema.counter_at}[metric.name] - schema.values_at
            for name, rows, text in self._names(metric):
                yield from rows.know(totals.labels)
                yield header(name, metric.kind, text, openmetrics=openmetrics)
                values = rows.summed(totals.ints[:, at])
                yield from _numbers(name, rows, values, rows.of(known) if metric.kind == "gauge" else values != 0)
        members: dict[Metric, list[tuple[int, Labelled]]] = {}
        for index, member in enumerate(group.histograms):
            members.setdefault(member.metric, []).append((index, member))
        for metric, parts in members.items():
            for name, rows, text in self._names(metric):
                yield from rows.know(totals.labels)
                yield header(name, metric.kind, text, openmetrics=openmetrics)
                for index, part in parts:
                    yield from self._histogram(name, rows, totals, index, part)

    def _names(self, metric: Metric) -> Iterator[tuple[str, Rows, str]]:
        """The metric's name, its label tuples and its help; then those of its twin."""
        labels = self._group.labels
        yield PREFIX + metric.name, self._rows_under(labels, range(len(labels))), metric.help
        twin = TWINS.get(metric.name)
        if twin is not None and self._legacy:
            rows = self._rows_under(twin.labels, twin.places(labels))
            yield twin.name, rows, older_name(metric)

    def _rows_under(self, names: tuple[str, ...], places: Sequence[int]) -> Rows:
        rows = self._rows.get(names)
        if rows is None:
            rows = self._rows[names] = Rows(names, places)
        return rows

    def _histogram(self, name: str, rows: Rows, totals: Totals, index: int, part: Labelled) -> Iterator[str]:
        counts = rows.summed(totals.ints[:, self._schema.counts(index)]).cumsum(axis=1)
        sums = rows.summed(totals.sums[:, index])
        (some,) = np.nonzero(counts[:, -1])
        form, texts = _form(name, part), rows.texts
        for row, buckets, total in zip(some.tolist(), counts[some].tolist(), sums[some].tolist(), strict=True):
            yield (form % (*buckets, buckets[-1], go_float(total))).replace(LABELS, texts[row])


def pieces(text: Iterable[str], size: int = PIECE_SIZE) -> Iterator[bytes]:
    """Bits of text -> pieces of about so many letters, and an empty piece for every empty bit.

    Encoded one by one: one wide letter would widen the whole page.
    """
    gathered: list[str] = []
    length = 0
    for bit in text:
        if not bit:
            yield b""
        gathered.append(bit)
        length += len(bit)
        if length >= size:
            yield "".join(gathered).encode()
            gathered, length = [], 0
    yield "".join(gathered).encode()


def header(name: str, kind: str, text: str, *, openmetrics: bool) -> str:
    """The lines above a family's."""
    family = name.removesuffix("_total") if openmetrics and kind == "counter" else name
    return f"# HELP {family} {text}\n# TYPE {family} {kind}\n"


def _numbers(name: str, rows: Rows, values: Ints, shown: NDArray[np.bool_]) -> Iterator[str]:
    (some,) = np.nonzero(shown)
    texts = rows.texts
    for row, value in zip(some.tolist(), values[some].tolist(), strict=True):
        yield f"{name}{{{texts[row]}}} {value}.0\n"


def go_float(value: float) -> str:
    """As prometheus_client writes a number."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _form(name: str, part: Labelled) -> str:
    """The lines of one label tuple: LABELS stands for its labels, % for numbers."""
    extra = f",{pairs((part.label,), (part.value,))}" if part.label else ""
    bounds = [*map(go_float, part.metric.buckets), "+Inf"]
    buckets = [f'{name}_bucket{{{LABELS}{extra},le="{bound}"}} %d.0\n' for bound in bounds]
    return "".join((*buckets, f"{name}_count{{{LABELS}{extra}}} %d.0\n", f"{name}_sum{{{LABELS}{extra}}} %s\n"))


def pairs(names: Sequence[str], values: Sequence[str]) -> str:
    """Labels as they are written, without braces."""
    return ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in zip(names, values, strict=True))
