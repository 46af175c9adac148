"""Agents are identified by their session headers, and get their own flow unless the client names one."""

import pytest

from epp.plugins.headers import AGENT, AgentIdentity
from epp.request import DEFAULT_FLOW, Request
from tests.fakes import request


def read(headers: dict[str, str], *additional: str, **fields: object) -> Request:
    r = request(headers=headers, **fields)
    AgentIdentity("a", AgentIdentity.Params(additional_session_headers=additional)).read(r)
    return r


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "x-session-affinity", "session-id", "session_id"])
def test_each_known_header_names_the_agent_and_its_flow(header: str) -> None:
    r = read({header: "s1"})
    assert r[AGENT] == r.fairness_id == "s1"


def test_the_first_non_empty_header_counts_and_additional_ones_are_read_first() -> None:
    headers = {"session-id": "codex", "x-session-affinity": "open", "x-claude-code-session-id": "", "x-mine": "mine"}
    assert read(headers)[AGENT] == "open"
    assert read(headers, " X-Mine ", "")[AGENT] == "mine"


@pytest.mark.parametrize("header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"])
@pytest.mark.parametrize("value", ["tenant", "default-flow", ""])
def test_a_fairness_header_of_the_client_overrides_the_agent(header: str, value: str) -> None:
    r = read({"session-id": "s1", header: value}, fairness_id=value or DEFAULT_FLOW)
    assert r.fairness_id == (value or DEFAULT_FLOW)
    assert r[AGENT] == "s1"


@pytest.mark.parametrize("agent", ["x" * 65, "a\x00b"])
def test_an_agent_that_cannot_be_a_metric_label_names_no_flow(agent: str) -> None:
    r = read({"session-id": agent})
    assert r[AGENT] == agent and r.fairness_id == DEFAULT_FLOW


def test_a_request_without_a_session_header_is_not_changed() -> None:
    r = read({"x-other": "1"})
    assert r[AGENT] is None and r.fairness_id == DEFAULT_FLOW
