"""What real engines show, and what several series of one metric become. The folder `pages` has lines that vLLM and llama.cpp sent."""

import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest

from epp.data import ACTIVE_MODELS, CACHE_TOKENS, KV_USAGE, MAX_LORA, RUNNING, WAITING, WAITING_MODELS, Column
from epp.plugins.extractors.core_metrics import BUILT_IN, CORE, CoreMetricsExtractor, Extracted, ExtractError, Mapped
from tests.cases import cases

FOLDER = Path(__file__).with_name("pages")
ADAPTERS = (ACTIVE_MODELS, WAITING_MODELS)
POWER: Column[float] = Column("power", float)


def page(name: str) -> bytes:
    return FOLDER.joinpath(f"{name}.txt").read_bytes()


def read(text: bytes, engine: str = "vllm", wanted: tuple[Column[Any], ...] = CORE, **config: Any) -> Extracted:
    params = {"engineConfigs": [{"name": engine, **config}]} if config else {}
    extractor = CoreMetricsExtractor("x", msgspec.convert(params, CoreMetricsExtractor.Params))
    reader = extractor.extraction({"llm-d.ai/engine-type": engine}, (*wanted, *ADAPTERS))
    first = reader.extract(text)
    assert reader.extract(text) == first, "the same page gives the same values again"
    return first


def known(extracted: Extracted, wanted: tuple[Column[Any], ...] = CORE) -> dict[str, float]:
    """The values of the columns that are known."""
    return {column.name: extracted.values[at] for at, column in enumerate(wanted) if extracted.present >> at & 1}


LOAD = ("waiting_requests", "running_requests", "kv_cache_usage")


def load(extracted: Extracted) -> list[float | None]:
    return [known(extracted).get(name) for name in LOAD]


def test_an_idle_server() -> None:
    found = read(page("vllm-idle"))
    assert known(found) == {
        "waiting_requests": 0.0,
        "running_requests": 0.0,
        "kv_cache_usage": 0.0,
        "cache_block_size": 128.0,
        "cache_num_blocks": 4096.0,
        "cache_tokens": 524288.0,
        "cache_ranks": 1.0,
    }
    assert not found.problems


def test_all_data_parallel_ranks_count() -> None:
    """Engine 1 has 2 running requests and a usage of 0.085, engine 0 has none. Each has 400 blocks, though it says 800."""
    assert known(read(page("vllm-dp2-load"))) == {
        "waiting_requests": 0.0,
        "running_requests": 2.0,
        "kv_cache_usage": 0.08521303258145363 / 2,
        "cache_block_size": 32.0,
        "cache_num_blocks": 1600.0,
        "cache_tokens": 2 * 12800.0,
        "cache_ranks": 2.0,
    }


def test_a_data_parallel_server_without_any_request_yet_is_idle() -> None:
    """It shows no gauge of its load before its first request."""
    found = read(page("vllm-dp2-idle"))
    assert load(found) == [0.0, 0.0, 0.0]
    assert not found.problems
    assert load(read(page("vllm-dp2-idle"), wanted=CORE[:3])) == [0.0, 0.0, 0.0]


def test_a_server_that_lacks_only_some_gauges_is_not_idle() -> None:
    found = read(without(page("vllm-idle"), b"vllm:num_requests_waiting{"))
    assert load(found) == [None, 0.0, 0.0]
    assert list(found.problems.values()) == ["vllm:num_requests_waiting: the page has no such series"]


def test_a_server_with_layers_of_several_kinds_says_how_many_tokens_its_cache_holds() -> None:
    found = known(read(page("vllm-hybrid-idle")))
    assert found["cache_tokens"] == 24950.0
    assert found["cache_num_blocks"] * found["cache_block_size"] == 38400.0


def test_prefixes_are_found_in_the_unit_that_the_server_names() -> None:
    labels = b'block_size="784",num_gpu_blocks="1760",prefix_match_unit="16",kv_cache_size_tokens="1325785"'
    found = known(read(b"vllm:cache_config_info{%b} 1.0\n" % labels))
    assert (found["cache_block_size"], found["cache_tokens"]) == (16.0, 1325785.0)
    older = known(read(b'vllm:cache_config_info{block_size="784",num_gpu_blocks="1760",prefix_match_unit="16"} 1.0\n'))
    assert (older["cache_block_size"], older["cache_tokens"]) == (16.0, 784 * 1760.0)


def test_an_adapter_that_is_in_both_sets_is_the_only_one_that_the_server_has() -> None:
    """vLLM writes one set into both labels."""
    found = read(page("vllm-lora-load"))
    assert set.union(*map(set, found.names.values())) == {"ad1"}
    assert known(found)["max_lora"] == 1.0


def test_the_newest_series_of_the_adapters_counts() -> None:
    assert read(page("vllm-lora-after")).names == {"active_models": frozenset(), "waiting_models": frozenset()}
    assert "max_lora" not in known(read(page("vllm-lora-idle")))


def test_llama_cpp_is_read_with_an_engine_of_the_configuration() -> None:
    specs = {"queuedRequestsSpec": "llamacpp:requests_deferred", "runningRequestsSpec": "llamacpp:requests_processing"}
    assert load(read(page("llamacpp"), "llama.cpp", **specs)) == [0.0, 0.0, None]


def without(text: bytes, start: bytes) -> bytes:
    return b"".join(line for line in text.splitlines(True) if not line.startswith(start))


SERIES = {
    "data-parallel ranks of vLLM are added up": (
        "vllm",
        [b'vllm:num_requests_waiting{engine="%d"} %d' % pair for pair in ((0, 0), (1, 120), (2, 3))],
        123.0,
    ),
    "data-parallel ranks of SGLang are added up": (
        "sglang",
        [b'sglang:num_queue_reqs{dp_rank="%d",tp_rank="%d",moe_ep_rank="%d"} %d' % (n, n, n, 4 + n) for n in range(3)],
        15.0,
    ),
    "models of Triton are added up": (
        "triton",
        [b'nv_inference_pending_request_count{model="%b",version="1"} %d' % pair for pair in ((b"a", 2), (b"b", 5))],
        7.0,
    ),
    "series that a selector leaves out do not count": (
        "triton-tensorrt-llm",
        [
            b'nv_trt_llm_request_metrics{model="%b",request_type="%b",version="1"} %d' % each
            for each in ((b"a", b"waiting", 2), (b"b", b"waiting", 5), (b"a", b"scheduled", 40))
        ],
        7.0,
    ),
    "one queue that several processes repeat counts once": (
        "sglang",
        [b'sglang:num_queue_reqs{pp_rank="%d",tp_rank="%d"} %d' % each for each in ((0, 0, 9), (0, 1, 9), (1, 0, 8))],
        9.0,
    ),
    "the total of a queue with priorities counts": (
        "sglang",
        [b'sglang:num_queue_reqs{priority="%b"} %d' % pair for pair in ((b"5", 3), (b"", 8), (b"-1", 5))],
        8.0,
    ),
    "priorities without a total are added up": (
        "sglang",
        [b'sglang:num_queue_reqs{priority="%b"} %d' % pair for pair in ((b"5", 3), (b"-1", 5))],
        8.0,
    ),
    "each rank has its own total": (
        "sglang",
        [
            b'sglang:num_queue_reqs{dp_rank="%d",priority="%b",tp_rank="%d"} %d' % each
            for each in ((0, b"", 0, 7), (0, b"1", 0, 7), (1, b"1", 2, 2), (1, b"2", 3, 1))
        ],
        10.0,
    ),
    "the latest of two values of one series counts": (
        "vllm",
        [b'vllm:num_requests_waiting{engine="0"} %d %d' % pair for pair in ((9, 1000), (4, 2000))],
        4.0,
    ),
    "equal timestamps of different ranks leave no rank out": (
        "vllm",
        [b'vllm:num_requests_waiting{engine="%d"} %d 1000' % pair for pair in ((0, 9), (1, 4))],
        13.0,
    ),
}


@cases("name", SERIES)
def test_several_series_of_a_queue(name: str) -> None:
    engine, lines, expected = SERIES[name]
    for order in itertools.permutations(lines):
        for between in (b"\n", b"\nother 1\n", b"\n# a comment\n\n"):
            assert load(read(between.join(order) + b"\n", engine))[0] == expected


@pytest.mark.parametrize(("usage", "read_as"), [(b"1", 1.0), (b"1.02", 1.0), (b"2", 1.0), (b"2.5", None), (b"37.0", None), (b"-0.1", None)])
def test_a_usage_in_percent_is_not_taken_for_a_full_cache(usage: bytes, read_as: float | None) -> None:
    text = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc " + usage + b"\n"
    for found in (read(text), read(text)):
        assert load(found)[2] == read_as
        problem = f"vllm:kv_cache_usage_perc: {float(usage)} is not a share from 0 to 1; its unit may be percent"
        assert list(found.problems.values()) == ([problem] if read_as is None else [])


def test_usages_become_their_mean_and_a_custom_metric_too() -> None:
    text = b'vllm:kv_cache_usage_perc{engine="0"} 0.9\nvllm:kv_cache_usage_perc{engine="1"} 0.3\n'
    assert load(read(text))[2] == pytest.approx(0.6)
    specs = {"customMetrics": [{"attributeKey": "power", "metricSpec": "gpu_power"}]}
    found = read(b'gpu_power{gpu="0"} 300\ngpu_power{gpu="1"} 100\n', "mine", (POWER,), **specs)
    assert found.values == (200.0,)


@pytest.mark.parametrize(
    ("engine", "text", "blocks", "tokens"),
    [
        ("vllm", b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="100"} 1\n', 200.0, 3200.0),
        ("sglang", b'sglang:cache_config_info{dp_rank="%d",num_pages="50",page_size="8"} 1\n', 100.0, 800.0),
        ("trtllm-serve", b'trtllm_kv_cache_tokens_per_block{model="%d"} 32\ntrtllm_kv_cache_max_blocks{model="%d"} 100\n', 200.0, 6400.0),
    ],
)
def test_the_blocks_of_all_ranks_are_added_up(engine: str, text: bytes, blocks: float, tokens: float) -> None:
    ranks = [text.replace(b"%d", b"%d" % rank) for rank in range(2)]
    for parts in (ranks, ranks[::-1]):
        found = known(read(b"other 1\n".join(parts), engine))
        assert (found["cache_num_blocks"], found["cache_tokens"]) == (blocks, tokens)
        only_tokens = (CACHE_TOKENS,)
        assert known(read(b"".join(parts), engine, only_tokens), only_tokens) == {"cache_tokens": tokens}


def test_one_cache_that_several_processes_show_counts_once() -> None:
    text = b'sglang:cache_config_info{num_pages="50",page_size="8",tp_rank="%d"} 1\n'
    assert known(read(text % 0 + text % 1, "sglang"))["cache_num_blocks"] == 50.0


LORA = b'vllm:lora_requests_info{%bmax_lora="%d",running_lora_adapters="%b",waiting_lora_adapters="%b"} %b\n'


def test_adapters_of_data_parallel_ranks_are_joined() -> None:
    series = [
        LORA % (b'engine="0",', 4, b"a", b"b", b"9"),
        LORA % (b'engine="0",', 4, b"old", b"", b"8"),
        LORA % (b'engine="1",', 4, b"c", b"", b"5"),
    ]
    for order in itertools.permutations(series):
        found = read(b"".join(order))
        assert found.names == {"active_models": {"a", "c"}, "waiting_models": {"b"}}
        assert known(found)["max_lora"] == 8.0


def test_adapters_with_equal_times_are_joined() -> None:
    series = [LORA % (b"", 4, b"a", b"", b"9"), LORA % (b"", 4, b"b", b"", b"9"), LORA % (b"", 4, b"old", b"", b"8")]
    for order in itertools.permutations(series):
        found = read(b"".join(order))
        assert found.names["active_models"] == {"a", "b"}
        assert known(found)["max_lora"] == 4.0


def test_thousands_of_combinations_of_adapters_cost_nothing_else() -> None:
    """8,000 are 1.7 MB. More than are read cost the columns of adapters alone."""
    for number, adapters in ((8000, {"a5000"}), (70_000, set())):
        series = b"".join(LORA % (b"", 4, b"a%d" % n, b"x", b"1.7e9") for n in range(number))
        text = page("vllm-idle") + series.replace(LORA % (b"", 4, b"a5000", b"x", b"1.7e9"), LORA % (b"", 4, b"a5000", b"", b"1.8e9"))
        found = read(text)
        assert load(found) == [0.0, 0.0, 0.0]
        assert found.names["active_models"] == adapters
        assert bool(found.problems) is not bool(adapters)


@pytest.mark.parametrize("end", [b"# EOF", b"# EOF\n", b""])
def test_an_openmetrics_page_may_end_without_a_newline(end: bytes) -> None:
    assert load(read(page("vllm-idle") + end)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("text", [b"", b"x", b"vllm:num_requests_waiting 3", b"vllm:num_requests_waiting 3 # EOF"])
def test_a_truncated_page_is_rejected(text: bytes) -> None:
    with pytest.raises(ExtractError, match="does not end with a newline"):
        read(text)


@pytest.mark.parametrize("configured", ["kv_cache_usage_perc", "gpu_cache_usage_perc"])
@pytest.mark.parametrize("reported", [b"kv_cache_usage_perc", b"gpu_cache_usage_perc"])
def test_the_old_and_the_new_name_of_the_cache_usage_are_the_same_gauge(configured: str, reported: bytes) -> None:
    text = b"vllm:num_requests_waiting 3\nvllm:" + reported + b'{engine="0"} 0.5\n'
    assert load(read(text, kvUsageSpec=f"vllm:{configured}"))[2] == 0.5


def test_a_server_that_changes_the_name_is_followed() -> None:
    reader = CoreMetricsExtractor("x", CoreMetricsExtractor.Params()).extraction({}, (KV_USAGE,))
    for name, value in ((b"gpu", 0.25), (b"kv", 0.5), (b"gpu", 0.75)):
        assert reader.extract(b"vllm:%b_cache_usage_perc %f\n" % (name, value)).values == (value,)


def test_one_rank_without_a_valid_value_leaves_the_column_unknown() -> None:
    text = b'vllm:num_requests_waiting{engine="%d"} %b\n'
    for ranks in ((b"3", b"NaN"), (b"NaN", b"3")):
        found = read(b"".join(text % pair for pair in enumerate(ranks)) + b"vllm:num_requests_running 1\n")
        assert load(found) == [None, 1.0, None]
        assert "vllm:num_requests_waiting: nan is not a count of 0 or more" in found.problems.values()


def test_the_documentation_names_every_metric_that_is_read() -> None:
    text = Path(__file__).parents[4].joinpath("docs", "data-sources.md").read_text()
    for engine in map(Mapped, BUILT_IN):
        selectors = [*(gauge.selector for gauge in engine.gauges), engine.lora, engine.cache_info]
        for selector in filter(None, selectors):
            assert f"`{selector.name}`" in text
            assert all(f"`{value.decode()}`" in text for _, value in selector.labels)


def test_columns_that_the_configuration_does_not_need_are_not_read() -> None:
    assert read(page("vllm-lora-load"), wanted=(WAITING, RUNNING)).values == (0.0, 16.0)
    assert read(page("vllm-lora-load"), wanted=(MAX_LORA,)).values == (1.0,)
