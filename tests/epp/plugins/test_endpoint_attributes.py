"""endpoint-attribute-scorer and endpoint-attribute-filter."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config.load import ConfigErrors, EffectiveConfig, load
from epp.data import KV_USAGE, RUNNING, WAITING, Column
from tests.cases import cases
from tests.epp.plugins.calls import kept, made, only, permuted, score
from tests.fakes import candidates

NAN = float("nan")
LOWER, HIGHER = "linear_lower_is_better", "linear_higher_is_better"


def scorer(type: str = LOWER, attribute: str = "power", **normalization: Any) -> Any:
    algorithm = {"type": type, "normalization": normalization}
    return made("endpoint-attribute-scorer", attributeKey=attribute, algorithm=algorithm)


def threshold(operator: str = "LessThan", value: float = 10, attribute: str = "power", **more: Any) -> Any:
    algorithm = {"type": "threshold", "threshold": {"operator": operator, "value": value}}
    return made("endpoint-attribute-filter", attribute=attribute, algorithm=algorithm, **more)


@cases(
    ("one", "values", "expected"),
    [
        # adaptive: (x - 10) / (30 - 10), and 1 - that
        (scorer(HIGHER), [10, 15, 30], [0.0, 0.25, 1.0]),
        (scorer(LOWER), [10, 15, 30], [1.0, 0.75, 0.0]),
        (scorer(LOWER, adaptiveRange={}), [10, 15, 30], [1.0, 0.75, 0.0]),
        (scorer(HIGHER), [-4, -4], [1.0, 1.0]),
        (scorer(HIGHER), [-1.7e308, 0, 1.7e308], [0.0, 0.5, 1.0]),
        (scorer(LOWER), [7], [1.0]),
        # missing: scores 0 and does not affect the range
        (scorer(LOWER), [10, NAN, 30], [1.0, 0.0, 0.0]),
        (scorer(LOWER), [10, NAN, 10], [1.0, 0.0, 1.0]),
        (scorer(HIGHER), [NAN, NAN], [0.0, 0.0]),
        # fixed: (x + 10) / 20, clipped to [0, 1]
        (scorer(HIGHER, fixedRange={"min": -10, "max": 10}), [-10, -5, 0, 10, 99, -99], [0, 0.25, 0.5, 1, 1, 0]),
        (scorer(LOWER, fixedRange={"min": -10, "max": 10}), [-10, -5, 0, 10, 99, -99], [1, 0.75, 0.5, 0, 0, 1]),
        (scorer(LOWER, fixedRange={"max": 10}), [NAN, 5], [0, 0.5]),
    ],
)
def test_a_value_scores_by_its_position_in_the_range(one: Any, values: list[float], expected: list[float]) -> None:
    assert score(one, candidates({"power": values})) == expected


@pytest.mark.parametrize("better", [LOWER, HIGHER])
def test_a_stale_endpoint_scores_as_the_worst_fresh_one_and_an_unknown_one_as_missing(better: str) -> None:
    c = candidates({"power": [0, 50, 100, 3]}, fresh=[True, True, False, False], known=[True, True, True, False])
    fresh = {LOWER: [1.0, 0.0], HIGHER: [0.0, 1.0]}[better]
    assert score(scorer(better), c) == [*fresh, 0.0, 0.0]
    # fixed: 0.2 and 0.7 of the range; then the worse of both, and missing
    ranged = score(scorer(better, fixedRange={"min": -20, "max": 80}), c)
    assert ranged[2:] == [min(ranged[:2]), 0.0]


def test_while_no_endpoint_is_fresh_all_that_reported_score_the_same() -> None:
    c = candidates({"power": [1, 2, NAN]}, fresh=[False] * 3)
    assert score(scorer(), c) == [1.0, 1.0, 0.0]


def test_an_attribute_without_a_column_is_missing_everywhere() -> None:
    c = candidates({"other": [1, 2]})
    assert score(scorer(), c) == [0.0, 0.0]
    assert kept(threshold(), c) == [0, 1]
    assert kept(threshold(onMissing="Fail"), c) == []


@pytest.mark.parametrize(
    ("operator", "rows"),
    [
        ("LessThan", [0]),
        ("LessThanOrEqual", [0, 1]),
        ("GreaterThan", [2]),
        ("GreaterThanOrEqual", [1, 2]),
        ("Equal", [1]),
        ("NotEqual", [0, 2]),
    ],
)
def test_endpoints_are_kept_if_the_comparison_is_true(operator: str, rows: list[int]) -> None:
    assert kept(threshold(operator), candidates({"power": [9, 10, 11]})) == rows


@pytest.mark.parametrize(
    ("more", "rows"), [({}, [0, 1]), ({"onMissing": ""}, [0, 1]), ({"onMissing": "Pass"}, [0, 1]), ({"onMissing": "Fail"}, [0])]
)
def test_missing_values_pass_or_fail_as_configured(more: dict[str, str], rows: list[int]) -> None:
    assert kept(threshold(**more), candidates({"power": [9, NAN, 11]})) == rows
    assert kept(threshold("GreaterThan", 0, **more), candidates({"power": [9, NAN]})) == rows


@pytest.mark.parametrize("on_missing", ["Pass", "Fail"])
def test_staleness_alone_drops_no_endpoint(on_missing: str) -> None:
    c = candidates({"power": [99, 99, 99]}, fresh=[True, False, False], known=[True, True, False])
    assert kept(threshold(onMissing=on_missing), c) == ([1, 2] if on_missing == "Pass" else [1])


def test_all_endpoints_stay_if_none_passes_and_the_fallback_is_configured() -> None:
    c = candidates({"power": [99, 99]})
    assert kept(threshold(), c) == []
    assert kept(threshold(fallbackOnEmpty=True), c) == [0, 1]
    assert kept(threshold(fallbackOnEmpty=True), candidates({"power": [99, 1]})) == [1]


def test_only_the_remaining_candidates_determine_scores_and_masks() -> None:
    c = only(candidates({"power": [0, 10, NAN, 30]}), 1, 2, 3)
    assert score(scorer(HIGHER), c) == [0.0, 0.0, 1.0]
    assert kept(threshold("Equal", 30, onMissing="Fail"), c) == [2]


@given(
    st.lists(st.tuples(st.one_of(st.floats(-1e12, 1e12), st.just(NAN)), st.booleans(), st.booleans()), min_size=1, max_size=10),
    st.sampled_from([LOWER, HIGHER]),
    st.sampled_from([{}, {"fixedRange": {"min": -5, "max": 5}}]),
    st.randoms(),
)
def test_scores_are_in_range_and_move_with_their_endpoints(
    rows: list[tuple[float, bool, bool]], better: str, normalization: dict[str, Any], rng: Any
) -> None:
    def scores(of: list[tuple[float, bool, bool]]) -> list[float]:
        values, fresh, known = zip(*of, strict=True)
        return score(scorer(better, **normalization), candidates({"power": values}, fresh=fresh, known=known))

    order = list(range(len(rows)))
    rng.shuffle(order)
    straight = scores(rows)
    assert all(0 <= s <= 1 for s in straight)
    assert scores(permuted(rows, order)) == permuted(straight, order)


# Which attribute, and which producer


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("WaitingQueueSize", WAITING),
        ("RunningRequestsSize", RUNNING),
        ("KVCacheUsagePercent", KV_USAGE),
        ("waiting_requests", WAITING),
        ("power", Column("power", float)),
    ],
)
def test_an_attribute_is_a_column_by_the_reference_name_or_by_ours(name: str, column: Column[Any]) -> None:
    assert scorer(attribute=name).consumes == (column,)
    assert threshold(attribute=name).consumes == (column,)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attributeKey": "ActiveModels"}, "^attributeKey: 'ActiveModels' is a set of names, not a number"),
        ({"attributeKey": "a/b"}, "^attributeKey: 'a/b' has a '/'.*'attributeKey: a' with 'producer: b'"),
        ({"attributeKey": ""}, "length >= 1"),
        ({"algorithm": {"type": "linear"}}, "Invalid enum value 'linear'"),
        ({"algorithm": {}}, "required field `type`"),
        (
            {"algorithm": {"type": LOWER, "normalization": {"fixedRange": {"min": 1, "max": 1}}}},
            "^algorithm.normalization.fixedRange: min 1 must be less than max 1",
        ),
        (
            {"algorithm": {"type": LOWER, "normalization": {"fixedRange": {"min": -1e308, "max": 1e308}}}},
            "^algorithm.normalization.fixedRange: min -1e.308 must be less than max 1e.308, by a finite difference",
        ),
        (
            {"algorithm": {"type": LOWER, "normalization": {"fixedRange": {"max": 1}, "adaptiveRange": {}}}},
            "^algorithm.normalization: has fixedRange and adaptiveRange",
        ),
    ],
)
def test_a_scorer_refuses_invalid_parameters(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made("endpoint-attribute-scorer", **{"attributeKey": "power", "algorithm": {"type": LOWER}} | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attribute": "a/b/c"}, "^attribute: 'a/b/c' has a '/'.*'attribute: a/b' with 'producer: c'"),
        ({"onMissing": "pass"}, "Invalid enum value 'pass'"),
        ({"algorithm": {"type": "topK"}}, "Invalid enum value 'topK'"),
        ({"algorithm": {"type": "threshold"}}, "required field `threshold`"),
        ({"algorithm": {"type": "threshold", "threshold": {"operator": "Less"}}}, "Invalid enum value 'Less'"),
    ],
)
def test_a_filter_refuses_invalid_parameters(changed: dict[str, Any], message: str) -> None:
    good = {"attribute": "power", "algorithm": {"type": "threshold", "threshold": {"operator": "Equal"}}}
    with pytest.raises(ValueError, match=message):
        made("endpoint-attribute-filter", **good | changed)


CONFIG = """\
plugins:
- name: one
  type: endpoint-attribute-scorer
  parameters:
    attributeKey: {attribute}
    algorithm: {{type: linear_lower_is_better}}
    {producer}
- name: {extractor}
  type: core-metrics-extractor
  parameters:
    engineConfigs:
    - {{name: mine, customMetrics: [{{attributeKey: gpu_power, metricSpec: w}}, {{attributeKey: a/b, metricSpec: v}}]}}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: one}}]}}]
dataLayer:
  sources: [{{pluginRef: metrics-data-source, extractors: [{{pluginRef: {extractor}}}]}}]
"""


def configured(attribute: str, producer: str = "", extractor: str = "core-metrics-extractor") -> EffectiveConfig:
    text = CONFIG.format(attribute=attribute, producer=producer, extractor=extractor)
    text = text.replace("schedulingProfiles", "- type: metrics-data-source\nschedulingProfiles")
    return load(text, "c.yaml", allow_experimental=True)


@pytest.mark.parametrize(
    ("attribute", "producer", "extractor", "column"),
    [
        ("WaitingQueueSize", "", "core-metrics-extractor", "waiting_requests"),
        ("gpu_power", "", "core-metrics-extractor", "gpu_power"),
        ("gpu_power", "producer: core-metrics-extractor", "core-metrics-extractor", "gpu_power"),
        ("gpu_power", "", "other", "gpu_power"),
        ("gpu_power", "producer: other", "other", "gpu_power"),
        ("KVCacheUsagePercent", "producer: other", "other", "kv_cache_usage"),
        ("a/b", "producer: ''", "core-metrics-extractor", "a/b"),
        ("a/b", "producer: core-metrics-extractor", "core-metrics-extractor", "a/b"),
    ],
)
def test_a_configured_attribute_finds_its_column(attribute: str, producer: str, extractor: str, column: str) -> None:
    config = configured(attribute, producer, extractor)
    assert [c.name for c in config.pipeline.columns] == [column]


@pytest.mark.parametrize(
    ("attribute", "producer", "extractor", "message"),
    [
        ("gpu_powr", "", "core-metrics-extractor", "(did you mean 'gpu_power'?)"),
        ("WaitingQueueSiz", "", "core-metrics-extractor", "(did you mean 'waiting_requests'?)"),
        ("zzz", "", "core-metrics-extractor", "(known: a/b, active_models, cache_block_size"),
        ("gpu_powr", "producer: other", "other", "reads 'gpu_powr/other', which no extractor of this configuration"),
        ("ActiveModels", "", "core-metrics-extractor", "c.yaml:5:5: error[bad-parameter]: plugin 'one': attributeKey:"),
        ("power", "producer: othr", "other", "c.yaml:7:5: error[unknown-ref]: parameters.producer of plugin 'one'"),
        ("power", "producer: othr", "other", "(did you mean 'other'?)"),
        ("power", "producer: one", "other", "plugin 'one' is a scorer, not an extractor"),
    ],
)
def test_an_unknown_attribute_or_producer_is_refused_with_the_nearest_name(
    attribute: str, producer: str, extractor: str, message: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        configured(attribute, producer, extractor)
    assert message in str(caught.value)
