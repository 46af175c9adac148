"""The data sources besides the metrics of engines, and what their extractors make of pages. Expected values are computed by hand."""

import contextlib
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config import registry
from epp.data import CLUSTER_KV_USAGE, CLUSTER_QUEUE, KV_USAGE, WAITING, Column
from epp.plugins.extractors._pages import Extracted, ExtractError
from epp.plugins.extractors.dcgm import GPU_UTILIZATION
from epp.plugins.extractors.models import SERVED_MODELS, models_of
from epp.protocol.models import Model
from tests.epp.plugins.calls import made, score
from tests.fakes import candidates

NODE = b"""\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",pod="vllm-0"} 40
DCGM_FI_DEV_GPU_UTIL{gpu="1",pod="vllm-0"} 85
DCGM_FI_DEV_GPU_UTIL{gpu="2",pod="vllm-1"} 97
# TYPE DCGM_FI_DEV_GPU_UTILITY gauge
DCGM_FI_DEV_GPU_UTILITY{gpu="0"} 3
"""


def read(type_name: str, page: bytes, *wanted: Column[Any], pod: str = "", **parameters: Any) -> Extracted:
    found: Extracted = made(type_name, **parameters).extraction({}, wanted, pod).extract(page)
    return found


def gpu(page: bytes, pod: str = "") -> float:
    found = read("dcgm-extractor", page, GPU_UTILIZATION, KV_USAGE, pod=pod)
    assert found.present == 1 and found.values[1] == 0.0
    return found.values[0]


def test_the_busiest_gpu_of_the_pod_counts() -> None:
    assert gpu(NODE, "vllm-0") == 0.85
    assert gpu(NODE, "vllm-1") == 0.97


def test_without_the_name_of_a_pod_all_gpus_count() -> None:
    assert gpu(NODE) == 0.97


def test_samples_without_the_label_belong_to_every_pod() -> None:
    assert gpu(b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 12 1700000000000\nDCGM_FI_DEV_GPU_UTIL 30\n', "vllm-9") == 0.3


@pytest.mark.parametrize(
    ("page", "why"),
    [
        (NODE, "no such series of pod 'vllm-9'"),
        (b"up 1\n", "no such series"),
        (b"", "empty or truncated"),
        (NODE[:-3], "empty or truncated"),
        (b"DCGM_FI_DEV_GPU_UTIL{a} 1\n", "labels cannot be read"),
        (b"DCGM_FI_DEV_GPU_UTIL many\n", "'many' is not a number"),
        (b"DCGM_FI_DEV_GPU_UTIL NaN\n", "is not a finite number"),
        (b"DCGM_FI_DEV_GPU_UTIL \n", "the line cannot be read"),
        (b"DCGM_FI_DEV_GPU_UTIL 1\n" * 20_000, "more than 16384 series"),
    ],
)
def test_a_page_without_the_utilization_is_rejected(page: bytes, why: str) -> None:
    with pytest.raises(ExtractError, match=why):
        read("dcgm-extractor", page, GPU_UTILIZATION, pod="vllm-9")


def test_a_gpu_without_a_number_leaves_the_others() -> None:
    for lines in (b"{a} NaN\n", b"{b} 30\n"), (b"{b} 30\n", b"{a} NaN\n"):
        page = b"".join(b"DCGM_FI_DEV_GPU_UTIL" + line.replace(b"}", b'="x"}') for line in lines)
        found = read("dcgm-extractor", page, GPU_UTILIZATION)
        assert found.values == (0.3,) and list(found.problems) == ["DCGM_FI_DEV_GPU_UTIL"]


def test_the_utilization_of_a_gpu_is_an_attribute_for_filters_and_scorers() -> None:
    """Fixed range 0 to 1, lower is better: 1 - 0.85 and 1 - 0.20."""
    plugin = made(
        "endpoint-attribute-scorer",
        attributeKey="GPUUtilization",
        producer="dcgm-extractor",
        algorithm={"type": "linear_lower_is_better", "normalization": {"fixedRange": {"min": 0, "max": 1}}},
    )
    plugin.resolve({"producer": made("dcgm-extractor")})
    assert score(plugin, candidates({"GPUUtilization": [0.85, 0.2]})) == pytest.approx([0.15, 0.8])


def test_the_served_models_are_the_ids_of_the_list() -> None:
    page = b'{"object":"list","data":[{"id":"base","object":"model"},{"id":"lora-a","parent":"base"}]}'
    found = read("models-data-extractor", page, SERVED_MODELS, WAITING)
    assert found == Extracted((0.0,), 0, {"served_models": frozenset(("base", "lora-a"))})


def test_the_set_stays_the_same_object_while_the_answer_does() -> None:
    reader = made("models-data-extractor").extraction({}, (SERVED_MODELS,))
    assert reader.extract(b'{"data":[]}').names is reader.extract(b'{"data":[]}').names


@pytest.mark.parametrize(
    "page",
    [
        b"", b"[]", b'{"data":1}', b'{"data":[{}]}', b'{"data":[{"id":7}]}', b'{"data":[{"id":"' + b"x" * 513 + b'"}]}',
        b'{"data":[' + b",".join(b'{"id":"%d"}' % n for n in range(1025)) + b"]}",
        b"\xff", b'{"data":[{"id":"\xff"}]}', b'{"data":[{"id":"x","root":%b%b}]}' % (b"[" * 5000, b"]" * 5000),
    ],
)  # fmt: skip
def test_a_list_that_is_none_is_rejected(page: bytes) -> None:
    with pytest.raises(ExtractError):
        read("models-data-extractor", page, SERVED_MODELS)


def test_fields_of_models_with_very_many_values_take_no_memory_for_them() -> None:
    many = b"[" + b"[]," * 100_000 + b"[]]"
    page = b'{"data":[{"id":"x","root":%b,"parent":%b,"max_model_len":%b}]}' % (many, many, many)
    tracemalloc.start()
    try:
        assert models_of(page) == [Model("x", "", "", 0)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(page) / 10


FORMS = [b"%b", b'{"data":%b}', b'{"data":[%b]}', b'{"data":[{"id":"%b"}]}', b'{"data":[{"id":"x",%b}]}']


@given(st.binary(max_size=60), st.sampled_from(FORMS))
def test_any_bytes_are_a_list_of_models_or_are_rejected(noise: bytes, form: bytes) -> None:
    with contextlib.suppress(ExtractError):
        read("models-data-extractor", form % noise, SERVED_MODELS)


POOL = b"""\
# TYPE llm_d_epp_average_kv_cache_utilization gauge
llm_d_epp_average_kv_cache_utilization{name="epp"} 0.25
# TYPE llm_d_epp_average_queue_size gauge
llm_d_epp_average_queue_size{name="epp"} 4.5
"""
BOTH = (CLUSTER_KV_USAGE, CLUSTER_QUEUE)


def test_a_cluster_reports_the_averages_of_its_pool() -> None:
    assert read("multicluster-metrics-extractor", POOL, *BOTH) == Extracted((0.25, 4.5), 3, {})


def test_a_missing_average_leaves_the_other_one() -> None:
    assert read("multicluster-metrics-extractor", b"llm_d_epp_average_queue_size 2\n", *BOTH) == Extracted((0.0, 2.0), 2, {})


def test_an_average_that_is_no_number_leaves_the_other_one_and_is_named() -> None:
    found = read("multicluster-metrics-extractor", POOL.replace(b" 4.5", b" NaN"), *BOTH)
    assert (found.values, found.present) == ((0.25, 0.0), 1)
    assert list(found.problems.values()) == ["llm_d_epp_average_queue_size: nan is not a number of 0 or more"]


def test_averages_of_several_pools_become_their_mean() -> None:
    page = b'llm_d_epp_average_queue_size{name="a"} 2\nllm_d_epp_average_queue_size{name="b"} 6\n'
    assert read("multicluster-metrics-extractor", page, *BOTH).values == (0.0, 4.0)


def test_the_metrics_may_have_other_names() -> None:
    page = b'kv{pool="a"} 0.9\nkv{pool="b"} 0.5\nqueue 1\n'
    names = {"kvCacheUtilizationMetric": "kv{pool=b}", "queueSizeMetric": "queue"}
    assert read("multicluster-metrics-extractor", page, *BOTH, **names).values == (0.5, 1.0)


@pytest.mark.parametrize("page", [b"", b"up 1\n", b"llm_d_epp_average_queue_size -1\n", POOL + b"x", POOL * 0 + b"\n"])
def test_a_page_without_both_averages_is_rejected(page: bytes) -> None:
    with pytest.raises(ExtractError):
        read("multicluster-metrics-extractor", page, *BOTH)


def test_a_wrong_name_of_a_metric_names_its_parameter() -> None:
    with pytest.raises(ValueError, match=r"^queueSizeMetric: "):
        made("multicluster-metrics-extractor", queueSizeMetric="{a=b}")


def clusters(queue: list[float], usage: list[float], known: list[bool] | None = None) -> Candidates:
    return candidates({CLUSTER_QUEUE.name: queue, CLUSTER_KV_USAGE.name: usage}, known=known, fresh=known)


NONE = float("nan")


def test_the_cluster_with_the_shortest_average_queue_scores_one() -> None:
    """(10 - q) / (10 - 2)."""
    assert score(made("multicluster-queue-scorer"), clusters([2, 10, 4], [0, 0, 0])) == [1.0, 0.0, 0.75]


@pytest.mark.parametrize(("queue", "expected"), [([3, 3], [1, 1]), ([5, NONE], [1, 0]), ([NONE, NONE], [0, 0]), ([2, NONE, 4], [1, 0, 0])])
def test_clusters_with_equal_queues_score_one_and_silent_ones_nothing(queue: list[float], expected: list[float]) -> None:
    assert score(made("multicluster-queue-scorer"), clusters(queue, [0.0] * len(queue))) == expected


def test_the_free_share_of_the_cache_is_the_score() -> None:
    scorer = made("multicluster-kv-cache-utilization-scorer")
    assert score(scorer, clusters([0, 0, 0], [0.25, 1.5, NONE])) == [0.75, 0.0, 0.0]
    assert score(scorer, clusters([0, 0], [0.5, 0.5], known=[True, False])) == [0.5, 0.0]


@pytest.mark.parametrize("type_name", ["multicluster-queue-scorer", "multicluster-kv-cache-utilization-scorer"])
def test_a_pool_that_was_never_scraped_scores_nothing(type_name: str) -> None:
    assert score(made(type_name), candidates({"waiting_requests": [0, 0]})) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("metrics-data-source", ("http", "/metrics", None, True, False)),
        ("dcgm-data-source", ("http", "/metrics", 9400, True, False)),
        ("models-data-source", ("http", "/v1/models", None, True, False)),
        ("multicluster-metrics-data-source", ("https", "/metrics", None, False, False)),
    ],
)
def test_the_defaults_of_sources_are_those_of_the_reference(type_name: str, expected: tuple[object, ...]) -> None:
    source = made(type_name)
    assert (source.scheme, source.path, source.port, source.insecure_skip_verify, source.at_node) == expected


def test_a_source_keeps_its_own_parameters() -> None:
    source = made("dcgm-data-source", useNodeAddress=True, interval="2s", port=9401)
    assert (source.at_node, source.interval_s, source.port) == (True, 2.0, 9401)
    assert msgspec.structs.asdict(source.params)["use_node_address"]
    with pytest.raises(ValueError, match="clientCertPath and clientKeyPath go together"):
        made("models-data-source", clientCertPath="c.pem")
    with pytest.raises(msgspec.ValidationError):
        made("dcgm-data-source", caCertPath="x")


def test_only_sources_of_load_say_which_endpoints_are_healthy() -> None:
    healthy = {name for name, cls in registry.known().items() if getattr(cls, "shows_health", False)}
    assert healthy == {"metrics-data-source", "multicluster-metrics-data-source"}
