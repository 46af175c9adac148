"""Declared metrics: bounds of label values, older names, and the names, labels and buckets that dashboards expect."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.metrics import NO_FAIRNESS_ID, OTHER, PREFIX, Group, Metric
from epp.metrics.catalogue import MODULES
from epp.metrics.computed import POOL_AVERAGES
from epp.metrics.label_caps import PINNED_MAX, LabelCaps
from epp.metrics.older_names import TWINS, older_name
from epp.metrics.request_series import (
    ATTEMPTS,
    BETWEEN_CHUNKS,
    CACHED_TOKENS,
    DURATION,
    ERROR,
    GROUPS,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    PER_OUTPUT_TOKEN,
    REQUEST,
    REQUEST_BYTES,
    REQUEST_FIGURES,
    RESPONSE_BYTES,
    STREAMING_PER_TOKEN,
    TTFT_STREAMING,
    TTFT_WHOLE,
)
from epp.request import DEFAULT_FLOW
from tests.cases import cases

DECLARED = {
    metric.name: metric
    for module in MODULES
    for value in vars(module).values()
    for metric in ([value] if isinstance(value, Metric) else value if isinstance(value, tuple) else ())
    if isinstance(metric, Metric)
} | {
    member.name: member
    for group in GROUPS
    for member in (*group.gauges, *group.counters, *(histogram.metric for histogram in group.histograms))
}


def test_names_count_as_themselves_after_a_request_with_them_was_served() -> None:
    caps = LabelCaps()
    assert [caps.model("a"), caps.model("b"), caps.fairness_id("t")] == [OTHER] * 3
    caps.served("a", "b", "t")
    assert [caps.model("a"), caps.model("b"), caps.fairness_id("t")] == ["a", "b", "t"]
    assert [caps.model("t"), caps.fairness_id("a")] == [OTHER] * 2


def test_values_that_no_client_has_invented_count_as_themselves() -> None:
    caps = LabelCaps()
    assert [caps.model(""), caps.model(OTHER), caps.fairness_id("")] == ["", OTHER, ""]
    assert caps.fairness_id(NO_FAIRNESS_ID) == NO_FAIRNESS_ID == DEFAULT_FLOW


def test_the_last_names_that_were_served_are_known() -> None:
    caps = LabelCaps(names_max=2)
    for model in ("a", "b", "a", "c"):
        caps.served(model, model, model)
    assert [caps.model(name) for name in "abc"] == ["a", OTHER, "c"]
    assert [caps.fairness_id(name) for name in "abc"] == ["a", OTHER, "c"]


def test_a_tuple_is_folded_label_by_label() -> None:
    caps = LabelCaps()
    caps.served("a", "b", "gold")
    request, error, attempts = (caps.names(group.labels) for group in (REQUEST, ERROR, ATTEMPTS))
    assert request.fold(("a", "b", "gold", "7")) == ("a", "b", "gold", "7")
    assert error.fold(("c", "a", "silver", "-1", "Internal")) == (OTHER, "a", OTHER, "-1", "Internal")
    assert attempts.fold(("success", "c", "pod", "ns", "80")) == ("success", OTHER, "pod", "ns", "80")


def test_without_room_a_tuple_counts_without_its_fairness_id() -> None:
    names = LabelCaps().names(REQUEST.labels)
    assert names.coarse(("a", "b", "gold", "7")) == ("a", "b", OTHER, "7")
    for plain in ("", OTHER, NO_FAIRNESS_ID):
        assert names.coarse(("a", "b", plain, "7")) == ("a", "b", plain, "7")
    assert LabelCaps().names(ATTEMPTS.labels).coarse(("success", "a", "pod", "ns", "80"))[1] == "a"


def test_a_successor_knows_the_names_of_its_predecessors_series() -> None:
    caps = LabelCaps()
    caps.names(ERROR.labels).recall(("a", "b", "gold", "0", "Internal"))
    assert [caps.model("a"), caps.model("b"), caps.fairness_id("gold"), caps.model("Internal")] == ["a", "b", "gold", OTHER]


@given(st.lists(st.text(max_size=3), max_size=40), st.integers(1, 5))
def test_no_more_names_are_known_than_the_limit(values: list[str], limit: int) -> None:
    caps = LabelCaps(limit)
    for value in values:
        caps.served(value, value, value)
    assert len({caps.model(value) for value in values} - {"", OTHER}) <= limit
    assert len({caps.fairness_id(value) for value in values} - {"", OTHER}) <= limit


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_labels_and_histogram_keys_of_a_group_are_unique(group: Group) -> None:
    assert len(set(group.labels)) == len(group.labels)
    keys = [histogram.key for histogram in group.histograms]
    assert len(set(keys)) == len(keys)


def test_the_indices_of_request_histograms_match_the_group() -> None:
    names = {
        DURATION: "request_duration_seconds",
        REQUEST_BYTES: "request_size_bytes",
        RESPONSE_BYTES: "response_size_bytes",
        INPUT_TOKENS: "request_input_tokens",
        OUTPUT_TOKENS: "request_output_tokens",
        CACHED_TOKENS: "request_cached_tokens",
        PER_OUTPUT_TOKEN: "request_ntpot_seconds",
        TTFT_STREAMING: "request_ttft_seconds@true",
        TTFT_WHOLE: "request_ttft_seconds@false",
        STREAMING_PER_TOKEN: "request_streaming_tpot_seconds",
        BETWEEN_CHUNKS: "request_streaming_itl_seconds",
    }
    assert names == dict(enumerate(histogram.key for histogram in REQUEST_FIGURES.histograms))


@cases(
    ("name", "count", "some"),
    [
        ("request_duration_seconds", 35, (0.005, 1.25, 3600.0)),
        ("request_ttft_seconds", 24, (0.005, 0.2, 120.0)),
        ("request_streaming_tpot_seconds", 19, (0.00205, 0.125, 2.0)),
        ("request_streaming_itl_seconds", 15, (0.001, 0.75, 2.0)),
        ("request_ntpot_seconds", 13, (0.001, 10.0)),
        ("request_size_bytes", 25, (64.0, 1073741824.0)),
        ("response_size_bytes", 15, (1.0, 8.0, 32778.0, 65536.0)),
        ("request_input_tokens", 19, (1.0, 32778.0, 1048576.0)),
        ("request_cached_tokens", 19, (1.0, 32778.0, 1048576.0)),
        ("request_output_tokens", 12, (1.0, 8.0, 8192.0)),
        ("plugin_duration_seconds", 10, (0.0001, 0.1)),
        ("extproc_stream_duration_seconds", 14, (0.001, 600.0)),
    ],
)
def test_buckets_are_those_of_the_reference_picker(name: str, count: int, some: tuple[float, ...]) -> None:
    buckets = DECLARED[name].buckets
    assert len(buckets) == count
    assert set(some) <= set(buckets)
    assert list(buckets) == sorted(set(buckets))


def test_each_metric_has_a_help_text_and_a_name_that_fits_its_kind() -> None:
    for name, metric in DECLARED.items():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert metric.help
        assert name.endswith("_total") == (metric.kind == "counter")
        assert bool(metric.buckets) == (metric.kind == "histogram")


def test_pinned_models_are_always_known() -> None:
    caps = LabelCaps(names_max=1)
    caps.pin(["ours", "mine"])
    caps.served("theirs", "late", "t")
    assert [caps.model(name) for name in ("ours", "theirs", "late", "mine")] == ["ours", OTHER, "late", "mine"]
    caps.pin(f"m{n}" for n in range(2 * PINNED_MAX))
    assert caps.model("m0") == "m0" and caps.model(f"m{2 * PINNED_MAX - 1}") == OTHER


def test_twins_are_older_names_of_declared_metrics() -> None:
    of_plugins = {"prefix_indexer_hit_ratio", "prefix_indexer_hit_bytes", "disagg_decision_total", "pd_decision_total"}
    averages = {metric.name for metric in POOL_AVERAGES.values()}
    assert set(TWINS) <= set(DECLARED) | of_plugins | averages
    prefixes = ("inference_objective_", "inference_pool_", "inference_extension_", "llm_d_inference_scheduler_", "leader_election_", "epp_")
    assert all(twin.name.startswith(prefixes) for twin in TWINS.values())
    assert len({twin.name for twin in TWINS.values()}) == len(TWINS)
    assert TWINS["request_size_bytes"].name == "inference_objective_request_sizes"
    assert older_name(REQUEST.counters[0]) == f"Older name of {PREFIX}request_total."


def test_a_twin_finds_its_labels_among_the_new_names() -> None:
    assert TWINS["request_total"].places(REQUEST.labels) == (0, 1, 3)
    assert TWINS["request_error_total"].places(ERROR.labels) == (0, 1, 4)
    assert TWINS["request_running"].places(REQUEST.labels) == (0,)
    attempts = TWINS["scheduler_attempts_total"]
    assert attempts.labels[2] == "pod_name"
    assert attempts.places(ATTEMPTS.labels) == (0, 1, 2, 3, 4)
    for group in GROUPS:
        for member in (*group.gauges, *group.counters, *(h.metric for h in group.histograms)):
            if member.name in TWINS:
                TWINS[member.name].places(group.labels)
