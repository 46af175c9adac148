"""Reads the columns of one engine from the metrics pages of one server. `core_metrics` names the metrics of each engine.

Each value is read by itself: an unreadable value leaves only its own column unknown. Only a page without any readable value is rejected.
"""

from collections.abc import Mapping, Sequence
from sys import float_info
from typing import Any, Final, NamedTuple, Protocol

from epp.data import (
    ACTIVE_MODELS,
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    CACHE_RANKS,
    CACHE_TOKENS,
    COUNT_MAX,
    KV_USAGE,
    MAX_LORA,
    RUNNING,
    WAITING,
    WAITING_MODELS,
    Column,
)
from epp.plugins.extractors._info_metrics import Adapters, Cache, Problems
from epp.plugins.extractors._pages import Extracted, ExtractError, check_whole
from epp.plugins.extractors._ranks import Join, each, mean, total
from epp.protocol.exposition import Finder, Malformed, Selector

ADAPTER_LABELS: Final = {ACTIVE_MODELS.name: b"running_lora_adapters", WAITING_MODELS.name: b"waiting_lora_adapters"}
LOAD: Final = frozenset((WAITING.name, RUNNING.name, KV_USAGE.name))
# Two names of one gauge. vLLM renamed the gauge, so a configuration or a server may have either name.
_OTHER_NAMES: Final = {"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc", "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc"}
_SIZES: Final = (CACHE_BLOCK_SIZE.name, CACHE_NUM_BLOCKS.name)
_NO_SHARE: Final = "is not a share from 0 to 1; its unit may be percent"
# A usage above 1 and up to this is a full cache that the server has counted a little too high.
_USAGE_MAX: Final = 2.0
_NO_SERIES: Final = "the page has no such series"
_NAN: Final = float("nan")


class Gauge(NamedTuple):
    """Names a metric and the column that its value fills. `optional`: whether a page may lack the metric."""

    column: Column[Any]
    selector: Selector
    optional: bool


class Engine(Protocol):
    """Names the metrics of an engine. `cache_labels`: name of a column -> the label of `cache_info` that fills the column."""

    gauges: list[Gauge]
    lora: Selector | None
    cache_info: Selector | None
    cache_labels: dict[str, bytes]


class Reading:
    """Says how one gauge is read: which column gets the value, how several series are joined, and which values are valid.

    `is_load`: an idle data-parallel server may lack the gauge.
    """

    __slots__ = ("_join", "_optional", "_other", "_rule", "at", "bit", "finder", "is_load", "least", "most", "whole")

    def __init__(self, gauge: Gauge, at: int) -> None:
        name = gauge.column.name
        self.finder = Finder(gauge.selector)
        other = _OTHER_NAMES.get(gauge.selector.name)
        self._other = Finder(gauge.selector._replace(name=other)) if other else None
        self._optional = gauge.optional
        self.at, self.bit = at, 1 << at
        self.is_load = name in LOAD
        self.whole = gauge.column.type is int
        self._join: Join = total if self.whole else mean
        self.least, self.most, self._rule = 0.0, COUNT_MAX, "is not a count of 0 or more"
        if name == CACHE_BLOCK_SIZE.name:
            self._join = max
        elif name == KV_USAGE.name:
            self.most, self._rule = 1.0, _NO_SHARE
        elif not self.whole:
            self.least, self.most, self._rule = -float_info.max, float_info.max, "is not a finite number"

    def search(self, page: bytes, problems: Problems) -> float | None:
        """Returns the gauge's value: NaN if it cannot be read, None if the page has no series of the gauge. Says in `problems` why the
        value cannot be read.
        """
        try:
            samples = self.finder.samples(page)
            if not samples and self._other is not None and (samples := self._other.samples(page)):
                self.finder, self._other = self._other, self.finder  # the next page probably has this name, too
            values = each(samples)
        except Malformed as wrong:
            problems[str(self.finder.selector)] = f"{self.finder.selector}: {wrong}"
            return _NAN
        if not values:
            if not self._optional:
                self._problem(problems, _NO_SERIES)
            return None
        for sample in samples:
            if not self.least <= sample.value <= float_info.max:
                return self._problem(problems, self._rule, sample.value)
        joined = self._join(values)
        if joined <= self.most:
            return joined
        return 1.0 if self.most == 1.0 and joined <= _USAGE_MAX else self._problem(problems, self._rule, joined)

    def found(self, problems: Problems) -> None:
        """Removes the problem that the page has no series of the gauge."""
        problems.pop(self._cause(_NO_SERIES), None)

    def _cause(self, rule: str) -> str:
        return f"{self.finder.selector} {rule}"

    def _problem(self, problems: Problems, rule: str, value: float | None = None) -> float:
        shown = "" if value is None else f"{value} "
        problems[self._cause(rule)] = f"{self.finder.selector}: {shown}{rule}"
        return _NAN


class Extraction:
    """Reads the wanted columns from the pages of one server. `engine`: which metrics of the server's engine fill which columns."""

    __slots__ = ("_adapters", "_cache", "_columns", "_idle", "_max_lora_at", "_none", "_product", "_readings", "_zeros")

    def __init__(self, engine: Engine, wanted: Sequence[Column[Any]]) -> None:
        numeric = [column.name for column in wanted if column.type is not frozenset]
        self._columns = len(numeric)
        reported = {gauge.column.name for gauge in engine.gauges}
        multiplies = CACHE_TOKENS.name in numeric and reported.issuperset(_SIZES)
        if multiplies:
            numeric += [name for name in _SIZES if name not in numeric]
        place = {name: index for index, name in enumerate(numeric)}
        self._product = (place[_SIZES[0]], place[_SIZES[1]], place[CACHE_TOKENS.name]) if multiplies else (-1, -1, -1)
        self._zeros = [0.0] * len(numeric)
        gauges = [gauge for gauge in engine.gauges if gauge.column.name in place]
        self._readings = [Reading(gauge, place[gauge.column.name]) for gauge in gauges]
        self._cache = None if multiplies else _cache(engine, place)
        self._idle = Finder(engine.cache_info) if engine.cache_info else None
        labels = {column.name: ADAPTER_LABELS[column.name] for column in wanted if column.name in ADAPTER_LABELS}
        self._none: Mapping[str, frozenset[str]] = dict.fromkeys(labels, frozenset())
        self._max_lora_at = place.get(MAX_LORA.name, -1)
        reads_lora = engine.lora is not None and (labels or self._max_lora_at >= 0)
        self._adapters = Adapters(engine.lora, labels) if engine.lora and reads_lora else None

    def extract(self, page: bytes) -> Extracted:
        """Returns the page's values. Raises ExtractError if the page is rejected."""
        if page[-1:] != b"\n":
            check_whole(page)
        values, present, missing = self._zeros.copy(), 0, 0
        problems: Problems = {}
        for reading in self._readings:
            value = reading.finder.find(page)
            if not reading.least <= value <= reading.most:  # or NaN: the value is no longer at its last place in the page
                searched = reading.search(page, problems)
                if searched is None:
                    missing |= reading.bit
                    continue
                if searched != searched:
                    continue
                value = searched
            values[reading.at] = float(int(value)) if reading.whole else value
            present |= reading.bit
        if missing:
            present |= self._idle_load(page, missing, problems)
        if self._cache is not None:
            for at, value in self._cache.read(page, problems):
                values[at] = value
                present |= 1 << at
        size, number, tokens = self._product
        if tokens >= 0 and present >> size & present >> number & 1:
            values[tokens] = min(values[size] * values[number], COUNT_MAX)
            present |= 1 << tokens
        names = self._none
        if self._adapters is not None:
            names = self._adapters.read(page, problems)
            if self._max_lora_at >= 0 and self._adapters.most >= 0.0:
                values[self._max_lora_at] = self._adapters.most
                present |= 1 << self._max_lora_at
        if problems and not present and not any(names.values()):
            raise ExtractError("; ".join(problems.values()))
        if len(values) > self._columns:
            del values[self._columns :]
            present &= (1 << self._columns) - 1
        return Extracted(tuple(values), present, names, problems)

    def _idle_load(self, page: bytes, missing: int, problems: Problems) -> int:
        """Returns the bits of the load columns if the page has the cache's configuration but no load gauge, because the load is then 0.

        A vLLM server with several data-parallel ranks shows no load before its first request.
        """
        loads = [reading for reading in self._readings if reading.is_load]
        bits = 0
        for reading in loads:
            bits |= reading.bit
        if self._idle is None or bits & ~missing or not _has(self._idle, page):
            return 0
        for reading in loads:
            reading.found(problems)
        return bits


def _cache(engine: Engine, place: Mapping[str, int]) -> Cache | None:
    """Returns the reader of the wanted values of the cache's configuration, or None if no such value is wanted."""
    if engine.cache_info is None:
        return None
    size, number = (engine.cache_labels.get(name, b"") for name in _SIZES)
    places = (
        place.get(_SIZES[0], -1) if size else -1,
        place.get(_SIZES[1], -1) if number else -1,
        place.get(CACHE_TOKENS.name, -1),
        place.get(CACHE_RANKS.name, -1),
    )
    return Cache(engine.cache_info, (size, number), places) if max(places) >= 0 else None


def _has(finder: Finder, page: bytes) -> bool:
    try:
        return bool(finder.samples(page))
    except Malformed:
        return False
