"""The metrics page, read back with prometheus_client's parser."""

from math import isnan

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from loadtest.sim.engine import Engine, EngineSettings, Job
from loadtest.sim.exposition import HISTOGRAMS, LORA_SERIES_MAX, MetricsPage
from loadtest.sim.observations import Histogram

MODEL = "meta-llama/Llama-3.1-8B-Instruct"


def page(engine: Engine, model: str = MODEL) -> MetricsPage:
    return MetricsPage(engine, model, 1_700_000_000.0)


def families(text: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def value(text: bytes, name: str) -> float:
    """The first sample with that name. Raises AssertionError if there is none."""
    for family in families(text).values():
        for sample in family.samples:
            if sample.name == name:
                return float(sample.value)
    raise AssertionError(f"no sample {name}")


def test_load_gauges_show_the_engine() -> None:
    engine = Engine(EngineSettings(max_running=1, kv_blocks=10))
    for _ in range(3):
        engine.submit(Job([], 32, 8), 0.0)
    text = page(engine).render(0.0)
    assert value(text, "vllm:num_requests_running") == 1
    assert value(text, "vllm:num_requests_waiting") == 2
    assert value(text, "vllm:kv_cache_usage_perc") == 0.3


def test_the_page_is_as_large_as_a_real_one_and_every_family_has_its_type() -> None:
    text = page(Engine(EngineSettings(max_loras=2))).render(0.0)
    assert 20_000 < len(text) < 40_000
    kinds = {name: family.type for name, family in families(text).items()}
    assert kinds["vllm:num_requests_waiting"] == "gauge"
    assert kinds["vllm:prefix_cache_hits"] == "counter"
    assert kinds["vllm:lora_requests_info"] == "gauge"
    histograms = {f"vllm:{name}" for name, _ in HISTOGRAMS.values()}
    assert {name for name, kind in kinds.items() if kind == "histogram"} == histograms
    assert all(family.documentation for family in families(text).values())
    assert "unknown" not in kinds.values()


def test_cache_configuration_is_in_labels() -> None:
    text = page(Engine(EngineSettings(kv_blocks=777, block_size=32))).render(0.0)
    (sample,) = families(text)["vllm:cache_config_info"].samples
    assert sample.labels["block_size"] == "32"
    assert sample.labels["num_gpu_blocks"] == "777"
    assert sample.value == 1


def test_histograms_are_cumulative_and_agree_with_their_counts() -> None:
    engine = Engine(EngineSettings())
    rendered = page(engine)
    rendered.render(0.0)
    for n in range(5):
        engine.submit(Job([], 100 * n + 1, 20), 0.0)
    engine.advance(100.0)
    for name, family in families(rendered.render(0.0)).items():
        if family.type == "histogram":
            buckets = [s.value for s in family.samples if s.name == f"{name}_bucket"]
            (count,) = [s.value for s in family.samples if s.name == f"{name}_count"]
            assert buckets == sorted(buckets)
            assert buckets[-1] == count > 0
    text = rendered.render(0.0)
    assert value(text, "vllm:e2e_request_latency_seconds_count") == 5
    assert value(text, "vllm:inter_token_latency_seconds_count") == 5 * 19
    assert value(text, "vllm:iteration_tokens_total_sum") == 1005 + 5 * 19
    assert value(text, "vllm:generation_tokens_total") == 100
    assert value(text, "vllm:prompt_tokens_total") == 1005


def test_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (1.0, 1.5, 2.0, 2.5):
        histogram.observe(number)
    assert histogram.counts == [1, 2, 1]


def test_the_newest_adapter_series_has_the_largest_value() -> None:
    engine = Engine(EngineSettings(max_loras=1))
    rendered = page(engine)
    rendered.render(10.0)
    for name in ("a", "b"):
        engine.submit(Job([], 16, 4, lora=name), 0.0)
    samples = families(rendered.render(11.5))["vllm:lora_requests_info"].samples
    newest = max(samples, key=lambda sample: sample.value)
    assert len(samples) == 2
    assert newest.value == 11.5
    assert newest.labels == {"max_lora": "1", "running_lora_adapters": "a,b", "waiting_lora_adapters": "a,b"}


def test_the_oldest_adapter_series_are_dropped_beyond_the_limit() -> None:
    engine = Engine(EngineSettings(max_loras=100))
    rendered = page(engine)
    now = 0.0
    for n in range(3 * LORA_SERIES_MAX):
        engine.advance(now)
        engine.submit(Job([], 1, 1000, lora=f"l{n}"), now)
        now += 1.0
        engine.advance(now)
        text = rendered.render(now)
    samples = families(text)["vllm:lora_requests_info"].samples
    assert len(samples) == LORA_SERIES_MAX
    assert max(sample.value for sample in samples) == now


def test_without_adapters_there_is_no_adapter_family() -> None:
    assert b"lora" not in page(Engine(EngineSettings())).render(0.0)


def test_a_page_with_nan_gauges_still_parses() -> None:
    text = page(Engine(EngineSettings())).render(0.0, not_a_number=True)
    assert isnan(value(text, "vllm:num_requests_waiting"))
    assert isnan(value(text, "vllm:kv_cache_usage_perc"))
    assert value(text, "vllm:prompt_tokens_total") == 0


def test_any_model_name_is_escaped() -> None:
    odd = 'a"b\\c 100%d %s\n{}'
    text = page(Engine(EngineSettings()), odd).render(0.0)
    (sample,) = families(text)["vllm:num_requests_running"].samples
    assert sample.labels["model_name"] == odd
