import json
import re
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epp.config import DEFAULT_TEXT, ConfigErrors, EffectiveConfig, Surroundings, load
from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, INFLIGHT_TOKENS, KV_USAGE, WAITING
from epp.plugins.extractors.metrics_source import MetricsDataSource
from tests.epp.config_plugins import HERE

BENCH = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- name: endpoints
  type: file-discovery
  parameters: {path: endpoints.yaml, watchFile: true}
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
dataLayer:
  discovery: {pluginRef: endpoints}
"""


def ok(text: str, **flags: bool) -> EffectiveConfig:
    return load(dedent(text), "c.yaml", **flags)


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        ok(text)
    return [str(error) for error in caught.value.errors]


def warnings(text: str) -> list[str]:
    return [str(warning) for warning in ok(text).warnings]


def rules(text: str) -> set[str]:
    return {warning.rule for warning in ok(text).warnings}


# The reference's configurations


def test_a_configuration_of_the_deprecated_version_runs_with_the_defaults_of_the_field() -> None:
    config = ok(BENCH)
    pipeline = config.pipeline
    assert [warning.rule for warning in config.warnings] == ["deprecated-version", "prefix-outweighs-load"]
    assert config.discovery is not None
    assert config.discovery.name == "endpoints"
    assert pipeline.recipe.handler.name == "single-profile-handler"
    profile = pipeline.profiles["default"]
    assert sorted(w for _, w in (*profile.scorers, *profile.static_scorers)) == [2.0, 2.0, 3.0]
    assert profile.picker.name == "max-score-picker"
    assert {"openai-parser", "passthrough-parser"} <= {parser.name for parser in pipeline.recipe.parsers}
    assert pipeline.recipe.parsers[-1].name == "passthrough-parser"
    assert isinstance(config.sources[0].source, MetricsDataSource)
    assert config.extractor.name == "core-metrics-extractor"
    assert pipeline.columns == (CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, KV_USAGE, WAITING)
    assert "approx-prefix-cache-producer" in pipeline.plugins
    assert len(pipeline.producers) == 1


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "---\n", "null"])
def test_an_empty_file_is_the_built_in_default_configuration(text: str) -> None:
    config = load(text, "c.yaml")
    assert config.as_yaml() == load(DEFAULT_TEXT, "c.yaml").as_yaml()
    assert config.warnings == ()


def test_json_is_read_as_well() -> None:
    assert ok('{"plugins": [{"type": "queue-scorer"}]}').pipeline.profiles["default"].scorers


def test_without_profiles_all_filters_scorers_and_pickers_form_one() -> None:
    config = ok(f"plugins: [{{type: queue-scorer}}, {{type: 'random-picker'}}, {{type: '{HERE}:Plain'}}]")
    profile = config.pipeline.profiles["default"]
    assert (len(profile.scorers), len(profile.filters), profile.picker.name) == (1, 1, "random-picker")


def test_a_profile_without_picker_gets_one_that_is_configured() -> None:
    text = """\
        plugins: [{type: queue-scorer}, {type: weighted-random-picker, name: mine}]
        schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]
        """
    assert ok(text).pipeline.profiles["a"].picker.name == "mine"


def test_a_listed_data_source_keeps_its_parameters_and_is_not_added_again() -> None:
    text = """\
        plugins:
        - {type: metrics-data-source, name: mine, parameters: {path: /m}}
        - {type: core-metrics-extractor}
        - {type: queue-scorer}
        dataLayer: {sources: [{pluginRef: mine, extractors: [{pluginRef: core-metrics-extractor}]}]}
        """
    assert ok(text).sources[0].source.name == "mine"


def test_default_instances_that_exist_by_name_are_used_as_they_are() -> None:
    config = ok("plugins: [{type: metrics-data-source, parameters: {path: /m}}, {type: queue-scorer}]")
    assert config.sources[0].source.params.path == "/m"


def test_who_reads_tokens_in_flight_gets_the_producer_that_counts_them() -> None:
    config = ok(f"plugins: [{{type: '{HERE}:ReadsTokens'}}]")
    assert "inflight-load-producer" in config.pipeline.plugins
    assert config.pipeline.columns == (INFLIGHT_TOKENS,)


def test_producers_that_are_read_come_in_order_and_those_that_are_not_leave_with_a_warning() -> None:
    text = f"plugins: [{{type: '{HERE}:ReadsLength'}}, {{type: '{HERE}:MakesLength'}}]"
    assert len(ok(text).pipeline.producers) == 1
    text = f"plugins: [{{type: queue-scorer}}, {{name: idle, type: '{HERE}:MakesLength'}}]"
    config = ok(text)
    assert "idle" not in config.pipeline.plugins
    assert [w.rule for w in config.warnings] == ["unread-producer"]
    text = f"plugins: [{{type: queue-scorer}}, {{name: busy, type: '{HERE}:MakesLengthAndHooks'}}]"
    config = ok(text)
    assert "busy" in config.pipeline.plugins
    assert [w.rule for w in config.warnings] == ["unread-producer"]


def test_deprecated_fields_move_to_their_new_place_with_a_warning() -> None:
    text = f"""\
        plugins: [{{type: queue-scorer}}, {{type: '{HERE}:Detector', name: full}}]
        parser: {{pluginRef: passthrough-parser}}
        saturationDetector: {{pluginRef: full}}
        """
    config = ok(text)
    assert [w.rule for w in config.warnings] == ["deprecated-field", "deprecated-field"]
    assert [parser.name for parser in config.pipeline.recipe.parsers] == ["passthrough-parser"]
    assert config.document["flowControl"] == {"saturationDetector": {"pluginRef": "full"}}
    new = "requestHandler: {parsers: [{pluginRef: openai-parser}]}\n"
    assert [parser.name for parser in ok(dedent(text) + new).pipeline.recipe.parsers] == ["openai-parser"]


def test_gates_are_read_as_the_field_writes_them() -> None:
    config = ok("featureGates: [flowControl=F, haPopulateNonLeaderDatastore=TRUE]")
    assert config.gates == {"flowControl": False, "haPopulateNonLeaderDatastore": True}
    assert "removed-gate" in rules("featureGates: [dataLayer, prepareDataPlugins=true]")


def test_the_gate_of_standby_replicas_has_an_effect_with_leader_election_only() -> None:
    text = "featureGates: [haPopulateNonLeaderDatastore=0]"
    assert "no-effect" in rules(text)
    elected = load(text, "test", around=Surroundings(leader_election=True))
    assert not [warning for warning in elected.warnings if warning.rule == "no-effect"]
    assert elected.gates["haPopulateNonLeaderDatastore"] is False


def test_nulls_are_fields_that_are_not_given() -> None:
    text = """\
        featureGates:
        plugins:
        - {type: queue-scorer, name: null, parameters: null}
        - {type: max-score-picker, parameters: {maxNumOfEndpoints: null}}
        schedulingProfiles: null
        dataLayer: {sources: null, injectDefaults: null, discovery: null, peerDiscovery: null}
        flowControl: {maxBytes: null}
        requestHandler: null
        """
    assert warnings(text) == []


# Rules for what is not given, one test a rule


def test_a_missing_version_and_kind_are_the_current_ones() -> None:
    assert ok("plugins: [{type: queue-scorer}]").document["apiVersion"] == "llm-d.ai/v1alpha1"
    assert (
        ok("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]").warnings == ()
    )


def test_a_plugin_without_a_name_has_that_of_its_type() -> None:
    assert "queue-scorer" in ok("plugins: [{type: queue-scorer}]").pipeline.plugins


def test_one_type_may_be_given_several_times_under_different_names() -> None:
    config = ok("plugins: [{type: queue-scorer, name: a}, {type: queue-scorer, name: b}]")
    assert len(config.pipeline.profiles["default"].scorers) == 2


def test_one_profile_without_a_handler_gets_the_one_for_one_profile_and_shadows_do_not_count() -> None:
    text = """\
        plugins: [{type: queue-scorer}, {type: random-picker}]
        schedulingProfiles:
        - {name: a, plugins: [{pluginRef: queue-scorer}]}
        - {name: b, shadow: true, plugins: [{pluginRef: random-picker}]}
        - {name: c, shadow: true, plugins: [{pluginRef: queue-scorer, weight: 3}]}
        """
    config = ok(text)
    assert config.pipeline.recipe.handler.name == "single-profile-handler"
    assert list(config.pipeline.profiles) == ["a"]
    assert [shadow.name for shadow in config.pipeline.shadows] == ["b", "c"]
    assert [profile.get("shadow") for profile in config.document["schedulingProfiles"]] == [None, True, True]
    assert load(config.as_yaml(), "e.yaml").as_yaml() == config.as_yaml()


def test_a_profile_that_is_said_to_be_no_shadow_is_none() -> None:
    assert list(ok("schedulingProfiles: [{name: a, shadow: false}]").pipeline.profiles) == ["a"]


def test_shadows_alone_cannot_decide() -> None:
    (found,) = errors("schedulingProfiles: [{name: a, shadow: true}, {name: b, shadow: true}]")
    assert found.startswith("c.yaml:1:22: error[only-shadows]: all profiles are shadows")


def test_a_profile_handler_is_never_asked_about_shadows() -> None:
    shadow = "{name: c, shadow: true, plugins: [{pluginRef: random-picker}]}"
    text = (
        f"plugins: [{{type: random-picker}}, {{type: '{HERE}:OnlyFirst'}}]\nschedulingProfiles: [{{name: a}}, {shadow}]"
    )
    assert ok(text).pipeline.shadows
    assert "it was offered a shadow" in errors(text.replace("shadow: true, ", ""))[0]


def test_without_any_picker_the_best_score_is_taken() -> None:
    assert ok("plugins: [{type: queue-scorer}]").pipeline.profiles["default"].picker.name == "max-score-picker"


def test_a_scorer_without_a_weight_has_weight_1() -> None:
    text = "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]"
    assert [weight for _, weight in ok(text).pipeline.profiles["a"].scorers] == [1.0]


def test_filters_run_in_the_order_of_the_profile() -> None:
    text = """\
        plugins: [{type: decode-filter, name: a}, {type: prefill-filter, name: b}, {type: random-picker}]
        schedulingProfiles: [{name: p, plugins: [{pluginRef: b}, {pluginRef: a}, {pluginRef: random-picker}]}]
        """
    filters = ok(text).pipeline.profiles["p"].filters
    assert [call.__self__.name for call in filters] == ["b", "a"]  # type: ignore[attr-defined]


def test_a_parser_that_is_listed_by_its_type_alone_is_made() -> None:
    config = ok("requestHandler: {parsers: [{pluginRef: passthrough-parser}]}")
    assert [parser.name for parser in config.pipeline.recipe.parsers] == ["passthrough-parser"]


def test_without_parsers_those_of_the_field_are_taken_and_the_one_for_the_rest_comes_last() -> None:
    parsers = [parser.name for parser in ok("").pipeline.recipe.parsers]
    assert parsers[0] == "openai-parser"
    assert parsers[-1] == "passthrough-parser"


def test_the_default_data_source_is_added_unless_that_is_switched_off() -> None:
    assert ok("plugins: [{type: queue-scorer}]").sources[0].source.name == "metrics-data-source"
    assert "no-source" in errors("dataLayer: {injectDefaults: false}")[0]
    text = """\
        plugins: [{type: metrics-data-source, name: s}, {type: core-metrics-extractor, name: e}]
        dataLayer: {injectDefaults: false, sources: [{pluginRef: s, extractors: [{pluginRef: e}]}]}
        """
    assert ok(text).extractor.name == "e"


def test_default_producers_are_added_for_those_who_need_them() -> None:
    config = ok("plugins: [{type: prefix-cache-scorer}, {type: queue-scorer}]")
    assert "approx-prefix-cache-producer" in config.pipeline.plugins
    assert [plugin["type"] for plugin in config.document["plugins"]].count("approx-prefix-cache-producer") == 1


def test_a_default_that_is_experimental_needs_the_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.registry.EXPERIMENTAL_TYPES", frozenset(("max-score-picker",)))
    assert "plugin type 'max-score-picker' is experimental" in errors("plugins: [{type: queue-scorer}]")[0]
    assert ok("plugins: [{type: queue-scorer}]", allow_experimental=True)


def test_peer_discovery_that_nothing_uses_is_told_and_no_error() -> None:
    found = warnings("plugins: [{type: queue-scorer}]\ndataLayer: {peerDiscovery: {pluginRef: x}}")
    assert found == ["c.yaml:2:28: warning[no-effect]: dataLayer.peerDiscovery has no effect (remove it)"]


def naming(*pairs: tuple[str, str]) -> str:
    listed = ", ".join(
        f"{{type: '{HERE}:Naming', name: {name}, parameters: {{other: '{other}'}}}}" for name, other in pairs
    )
    return f"plugins: [{{type: queue-scorer}}, {listed}]"


def test_plugins_that_name_each_other_get_each_other_whatever_their_order() -> None:
    plugins = ok(naming(("a", "b"), ("b", "c"), ("c", ""))).pipeline.plugins
    assert plugins["a"].other is plugins["b"]  # type: ignore[attr-defined]
    assert plugins["b"].other is plugins["c"]  # type: ignore[attr-defined]


def test_plugins_that_name_each_other_in_a_circle_or_nobody_are_refused() -> None:
    (found,) = errors(naming(("a", "b"), ("b", "a"), ("c", "a")))
    assert found.startswith(
        "c.yaml:1:33: error[reference-cycle]: plugins name each other by their parameters, in a circle: 'a', 'b', 'c'"
    )
    assert "parameters.other of plugin 'a' references undefined plugin 'x'" in errors(naming(("a", "x")))[0]


def test_a_data_source_that_is_unknown_is_the_only_error() -> None:
    text = "plugins: [{type: queue-scorer}]\ndataLayer: {sources: [{pluginRef: metrics-data-source, extractors: []}]}"
    assert [re.findall(r"error\[(.*?)\]", line) for line in errors(text)] == [["unknown-ref"]]


# Errors


def test_all_errors_come_at_once_each_with_its_line_rule_and_hint() -> None:
    text = f"""\
        apiVersion: llm-d.ai/v1
        kind: EndpointPickerConf
        featuregates: []
        featureGates: [flowControl, flowcontrol, flowControl=maybe]
        plugins:
        - type: queue-scrorer
        - type: dcgm-extractor
        - name: unnamed
        - {{type: queue-scorer, name: twice}}
        - {{type: queue-scorer, name: twice}}
        - type: {HERE}:Strict
          name: strict
          parameters:
            filename: x
            retries: 0
            conditions:
            - {{maxValue: 2}}
            - {{maxvalue: 1}}
        schedulingProfiles:
        - name: a
          plugins:
          - pluginRef: twic
          - {{pluginRef: twice, weight: heavy}}
          - {{weight: 1}}
        - plugins: []
        dataLayer:
          discovery: {{pluginRef: twice}}
          peerDiscovery: {{pluginRef: x}}
          crossReplicaSyncerPluginRef: syncer
        flowControl:
          maxBytes: 1Gb
          defaultRequestTTL: -5s
          noEndpointRequestTTL: 5
        """
    assert errors(text) == [
        "c.yaml:1:13: error[api-version]: apiVersion 'llm-d.ai/v1' is not supported (did you mean 'llm-d.ai/v1alpha1'?)",
        "c.yaml:2:7: error[kind]: kind 'EndpointPickerConf' is not supported (did you mean 'EndpointPickerConfig'?)",
        "c.yaml:3:1: error[unknown-field]: the configuration: unknown field 'featuregates' (did you mean 'featureGates'?)",
        "c.yaml:4:29: error[feature-gate]: unknown feature gate 'flowcontrol' (did you mean 'flowControl'?)",
        "c.yaml:4:42: error[feature-gate]: feature gate 'flowControl': 'maybe' is neither true nor false",
        "c.yaml:6:9: error[unknown-type]: plugin type 'queue-scrorer' is not registered (did you mean 'queue-scorer'?)",
        "c.yaml:7:9: error[unavailable-type]: plugin type 'dcgm-extractor' of llm-d-router is not available in this version "
        "('epp plugins' lists those that are)",
        "c.yaml:8:3: error[missing-field]: plugins[2]: plugin 'unnamed' is missing a type",
        "c.yaml:10:30: error[duplicate-name]: duplicate plugin name 'twice' (first in line 9; give one of them another name)",
        "c.yaml:14:5: error[unknown-field]: parameters of plugin 'strict': unknown field 'filename' (did you mean 'fileName'?)",
        "c.yaml:14:5: error[missing-field]: parameters of plugin 'strict': 'fileName' is required",
        "c.yaml:15:5: error[bad-parameter]: parameters.retries of plugin 'strict': expected an integer >= 1, got the number 0",
        "c.yaml:17:8: error[bad-parameter]: parameters.conditions[].maxValue of plugin 'strict': expected a number <= 1.0, "
        "got the number 2",
        "c.yaml:18:7: error[missing-field]: parameters.conditions[] of plugin 'strict': 'maxValue' is required",
        "c.yaml:18:8: error[unknown-field]: parameters.conditions[] of plugin 'strict': unknown field 'maxvalue' "
        "(did you mean 'maxValue'?)",
        "c.yaml:22:16: error[unknown-ref]: profile 'a' references undefined plugin 'twic' (did you mean 'twice'?)",
        "c.yaml:23:32: error[wrong-type]: schedulingProfiles[0].plugins[1].weight: expected a number, got the text 'heavy'",
        "c.yaml:24:5: error[missing-field]: schedulingProfiles[0].plugins[2]: 'pluginRef' is required",
        "c.yaml:25:3: error[missing-field]: schedulingProfiles[1] is missing a name",
        "c.yaml:27:26: error[wrong-kind]: dataLayer.discovery: plugin 'twice' is a scorer, not a discovery plugin",
        "c.yaml:29:32: error[unsupported]: dataLayer.crossReplicaSyncerPluginRef is not supported by this version (remove it)",
        "c.yaml:31:13: error[bad-quantity]: flowControl.maxBytes: '1Gb' is not a quantity; write for example 1000, 500M or 1Gi",
        "c.yaml:32:22: error[bad-duration]: flowControl.defaultRequestTTL: '-5s' is negative; it is 0 or more",
        "c.yaml:33:25: error[wrong-type]: flowControl.noEndpointRequestTTL: expected a duration such as 200ms or 1m30s, "
        "got the number 5",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1, 2]", "c.yaml:1:1: error[wrong-type]: the configuration: expected a mapping, got a list"),
        ("plugins: queue-scorer", "c.yaml:1:10: error[wrong-type]: plugins: expected a list, got the text 'queue-scorer'"),
        ("plugins: [queue-scorer]", "c.yaml:1:11: error[wrong-type]: plugins[0]: expected a mapping, got the text 'queue-scorer'"),
        ("plugins: [null]", "c.yaml:1:11: error[missing-field]: plugins[0]: plugin is missing a type"),
        ("plugins: [{type: ''}]", "c.yaml:1:11: error[missing-field]: plugins[0]: plugin is missing a type"),
        (
            "plugins: [{type: queue-scorer, name: 5}]",
            "c.yaml:1:38: error[wrong-type]: plugins[0].name: expected text, got the number 5 (put it in quotes)",
        ),
        (
            "plugins: [{type: queue-scorer, name: yes}]",
            "c.yaml:1:38: error[wrong-type]: plugins[0].name: expected text, got the boolean true (put it in quotes)",
        ),
        ("a: 1\na: 2", "c.yaml:2:1: error[duplicate-key]: 'a' is given twice; first in line 1"),
        ("plugins: []\n---\nplugins: []", "c.yaml:2:1: error[one-document]: a configuration is one document (remove what follows '---')"),
        ("plugins: [", "c.yaml:2:1: error[yaml-syntax]: did not find expected node content"),
        (
            "schedulingProfiles: [{name: a}, {name: a}]",
            "c.yaml:1:40: error[duplicate-name]: duplicate profile name 'a'",
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [null]}]",
            "c.yaml:1:42: error[missing-field]: schedulingProfiles[0].plugins[0]: 'pluginRef' is required",
        ),
        (
            "schedulingProfiles: [{name: a}, {name: b}]",
            "c.yaml: error[no-handler]: no profile handler configured (several profiles need one; single-profile-handler runs one profile)",
        ),
        (
            "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "c.yaml:1:11: error[handler-profiles]: single-profile-handler runs one profile, but 2 are configured: a, b",
        ),
        (
            f"plugins: [{{type: single-profile-handler}}, {{type: '{HERE}:OtherHandler', name: other}}]",
            "c.yaml:1:43: error[one-handler]: plugins 'single-profile-handler' and 'other' are both profile handlers; only one is allowed",
        ),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: random-picker}, {pluginRef: max-score-picker}]}]",
            "c.yaml:2:82: error[one-picker]: profile 'a' has two pickers, 'random-picker' and 'max-score-picker'; it takes one",
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
            "c.yaml:1:54: error[unknown-ref]: profile 'a' references undefined plugin 'queue-scorer' "
            "(add '- type: queue-scorer' to plugins)",
        ),
        (
            "plugins: [{type: dcgm-data-source}]",
            "c.yaml:1:18: error[unavailable-type]: plugin type 'dcgm-data-source' of llm-d-router is not available in this version "
            "('epp plugins' lists those that are)",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: queue-scorer}]}\nplugins: [{type: queue-scorer}]",
            "c.yaml:1:40: error[wrong-kind]: requestHandler.parsers: plugin 'queue-scorer' is a scorer, not a parser",
        ),
        (
            "dataLayer: {injectDefaults: false}",
            "c.yaml: error[no-source]: no data source is configured and dataLayer.injectDefaults is false "
            "(list metrics-data-source with core-metrics-extractor, or remove injectDefaults)",
        ),
        (
            "plugins: [{type: queue-scorer, name: max-score-picker}]",
            "c.yaml:1:11: error[name-taken]: plugin 'max-score-picker' of type 'queue-scorer' has the name of a default plugin "
            "that is needed (give it another name)",
        ),
        (
            f"plugins:\n- type: {HERE}:Strict\n  name: s\n  parameters:\n    fileName: refused",
            "c.yaml:5:5: error[bad-parameter]: plugin 's': fileName: no such file",
        ),
        (
            f"plugins: [{{type: '{HERE}:Strict', name: s, parameters: {{fileName: broken}}}}]",
            "c.yaml:1:11: error[bad-parameter]: plugin 's': RuntimeError: it broke",
        ),
        (
            "plugins: [{type: queue-scorer, parameters: 5}]",
            "c.yaml:1:44: error[wrong-type]: parameters of plugin 'queue-scorer': expected a mapping, got the number 5",
        ),
        ("flowControl: {maxRequests: 1.5.2}", "c.yaml:1:28: error[bad-quantity]: flowControl.maxRequests: "
         "'1.5.2' is not a quantity; write for example 1000, 500M or 1Gi"),
        ("flowControl: {maxRequests: -1}", "c.yaml:1:28: error[bad-quantity]: flowControl.maxRequests: '-1' is negative; it is 0 or more"),
        (
            "flowControl: {priorityBands: [{priority: 1}, {priority: 1}]}",
            "c.yaml:1:46: error[duplicate-priority]: flowControl.priorityBands[1]: priority 1 is given twice; first in line 1",
        ),
        (
            "flowControl: {priorityBands: [{priority: 1.5}]}",
            "c.yaml:1:42: error[wrong-type]: flowControl.priorityBands[0].priority: expected an integer, got the number 1.5",
        ),
        ("flowControl: {saturationDetector: {pluginRef: x}}", "c.yaml:1:47: error[unknown-ref]: "
         "flowControl.saturationDetector references undefined plugin 'x'"),
        ("plugins: [{type: .inf}]", "c.yaml:1:18: error[yaml-number]: '.inf' is not a finite number"),
    ],
)  # fmt: skip
def test_an_error_names_the_place_the_rule_and_the_way_out(text: str, found: str) -> None:
    assert found in errors(text)


def test_without_the_gate_the_section_is_ignored_with_a_warning() -> None:
    section = "flowControl: {enableEviction: true, priorityBands: [{priority: -1, maxBytes: 1Gi}]}\n"
    assert warnings(section)[0].startswith("c.yaml:1:1: warning[gate-missing]: flowControl has no effect")
    assert ok(section).flow is None


def test_a_parser_that_is_not_available_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.registry.REFERENCE_TYPES", frozenset(("later-parser",)))
    found = errors("requestHandler: {parsers: [{pluginRef: later-parser}]}")
    assert "plugin type 'later-parser' of llm-d-router is not available in this version" in found[0]


def test_an_experimental_type_needs_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.registry.EXPERIMENTAL_TYPES", frozenset(("queue-scorer",)))
    assert (
        "plugin type 'queue-scorer' is experimental (start with --allow-experimental-plugins)"
        in errors("plugins: [{type: queue-scorer}]")[0]
    )
    assert ok("plugins: [{type: queue-scorer}]", allow_experimental=True)


def test_contract_errors_name_both_sides_and_stand_at_the_reader() -> None:
    text = f"""\
        plugins:
        - {{type: '{HERE}:ReadsLengthAsText', name: reader}}
        - {{type: '{HERE}:MakesLength', name: maker}}
        - {{type: '{HERE}:ReadsHeat', name: hot}}
        """
    assert errors(text) == [
        f"c.yaml:2:3: error[type-clash]: 'reader' (type ReadsLengthAsText, {HERE}) reads 'length' as str, "
        f"'maker' (type MakesLength, {HERE}) produces it as int",
        f"c.yaml:4:3: error[no-producer]: 'hot' (type ReadsHeat, {HERE}) reads 'heat', which no extractor of this configuration produces "
        "(known: active_models, cache_block_size, cache_num_blocks, kv_cache_usage, max_lora, "
        "running_requests, waiting_models, waiting_requests)",
    ]


def test_a_named_producer_that_does_not_exist_is_an_error() -> None:
    text = "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: mine}}]"
    assert "reads 'prefix_match/mine', which no data producer" in errors(text)[0]
    assert ok(text.replace("[{", "[{type: approx-prefix-cache-producer, name: mine}, {"))


def test_one_data_source_with_one_extractor_is_scraped() -> None:
    plugins = f"plugins: [{{type: core-metrics-extractor}}, {{type: '{HERE}:OtherWaiting', name: own}}, "
    plugins += f"{{type: '{HERE}:OtherSource', name: s}}, {{type: metrics-data-source}}]\n"
    both = "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}, {pluginRef: own}]}]}"
    assert any("has 2 extractors; one is supported" in e for e in errors(plugins + both))
    two = "dataLayer: {sources: [{pluginRef: s, extractors: [{pluginRef: own}]}, "
    two += "{pluginRef: metrics-data-source, extractors: [{pluginRef: own}]}]}"
    found = errors(plugins + two)
    assert any("scrapes one data source, but there are 2" in e for e in found)
    assert any(
        "extractor 'own' reads the pages of data source 's' and of data source 'metrics-data-source'" in e
        for e in found
    )
    same = "dataLayer: {sources: [{pluginRef: s, extractors: [{pluginRef: own}, {pluginRef: own}]}, {pluginRef: s}]}"
    found = errors(plugins + same)
    assert any("two extractors of type" in e for e in found)
    assert any("lists 's' twice" in e for e in found)


def test_a_data_layer_of_ones_own_kind_is_refused_since_nobody_would_use_it() -> None:
    own = f"plugins: [{{type: '{HERE}:OtherSource', name: s}}, {{type: '{HERE}:OtherWaiting', name: e}}]\n"
    found = errors(own + "dataLayer: {injectDefaults: false, sources: [{pluginRef: s, extractors: [{pluginRef: e}]}]}")
    assert any("plugin 's' is a data source of its own kind, which this version has no use for" in e for e in found)
    assert any("plugin 'e' is an extractor of its own kind" in e for e in found)
    heir = f"plugins: [{{type: '{HERE}:HeirOfCoreMetrics', name: e}}, {{type: metrics-data-source}}]\n"
    assert ok(heir + "dataLayer: {sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: e}]}]}")


def test_what_a_foreign_plugin_raises_when_it_meets_the_others_is_told_with_its_name() -> None:
    (found,) = errors(f"plugins: [{{type: '{HERE}:Shy', name: shy}}]")
    assert "error[bad-parameter]: plugin 'shy': RuntimeError: so many" in found


def test_a_policy_that_is_referenced_nowhere_is_told_where_it_could_be() -> None:
    (found,) = [w for w in ok("plugins: [{type: fcfs-ordering-policy}]").warnings if w.rule == "unused-plugin"]
    assert found.hint == "name it by flowControl.defaultPriorityBand.orderingPolicyRef"


# Warnings


def profile(*members: str, plugin: str = "queue-scorer") -> str:
    """A configuration with one plugin and one profile."""
    listed = ", ".join(f"{{pluginRef: {plugin}{member}}}" for member in members)
    return f"plugins: [{{type: {plugin}}}]\nschedulingProfiles: [{{name: a, plugins: [{listed}]}}]"


@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        ("plugins: [{type: queue-scorer, parameters: {threshold: 1}}]", "parameters-ignored", "takes no parameters; they are ignored"),
        ("plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}]", "unused-plugin", "plugin 'queue-scorer' is in no profile"),
        ("plugins: [{type: file-discovery, parameters: {path: e}}]", "unused-plugin",
         "'file-discovery', a discovery plugin, is referenced nowhere"),
        ("plugins: [{type: openai-parser, name: mine}]", "unused-plugin", "'mine', a parser, is referenced nowhere"),
        ("schedulingProfiles: [{name: a}]", "no-scorer", "what its filters leave is picked at random"),
        (profile(", weight: 0"), "weight-zero", "has weight 0"),
        (profile(", weight: -1"), "weight-negative", "negative weight"),
        (profile(", weight: 2", plugin="random-picker"), "weight-ignored", "is a picker; only scorers"),
        (profile("", plugin="openai-parser"), "not-scheduling", "is a parser; only filters"),
        (profile("", ""), "ref-twice", "more than once"),
        ("dataLayer: {crossReplicaSyncInterval: 200ms}", "no-effect", "without a syncer"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_told(text: str, rule: str, message: str) -> None:
    found = [w for w in ok(text).warnings if w.rule == rule]
    assert len(found) == 1
    assert message in found[0].message


def test_random_picking_that_was_asked_for_is_no_surprise() -> None:
    assert rules("plugins: [{type: random-picker}]") == set()


# The effective configuration


def test_the_effective_configuration_has_all_defaults_and_loads_to_itself() -> None:
    config = ok(BENCH)
    text = config.as_yaml()
    again = load(text, "effective.yaml")
    assert again.as_yaml() == text
    assert [warning.rule for warning in again.warnings] == ["prefix-outweighs-load"]
    assert again.parameters == config.parameters
    assert list(again.pipeline.plugins) == list(config.pipeline.plugins)
    assert "matchLengthScaleTokens: 8192" in text


NAMES = st.one_of(
    st.sampled_from(
        [
            "on",
            "1e8",
            "~",
            "null",
            "a: b",
            "- x",
            "0o17",
            "1_000",
            "é",
            "#",
            "'",
            '"',
            "<<",
            "y",
            "!x",
            "*a",
            "&a",
            "%",
            "@",
        ]
    ),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8),
)
SCORERS = st.sampled_from(
    [
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "prefix-cache-scorer",
        "lora-affinity-scorer",
        f"{HERE}:ReadsTokens",
    ]
)


@given(
    plugins=st.dictionaries(NAMES, st.tuples(SCORERS, st.floats(-5, 5)), max_size=5),
    picker=st.sampled_from([None, "max-score-picker", "random-picker", "weighted-random-picker"]),
    own_profile=st.booleans(),
    count=st.integers(-3, 9),
)
@settings(max_examples=60, deadline=None)
def test_any_valid_configuration_s_effective_form_loads_to_itself(
    plugins: dict[str, tuple[str, float]], picker: str | None, own_profile: bool, count: int
) -> None:
    listed: list[object] = [{"name": name, "type": kind} for name, (kind, _) in plugins.items()]
    if picker:
        listed.append({"type": picker, "parameters": {"maxNumOfEndpoints": count}})
    document: dict[str, object] = {"plugins": listed}
    if own_profile:
        members = [{"pluginRef": name, "weight": weight} for name, (_, weight) in plugins.items()]
        document["schedulingProfiles"] = [{"name": "p", "plugins": members}]
    try:
        config = load(json.dumps(document), "c.json")
    except ConfigErrors as refused:
        assert {error.rule for error in refused.errors} <= {"name-taken", "yaml-syntax"}
        return
    text = config.as_yaml()
    again = load(text, "e.yaml")
    assert again.as_yaml() == text
    assert again.parameters == config.parameters


FULL = BENCH + dedent("""\
    featureGates: [haPopulateNonLeaderDatastore=true]
    flowControl:
      maxBytes: 1Gi
      defaultRequestTTL: 1m30s
      priorityBands: &bands
      - {priority: 5, maxRequests: 1k, fairnessPolicyRef: x}
      - &band {priority: -1}
      defaultPriorityBand: {<<: *band, maxBytes: 500M}
    requestHandler: {parsers: [{pluginRef: passthrough-parser}]}
    """)
PIECES = st.sampled_from(
    ["", " ", "\n", "-", ":", "{", "}", "[", "]", "null", "5", "-1", "1e999", "true", "'", '"', "&a ", "*band", "<<: *band",
     "!!str ", "#", "\t",
     "pluginRef", "type", "- ", "  ", "9" * 30, "é", "\x00", "---\n", "random-picker",
     "parameters: {a: [1, {b: 2}]}", "0x", "._", "tests.epp:x"]
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, len(FULL)), st.integers(0, 12), PIECES), min_size=1, max_size=4))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_mutated_configuration_loads_or_is_refused_with_places_and_nothing_else(
    edits: list[tuple[int, int, str]],
) -> None:
    text = FULL
    for at, cut, piece in edits:
        text = text[:at] + piece + text[at + cut :]
    try:
        config = load(text, "c.yaml")
    except ConfigErrors as refused:
        assert refused.errors
        lines = text.count("\n") + 2
        assert all(error.line <= lines and error.message for error in refused.errors)
    else:
        assert load(config.as_yaml(), "e.yaml").as_yaml() == config.as_yaml()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "plugins",
                        "type",
                        "name",
                        "parameters",
                        "schedulingProfiles",
                        "pluginRef",
                        "weight",
                        "dataLayer",
                        "sources",
                        "extractors",
                        "discovery",
                        "flowControl",
                        "priorityBands",
                        "featureGates",
                        "requestHandler",
                        "parsers",
                        "parser",
                        "x",
                    ]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=25,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_json_document_loads_or_is_refused(document: object) -> None:  # fmt: skip
    try:
        load(json.dumps(document), "c.json")
    except ConfigErrors as refused:
        assert refused.errors


def test_parameters_that_have_no_effect_here_are_said_at_start() -> None:
    config = ok(
        "plugins:\n- type: mm-embeddings-cache-producer\n  parameters: {cacheSizeInMBPerServer: 7}\n- type: mm-embeddings-cache-scorer\n"
    )
    (warning,) = [w for w in config.warnings if w.rule == "without-effect"]
    assert warning.line == 3
    assert "cacheSizeInMBPerServer: has no effect here" in warning.message


def test_the_capacity_of_the_prefix_producer_has_effect_and_is_not_remarked_upon() -> None:
    config = ok(
        "plugins:\n- type: approx-prefix-cache-producer\n  parameters: {autoTune: false, lruCapacityPerServer: 7}\n"
        "- type: prefix-cache-scorer\n"
    )
    assert [w for w in config.warnings if w.rule == "without-effect"] == []
    assert CACHE_NUM_BLOCKS not in config.pipeline.columns
