"""Pages of model servers -> columns, for five engines, and for any other by configuration.

An engine is a mapping from columns to selectors of metrics. A label says which engine an endpoint
runs; without it, or with one that nobody knows, it is the default engine.

A page is taken whole or not at all: one wanted family that is missing, unreadable or out of range
fails the extraction, and the endpoint keeps its last good values. What engines may leave out is
absent instead, column by column: LoRA adapters and the cache's configuration. Only what somebody
wants is looked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Annotated, Any, NamedTuple

import msgspec

from epp.data import (
    ACTIVE_MODELS,
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    KV_USAGE,
    MAX_LORA,
    RUNNING,
    WAITING,
    WAITING_MODELS,
    Column,
)
from epp.plugin import Extractor, plugin
from epp.protocol.exposition import Finder, Malformed, Selector, labels_of, parse_selector

LEGACY_ENGINE_LABEL = "inference.networking.k8s.io/engine-type"
COUNT_MAX = 2.0**53  # counts are exact in the table up to here
ADAPTERS_MAX = 1024  # of one endpoint, running or waiting
ADAPTER_NAME_BYTES_MAX = 512

CORE = (WAITING, RUNNING, KV_USAGE, MAX_LORA, CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS)
ADAPTER_LABELS = {
    ACTIVE_MODELS.name: b"running_lora_adapters",
    WAITING_MODELS.name: b"waiting_lora_adapters",
}
MAX_LORA_LABEL = b"max_lora"

Name = Annotated[str, msgspec.Meta(min_length=1)]


class CustomMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One more column: its name, and the metric that fills it."""

    attribute_key: Name
    metric_spec: Name


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where one engine reports what; an empty spec switches a column off."""

    name: Name
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = "block_size"
    cache_num_blocks_label_name: str = "num_gpu_blocks"
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: tuple[CustomMetric, ...] = ()


BUILT_IN = (
    EngineConfig(
        name="vllm",
        queued_requests_spec="vllm:num_requests_waiting",
        running_requests_spec="vllm:num_requests_running",
        kv_usage_spec="vllm:kv_cache_usage_perc",
        lora_spec="vllm:lora_requests_info",
        cache_info_spec="vllm:cache_config_info",
    ),
    EngineConfig(
        name="sglang",
        queued_requests_spec="sglang:num_queue_reqs",
        running_requests_spec="sglang:num_running_reqs",
        kv_usage_spec="sglang:token_usage",
        cache_info_spec="sglang:cache_config_info",
        cache_block_size_label_name="page_size",
        cache_num_blocks_label_name="num_pages",
    ),
    EngineConfig(
        name="trtllm-serve",
        queued_requests_spec="trtllm_num_requests_waiting",
        running_requests_spec="trtllm_num_requests_running",
        kv_usage_spec="trtllm_kv_cache_utilization",
        cache_block_size_spec="trtllm_kv_cache_tokens_per_block",
        cache_num_blocks_spec="trtllm_kv_cache_max_blocks",
    ),
    EngineConfig(
        name="triton-tensorrt-llm",
        queued_requests_spec="nv_trt_llm_request_metrics{request_type=waiting}",
        running_requests_spec="nv_trt_llm_request_metrics{request_type=scheduled}",
        kv_usage_spec="nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}",
        cache_block_size_spec="nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}",
        cache_num_blocks_spec="nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}",
    ),
    EngineConfig(
        name="triton",
        queued_requests_spec="nv_inference_pending_request_count",
        running_requests_spec="nv_inference_exec_count",
    ),
)


class ExtractError(Exception):
    """A page that cannot be taken; the text names the metric and the rule."""


class Extracted(NamedTuple):
    """What one page says.

    `values` are the wanted numeric columns in order, never NaN; bit i of `present` says that value
    i was reported. `names` holds the wanted columns of names; equal sets stay the same object as
    long as the server reports the same text.
    """

    values: tuple[float, ...]
    present: int
    names: Mapping[str, frozenset[str]]


class Gauge(NamedTuple):
    """A column that is the value of a metric."""

    column: Column[Any]
    selector: Selector
    optional: bool


class Mapped:
    """One engine's specs, parsed; shared by all endpoints that run the engine."""

    def __init__(self, config: EngineConfig) -> None:
        self.name = config.name
        self.gauges: list[Gauge] = []
        self._gauge(WAITING, config, "queued_requests_spec")
        self._gauge(RUNNING, config, "running_requests_spec")
        self._gauge(KV_USAGE, config, "kv_usage_spec")
        self._gauge(CACHE_BLOCK_SIZE, config, "cache_block_size_spec", optional=True)
        self._gauge(CACHE_NUM_BLOCKS, config, "cache_num_blocks_spec", optional=True)
        self.lora = self._selector(config, "lora_spec")
        self.cache_info = self._selector(config, "cache_info_spec")
        direct = {gauge.column.name for gauge in self.gauges}
        labels = {
            CACHE_BLOCK_SIZE: config.cache_block_size_label_name or "block_size",
            CACHE_NUM_BLOCKS: config.cache_num_blocks_label_name or "num_gpu_blocks",
        }
        self.cache_labels = {
            column.name: label.encode() for column, label in labels.items() if column.name not in direct
        }
        self.custom = self._customs(config)

    def _selector(self, config: EngineConfig, attribute: str) -> Selector | None:
        text: str = getattr(config, attribute)
        return _selector(text, f"engine '{self.name}': {_field(attribute)}") if text.strip() else None

    def _gauge(self, column: Column[Any], config: EngineConfig, attribute: str, *, optional: bool = False) -> None:
        selector = self._selector(config, attribute)
        if selector is not None:
            self.gauges.append(Gauge(column, selector, optional))

    def _customs(self, config: EngineConfig) -> list[Column[float]]:
        columns: list[Column[float]] = []
        taken = {column.name for column in (*CORE, ACTIVE_MODELS, WAITING_MODELS)}
        for index, custom in enumerate(config.custom_metrics):
            where = f"engine '{self.name}': customMetrics[{index}]"
            key = custom.attribute_key
            if key in taken:
                raise ValueError(f"{where}.attributeKey: '{key}' is taken; choose another name")
            taken.add(key)
            column = Column(key, float)
            columns.append(column)
            selector = _selector(custom.metric_spec, f"{where}.metricSpec")
            self.gauges.append(Gauge(column, selector, optional=False))
        return columns


@plugin("core-metrics-extractor")
class CoreMetricsExtractor(Extractor):
    """Chooses an engine per endpoint and makes its extraction."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """Engines given here replace built-in ones of the same name as a whole."""

        engine_label_key: str = "llm-d.ai/engine-type"
        default_engine: str = "vllm"
        engine_configs: tuple[EngineConfig, ...] = ()

    def __init__(self, name: str, params: "CoreMetricsExtractor.Params") -> None:
        super().__init__(name, params)
        self._label = params.engine_label_key or "llm-d.ai/engine-type"
        self._engines = _engines(params.engine_configs)
        default = params.default_engine or "vllm"
        if default not in self._engines:
            known = ", ".join(sorted(self._engines))
            raise ValueError(f"defaultEngine: no engine '{default}'; there are {known}")
        self._default = self._engines[default]
        custom = {column: None for engine in self._engines.values() for column in engine.custom}
        self.produces = (*CORE, ACTIVE_MODELS, WAITING_MODELS, *custom)

    def engine(self, labels: Mapping[str, str]) -> Mapped:
        """The engine that an endpoint with these labels runs."""
        name = labels.get(self._label) or labels.get(LEGACY_ENGINE_LABEL) or ""
        return self._engines.get(name, self._default)

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]]) -> "Extraction":
        """For the pages of one server; to be made anew when its labels change."""
        return Extraction(self.engine(labels), wanted)


class Extraction:
    """One engine's mapping, cut to the wanted columns, for the pages of one server."""

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

    def __init__(self, engine: Mapped, wanted: Sequence[Column[Any]]) -> None:
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
        """The page's values; ExtractError when it cannot be taken as a whole."""
        if page[-1:] != b"\n":
            raise ExtractError("the page does not end with a newline: it is cut, or empty")
        values, present = self._zeros.copy(), 0
        for finder, at, column, optional in self._gauges:
            found = _found(finder, page)
            if found is None:
                if not optional:
                    raise ExtractError(f"{finder.selector}: the page has no such series")
                continue
            values[at] = _checked(found[1], column, finder.selector)
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
        found = _found(finder, page)
        if found is None:
            return 0
        text = found[0]
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
        found = _found(finder, page)
        if found is None:
            self._adapters, self._adapters_text, self._max_lora = self._no_adapters(), b"", -1.0
            return
        text, value = found
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


def _engines(configured: Iterable[EngineConfig]) -> dict[str, Mapped]:
    engines: dict[str, Mapped] = {}
    for index, config in enumerate(configured):
        if config.name == "default":
            raise ValueError(f"engineConfigs[{index}].name: 'default' is reserved; set defaultEngine instead")
        if config.name in engines:
            raise ValueError(f"engineConfigs[{index}].name: '{config.name}' is given twice")
        engines[config.name] = Mapped(config)
    for config in BUILT_IN:
        if config.name not in engines:
            engines[config.name] = Mapped(config)
    return engines


def _selector(text: str, where: str) -> Selector:
    try:
        return parse_selector(text)
    except ValueError as wrong:
        raise ValueError(f"{where}: {wrong}") from None


def _field(attribute: str) -> str:
    return next(field.encode_name for field in msgspec.structs.fields(EngineConfig) if field.name == attribute)


def _found(finder: Finder, page: bytes) -> tuple[bytes, float] | None:
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
    if column.name != KV_USAGE.name:
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
    """The label as a count; -1 where the engine leaves it out, or says that it does not know."""
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
