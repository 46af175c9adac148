"""Warnings about a configuration: whatever has no effect is named once, with its place."""

from textwrap import dedent

import msgspec
import pytest

from epp.config import registry
from epp.config.plugin_instances import without_effect
from epp.data import CACHE_TOKENS
from tests.cases import cases
from tests.epp.config.loading import ok, rules, warnings
from tests.epp.config_plugins import HERE


def test_unread_producers_are_dropped_with_a_warning_unless_they_have_hooks() -> None:
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
    (warning,) = config.warnings
    assert warning.rule == "deprecated"
    assert (
        warning.message == "the field 'parser' (line 2) is now 'requestHandler.parsers'; "
        "the field 'saturationDetector' (line 3) is now 'flowControl.saturationDetector'"
    )
    assert "--migrate" in warning.hint
    assert [parser.name for parser in config.pipeline.wiring.parsers] == ["passthrough-parser"]
    assert config.document["flowControl"] == {"saturationDetector": {"pluginRef": "full"}}
    new = "requestHandler: {parsers: [{pluginRef: openai-parser}]}\n"
    assert [parser.name for parser in ok(dedent(text) + new).pipeline.wiring.parsers] == ["openai-parser"]


def test_peer_discovery_gets_a_warning_and_no_error() -> None:
    messages = warnings("plugins: [{type: queue-scorer}]\ndataLayer: {peerDiscovery: {pluginRef: x}}")
    assert messages == [
        "c.yaml:2:13: warning[deprecated]: the field 'dataLayer.peerDiscovery' (line 2) is now 'dataLayer.discovery.peers' "
        "(epp config check --migrate prints the file in its current form)",
        "c.yaml:2:28: warning[no-effect]: dataLayer.discovery.peers has no effect (remove it)",
    ]


def test_a_warning_about_deprecated_names_is_one_line_however_many_there_are() -> None:
    listed = ", ".join(f"{{type: by-label-selector, name: f{number}}}" for number in range(7))
    (warning,) = [w for w in ok(f"plugins: [{listed}, {{type: random-picker}}]").warnings if w.rule == "deprecated"]
    assert warning.message.count("plugin type 'by-label-selector' (line 1) is now 'label-selector-filter'") == 4
    assert warning.message.endswith("; 3 more")


def test_without_the_gate_the_section_is_ignored_with_a_warning() -> None:
    section = "flowControl: {enableEviction: true, priorityBands: [{priority: -1, maxBytes: 1Gi}]}\n"
    assert warnings(section)[0].startswith("c.yaml:1:1: warning[gate-missing]: flowControl has no effect")
    assert ok(section).flow is None


def test_the_warning_about_an_unused_policy_names_the_field_for_it() -> None:
    (warning,) = [w for w in ok("plugins: [{type: fcfs-ordering-policy}]").warnings if w.rule == "unused-plugin"]
    assert warning.hint == "name it in flowControl.defaultPriorityBand.orderingPolicyRef"


def profile(*members: str, plugin: str = "queue-scorer") -> str:
    """A configuration with one plugin and one profile."""
    listed = ", ".join(f"{{pluginRef: {plugin}{member}}}" for member in members)
    return f"plugins: [{{type: {plugin}}}]\nschedulingProfiles: [{{name: a, plugins: [{listed}]}}]"


@cases(
    ("text", "rule", "message"),
    [
        ("plugins: [{type: queue-scorer, parameters: {threshold: 1}}]", "parameters-ignored", "takes no parameters; they are ignored"),
        ("plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: a}]", "unused-plugin", "plugin 'queue-scorer' is in no profile"),
        ("plugins: [{type: file-discovery, parameters: {path: e}}]", "unused-plugin",
         "'file-discovery', a discovery plugin, is not referenced"),
        ("plugins: [{type: openai-parser, name: mine}]", "unused-plugin", "'mine', a parser, is not referenced"),
        ("schedulingProfiles: [{name: a}]", "no-scorer", "the endpoint is picked at random"),
        (profile(", weight: 0"), "weight-zero", "has weight 0"),
        (profile(", weight: -1"), "weight-negative", "negative weight"),
        (profile(", weight: 2", plugin="random-picker"), "weight-ignored", "is a picker; only scorers"),
        (profile("", plugin="openai-parser"), "not-scheduling", "is a parser; only filters"),
        (profile("", ""), "ref-twice", "more than once"),
        ("dataLayer: {crossReplicaSyncInterval: 200ms}", "no-effect", "replicas of this picker share state through --replica-store"),
    ],
)  # fmt: skip
def test_a_part_without_effect_gets_one_warning(text: str, rule: str, message: str) -> None:
    (warning,) = [w for w in ok(text).warnings if w.rule == rule]
    assert message in warning.message


@pytest.mark.parametrize("type_name", ["redis-syncer", "redis-state-store"])
def test_a_syncer_of_the_reference_is_accepted_and_each_field_of_it_gets_a_warning(type_name: str) -> None:
    text = f"""
        apiVersion: llm-d.ai/v1
        kind: EndpointPickerConfig
        plugins:
        - {{type: random-picker}}
        - {{type: {type_name}, name: shared, parameters: {{address: redis:6379, passwordEnv: SECRET, stateTTL: 2s}}}}
        dataLayer:
          crossReplica: {{syncerPluginRef: shared, syncInterval: 1s, publishTimeout: 2s}}
        """
    effective = ok(text)
    told = [str(warning) for warning in effective.warnings]
    assert len(told) == 3 and all("has no effect: replicas of this picker share state through --replica-store" in line for line in told)
    assert {warning.rule for warning in effective.warnings} == {"no-effect"}


def test_a_configured_random_picker_gets_no_warning() -> None:
    assert rules("plugins: [{type: random-picker}]") == set()


def test_parameters_that_have_no_effect_get_a_warning() -> None:
    config = ok(
        "plugins:\n- type: mm-embeddings-cache-producer\n  parameters: {cacheSizeInMBPerServer: 7}\n- type: mm-embeddings-cache-scorer\n"
    )
    (warning,) = [w for w in config.warnings if w.rule == "without-effect"]
    assert warning.line == 3
    assert "cacheSizeInMBPerServer: has no effect here" in warning.message


def test_a_parameter_has_a_warning_if_its_description_says_that_it_has_no_effect() -> None:
    params = {
        "precise-prefix-cache-producer": {
            "tokenProcessorConfig": {"hashSeed": "7"},
            "indexerConfig": {"kvBlockIndexConfig": {"redisConfig": {"address": "redis:6379"}, "inMemoryConfig": {"size": 9}}},
        },
        "predicted-latency-producer": {"contextTTL": 1, "samplingMean": 1, "inFlightLoadProducerName": "x"},
        "no-hit-lru-scorer": {"prefixPluginType": "a", "lruSize": 7},
        "active-request-scorer": {"requestTimeout": ""},
    }
    found = [remark for name, given in params.items() for remark in without_effect(msgspec.convert(given, registry.find(name).Params))]
    assert found == [
        "tokenProcessorConfig.hashSeed: has no effect here: the keys of blocks stay in this picker, which shares no index",
        "indexerConfig.kvBlockIndexConfig.redisConfig: has no effect here: the index is in this picker's shared memory",
        "contextTTL: has no effect here",
        "inFlightLoadProducerName: has no effect here: the picker counts the load in flight itself",
        "samplingMean: has no effect here",
        "prefixPluginType: has no effect here: `prefixMatchInfoProducerName` names the producer of the matches",
    ]


def test_the_capacity_of_the_prefix_producer_has_an_effect_and_gets_no_warning() -> None:
    config = ok(
        "plugins:\n- type: approx-prefix-cache-producer\n  parameters: {autoTune: false, lruCapacityPerServer: 7}\n"
        "- type: prefix-cache-scorer\n"
    )
    assert [w for w in config.warnings if w.rule == "without-effect"] == []
    assert CACHE_TOKENS not in config.pipeline.columns
