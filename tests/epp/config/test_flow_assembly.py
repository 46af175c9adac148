"""The section `flowControl`: defaults, policies by name, suitable queues and warnings."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.config import yaml_nodes
from epp.config.effective import duration
from epp.config.flow_assembly import BANDS_MAX
from epp.config.load import ConfigErrors, EffectiveConfig, load
from epp.flow.plan import FlowPlan
from epp.quantities import parse_duration
from tests.examples import examples

FAIR = "fairnessPolicyRef: round-robin-fairness-policy"
LISTED = "plugins: [{type: round-robin-fairness-policy}, {type: edf-ordering-policy}]\n"


def config(section: str, before: str = "") -> EffectiveConfig:
    return load(f"featureGates: [flowControl]\n{before}flowControl: {{{section}}}\n", "c.yaml")


def plan(section: str = "", before: str = "") -> FlowPlan:
    flow = config(section, before).flow
    assert flow is not None
    return flow


def test_without_the_gate_there_is_no_plan_but_a_detector_for_sheddable_requests() -> None:
    loaded = load("plugins: []", "c.yaml")
    assert loaded.flow is None
    assert loaded.saturation is not None
    assert loaded.saturation.name == "utilization-detector"
    assert "utilization-detector" not in loaded.pipeline.plugins


def test_a_gate_without_a_section_has_the_defaults_of_the_reference() -> None:
    made = plan()
    assert made.bands == ()
    assert (made.max_requests, made.max_bytes) == (0, 0)
    assert (made.request_ttl_s, made.no_endpoint_ttl_s) == (60.0, 60.0)
    assert (made.template.max_requests, made.template.max_bytes) == (5000, 1_000_000_000)
    assert made.template.request_ttl_s is None
    names = {made.detector.name, made.usage_limits.name, made.template.ordering.name, made.template.fairness.name}
    assert names == {
        "utilization-detector", "static-usage-limit-policy", "fcfs-ordering-policy", "global-strict-fairness-policy",
    }  # fmt: skip
    assert list(made.priorities()) == [0]
    assert not made.eviction


def test_a_ttl_of_0s_is_infinite_and_the_ttl_without_endpoints_defaults_to_the_other_one() -> None:
    assert plan("defaultRequestTTL: 0s").no_endpoint_ttl_s == math.inf
    assert plan("defaultRequestTTL: 5s").no_endpoint_ttl_s == 5.0
    made = plan("noEndpointRequestTTL: 7s, priorityBands: [{priority: 1, defaultRequestTTL: 0s}]")
    assert (made.request_ttl_s, made.no_endpoint_ttl_s) == (60.0, 7.0)
    assert made.band(1).request_ttl_s == math.inf


@pytest.mark.parametrize(
    ("of_all", "of_band", "expected"),
    [
        ("30s", "5s", 5.0), ("30s", "300s", 30.0), ("30s", "0s", 30.0), ("0s", "300s", 300.0), ("0s", "0s", math.inf),
        (None, "300s", 300.0), (None, "5s", 5.0), (None, "0s", math.inf), ("30s", None, None), (None, None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["priorityBands: [{priority: 1, %s}]", "defaultPriorityBand: {%s}"])
def test_a_bands_ttl_is_bounded_by_a_global_one_that_is_given(
    of_all: str | None, of_band: str | None, expected: float | None, where: str
) -> None:
    given = [where % ("maxRequests: 7" if of_band is None else f"defaultRequestTTL: {of_band}")]
    loaded = config(", ".join([*given, *([] if of_all is None else [f"defaultRequestTTL: {of_all}"])]))
    for flow in (loaded.flow, load(loaded.as_yaml(), "effective.yaml").flow):
        assert flow is not None
        assert flow.band(1).request_ttl_s == expected
        assert duration(flow.request_ttl_s) == (of_all or "60s")


def test_bands_that_are_not_configured_are_made_from_the_templates() -> None:
    made = plan(
        "defaultPriorityBand: {maxRequests: 7}, defaultNegativePriorityBand: {maxRequests: 3}, "
        "priorityBands: [{priority: 5, maxRequests: 1}]"
    )
    assert [made.band(p).max_requests for p in (5, 4, 0, -1)] == [1, 7, 7, 3]
    assert plan("defaultPriorityBand: {maxRequests: 7}").band(-1).max_requests == 7


def test_a_limit_of_0_is_the_default_in_a_band_and_no_limit_over_all_bands() -> None:
    made = plan("maxRequests: 0, maxBytes: 0, defaultPriorityBand: {maxRequests: 0, maxBytes: 0}")
    assert (made.max_requests, made.max_bytes) == (0, 0)
    assert (made.template.max_requests, made.template.max_bytes) == (5000, 1_000_000_000)


def test_each_band_gets_the_first_queue_that_can_do_what_its_policies_need() -> None:
    made = plan(f"defaultPriorityBand: {{{FAIR}, orderingPolicyRef: edf-ordering-policy}}, "
                f"priorityBands: [{{priority: 1, {FAIR}}}]", LISTED)  # fmt: skip
    assert made.template.queue.name == "priority-queue"
    assert made.band(1).queue.name == "fifo-queue"


def test_one_instance_of_a_policy_serves_all_bands() -> None:
    made = plan(f"defaultPriorityBand: {{{FAIR}}}, priorityBands: [{{priority: 1, {FAIR}}}]", LISTED)
    assert made.template.fairness is made.band(1).fairness


def test_eviction_gets_its_filter_and_order_without_a_flag() -> None:
    made = plan("enableEviction: true")
    assert made.eviction_filter is not None
    assert made.eviction_order is not None


def test_a_band_without_a_fairness_policy_gets_a_warning() -> None:
    (warning,) = (w for w in config("").warnings if w.rule == "no-isolation")
    assert "global-strict-fairness-policy does not isolate flows" in warning.message
    assert "list token-weighted-fairness-policy" in warning.hint


def test_the_warning_names_the_policy_of_the_band_that_names_none() -> None:
    (warning,) = (w for w in config(f"priorityBands: [{{priority: 0, {FAIR}}}]", LISTED).warnings if w.rule == "no-isolation")
    assert "defaultPriorityBand: no fairnessPolicyRef is given, and global-strict-fairness-policy" in warning.message


@pytest.mark.parametrize(
    "section", [f"defaultPriorityBand: {{{FAIR}}}", "defaultPriorityBand: {fairnessPolicyRef: global-strict-fairness-policy}"]
)
def test_a_band_that_names_a_fairness_policy_gets_no_warning(section: str) -> None:
    assert not [w for w in config(section, LISTED).warnings if w.rule == "no-isolation"]


@pytest.mark.parametrize("band", ["fairnessPolicyRef: missing", "orderingPolicyRef: edf-ordering-policy, queueRef: fifo-queue"])
def test_with_an_error_in_the_section_no_policy_counts_as_unused(band: str) -> None:
    with pytest.raises(ConfigErrors) as raised:
        config(f"defaultPriorityBand: {{{band}}}, priorityBands: [{{priority: 1, {FAIR}}}]", LISTED)
    assert not [w for w in raised.value.warnings if w.rule == "unused-plugin"]


def test_policies_without_the_gate_are_dropped_with_a_warning() -> None:
    loaded = load(LISTED, "c.yaml")
    assert [w.rule for w in loaded.warnings if "policy" in w.message] == ["unused-plugin", "unused-plugin"]
    assert "round-robin-fairness-policy" not in loaded.pipeline.plugins


def test_more_bands_than_the_areas_have_places_for_are_refused() -> None:
    bands = ", ".join(f"{{priority: {p}}}" for p in range(1, BANDS_MAX + 1))
    with pytest.raises(ConfigErrors, match="too-many-bands"):
        config(f"priorityBands: [{bands}]")


@pytest.mark.parametrize(("limits", "warnings"), [("", 1), ("maxRequests: 0, ", 1), ("maxBytes: 1G, ", 0)])
def test_a_displacement_policy_without_a_limit_over_all_bands_gets_a_warning(limits: str, warnings: int) -> None:
    band = f"defaultPriorityBand: {{{FAIR}, displacementPolicyRef: largest-displacement-policy}}"
    loaded = config(limits + band, LISTED.replace("]", ", {type: largest-displacement-policy}]"))
    found = [w for w in loaded.warnings if w.rule == "no-effect" and "displacementPolicyRef" in w.message]
    assert len(found) == warnings


def test_a_staleness_below_the_scrape_interval_gets_a_warning() -> None:
    before = "plugins: [{type: utilization-detector, parameters: {metricsStalenessThreshold: 20ms}}]\n"
    assert "staleness-below-interval" in {w.rule for w in config("", before).warnings}


@given(st.floats(0.001, 1e6, allow_nan=False))
def test_a_written_duration_is_read_back_unchanged(seconds: float) -> None:
    assert math.isclose(parse_duration(duration(seconds)), seconds, rel_tol=1e-6, abs_tol=1e-9)


BANDS = st.fixed_dictionaries(
    {},
    optional={
        "maxRequests": st.integers(0, 10_000),
        "maxBytes": st.sampled_from(["1Gi", 0, "500M"]),
        "defaultRequestTTL": st.sampled_from(["0s", "1m30s", "250ms"]),
        "fairnessPolicyRef": st.sampled_from(["round-robin-fairness-policy", "global-strict-fairness-policy"]),
        "orderingPolicyRef": st.sampled_from(["fcfs-ordering-policy", "edf-ordering-policy"]),
        "queueRef": st.just("priority-queue"),
        "displacementPolicyRef": st.just("newest-displacement-policy"),
    },
)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "maxBytes": st.sampled_from(["2Gi", 0]),
            "maxRequests": st.integers(0, 100_000),
            "defaultRequestTTL": st.sampled_from(["0s", "5s"]),
            "noEndpointRequestTTL": st.sampled_from(["0s", "2m"]),
            "defaultPriorityBand": BANDS,
            "defaultNegativePriorityBand": BANDS,
            "enableEviction": st.booleans(),
        },
    ),
    st.dictionaries(st.integers(-(2**31), 2**31 - 1), BANDS, max_size=4),
)
@examples(60)
def test_the_effective_section_loads_to_the_same_plan_without_warnings(section: Any, bands: Any) -> None:
    document = {
        "featureGates": ["flowControl"],
        "plugins": [{"type": "round-robin-fairness-policy"}, {"type": "edf-ordering-policy"}],
        "flowControl": {**section, "priorityBands": [{"priority": p, **band} for p, band in bands.items()]},
    }
    first = load(yaml_nodes.dump(document), "c.yaml")
    again = load(first.as_yaml(), "again.yaml")
    assert again.as_yaml() == first.as_yaml()
    assert not {w.rule for w in again.warnings} & {"no-isolation", "unused-plugin"}
    assert again.flow is not None
    assert first.flow is not None
    for p in (*bands, 0, 3, -3):
        ours, theirs = first.flow.band(p), again.flow.band(p)
        assert (ours.max_requests, ours.max_bytes, ours.request_ttl_s) == (
            theirs.max_requests, theirs.max_bytes, theirs.request_ttl_s,
        )  # fmt: skip
        assert (ours.queue.name, ours.ordering.name, ours.fairness.name) == (
            theirs.queue.name, theirs.ordering.name, theirs.fairness.name,
        )  # fmt: skip
