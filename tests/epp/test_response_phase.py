"""requestHandler.responsePhase: what it says, who refuses it, and what the log says at start."""

import pytest

from epp.config import ConfigErrors, load
from epp.response_phase import FULL, NONE, parts

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
WITHOUT_LOAD = f"""{HEAD}plugins:
- type: kv-cache-utilization-scorer
- type: max-score-picker
requestHandler:
  responsePhase: none
"""


def why(text: str) -> list[str]:
    with pytest.raises(ConfigErrors) as raised:
        load(text, "c.yaml")
    return [str(error) for error in raised.value.errors]


def test_the_whole_response_phase_is_on_unless_it_is_said() -> None:
    assert load("", "c.yaml").response_phase == FULL
    assert load(HEAD + "requestHandler: {responsePhase: full}", "c.yaml").response_phase == FULL
    assert load(WITHOUT_LOAD, "c.yaml").response_phase == NONE


def test_the_effective_configuration_says_it_and_loads_again() -> None:
    config = load(WITHOUT_LOAD, "c.yaml")
    assert "responsePhase: none" in config.as_yaml()
    assert load(config.as_yaml(), "again.yaml").response_phase == NONE
    assert "responsePhase: full" in load("", "c.yaml").as_yaml()


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("queue-scorer", "reads load in flight (waiting_requests)"),
        ("token-load-scorer", "reads load in flight ("),
        ("active-request-scorer", "reads load in flight (inflight_requests)"),
        ("destination-endpoint-served-verifier", "is told of answers"),
    ],
)
def test_who_needs_answers_is_named_with_file_and_line(plugin: str, reason: str) -> None:
    added = f"- type: {plugin}\n- type: max-score-picker\n"
    (error,) = why(WITHOUT_LOAD.replace("- type: max-score-picker\n", added))
    assert error.startswith("c.yaml:8") and f"'{plugin}' {reason}" in error
    assert "write 'full'" in error


def test_the_built_in_default_needs_it() -> None:
    default = load("", "c.yaml").as_yaml().replace("responsePhase: full", "responsePhase: none")
    (error,) = why(default)
    assert "'token-load-scorer'" in error and "'approx-prefix-cache-producer' is told of answers" in error


@pytest.mark.parametrize(("given", "hint"), [("ful", "full"), ("off", ""), ("[]", "text")])
def test_another_value_is_refused(given: str, hint: str) -> None:
    (error,) = why(HEAD + f"requestHandler:\n  responsePhase: {given}\n")
    assert error.startswith("c.yaml:4:18") and "requestHandler.responsePhase" in error and hint in error


def test_the_log_says_what_is_on_and_on_whose_account() -> None:
    default = parts(load("", "c.yaml").pipeline.recipe, FULL)
    assert default["phase"] == "full" and default["usage"].startswith("openai-parser")
    assert default["first_chunk"] == "inflight-load-producer"
    assert default["failures"] == "approx-prefix-cache-producer"
    assert default["headers"] == "token-weighted-fairness-policy"
    assert "every_chunk" not in default
    assert parts(load(WITHOUT_LOAD, "c.yaml").pipeline.recipe, NONE) == {"phase": "none"}
