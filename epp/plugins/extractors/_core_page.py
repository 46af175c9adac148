"""Reads the columns of one engine from the metrics pages of one server. `core_metrics` names the metrics of each engine."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final, NamedTuple, Protocol

from epp.data import ACTIVE_MODELS, KV_USAGE, MAX_LORA, WAITING_MODELS, Column
from epp.plugins.extractors._pages import Extracted, ExtractError
from epp.protocol.exposition import Finder, Malformed, Selector, labels_of

COUNT_MAX: Final = 2.0**53  # the endpoint table stores counts exactly up to this number
ADAPTERS_MAX: Final = 1024  # running or waiting adapters that are read for one endpoint
ADAPTER_NAME_BYTES_MAX: Final = 512
ADAPTER_LABELS: Final = {
    ACTIVE_MODELS.name: b"running_lora_adapters",
    WAITING_MODELS.name: b"waiting_lora_adapters",
}
MAX_LORA_LABEL: Final = b"max_lora"
_KV_USAGE: Final = KV_USAGE.name


class Gauge(NamedTuple):
    """Names a metric and the column that its value fills. `optional`: whether a page without the metric is accepted."""

    column: Column[Any]
    selector: Selector
    optional: bool


class Engine(Protocol):
    """Names the metrics of an engine. `cache_labels`: name of a column -> the label of `cache_info` that fills the column."""

    gauges: list[Gauge]
    lora: Selector | None
    cache_info: Selector | None
    cache_labels: dict[str, bytes]


class Extraction:
    """Reads the wanted columns from the pages of one server. `engine`: which metrics of the server's engine fill which columns."""

    __slots__ = (
        "_adapters",
        "_adapters_text",
        "_cache",
        "_cache_counts",
        "_cache_labels",
        "_cache_text",
        "_gauges",
        "_lora",
        "_max_lora",
        "_max_lora_at",
        "_names",
        "_zeros",
    )

    def __init__(self, engine: Engine, wanted: Sequence[Column[Any]]) -> None:
        numeric = [column.name for column in wanted if column.type is not frozenset]
        place = {name: index for index, name in enumerate(numeric)}
        self._zeros = [0.0] * len(numeric)
        self._gauges = [
            (Finder(gauge.selector), place[gauge.column.name], gauge.column, gauge.optional)
            for gauge in engine.gauges
            if gauge.column.name in place
        ]
        self._cache_labels = [(place[name], label) for name, label in engine.cache_labels.items() if name in place]
        self._cache = Finder(engine.cache_info) if engine.cache_info and self._cache_labels else None
        self._cache_counts: list[tuple[int, float]] = []
        self._cache_text = b""
        self._names = [column.name for column in wanted if column.name in ADAPTER_LABELS]
        self._max_lora_at = place.get(MAX_LORA.name, -1)
        reads_lora = engine.lora is not None and (self._names or self._max_lora_at >= 0)
        self._lora = Finder(engine.lora, by_value=True) if engine.lora and reads_lora else None
        self._adapters: dict[str, frozenset[str]] = self._no_adapters()
        self._adapters_text = b""
        self._max_lora = -1.0

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""
        if page[-1:] != b"\n":
            raise ExtractError("the page does not end with a newline: it is empty or truncated")
        values, present = self._zeros.copy(), 0
        for finder, at, column, optional in self._gauges:
            series = _find(finder, page)
            if series is None:
                if not optional:
                    raise ExtractError(f"{finder.selector}: the page has no such series")
                continue
            values[at] = _checked(series[1], column, finder.selector)
            present |= 1 << at
        if self._cache is not None:
            present |= self._read_cache(self._cache, page, values)
        if self._lora is not None:
            self._read_lora(self._lora, page)
            if self._max_lora_at >= 0 and self._max_lora >= 0.0:
                values[self._max_lora_at] = self._max_lora
                present |= 1 << self._max_lora_at
        return Extracted(tuple(values), present, self._adapters)

    def _read_cache(self, finder: Finder, page: bytes, values: list[float]) -> int:
        series = _find(finder, page)
        if series is None:
            return 0
        text = series[0]
        if text != self._cache_text:
            labels = _labels(text, finder.selector)
            counts = [(at, _label_count(labels, label, finder.selector)) for at, label in self._cache_labels]
            self._cache_counts = [(at, count) for at, count in counts if count >= 0.0]
            self._cache_text = text
        present = 0
        for at, count in self._cache_counts:
            values[at] = count
            present |= 1 << at
        return present

    def _read_lora(self, finder: Finder, page: bytes) -> None:
        series = _find(finder, page)
        if series is None:
            self._adapters, self._adapters_text, self._max_lora = self._no_adapters(), b"", -1.0
            return
        text, value = series
        if not isfinite(value):
            raise ExtractError(f"{finder.selector}: {value} is not a time")
        if text == self._adapters_text:
            return
        labels = _labels(text, finder.selector)
        maximum = _label_count(labels, MAX_LORA_LABEL, finder.selector)
        self._adapters = {
            name: _adapters(labels.get(ADAPTER_LABELS[name], b""), finder.selector) for name in self._names
        }
        self._max_lora, self._adapters_text = maximum, text

    def _no_adapters(self) -> dict[str, frozenset[str]]:
        return dict.fromkeys(self._names, frozenset())


def _find(finder: Finder, page: bytes) -> tuple[bytes, float] | None:
    try:
        return finder.find(page)
    except Malformed as wrong:
        raise ExtractError(f"{finder.selector}: {wrong}") from None


def _checked(value: float, column: Column[Any], selector: Selector) -> float:
    if column.type is int:
        if not 0.0 <= value <= COUNT_MAX:
            raise ExtractError(f"{selector}: {value} is not a count of 0 or more")
        return float(int(value))
    if not isfinite(value):
        raise ExtractError(f"{selector}: {value} is not a finite number")
    if column.name != _KV_USAGE:
        return value
    if value < 0.0:
        raise ExtractError(f"{selector}: {value} is not a share of 0 or more")
    return min(value, 1.0)


def _labels(text: bytes, selector: Selector) -> dict[bytes, bytes]:
    try:
        return labels_of(text)
    except Malformed as wrong:
        raise ExtractError(f"{selector}: {wrong}") from None


def _label_count(labels: Mapping[bytes, bytes], label: bytes, selector: Selector) -> float:
    """Returns the label's value as a count; -1 if the label is missing, empty or `None`. Raises ExtractError if it is no count."""
    text = labels.get(label, b"").strip()
    if text in (b"", b"None"):
        return -1.0
    if text.isdigit() and len(text) <= len(str(int(COUNT_MAX))):
        return float(text)
    shown = text[:60].decode("utf-8", "replace")
    raise ExtractError(f"{selector}: label {label.decode()}='{shown}' is not a count of 0 or more")


def _adapters(text: bytes, selector: Selector) -> frozenset[str]:
    names = [name for part in text.split(b",") if (name := part.strip())]
    if len(names) > ADAPTERS_MAX or any(len(name) > ADAPTER_NAME_BYTES_MAX for name in names):
        raise ExtractError(
            f"{selector}: more than {ADAPTERS_MAX} adapters, or one with a name over {ADAPTER_NAME_BYTES_MAX} bytes"
        )
    return frozenset(name.decode("utf-8", "replace") for name in names)
