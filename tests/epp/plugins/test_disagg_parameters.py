"""Parameters of disaggregated serving, the deprecated handlers, and what a configuration adds or refuses."""

import re
from typing import Any

import pytest

from epp.config.findings import ConfigErrors
from epp.config.load import load
from epp.plugin import PreRequest
from epp.plugins.profiles.disagg_headers import DisaggregationHeaders
from epp.prefix.match import APPROXIMATE
from tests.epp.plugins.stages import PREFILLER, Bench, Fixed, handler, pd, servers

FLAT = {
    "decodeProfile": "d", "prefillProfile": "p", "encodeProfile": "e",
    "prefillDeciderPluginName": "x", "encodeDeciderPluginName": "y",
}  # fmt: skip


def test_the_flat_parameters_mean_the_same_as_the_nested_ones_and_are_reported_as_deprecated() -> None:
    flat = handler(**FLAT, deciderPluginName="ignored")
    nested = handler(profiles={"decode": "d", "prefill": "p", "encode": "e"}, deciders={"prefill": "x", "encode": "y"})
    for made in (flat, nested):
        assert (made.decode, made.prefill, made.encode) == ("d", "p", "e")
        assert {stage: need.name for stage, need in made.needs.items()} == {"prefill": "x", "encode": "y"}
    assert nested.deprecated == {}
    assert flat.deprecated == {
        "decodeProfile": "profiles.decode",
        "encodeDeciderPluginName": "deciders.encode",
        "encodeProfile": "profiles.encode",
        "prefillDeciderPluginName": "deciders.prefill",
        "prefillProfile": "profiles.prefill",
    }
    assert handler(deciderPluginName="z").needs["prefill"].name == "z"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"profiles": {}, "decodeProfile": "d"}, "decodeProfile: the deprecated flat parameters and the nested"),
        ({"deciders": {"prefill": "p"}, "encodeProfile": "e"}, "encodeProfile: the deprecated flat"),
        ({"stageOrder": "sideways"}, "stageOrder: 'sideways' is neither decode-first nor prefill-first"),
        ({"stageOrder": "prefill", "deciders": {"prefill": "p"}}, "deciders.prefill: with stageOrder prefill-first"),
        ({"stageOrder": "prefill", "deciderPluginName": "p"}, "deciderPluginName: with stageOrder prefill-first"),
    ],
)
def test_contradictory_parameters_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        handler(**params)


def test_stages_that_cannot_run_are_reported_at_start() -> None:
    assert handler().check(["prefill"]) is not None
    assert handler(profiles={"prefill": "decode"}).check(["decode"]) is not None
    made = handler(deciders={"prefill": "p"})
    assert made.check(["decode", "encode", "other"]) is None
    assert made.idle(["decode", "encode", "other"]) == ["disagg has no prefill stage: there is no profile 'prefill' (profiles.prefill)"]
    assert made.reaches(["decode", "encode", "other"]) == ["decode"]
    prefills = handler(stageOrder="prefill-first")
    for one in (made, prefills):
        assert one.idle(["decode", "prefill"]) == []
        assert one.reaches(["encode", "decode", "prefill"]) == ["decode", "prefill"]
    assert len(prefills.idle(["decode"])) == 1


@pytest.mark.parametrize(("wanted", "kind"), [(True, "prefill-decode"), (False, "decode-only")])
def test_the_old_handler_decides_and_a_header_handler_sets_the_headers(wanted: bool, kind: str) -> None:
    headers = DisaggregationHeaders("h", DisaggregationHeaders.Params())
    bench = Bench(pd(), ("decode", "prefill"), headers, prefill=Fixed(wanted))
    decision = bench.decide(servers("prefill", "decode"))
    assert decision.targets[0].name == "pod-1"
    assert decision.headers == ({PREFILLER: "10.0.0.1:8000"} if wanted else {})
    assert bench.counted("pd_decision_total") == {("m", kind): 1}


def test_the_old_handler_alone_sets_no_headers() -> None:
    assert not isinstance(pd(), PreRequest)


def test_a_primary_port_replaces_the_port_of_the_decode_target_and_a_header_names_the_original() -> None:
    decision = Bench(pd(primaryPort=9000), ("decode", "prefill"), prefill=Fixed(True)).decide(servers("decode", "prefill"))
    assert decision.targets[0].address == "10.0.0.1:9000"
    assert decision.targets[0].slot == 0
    assert decision.headers == {"x-data-parallel-host-port": "10.0.0.1:8000"}
    assert decision.runs["prefill"].targets[0].address == "10.0.0.2:8000"  # type: ignore[union-attr]


def test_the_old_handler_needs_both_profiles_and_a_decider() -> None:
    assert pd().check(["decode", "prefill"]) is None
    assert "there is no 'prefill'" in (pd().check(["decode"]) or "")
    assert "both are the same" in (pd(prefillProfile="decode").check(["decode"]) or "")
    assert pd().needs["prefill"].name == "prefix-based-pd-decider"
    with pytest.raises(ValueError, match="deciderPluginName: is empty"):
        pd(deciderPluginName="")
    assert pd().reaches(["decode", "prefill", "x"]) == ["decode", "prefill"]


CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: prefill-filter
- type: decode-filter
- type: queue-scorer
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: %d}
- type: disagg-profile-handler
  parameters: %s
schedulingProfiles:
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}]}
"""


def test_the_prefix_producer_is_added_only_if_a_decider_reads_it() -> None:
    used = "{deciders: {prefill: prefix-based-pd-decider}}"
    assert APPROXIMATE in load(CONFIG % (16, used), "test").pipeline.plugins
    assert APPROXIMATE not in load(CONFIG % (0, used), "test").pipeline.plugins
    unused = load(CONFIG % (16, "{}"), "test")
    assert APPROXIMATE not in unused.pipeline.plugins
    assert any(warning.rule == "unreachable-profile" for warning in unused.warnings)


def test_deprecated_parameters_are_reported_with_their_line() -> None:
    warnings = load(CONFIG % (16, "{deciderPluginName: prefix-based-pd-decider}"), "test").warnings
    (warning,) = [w for w in warnings if w.rule == "deprecated"]
    line = 1 + next(n for n, text in enumerate(CONFIG.splitlines()) if text.startswith("  parameters: %s"))
    assert f"'deciderPluginName' of plugin 'disagg-profile-handler' (line {line}) is now 'deciders.prefill'" in warning.message


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("{deciders: {prefill: nothing}}", "references undefined plugin 'nothing'"),
        ("{deciders: {prefill: queue-scorer}}", "plugin 'queue-scorer' is a scorer, not a decider"),
        ("{profiles: {decode: d}}", "decodes with the profile 'd'"),
        ("{profiles: {decoed: d}}", "unknown field 'decoed'"),
        ("{onNoPrefill: retry}", "onNoPrefill"),
    ],
)
def test_an_error_in_the_configuration_stops_the_start(parameters: str, message: str) -> None:
    with pytest.raises(ConfigErrors) as errors:
        load(CONFIG % (16, parameters), "test")
    assert message in str(errors.value)
