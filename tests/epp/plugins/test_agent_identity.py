"""Agents are known by their session headers, and get a flow of their own unless they named one."""

import pytest

from epp.plugins.headers.agent_identity import AGENT, AgentIdentity
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


def test_the_first_header_that_is_not_empty_counts_additional_ones_before_all() -> None:
    headers = {"session-id": "codex", "x-session-affinity": "open", "x-claude-code-session-id": "", "x-mine": "mine"}
    assert read(headers)[AGENT] == "open"
    assert read(headers, " X-Mine ", "")[AGENT] == "mine"


@pytest.mark.parametrize("header", ["x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id"])
@pytest.mark.parametrize("value", ["tenant", "default-flow", ""])
def test_a_fairness_header_is_the_clients_own_word(header: str, value: str) -> None:
    r = read({"session-id": "s1", header: value}, fairness_id=value or DEFAULT_FLOW)
    assert r.fairness_id == (value or DEFAULT_FLOW)
    assert r[AGENT] == "s1"


@pytest.mark.parametrize("agent", ["x" * 65, "a\x00b"])
def test_what_cannot_stand_in_a_metric_names_no_flow(agent: str) -> None:
    r = read({"session-id": agent})
    assert r[AGENT] == agent and r.fairness_id == DEFAULT_FLOW


def test_nobody_known_changes_nothing() -> None:
    r = read({"x-other": "1"})
    assert r[AGENT] is None and r.fairness_id == DEFAULT_FLOW
