"""Errors of a configuration: all come at once, each with its place, its rule and a fix."""

import pytest

from epp.config.registry import REFERENCE_TYPES
from tests.epp.config.loading import errors, ok
from tests.epp.config_plugins import HERE


@pytest.fixture(autouse=True)
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference picker has a type that does not exist here."""
    monkeypatch.setattr("epp.config.registry.REFERENCE_TYPES", REFERENCE_TYPES | {"newer-scorer"})


MISTAKES = f"""\
    apiVersion: llm-d.ai/v2
    kind: EndpointPickerConf
    featuregates: []
    featureGates: [flowControl, flowcontrol, flowControl=maybe]
    plugins:
    - type: queue-scrorer
    - type: newer-scorer
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


def test_all_errors_come_at_once_each_with_its_line_rule_and_hint() -> None:
    assert errors(MISTAKES) == [
        "c.yaml:1:13: error[api-version]: apiVersion 'llm-d.ai/v2' is not supported (did you mean 'llm-d.ai/v1'?)",
        "c.yaml:2:7: error[kind]: kind 'EndpointPickerConf' is not supported (did you mean 'EndpointPickerConfig'?)",
        "c.yaml:3:1: error[unknown-field]: the configuration: unknown field 'featuregates' (did you mean 'featureGates'?)",
        "c.yaml:4:29: error[feature-gate]: unknown feature gate 'flowcontrol' (did you mean 'flowControl'?)",
        "c.yaml:4:42: error[feature-gate]: feature gate 'flowControl': 'maybe' is neither true nor false",
        "c.yaml:6:9: error[unknown-type]: plugin type 'queue-scrorer' is not registered (did you mean 'queue-scorer'?)",
        "c.yaml:7:9: error[unavailable-type]: plugin type 'newer-scorer' of llm-d-router is not available in this version "
        "('epp config plugins' lists the available types)",
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
        "c.yaml:27:26: error[wrong-kind]: dataLayer.discovery.endpoints: plugin 'twice' is a scorer, not a discovery plugin",
        "c.yaml:29:32: error[unknown-ref]: dataLayer.crossReplica.syncerPluginRef references undefined plugin 'syncer' "
        "(known: newer-scorer, queue-scrorer, strict, twice)",
        "c.yaml:31:13: error[bad-quantity]: flowControl.maxBytes: '1Gb' is not a quantity; write for example 1000, 500M or 1Gi",
        "c.yaml:32:22: error[bad-duration]: flowControl.defaultRequestTTL: '-5s' is negative; give 0 or more",
        "c.yaml:33:25: error[wrong-type]: flowControl.noEndpointRequestTTL: expected a duration such as 200ms or 1m30s, got the number 5",
    ]


@pytest.mark.parametrize(
    ("text", "error"),
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
        ("plugins: []\n---\nplugins: []", "c.yaml:2:1: error[one-document]: a configuration must be a single YAML document "
         "(remove this '---' and everything after it)"),
        ("plugins: [", "c.yaml:2:1: error[yaml-syntax]: did not find expected node content"),
        (
            "schedulingProfiles: [{name: a}, {name: a}]",
            "c.yaml:1:40: error[duplicate-name]: duplicate profile name 'a' (give one of them another name)",
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [null]}]",
            "c.yaml:1:42: error[missing-field]: schedulingProfiles[0].plugins[0]: 'pluginRef' is required",
        ),
        (
            "schedulingProfiles: [{name: a}, {name: b}]",
            "c.yaml: error[no-handler]: no profile handler is configured "
            "(several profiles need one in plugins; single-profile-handler runs only one profile)",
        ),
        (
            "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: a}, {name: b}]",
            "c.yaml:1:11: error[handler-profiles]: single-profile-handler runs one profile, but 2 are configured: a, b",
        ),
        (
            f"plugins: [{{type: single-profile-handler}}, {{type: '{HERE}:OtherHandler', name: other}}]",
            "c.yaml:1:43: error[one-handler]: plugins 'single-profile-handler' and 'other' are both profile handlers; "
            "only one is allowed (remove one of them)",
        ),
        (
            "plugins: [{type: random-picker}, {type: max-score-picker}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: random-picker}, {pluginRef: max-score-picker}]}]",
            "c.yaml:2:82: error[one-picker]: profile 'a' has two pickers, 'random-picker' and 'max-score-picker'; "
            "a profile takes one (remove one of them)",
        ),
        (
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
            "c.yaml:1:54: error[unknown-ref]: profile 'a' references undefined plugin 'queue-scorer' "
            "(add '- type: queue-scorer' to plugins)",
        ),
        (
            "plugins: [{type: newer-scorer}]",
            "c.yaml:1:18: error[unavailable-type]: plugin type 'newer-scorer' of llm-d-router is not available in this version "
            "('epp config plugins' lists the available types)",
        ),
        (
            "requestHandler: {parsers: [{pluginRef: queue-scorer}]}\nplugins: [{type: queue-scorer}]",
            "c.yaml:1:40: error[wrong-kind]: requestHandler.parsers: plugin 'queue-scorer' is a scorer, not a parser",
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
        ("flowControl: {maxRequests: -1}", "c.yaml:1:28: error[bad-quantity]: flowControl.maxRequests: '-1' is negative; give 0 or more"),
        (
            "flowControl: {priorityBands: [{priority: 1}, {priority: 1}]}",
            "c.yaml:1:46: error[duplicate-priority]: flowControl.priorityBands[1]: priority 1 is given twice; first in line 1",
        ),
        (
            "flowControl: {priorityBands: [{priority: 1.5}]}",
            "c.yaml:1:42: error[wrong-type]: flowControl.priorityBands[0].priority: expected an integer, got the number 1.5",
        ),
        ("flowControl: {saturationDetector: {pluginRef: x}}", "c.yaml:1:47: error[unknown-ref]: "
         "flowControl.saturationDetector references undefined plugin 'x' (list it in plugins)"),
        ("plugins: [{type: .inf}]", "c.yaml:1:18: error[yaml-number]: '.inf' is not a finite number"),
    ],
)  # fmt: skip
def test_an_error_has_its_place_its_rule_and_a_fix(text: str, error: str) -> None:
    assert error in errors(text)


def test_a_parser_that_is_not_available_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.config.registry.REFERENCE_TYPES", frozenset(("later-parser",)))
    (error,) = errors("requestHandler: {parsers: [{pluginRef: later-parser}]}")
    assert "plugin type 'later-parser' of llm-d-router is not available in this version" in error


def test_an_experimental_type_needs_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.config.registry.EXPERIMENTAL_TYPES", frozenset(("queue-scorer",)))
    assert (
        "plugin type 'queue-scorer' is experimental (start with --allow-experimental-plugins)"
        in errors("plugins: [{type: queue-scorer}]")[0]
    )
    assert ok("plugins: [{type: queue-scorer}]", allow_experimental=True)


def test_contract_errors_name_both_plugins_at_the_place_of_the_reader() -> None:
    text = f"""\
        plugins:
        - {{type: '{HERE}:ReadsLengthAsText', name: reader}}
        - {{type: '{HERE}:MakesLength', name: maker}}
        - {{type: '{HERE}:ReadsHeat', name: hot}}
        """
    assert errors(text) == [
        f"c.yaml:2:3: error[type-clash]: 'reader' (type ReadsLengthAsText, {HERE}) reads 'length' as str, "
        f"but 'maker' (type MakesLength, {HERE}) produces it as int",
        f"c.yaml:4:3: error[no-producer]: 'hot' (type ReadsHeat, {HERE}) reads 'heat', which no extractor of this configuration produces "
        "(known: active_models, cache_block_size, cache_num_blocks, cache_ranks, cache_tokens, kv_cache_usage, max_lora, "
        "running_requests, waiting_models, waiting_requests)",
    ]


def test_a_named_producer_that_does_not_exist_is_an_error() -> None:
    text = "plugins: [{type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: mine}}]"
    assert "reads 'prefix_match/mine', which no data producer" in errors(text)[0]
    assert ok(text.replace("[{", "[{type: approx-prefix-cache-producer, name: mine}, {"))


def test_an_exception_of_a_foreign_plugin_in_meet_is_an_error_with_its_name() -> None:
    (error,) = errors(f"plugins: [{{type: '{HERE}:Shy', name: shy}}]")
    assert "error[bad-parameter]: plugin 'shy': RuntimeError: so many" in error
