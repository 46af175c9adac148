"""Renders the metrics page of a simulated server: in the Prometheus text format, with vLLM's metric names.

A page is a list of parts. Most parts are constant bytes. Each scrape fills in the gauges and totals.
A histogram is rendered again only if it has changed. So a scrape of an idle server costs little more
than joining the parts. Details are as prometheus_client writes them: all values are floats, labels
are sorted by name, and counters and histograms have a `_created` metric beside them.

As in vLLM, `vllm:lora_requests_info` has one series for each set of adapters with running or
waiting requests that any scrape has found, and shows the set as both. The value of a series is the
time of the last such scrape. Only the LORA_SERIES_MAX series with the latest times stay.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import nan

from loadtest.sim.engine import Engine, EngineSettings
from loadtest.sim.observations import Histogram, Observations

LORA_SERIES_MAX = 8
CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

# Field of `Observations` -> (name of the metric, help text).
HISTOGRAMS = {
    "step_tokens": ("iteration_tokens_total", "Histogram of tokens per engine step."),
    "ttft": ("time_to_first_token_seconds", "Histogram of time to first token in seconds."),
    "inter_token": ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds."),
    "per_output_token": ("request_time_per_output_token_seconds", "Histogram of mean time per output token of a request in seconds."),
    "end_to_end": ("e2e_request_latency_seconds", "Histogram of request latency in seconds."),
    "queued": ("request_queue_time_seconds", "Histogram of time spent WAITING in seconds."),
    "prefill": ("request_prefill_time_seconds", "Histogram of time spent in PREFILL in seconds."),
    "decode": ("request_decode_time_seconds", "Histogram of time spent in DECODE in seconds."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prefill tokens processed per request."),
    "request_generation_tokens": ("request_generation_tokens", "Generation tokens processed per request."),
}
TOTALS = (
    ("num_preemptions", "Cumulative preemptions."),
    ("prefix_cache_queries", "Prefix cache queries, in queried tokens."),
    ("prefix_cache_hits", "Prefix cache hits, in cached tokens."),
    ("external_prefix_cache_queries", "External prefix cache queries, in queried tokens."),
    ("external_prefix_cache_hits", "External prefix cache hits, in cached tokens."),
    ("mm_cache_queries", "Multi-modal cache queries, in queried items."),
    ("mm_cache_hits", "Multi-modal cache hits, in cached items."),
    ("prompt_tokens", "Prefill tokens processed."),
    ("generation_tokens", "Generation tokens processed."),
)


def family(name: str, kind: str, text: str) -> str:
    """Returns the HELP and TYPE lines of a metric family."""
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def sample(name: str, labels: dict[str, str], value: str) -> str:
    """Returns one sample line. `value`: text, or a placeholder (INTEGER or FLOAT)."""
    if not labels:
        return f"{name} {value}\n"
    inside = ",".join(f'{key}="{_escape(labels[key])}"' for key in sorted(labels))
    return f"{name}{{{inside}}} {value}\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _placeholders(text: str) -> bytes:
    """Turns text into a %-template with INTEGER and FLOAT as its only placeholders."""
    return text.replace("%", "%%").replace("\0f", "%a").replace("\0d", "%d.0").encode()


INTEGER, FLOAT = "\0d", "\0f"


class _HistogramPart:
    """Renders one histogram. Keeps the rendered lines, and renders them again only if the histogram has changed."""

    def __init__(self, histogram: Histogram, field: str, labels: dict[str, str], born: str) -> None:
        self.histogram = histogram
        self.version = -1
        self.rendered = b""
        short, text = HISTOGRAMS[field]
        name = f"vllm:{short}"
        bounds = [str(bound) for bound in histogram.bounds] + ["+Inf"]
        lines = [family(name, "histogram", text)]
        lines += [sample(f"{name}_bucket", labels | {"le": bound}, INTEGER) for bound in bounds]
        lines.append(sample(f"{name}_count", labels, INTEGER))
        lines.append(sample(f"{name}_sum", labels, FLOAT))
        lines.append(family(f"{name}_created", "gauge", text))
        lines.append(sample(f"{name}_created", labels, born))
        self._template = _placeholders("".join(lines))

    def render(self) -> bytes:
        histogram = self.histogram
        if histogram.version != self.version:
            counts = tuple(accumulate(histogram.counts))
            self.rendered = self._template % (*counts, counts[-1], histogram.sum)
            self.version = histogram.version
        return self.rendered


class MetricsPage:
    """Renders the page of one engine. `started`: the wall-clock time of its start, in seconds."""

    def __init__(self, engine: Engine, model: str, started: float) -> None:
        self._engine = engine
        self._labels = {"engine": "0", "model_name": model}
        self._lora_seen: dict[str, float] = {}  # adapters -> when they were shown last
        born = repr(float(started))
        self._process = (_python_part() + _process_part(born)).encode()
        self._gauges = _placeholders("".join(self._gauge_lines()))
        self._totals = _placeholders("".join(self._total_lines(born)))
        self._info = _cache_config(engine.settings).encode()
        self._histograms = [_HistogramPart(getattr(engine.seen, field), field, self._labels, born) for field in HISTOGRAMS]

    def _gauge_lines(self) -> Iterable[str]:
        gauges = (
            ("num_requests_running", "Requests in model execution batches.", INTEGER),
            ("num_requests_waiting", "Requests waiting to be processed.", INTEGER),
            ("engine_sleep_state", "Engine sleep state.", "0.0"),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", FLOAT),
        )
        for short, text, value in gauges:
            yield family(f"vllm:{short}", "gauge", text)
            yield sample(f"vllm:{short}", self._labels, value)

    def _total_lines(self, born: str) -> Iterable[str]:
        for short, text in TOTALS:
            name = f"vllm:{short}"
            yield family(f"{name}_total", "counter", text)
            yield sample(f"{name}_total", self._labels, INTEGER)
            yield family(f"{name}_created", "gauge", text)
            yield sample(f"{name}_created", self._labels, born)
        name, text = "vllm:request_success", "Successfully processed requests."
        reasons = [self._labels | {"finished_reason": reason} for reason in FINISHED_REASONS]
        yield family(f"{name}_total", "counter", text)
        yield from (sample(f"{name}_total", labels, INTEGER) for labels in reasons)
        yield family(f"{name}_created", "gauge", text)
        yield from (sample(f"{name}_created", labels, born) for labels in reasons)

    def render(self, wall: float, *, not_a_number: bool = False) -> bytes:
        """Returns the page at wall-clock time `wall`, in seconds. With `not_a_number`, the load gauges are NaN."""
        engine = self._engine
        if not_a_number:
            gauges = self._gauges.replace(b"%d.0", b"%a") % (nan, nan, nan)
        else:
            gauges = self._gauges % (engine.running, engine.waiting, engine.pool.usage)
        parts = [self._process, gauges, self._totals % _totals(engine.seen), self._info]
        parts += [part.render() for part in self._histograms]
        if engine.settings.max_loras:
            parts.append(self._lora_lines(wall))
        return b"".join(parts)

    def _lora_lines(self, wall: float) -> bytes:
        seen = self._lora_seen
        now = ",".join(sorted({*self._engine.loras.running, *self._engine.waiting_loras()}))
        seen.pop(now, None)
        seen[now] = wall
        if len(seen) > LORA_SERIES_MAX:
            del seen[next(iter(seen))]
        name = "vllm:lora_requests_info"
        slots = str(self._engine.settings.max_loras)
        lines = [family(name, "gauge", "Running stats on lora requests.")]
        for adapters, stamp in seen.items():
            labels = {"max_lora": slots, "running_lora_adapters": adapters, "waiting_lora_adapters": adapters}
            lines.append(sample(name, labels, repr(float(stamp))))
        return "".join(lines).encode()


FINISHED_REASONS = ("stop", "length", "abort", "error")


def _totals(seen: Observations) -> Sequence[int]:
    """Returns the values of all counters in the order of their lines: those of TOTALS, then one per finished reason."""
    tokens = (seen.prompt_tokens, seen.generation_tokens)
    return (0, seen.prefix_queries, seen.prefix_hits, seen.transferred, seen.transferred, 0, 0, *tokens, 0, seen.served, seen.aborted, 0)


def _cache_config(settings: EngineSettings) -> str:
    name = "vllm:cache_config_info"
    labels = {
        "block_size": str(settings.block_size),
        "cache_dtype": "auto",
        "calculate_kv_scales": "False",
        "cpu_offload_gb": "0.0",
        "enable_prefix_caching": "True",
        "engine": "0",
        "gpu_memory_utilization": "0.9",
        "is_attention_free": "False",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(settings.kv_blocks),
        "num_gpu_blocks_override": "None",
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": "None",
        "swap_space": "4.0",
    }
    text = "Information of the LLMEngine CacheConfig"
    return family(name, "gauge", text) + sample(name, labels, "1.0")


def _python_part() -> str:
    lines = []
    objects = (
        ("collected", "Objects collected during gc", (11298, 1402, 1203)),
        ("uncollectable", "Uncollectable objects found during GC", (0, 0, 0)),
    )
    for what, text, counts in objects:
        name = f"python_gc_objects_{what}_total"
        lines.append(family(name, "counter", text))
        lines += [_generation(name, n, count) for n, count in enumerate(counts)]
    name = "python_gc_collections_total"
    lines.append(family(name, "counter", "Number of times this generation was collected"))
    lines += [_generation(name, n, count) for n, count in enumerate((1480, 134, 57))]
    major, minor, patch = platform.python_version_tuple()
    labels = {
        "implementation": platform.python_implementation(),
        "major": major,
        "minor": minor,
        "patchlevel": patch,
        "version": platform.python_version(),
    }
    lines.append(family("python_info", "gauge", "Python platform information"))
    lines.append(sample("python_info", labels, "1.0"))
    return "".join(lines)


def _generation(name: str, generation: int, count: int) -> str:
    return sample(name, {"generation": str(generation)}, str(float(count)))


def _process_part(born: str) -> str:
    gauges = (
        ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", "1.1549966336e+10"),
        ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", "1.075396608e+09"),
        ("start_time_seconds", "gauge", "Start time of the process since unix epoch.", born),
        ("cpu_seconds_total", "counter", "Total user and system CPU time in seconds.", "38.42"),
        ("open_fds", "gauge", "Number of open file descriptors.", "69.0"),
        ("max_fds", "gauge", "Maximum number of open file descriptors.", "1.048576e+06"),
    )
    return "".join(family(f"process_{short}", kind, text) + sample(f"process_{short}", {}, value) for short, kind, text, value in gauges)
