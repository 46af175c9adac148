"""Configurations of the reference picker and of this one load, and references between plugins resolve."""

from collections.abc import Iterator
from typing import Any

import pytest

from epp.config.load import DEFAULT_TEXT, ConfigErrors, Surroundings, load
from epp.config.schema import API_VERSION
from epp.data import CACHE_BLOCK_SIZE, CACHE_TOKENS, INFLIGHT_TOKENS, KV_USAGE, WAITING
from epp.plugins.extractors.metrics_source import MetricsDataSource
from tests.epp.config.loading import BENCH, errors, ok, rules, warnings
from tests.epp.config_plugins import HERE
from tests.epp.test_mutations import EVERYTHING


def test_a_configuration_of_the_deprecated_version_gets_the_defaults_of_the_reference() -> None:
    config = ok(BENCH)
    pipeline = config.pipeline
    assert [warning.rule for warning in config.warnings] == ["deprecated", "prefix-outweighs-load"]
    assert config.discovery is not None
    assert config.discovery.name == "endpoints"
    assert pipeline.wiring.handler.name == "single-profile-handler"
    profile = pipeline.profiles["default"]
    assert sorted(w for _, w in (*profile.scorers, *profile.static_scorers)) == [2.0, 2.0, 3.0]
    assert profile.picker.name == "max-score-picker"
    assert {"openai-parser", "passthrough-parser"} <= {parser.name for parser in pipeline.wiring.parsers}
    assert pipeline.wiring.parsers[-1].name == "passthrough-parser"
    assert isinstance(config.sources[0].source, MetricsDataSource)
    assert config.sources[0].extractors[0].name == "core-metrics-extractor"
    assert pipeline.columns == (CACHE_BLOCK_SIZE, CACHE_TOKENS, KV_USAGE, WAITING)
    assert "approx-prefix-cache-producer" in pipeline.plugins
    assert len(pipeline.producers) == 1


def test_without_a_text_there_is_the_built_in_default_configuration() -> None:
    config = load(None, "c.yaml")
    assert config.as_yaml() == load(DEFAULT_TEXT, "c.yaml").as_yaml()
    assert config.warnings == ()


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "---\n", "null"])
def test_a_text_without_a_document_is_refused_since_a_file_that_was_cut_off_looks_like_this(text: str) -> None:
    (error,) = errors(text)
    assert error.startswith("c.yaml: error[no-document]: there is no document: ")
    assert "ConfigMap" in error


@pytest.mark.parametrize("text", ["{}", f"apiVersion: {API_VERSION}\nkind: EndpointPickerConfig\n"])
def test_a_configuration_without_content_starts_with_one_warning_that_says_what_runs(text: str) -> None:
    (warning,) = ok(text).warnings
    assert warning.rule == "nothing-configured"
    assert "picked at random" in warning.message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "plugins: [{type: queue-scorrer}, {type: prefix-cache-scorer}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]",
            "unknown-type",
        ),
        (
            "plugins: [{type: queue-scorrer}, {type: max-score-picker}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorrer}]}]",
            "unknown-type",
        ),
        (
            "plugins: [{type: queue-scorer}, {type: random-picker}]\n"
            "schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorrer}]}]",
            "unknown-ref",
        ),
        ("plugins: [{name: mine}, {type: random-picker}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: mine}]}]", "missing-field"),
        ("featureGates: [flowcontrol]\nplugins: [{type: queue-scorer}]\nflowControl: {maxRequests: 5}", "feature-gate"),
        (
            "plugins: [{type: disagg-profile-handlr}, {type: always-disagg-pd-decider}]\n"
            "schedulingProfiles: [{name: prefill}, {name: decode}]",
            "unknown-type",
        ),
    ],
)
def test_one_mistake_gives_one_message(text: str, error: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        ok(text)
    assert [finding.rule for finding in (*caught.value.errors, *caught.value.warnings)] == [error]


def test_a_name_that_resembles_no_misspelt_type_is_still_reported() -> None:
    text = "plugins: [{type: queue-scorrer}]\nschedulingProfiles: [{name: a, plugins: [{pluginRef: random-picker}]}]"
    assert [error.split("[")[1].split("]")[0] for error in errors(text)] == ["unknown-type", "unknown-ref"]


def named(document: Any) -> Iterator[str]:
    """All names in the fields of a document that reference plugins."""
    for key, value in document.items() if isinstance(document, dict) else ():
        if isinstance(value, str) and key.endswith(("pluginRef", "PolicyRef", "PluginRef", "queueRef")):
            yield value
    children = document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    for child in children:
        yield from named(child)


@pytest.mark.parametrize("text", [BENCH, DEFAULT_TEXT, EVERYTHING, "{}", "plugins: [{type: queue-scorer}]"])
def test_every_reference_of_an_effective_configuration_names_a_plugin_that_it_lists(text: str) -> None:
    document = ok(text, allow_experimental=True).document
    names = list(named(document))
    assert names
    assert set(names) <= {entry["name"] for entry in document["plugins"]}


def test_json_is_accepted() -> None:
    assert ok('{"plugins": [{"type": "queue-scorer"}]}').pipeline.profiles["default"].scorers


def test_without_profiles_all_filters_scorers_and_pickers_form_one() -> None:
    config = ok(f"plugins: [{{type: queue-scorer}}, {{type: 'random-picker'}}, {{type: '{HERE}:Plain'}}]")
    profile = config.pipeline.profiles["default"]
    assert (len(profile.scorers), len(profile.filters), profile.picker.name) == (1, 1, "random-picker")


def test_a_profile_without_a_picker_gets_the_configured_one() -> None:
    text = """\
        plugins: [{type: queue-scorer}, {type: weighted-random-picker, name: mine}]
        schedulingProfiles: [{name: a, plugins: [{pluginRef: queue-scorer}]}]
        """
    assert ok(text).pipeline.profiles["a"].picker.name == "mine"


def test_listed_instances_with_the_names_of_defaults_are_used() -> None:
    config = ok("plugins: [{type: metrics-data-source, parameters: {path: /m}}, {type: queue-scorer}]")
    assert config.sources[0].source.params.path == "/m"


def test_a_plugin_that_reads_tokens_in_flight_adds_the_producer_that_counts_them() -> None:
    config = ok(f"plugins: [{{type: '{HERE}:ReadsTokens'}}]")
    assert "inflight-load-producer" in config.pipeline.plugins
    assert config.pipeline.columns == (INFLIGHT_TOKENS,)


def test_gates_are_read_as_in_the_reference() -> None:
    config = ok("featureGates: [flowControl=F, haPopulateNonLeaderDatastore=TRUE]")
    assert config.gates == {"flowControl": False, "haPopulateNonLeaderDatastore": True}
    assert "removed-gate" in rules("featureGates: [dataLayer, prepareDataPlugins=true]")


def test_the_gate_of_standby_replicas_has_an_effect_with_leader_election_only() -> None:
    text = "featureGates: [haPopulateNonLeaderDatastore=0]"
    assert "no-effect" in rules(text)
    elected = load(text, "test", surroundings=Surroundings(leader_election=True))
    assert not [warning for warning in elected.warnings if warning.rule == "no-effect"]
    assert elected.gates["haPopulateNonLeaderDatastore"] is False


def test_a_null_means_that_a_field_is_not_given() -> None:
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
    assert warnings("plugins: [{type: queue-scorer}]\nrequestHandler: {propagatePriority: false}") == []


def naming(*pairs: tuple[str, str]) -> str:
    listed = ", ".join(f"{{type: '{HERE}:Naming', name: {name}, parameters: {{other: '{other}'}}}}" for name, other in pairs)
    return f"plugins: [{{type: queue-scorer}}, {listed}]"


def test_references_between_plugins_resolve_in_any_order() -> None:
    plugins = ok(naming(("a", "b"), ("b", "c"), ("c", ""))).pipeline.plugins
    assert plugins["a"].other is plugins["b"]  # type: ignore[attr-defined]
    assert plugins["b"].other is plugins["c"]  # type: ignore[attr-defined]


def test_reference_cycles_and_references_to_missing_plugins_are_refused() -> None:
    (error,) = errors(naming(("a", "b"), ("b", "a"), ("c", "a")))
    assert error.startswith(
        "c.yaml:1:33: error[reference-cycle]: plugins refer to each other in a cycle through their parameters: 'a', 'b', 'c'"
    )
    assert "parameters.other of plugin 'a' references undefined plugin 'x'" in errors(naming(("a", "x")))[0]
