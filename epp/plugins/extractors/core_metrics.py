"""Reads columns from the metrics pages of model servers: five built-in engines, and any other by configuration.

An engine is described by a mapping from columns to selectors of metrics. A label of the endpoint names its engine. If the label is
missing, or names no known engine, the endpoint has the default engine.

Each value of a page is read by itself: a value that is missing, unreadable or out of range leaves only its own column without a value.
Metrics of LoRA adapters and of the cache's configuration may be missing; other missing metrics are reported as a problem. Only the columns
that a plugin reads are wanted.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from epp.data import (
    ACTIVE_MODELS,
    CACHE_BLOCK_SIZE,
    CACHE_NUM_BLOCKS,
    CACHE_RANKS,
    CACHE_TOKENS,
    KV_USAGE,
    MAX_LORA,
    RUNNING,
    WAITING,
    WAITING_MODELS,
    Column,
)
from epp.plugin import plugin
from epp.plugins.extractors._core_page import Extraction, Gauge
from epp.plugins.extractors._pages import Extracted, ExtractError, PageExtractor
from epp.protocol.exposition import Selector, parse_selector

LEGACY_ENGINE_LABEL = "inference.networking.k8s.io/engine-type"
__all__ = ["CoreMetricsExtractor", "ExtractError", "Extracted", "Extraction"]

CORE = (WAITING, RUNNING, KV_USAGE, MAX_LORA, CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, CACHE_TOKENS, CACHE_RANKS)
Name = Annotated[str, msgspec.Meta(min_length=1)]


class CustomMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """An additional column.

    attribute_key: The name of the column.
    metric_spec: The metric that fills the column.
    """

    attribute_key: Name
    metric_spec: Name


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Which metrics of an engine fill which columns. An empty spec means that no metric fills the column.

    name: The engine's name, as the pod label has it.
    queued_requests_spec: The metric of waiting requests.
    running_requests_spec: The metric of running requests.
    kv_usage_spec: The metric of the KV cache's usage, 0 to 1.
    lora_spec: The metric with the adapters that are loaded and waited for.
    cache_info_spec: The metric with block size and number of blocks as labels.
    cache_block_size_label_name: The label with the block size.
    cache_num_blocks_label_name: The label with the number of blocks.
    cache_block_size_spec: The metric of the block size, in tokens.
    cache_num_blocks_spec: The metric of the number of blocks.
    custom_metrics: Further columns.
    """

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
    EngineConfig(name="triton", queued_requests_spec="nv_inference_pending_request_count", running_requests_spec="nv_inference_exec_count"),
)


class Mapped:
    """Holds the parsed specs of one engine, for all endpoints that run this engine. Raises ValueError for an invalid spec."""

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
        self.cache_labels = {column.name: label.encode() for column, label in labels.items() if column.name not in direct}
        self.custom = self._customs(config)

    def _selector(self, config: EngineConfig, attribute: str) -> Selector | None:
        text: str = getattr(config, attribute)
        return parse_selector(text, f"engine '{self.name}': {_field(attribute)}") if text.strip() else None

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
            selector = parse_selector(custom.metric_spec, f"{where}.metricSpec")
            self.gauges.append(Gauge(column, selector, optional=False))
        return columns


@plugin("core-metrics-extractor")
class CoreMetricsExtractor(PageExtractor):
    """Reads load and cache metrics from the pages of vLLM, SGLang, TensorRT-LLM and Triton, or of a configured engine."""

    class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
        """Says which engine's metrics a page has.

        engine_label_key: The pod label that names the engine.
        default_engine: The engine of endpoints without the label, or with an unknown name in it.
        engine_configs: Further engines. An engine with the name of a built-in engine replaces the built-in engine as a whole.
        """

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
            raise ValueError(f"defaultEngine: unknown engine '{default}'; known: {known}")
        self._default = self._engines[default]
        custom = {column: None for engine in self._engines.values() for column in engine.custom}
        self.produces = (*CORE, ACTIVE_MODELS, WAITING_MODELS, *custom)

    def engine(self, labels: Mapping[str, str]) -> Mapped:
        """Returns the engine of an endpoint with these labels."""
        name = labels.get(self._label) or labels.get(LEGACY_ENGINE_LABEL) or ""
        return self._engines.get(name, self._default)

    def extraction(self, labels: Mapping[str, str], wanted: Sequence[Column[Any]], pod: str = "") -> "Extraction":
        return Extraction(self.engine(labels), wanted)


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


@functools.cache  # each reload of the configuration asks for all fields
def _field(attribute: str) -> str:
    return next(field.encode_name for field in msgspec.structs.fields(EngineConfig) if field.name == attribute)
