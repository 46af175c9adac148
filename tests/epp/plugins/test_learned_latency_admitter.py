"""Requests with an objective are admitted, held or refused by predictions."""

import pytest

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun
from epp.errors import Cause, Refused
from epp.learning.costs import FEW, WORSE, learned_costs
from epp.plugin import Profile
from epp.plugins.admitters.learned_latency import LearnedLatency, Parameters
from epp.request import Request
from tests.fakes import FakeServices, candidates, predictions, request

COSTS = learned_costs("")
TTFT, TPOT = "x-llm-d-slo-ttft-ms", "x-llm-d-slo-tpot-ms"


def made(otherwise: str = "refuse") -> tuple[LearnedLatency, FakeServices]:
    plugin, services = LearnedLatency("a", Parameters(otherwise=otherwise)), FakeServices()  # type: ignore[arg-type]
    plugin.start(services)
    return plugin, services


def pool() -> Candidates:
    return candidates({"waiting_requests": [0, 0]})


def asked(times: list[float], headers: dict[str, str], why_not: str = "") -> Request:
    r = request(headers=headers)
    r.wishes = True
    r[COSTS] = predictions(times, why_not=why_not)
    return r


def test_a_request_that_an_endpoint_can_serve_in_time_is_admitted_and_goes_there() -> None:
    plugin, _ = made()
    r, at = asked([0.2, 5.0], {TTFT: "1000"}), pool()
    assert plugin.admit(r, at) is None
    assert plugin.keep(r, at, Profile).tolist() == [True, False]  # type: ignore[arg-type]


def test_a_hopeless_request_gets_429_with_a_time_for_the_retry() -> None:
    plugin, _ = made()
    with pytest.raises(Refused, match=r"predicted in 4\.0 s, and the objective leaves 1\.0 s") as refused:
        plugin.admit(asked([4.0, 5.0], {TTFT: "1000"}), pool())
    assert refused.value.cause is Cause.NOT_ADMITTED and refused.value.retry_after_s == 3


def test_a_request_within_the_margin_is_held_and_refused_when_time_is_up() -> None:
    plugin, services = made()
    r = asked([0.9, 5.0], {TTFT: "1000"})
    assert plugin.admit(r, pool()) is not None and len(services.pauses) == 1
    r.now = r.arrived_at + 0.5
    with pytest.raises(Refused):
        plugin.admit(r, pool())


@pytest.mark.parametrize("headers", [{}, {TTFT: "0"}])
def test_without_an_objective_or_a_model_every_request_is_admitted(headers: dict[str, str]) -> None:
    plugin, _ = made()
    assert plugin.admit(asked([9.0, 9.0], headers), pool()) is None
    assert plugin.admit(asked([9.0, 9.0], {TTFT: "1"}, FEW), pool()) is None


def test_a_model_that_is_worse_than_the_mean_time_still_refuses() -> None:
    plugin, _ = made()
    with pytest.raises(Refused):
        plugin.admit(asked([9.0, 9.0], {TTFT: "1"}, WORSE), pool())


def test_with_otherwise_pass_a_hopeless_request_is_routed() -> None:
    plugin, _ = made("pass")
    r, at = asked([4.0, 5.0], {TTFT: "1000"}), pool()
    assert plugin.admit(r, at) is None
    assert plugin.keep(r, at, Profile).all()  # type: ignore[arg-type]


def test_an_objective_per_token_that_no_endpoint_meets_is_refused() -> None:
    plugin, _ = made()
    with pytest.raises(Refused, match="per output token"):
        plugin.admit(asked([0.1, 0.1], {TPOT: "1"}), pool())


def test_first_tokens_are_counted_by_whether_they_met_the_objective() -> None:
    plugin, services = made()
    r, at = asked([0.5, 5.0], {TTFT: "1000"}), pool()
    plugin.admit(r, at)
    run = ProfileRun(at, at.zeros(), (0,))
    decision = Decision(run.targets, {"default": run}, "default")
    plugin.before_send(r, decision)
    r.now = r.arrived_at + 2.0
    plugin.response_streaming(r, decision)
    assert "missed" in str(vars(services.counted["objective_first_tokens_total"]))
