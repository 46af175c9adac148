"""Defaults of a configuration, one test per rule."""

import pytest

from epp.config.load import load
from tests.epp.config.loading import errors, ok
from tests.epp.config_plugins import HERE


def test_version_and_kind_default_to_the_current_ones() -> None:
    assert ok("plugins: [{type: queue-scorer}]").document["apiVersion"] == "llm-d.ai/v1"
    assert ok("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]").warnings == ()


def test_a_plugin_without_a_name_is_named_like_its_type() -> None:
    assert "queue-scorer" in ok("plugins: [{type: queue-scorer}]").pipeline.plugins


def test_a_type_may_be_listed_several_times_with_different_names() -> None:
    config = ok("plugins: [{type: queue-scorer, name: a}, {type: queue-scorer, name: b}]")
    assert len(config.pipeline.profiles["default"].scorers) == 2


def test_one_profile_without_a_handler_gets_the_single_profile_handler_and_shadows_do_not_count() -> None:
    text = """\
        plugins: [{type: queue-scorer}, {type: random-picker}]
        schedulingProfiles:
        - {name: a, plugins: [{pluginRef: queue-scorer}]}
        - {name: b, shadow: true, plugins: [{pluginRef: random-picker}]}
        - {name: c, shadow: true, plugins: [{pluginRef: queue-scorer, weight: 3}]}
        """
    config = ok(text)
    assert config.pipeline.wiring.handler.name == "single-profile-handler"
    assert list(config.pipeline.profiles) == ["a"]
    assert [shadow.name for shadow in config.pipeline.shadows] == ["b", "c"]
    assert [profile.get("shadow") for profile in config.document["schedulingProfiles"]] == [None, True, True]
    assert load(config.as_yaml(), "e.yaml").as_yaml() == config.as_yaml()


def test_a_profile_with_shadow_false_is_not_a_shadow() -> None:
    assert list(ok("schedulingProfiles: [{name: a, shadow: false}]").pipeline.profiles) == ["a"]


def test_shadows_alone_cannot_decide() -> None:
    (error,) = errors("schedulingProfiles: [{name: a, shadow: true}, {name: b, shadow: true}]")
    assert error.startswith("c.yaml:1:22: error[only-shadows]: all profiles are shadows")


def test_a_profile_handler_never_sees_shadows() -> None:
    shadow = "{name: c, shadow: true, plugins: [{pluginRef: random-picker}]}"
    text = f"plugins: [{{type: random-picker}}, {{type: '{HERE}:OnlyFirst'}}]\nschedulingProfiles: [{{name: a}}, {shadow}]"
    assert ok(text).pipeline.shadows
    assert "it was offered a shadow" in errors(text.replace("shadow: true, ", ""))[0]


def test_the_default_picker_takes_the_best_score() -> None:
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


def test_a_parser_may_be_referenced_by_its_type_without_being_listed() -> None:
    config = ok("requestHandler: {parsers: [{pluginRef: passthrough-parser}]}")
    assert [parser.name for parser in config.pipeline.wiring.parsers] == ["passthrough-parser"]


def test_the_default_parsers_are_those_of_the_reference_and_passthrough_comes_last() -> None:
    parsers = [parser.name for parser in load(None, "c.yaml").pipeline.wiring.parsers]
    assert parsers[0] == "openai-parser"
    assert parsers[-1] == "passthrough-parser"


def test_default_producers_are_added_for_plugins_that_need_them() -> None:
    config = ok("plugins: [{type: prefix-cache-scorer}, {type: queue-scorer}]")
    assert "approx-prefix-cache-producer" in config.pipeline.plugins
    assert [plugin["type"] for plugin in config.document["plugins"]].count("approx-prefix-cache-producer") == 1


def test_a_default_that_is_experimental_needs_the_flag_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.config.registry.EXPERIMENTAL_TYPES", frozenset(("max-score-picker",)))
    assert "plugin type 'max-score-picker' is experimental" in errors("plugins: [{type: queue-scorer}]")[0]
    assert ok("plugins: [{type: queue-scorer}]", allow_experimental=True)
