"""Pages of five engines, custom engines, and pages that are rejected."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from epp.plugins.extractors.core_metrics import CORE, CoreMetricsExtractor, ExtractError, Extraction
from tests.cases import cases

WANTED = (*CORE, ACTIVE_MODELS, WAITING_MODELS)
VLLM = b"""# HELP vllm:num_requests_running Number of requests running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a, b,",waiting_lora_adapters="c"} 1.7e9
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="20000"} 1.0
"""
SGLANG = b"""sglang:num_queue_reqs{model_name="m"} 3.0
sglang:num_running_reqs{model_name="m"} 7.0
sglang:token_usage{model_name="m"} 0.25
sglang:cache_config_info{num_pages="20000",page_size="16"} 1.0
"""
TRTLLM = b"""trtllm_num_requests_waiting 3
trtllm_num_requests_running 7
trtllm_kv_cache_utilization 0.25
trtllm_kv_cache_tokens_per_block 16
trtllm_kv_cache_max_blocks 20000
"""
TRITON_TRTLLM = b"""# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 7
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 3
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 16
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 20000
"""
TRITON = b'nv_inference_exec_count{model="m"} 7\nnv_inference_pending_request_count{model="m"} 3\n'


def extractor(**params: object) -> CoreMetricsExtractor:
    return CoreMetricsExtractor("x", msgspec.convert(params, CoreMetricsExtractor.Params))


def vllm(wanted: tuple[Column, ...] = WANTED) -> Extraction:
    return extractor().extraction({}, wanted)


@pytest.mark.parametrize(
    ("engine", "page", "columns"),
    [
        ("vllm", VLLM, "all"),
        ("sglang", SGLANG, "no lora"),
        ("trtllm-serve", TRTLLM, "no lora and ranks"),
        ("triton-tensorrt-llm", TRITON_TRTLLM, "no lora and ranks"),
        ("triton", TRITON, "queues"),
    ],
)
def test_each_engines_page_yields_the_columns_that_it_reports(engine: str, page: bytes, columns: str) -> None:
    values = {WAITING: 3.0, RUNNING: 7.0, KV_USAGE: 0.25, MAX_LORA: 4.0}
    values |= {CACHE_BLOCK_SIZE: 16.0, CACHE_NUM_BLOCKS: 20000.0, CACHE_TOKENS: 320000.0, CACHE_RANKS: 1.0}
    absent = {"all": (), "no lora": (MAX_LORA,), "no lora and ranks": (MAX_LORA, CACHE_RANKS), "queues": CORE[2:]}[columns]
    reader = extractor().extraction({"llm-d.ai/engine-type": engine}, WANTED)
    for _ in range(2):
        got = reader.extract(page)
        assert got.values == tuple(0.0 if c in absent else values[c] for c in CORE)
        assert got.present == sum(1 << i for i, c in enumerate(CORE) if c not in absent)
        adapters = {"a", "b"} if columns == "all" else set()
        assert got.names["active_models"] == adapters
        assert got.problems == {}


def test_values_are_in_the_order_of_the_wanted_columns_and_names_only_if_wanted() -> None:
    got = vllm((KV_USAGE, WAITING_MODELS, Column("unheard_of", float), WAITING)).extract(VLLM)
    assert got.values == (0.25, 0.0, 3.0)
    assert got.present == 0b101
    assert got.names == {"waiting_models": frozenset({"c"})}


def test_only_wanted_metrics_must_be_on_the_page() -> None:
    assert vllm((WAITING,)).extract(b"vllm:num_requests_waiting 2\n").values == (2.0,)


@pytest.mark.parametrize(
    ("labels", "engine"),
    [
        ({}, "vllm"),
        ({"llm-d.ai/engine-type": "sglang"}, "sglang"),
        ({"inference.networking.k8s.io/engine-type": "triton"}, "triton"),
        ({"llm-d.ai/engine-type": "", "inference.networking.k8s.io/engine-type": "triton"}, "triton"),
        ({"llm-d.ai/engine-type": "sglang", "inference.networking.k8s.io/engine-type": "triton"}, "sglang"),
        ({"llm-d.ai/engine-type": "unknown"}, "vllm"),
    ],
)
def test_the_engine_is_chosen_by_label_then_by_legacy_label_then_by_default(labels: dict[str, str], engine: str) -> None:
    assert extractor().engine(labels).name == engine


def test_default_engine_and_label_key_are_configurable() -> None:
    ours = extractor(defaultEngine="sglang", engineLabelKey="engine")
    assert ours.engine({}).name == "sglang"
    assert ours.engine({"engine": "triton"}).name == "triton"


def test_a_configured_engine_replaces_a_built_in_one_as_a_whole() -> None:
    ours = extractor(engineConfigs=[{"name": "vllm", "queuedRequestsSpec": "q{kind=waiting}"}])
    page = b'q{kind="running"} 1\nq{kind="waiting"} 5\n'
    got = ours.extraction({}, WANTED).extract(page)
    assert (got.values[0], got.present) == (5.0, 1)


def test_custom_metrics_are_produced_as_columns_of_their_attribute_key() -> None:
    custom = [{"attributeKey": "power", "metricSpec": "gpu_power{gpu=0}"}]
    ours = extractor(engineConfigs=[{"name": "mine", "customMetrics": custom}])
    power = Column("power", float)
    assert ours.produces == (*WANTED, power)
    reader = ours.extraction({"llm-d.ai/engine-type": "mine"}, (power,))
    assert reader.extract(b'gpu_power{gpu="0"} 300.5\n').values == (300.5,)
    with pytest.raises(ExtractError, match=r'gpu_power\{gpu="0"\}: the page has no such series'):
        reader.extract(b'gpu_power{gpu="1"} 300.5\n')


def test_a_custom_metric_that_one_server_lacks_leaves_its_queue() -> None:
    power = Column("power", float)
    custom = [{"attributeKey": "power", "metricSpec": "gpu_power"}]
    ours = extractor(engineConfigs=[{"name": "vllm", "queuedRequestsSpec": "queue", "customMetrics": custom}])
    got = ours.extraction({}, (WAITING, power)).extract(b"queue 4\n")
    assert (got.values, got.present) == ((4.0, 0.0), 1)
    assert list(got.problems.values()) == ["gpu_power: the page has no such series"]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"defaultEngine": "nosuch"}, "defaultEngine: unknown engine 'nosuch'; known: sglang"),
        ({"engineConfigs": [{"name": "default"}]}, r"engineConfigs\[0\].name: 'default' is reserved"),
        ({"engineConfigs": [{"name": "a"}, {"name": "a"}]}, r"engineConfigs\[1\].name: 'a' is given"),
        ({"engineConfigs": [{"name": "a", "kvUsageSpec": "x y"}]}, "engine 'a': kvUsageSpec: 'x y'"),
        ({"engineConfigs": [{"name": "a", "loraSpec": "x{y}"}]}, "engine 'a': loraSpec"),
        ({"engineConfigs": [{"name": "a", "customMetrics": [{"attributeKey": "k", "metricSpec": "{"}]}]}, r"customMetrics\[0\].metricSpec"),
        (
            {"engineConfigs": [{"name": "a", "customMetrics": [{"attributeKey": "k", "metricSpec": "m"}] * 2}]},
            r"customMetrics\[1\].attributeKey: 'k' is taken",
        ),
        ({"engineConfigs": [{"name": "a", "customMetrics": [{"attributeKey": "max_lora", "metricSpec": "m"}]}]}, "'max_lora' is taken"),
    ],
)
def test_an_error_names_the_field_with_the_wrong_parameter(params: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        extractor(**params)


@pytest.mark.parametrize("empty", ["name", "attributeKey", "metricSpec"])
def test_empty_names_and_keys_are_refused(empty: str) -> None:
    custom = {"attributeKey": "k", "metricSpec": "m"}
    config = {"name": "a", "customMetrics": [custom]}
    (config if empty == "name" else custom)[empty] = ""
    with pytest.raises(msgspec.ValidationError):
        extractor(engineConfigs=[config])


@cases("value", [b"NaN", b"+Inf", b"-Inf", b"-1", b"1e17", b"x", b"", b"2 yesterday"])
@cases("column", [WAITING, RUNNING])
def test_an_invalid_count_leaves_its_column_unknown_and_is_named(column: Column[int], value: bytes) -> None:
    family = b"vllm:num_requests_" + column.name.partition("_")[0].encode()
    before, _, rest = VLLM.partition(family + b"{")
    after = rest.partition(b"\n")[2]
    reader = vllm()
    whole = reader.extract(VLLM)
    for _ in range(2):
        got = reader.extract(before + family + b"{} " + value + b"\n" + after)
        assert got.present == whole.present & ~(1 << CORE.index(column))
        assert got.names == whole.names
        (problem,) = got.problems.values()
        assert problem.startswith(family.decode() + ": ")
    assert reader.extract(VLLM) == whole


def test_a_cause_stays_the_same_while_the_value_changes() -> None:
    reader = vllm()
    pages = [VLLM.replace(b"} 3.0", b"} %d" % value) for value in (-1, -2)]
    first, second = (reader.extract(page).problems for page in pages)
    assert list(first) == list(second) and list(first.values()) != list(second.values())


@pytest.mark.parametrize("page", [b"up 1\n", b"\n", b"vllm:num_requests_waiting NaN\nvllm:num_requests_running x\n"])
def test_a_page_without_any_readable_value_is_rejected_with_what_it_lacks(page: bytes) -> None:
    with pytest.raises(ExtractError, match=r"^vllm:num_requests_waiting: .*; vllm:num_requests_running: "):
        vllm().extract(page)


def test_counts_are_truncated_and_a_usage_above_one_counts_as_full() -> None:
    page = VLLM.replace(b"} 3.0", b"} 3.9").replace(b"} 0.25", b"} 1.01")
    assert vllm().extract(page).values[:3] == (3.0, 7.0, 1.0)


@pytest.mark.parametrize("family", [b"lora_requests_info", b"cache_config_info"])
def test_adapters_and_cache_configuration_may_be_absent_and_come_back(family: bytes) -> None:
    without = b"".join(line for line in VLLM.splitlines(True) if family not in line)
    reader = vllm()
    whole = reader.extract(VLLM)
    less = reader.extract(without)
    if family.startswith(b"lora"):
        assert less.present == whole.present & ~(1 << CORE.index(MAX_LORA))
        assert less.names == {"active_models": frozenset(), "waiting_models": frozenset()}
    else:
        assert less.present == 0b1111
    assert not less.problems
    assert reader.extract(VLLM) == whole


def test_an_engine_that_does_not_know_its_cache_size_yet_makes_the_column_absent() -> None:
    page = VLLM.replace(b'num_gpu_blocks="20000"', b'num_gpu_blocks="None"')
    got = vllm().extract(page)
    assert got.present == 0b10011111


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b'block_size="16"', b'block_size="many"', "cache_config_info: label block_size='many'"),
        (b'block_size="16"', b'block_size="-1"', "label block_size='-1'"),
        (b'max_lora="4"', b'max_lora="4.5"', "lora_requests_info: label max_lora='4.5'"),
        (b"1.7e9", b"NaN", "lora_requests_info: nan is not a time"),
        (b"1.7e9", b"-", "lora_requests_info: nan is not a time"),
        (b'="a, b,"', b"=a", "lora_requests_info: "),
        (b'="a, b,"', b'="' + b",".join(b"a%d" % n for n in range(1025)) + b'"', "more than 1024 adapters"),
        (b'"a, b,"', b'"' + b"x" * 600 + b'"', "a name over 512 bytes"),
    ],
)
def test_labels_out_of_range_cost_only_their_own_columns(old: bytes, new: bytes, named: str) -> None:
    reader = vllm()
    whole = reader.extract(VLLM)
    got = reader.extract(VLLM.replace(old, new))
    assert got.values[:3] == whole.values[:3] and got.present & 7 == 7
    (problem,) = got.problems.values()
    assert named in problem
    assert reader.extract(VLLM) == whole
    first = vllm()
    assert first.extract(VLLM.replace(old, new)) == got
    assert first.extract(VLLM) == whole


def test_unchanged_adapters_stay_the_same_object() -> None:
    reader = vllm()
    first = reader.extract(VLLM)
    assert reader.extract(VLLM.replace(b"1.7e9", b"1.8e+09")).names is first.names
    assert reader.extract(VLLM.replace(b'"c"', b'"d"')).names is not first.names


@given(st.integers(0, len(VLLM) - 1))
def test_a_page_cut_at_any_byte_gives_an_error_or_values_of_the_whole_page(cut: int) -> None:
    try:
        got = vllm().extract(VLLM[:cut])
    except ExtractError:
        return
    whole = vllm().extract(VLLM)
    assert all(got.values[at] == whole.values[at] for at in range(len(CORE)) if got.present >> at & 1)


@given(st.binary(max_size=60), st.integers(0, len(VLLM)))
def test_a_page_with_bytes_written_over_gives_an_error_or_numbers_in_range(noise: bytes, at: int) -> None:
    reader = vllm()
    reader.extract(VLLM)
    try:
        got = reader.extract(VLLM[:at] + noise + VLLM[at + len(noise) :])
    except ExtractError:
        return
    assert all(0.0 <= value <= 2.0**53 for value in got.values)
    assert got.present or any(got.names.values()) or not got.problems
    assert got.values[2] <= 1.0
