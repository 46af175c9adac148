"""requestHandler.responsePhase: its values, the plugins that need it, and the log line at start."""

import pytest

from epp.config.load import ConfigErrors, load
from epp.decision.response_needs import FULL, NONE, parts

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
WITHOUT_LOAD = f"""{HEAD}plugins:
- type: kv-cache-utilization-scorer
- type: max-score-picker
requestHandler:
  responsePhase: none
"""


def errors(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as raised:
        load(text, "c.yaml")
    return [str(error) for error in raised.value.errors]


def test_the_whole_response_phase_is_on_by_default() -> None:
    assert load(None, "c.yaml").response_phase == FULL
    assert load(HEAD + "requestHandler: {responsePhase: full}", "c.yaml").response_phase == FULL
    assert load(WITHOUT_LOAD, "c.yaml").response_phase == NONE


def test_the_effective_configuration_contains_it_and_loads_again() -> None:
    config = load(WITHOUT_LOAD, "c.yaml")
    assert "responsePhase: none" in config.as_yaml()
    assert load(config.as_yaml(), "again.yaml").response_phase == NONE
    assert "responsePhase: full" in load(None, "c.yaml").as_yaml()


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("queue-scorer", "reads load in flight (waiting_requests)"),
        ("token-load-scorer", "reads load in flight ("),
        ("active-request-scorer", "reads load in flight (inflight_requests)"),
        ("destination-endpoint-served-verifier", "is called for responses"),
    ],
)
def test_the_error_names_each_plugin_that_needs_responses(plugin: str, reason: str) -> None:
    added = f"- type: {plugin}\n- type: max-score-picker\n"
    (error,) = errors(WITHOUT_LOAD.replace("- type: max-score-picker\n", added))
    assert error.startswith("c.yaml:8") and f"'{plugin}' {reason}" in error
    assert "write 'full'" in error


def test_the_built_in_configuration_needs_responses() -> None:
    default = load(None, "c.yaml").as_yaml().replace("responsePhase: full", "responsePhase: none")
    (error,) = errors(default)
    assert "'learned-latency-scorer'" in error and "'approx-prefix-cache-producer' is called for responses" in error


@pytest.mark.parametrize(("value", "hint"), [("ful", "full"), ("off", ""), ("[]", "text")])
def test_an_invalid_value_is_refused(value: str, hint: str) -> None:
    (error,) = errors(HEAD + f"requestHandler:\n  responsePhase: {value}\n")
    assert error.startswith("c.yaml:4:18") and "requestHandler.responsePhase" in error and hint in error


def test_the_log_names_the_parts_that_are_on_and_the_plugins_that_need_them() -> None:
    default = parts(load(None, "c.yaml").pipeline.wiring, FULL)
    assert default["phase"] == "full" and default["usage"].startswith("openai-parser")
    assert default["first_chunk"] == "learned-latency-producer, approx-prefix-cache-producer, inflight-load-producer"
    assert default["headers"] == "learned-latency-producer, token-weighted-fairness-policy"
    assert "every_chunk" not in default
    assert parts(load(WITHOUT_LOAD, "c.yaml").pipeline.wiring, NONE) == {"phase": "none"}
