"""Admission of programs by the KV cache that they hold. Each endpoint has 1,000 tokens, of which 900 are let; all values are by hand."""

from math import isclose
from textwrap import dedent
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config.load import load
from epp.data import CACHE_TOKENS
from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.plugins.fairness.thunder_agent import ThunderAgent
from epp.plugins.ordering import FirstCome
from epp.request import DEFAULT_FLOW, Request
from tests.contract.waiting import Band, Waits, asking, made
from tests.epp.plugins.calls import PROFILE
from tests.examples import examples
from tests.fakes import FakeServices, candidates, request

SIZES = {"capacityTokens": 1000, "bufferTokensPerProgram": 0}


class World:
    """A picker with one band and some endpoints."""

    def __init__(self, endpoints: int = 1, **parameters: Any) -> None:
        self.agent = ThunderAgent("thunder", msgspec.convert({**SIZES, **parameters}, ThunderAgent.Params))
        self.services = FakeServices()
        self.agent.start(self.services)
        self.pool = candidates({"waiting_requests": [0.0] * endpoints})
        self.agent.saturation(self.pool)
        self.band = Band(self.agent, made(FirstCome))

    def send(self, name: str, row: int = 0, *, at: float = 0.0, size: int = 400, **headers: str) -> tuple[Request, Decision]:
        """A turn that was dispatched, and goes to the endpoint in this row."""
        r = request(b"", fairness_id=name, now=at, body_bytes=size, headers=headers)
        run = ProfileRun(self.pool, np.zeros(len(self.pool)), [row])
        decision = Decision(run.targets, {"default": run}, "default")
        self.agent.before_send(r, decision)
        return r, decision

    def answer(self, turn: tuple[Request, Decision], tokens: int, at: float = 0.0, *, status: int = 200) -> None:
        """The turn ends with `tokens` in total, three quarters of them in the prompt; 0: without usage."""
        r, decision = turn
        r.now = at
        response = Response(status)
        response.usage = Usage(tokens - tokens // 4, tokens // 4) if tokens else None
        self.agent.response_complete(r, decision, response)

    def hold(self, name: str, tokens: int, row: int = 0, *, at: float = 0.0) -> None:
        """A program that is idle and holds so many tokens."""
        self.answer(self.send(name, row, at=at, size=3 * tokens), tokens, at)  # 4 bytes per token of the prompt

    def wait(self, name: str, *, at: float = 0.0, size: int = 400) -> Waits:
        return self.band.offer(asking(name, arrival=at, bytes=size))

    def next(self, now: float = 0.0) -> str | None:
        """Whose turn is next."""
        flow = self.band.share.pick(now)
        return None if flow is None else str(flow.key.fairness_id)

    def scores(self, name: str, pool: Candidates | None = None, *, at: float = 0.0) -> list[float] | None:
        scores = self.agent.score(request(b"", fairness_id=name, now=at), pool or self.pool, PROFILE)
        return None if scores is None else [round(float(score), 6) for score in scores]

    def counted(self, metric: str) -> dict[tuple[str, ...], int]:
        return dict(self.services.counted[f"thunder_agent_{metric}"].values) if f"thunder_agent_{metric}" in self.services.counted else {}


# Who goes next


def test_a_program_that_holds_room_goes_before_new_ones_even_at_a_full_endpoint() -> None:
    world = World()
    world.hold("veteran", 900)
    world.wait("new", at=1.0)
    world.wait("veteran", at=2.0)
    assert world.next(3.0) == "veteran"


def test_the_smallest_program_that_holds_room_goes_first_and_of_equal_ones_the_oldest() -> None:
    world = World(endpoints=2)
    world.hold("big", 200)
    world.hold("small", 20)
    world.hold("twin", 20, row=1)
    for at, name in ((1.0, "big"), (2.0, "twin"), (3.0, "small")):
        world.wait(name, at=at)
    assert world.next(4.0) == "twin"
    world.band.dispatch(4.0)
    assert world.next(4.0) == "small"


def test_a_new_program_waits_until_it_fits() -> None:
    world = World()
    running = world.send("veteran", size=3600)  # 900 tokens
    world.wait("new")
    assert world.next() is None, "900 of 900 tokens are held"
    world.answer(running, 800)  # the estimator learns 0.8 x 4 + 0.2 x 3600 / 600 = 4.4 bytes per token: 400 bytes are 90 tokens
    assert world.next() == "new", "90 fit into 100"
    world.wait("larger", size=444)  # 100 tokens
    world.band.dispatch(0.0)
    assert world.next() is None, "the room of the first one is kept for it"


def test_room_that_is_kept_is_given_up_when_the_program_is_sent_or_after_five_seconds() -> None:
    world = World()
    world.wait("first", size=2400)
    world.wait("second", size=2000)
    assert world.band.dispatch(0.0) is not None  # the smaller one: 500 tokens
    assert world.next(4.9) is None and world.next(5.1) == "first", "600 fit again"
    world.band.dispatch(5.1)
    world.send("first", at=5.2, size=400)  # needs 100 only
    world.wait("third", at=5.2, size=2800)
    assert world.next(5.3) == "third", "700 fit beside 100"


def test_the_buffer_counts_for_each_program_and_for_the_new_one() -> None:
    world = World(bufferTokensPerProgram=100)
    world.hold("one", 600)
    world.wait("new", size=400)
    assert world.next() == "new", "600 + 100 + 100 + 100 = 900"
    world.hold("one", 601)
    assert world.next() is None


def test_a_smaller_new_program_passes_one_that_does_not_fit() -> None:
    world = World()
    world.hold("veteran", 700)
    world.wait("large", at=1.0, size=1200)
    world.wait("small", at=2.0, size=600)
    assert world.next(3.0) == "small"


def test_after_the_limit_of_starvation_the_oldest_head_goes_whether_it_fits_or_not() -> None:
    world = World(headWaitStarvationMs=5000)
    world.hold("veteran", 900)
    world.wait("large", at=1.0, size=40_000)
    world.wait("veteran", at=2.0)
    assert world.next(5.9) == "veteran"
    assert world.next(6.0) == "large"
    world.band.dispatch(6.0)
    assert world.counted("starvation_promotions_total") == {(): 1}
    assert world.counted("holds_total") == {("new",): 1}


def test_without_a_limit_of_starvation_a_program_that_never_fits_waits_for_ever() -> None:
    world = World(headWaitStarvationMs=0)
    world.wait("large", size=40_000)
    assert world.next(1e6) is None


def test_before_any_endpoint_is_known_all_go_in_order_of_their_classes() -> None:
    world = World()
    world.agent = ThunderAgent("t", msgspec.convert(SIZES, ThunderAgent.Params))  # not the detector
    world.agent.start(FakeServices())
    world.band = Band(world.agent, made(FirstCome))
    world.wait("large", at=1.0, size=10**9)
    assert world.next(2.0) == "large"


def test_the_second_request_of_a_program_needs_no_room_once_the_first_was_sent() -> None:
    world = World()
    world.wait("agent", size=3600)
    world.wait("agent", size=3600)
    world.band.dispatch(0.0)
    assert world.next() is None, "900 are kept for the first"
    world.send("agent", size=3600)
    assert world.next() == "agent"


# What programs hold


def test_a_running_turn_holds_its_estimate_or_what_the_program_held_before_but_not_both() -> None:
    world = World()
    world.hold("agent", 500)
    turn = world.send("agent", size=1200)  # 300 tokens of 4 bytes
    assert world.scores("new") == [0.5]
    other = world.send("agent", size=1600)  # 300 + 400 are in flight
    assert world.scores("new") == [0.3]
    world.answer(turn, 0)
    world.answer(other, 0)
    assert world.scores("new") == [0.5], "without usage the larger of 500 and the estimate of 400 stays"


def test_an_answer_that_failed_commits_no_estimate() -> None:
    world = World()
    world.answer(world.send("agent", size=2000), 0, status=503)
    assert world.scores("new") == [1.0]


def test_the_tokens_of_an_idle_program_halve_every_half_life() -> None:
    world = World(actingHalfLifeSeconds=10)
    world.hold("a", 800, at=100.0)
    world.hold("b", 100, at=110.0)
    assert world.scores("new", at=110.0) == [0.5], "400 + 100"
    assert world.scores("new", at=120.0) == [0.75], "200 + 50"
    world.send("a", at=120.0, size=4)
    assert world.scores("new", at=120.0) == [0.15], "while it runs it holds all 800; beside 50"


def test_the_size_of_a_cache_is_what_the_endpoint_reports_else_the_configured_one() -> None:
    world = World(endpoints=2)
    values = {CACHE_TOKENS.name: [1600.0, float("nan")]}
    world.pool = candidates(values)
    world.agent.saturation(world.pool)
    world.hold("a", 800)
    world.hold("b", 500, row=1)
    assert world.scores("new") == [0.5, 0.5], "1 - 800 / 1600 and 1 - 500 / 1000"
    strict = World(requireRealCapacity=True)
    strict.wait("new", size=4)
    assert strict.next() is None and strict.scores("new") == [0.0]


def test_the_estimator_learns_the_bytes_per_token_of_prompts() -> None:
    world = World()
    world.answer(world.send("a", size=8000), 2000)  # 8000 / 1500 = 5.33: 0.8 x 4 + 0.2 x 5.33 = 4.267
    assert isclose(world.agent.programs.bytes_per_token, 3.2 + 0.2 * 8000 / 1500)
    assert world.agent.programs.estimate(4267) == 1000


def test_a_program_that_announced_its_last_turn_is_forgotten_when_all_its_turns_have_ended() -> None:
    world = World()
    early = world.send("agent")
    last = world.send("agent", **{"x-session-final": " True "})
    world.answer(last, 900)
    assert world.scores("other") != [1.0]
    world.answer(early, 900)
    assert world.scores("other") == [1.0] and len(world.agent.programs) == 0
    assert world.counted("session_final_releases_total") == {(): 1}


def test_idle_programs_are_forgotten_after_the_ttl() -> None:
    world = World(evictionTtlSeconds=60, evictionSweepSeconds=10)
    (sweep,) = (act for seconds, act in world.services.periodic if seconds == 10)
    world.hold("old", 400, at=100.0)
    running = world.send("busy", at=100.0)
    world.hold("new", 100, at=161.0)
    sweep()
    assert world.scores("x", at=161.0) == [0.8], "100 tokens of `new`, and 100 of `busy`"
    assert world.counted("ttl_evictions_total") == {(): 1}
    world.answer(running, 0, 162.0)


# Shedding


def test_a_full_endpoint_sheds_its_smallest_idle_programs_first_until_it_is_below_the_limit() -> None:
    world = World(shedIdleSeconds=1)
    for name, tokens in (("small", 100), ("medium", 200), ("large", 900)):
        world.hold(name, tokens)
    world.wait("x", at=10.0, size=4)
    assert world.next(10.0) is None, "the rest, 900, fills what is let"
    assert world.scores("new", at=10.0) == [0.1], "900 of 1000 are left"
    assert world.counted("sheds_total") == {(): 2}


def test_a_shed_program_waits_until_it_fits_again_and_goes_before_new_ones() -> None:
    world = World(endpoints=2, shedIdleSeconds=1)
    world.hold("veteran", 400)
    world.hold("runner", 600)
    world.send("runner", at=10.0, size=2400)
    world.hold("filler", 900, row=1, at=10.0)
    world.wait("newcomer", at=10.0, size=1200)
    assert world.next(10.0) == "newcomer", "400 were shed, 300 are free"
    world.wait("veteran", at=10.1)
    assert world.next(10.1) == "newcomer", "400 do not fit beside 600, and do not block 300"
    assert world.scores("veteran", at=10.1) == [0.4, 0.1], "it is no longer bound"
    world.hold("filler", 100, row=1, at=10.2)
    assert world.next(10.2) == "veteran"


def test_running_and_recently_active_programs_are_not_shed() -> None:
    world = World(shedIdleSeconds=10)
    world.hold("fresh", 500, at=100.0)
    world.hold("busy", 1000, at=50.0)
    world.send("busy", at=100.0)
    world.wait("x", at=101.0, size=4000)
    assert world.next(101.0) is None
    assert world.counted("sheds_total") == {}


# Where a program goes


def test_a_program_stays_at_its_endpoint_and_a_new_one_goes_where_least_is_held() -> None:
    world = World(endpoints=3)
    world.hold("a", 500)
    world.hold("b", 200, row=1)
    assert world.scores("a") == [1.0, 0.0, 0.0]
    assert world.scores("new") == [0.5, 0.8, 1.0]


def test_a_program_whose_endpoint_is_filtered_out_goes_elsewhere_and_moves() -> None:
    world = World(endpoints=3)
    world.hold("a", 500)
    rest = world.pool.keep(np.array([False, True, True]))
    assert world.scores("a", rest) == [1.0, 1.0]
    world.answer(world.send("a", row=2), 600)
    assert world.scores("a") == [0.0, 0.0, 1.0]
    assert world.scores("a", rest) == [0.0, 1.0]
    assert world.counted("rebinds_total") == {(): 1}
    assert world.scores("new") == [1.0, 1.0, 0.4], "nothing of it is left at the first endpoint"


def test_a_program_goes_where_room_was_kept_for_it() -> None:
    world = World(endpoints=2)
    world.hold("other", 500)
    world.wait("new", size=2000)
    world.band.dispatch(0.0)
    assert world.scores("new") == [0.0, 1.0]


def test_requests_without_a_fairness_id_are_not_scored_and_hold_nothing() -> None:
    world = World()
    assert world.scores(DEFAULT_FLOW) is None
    world.answer(world.send(DEFAULT_FLOW), 900)
    assert world.scores("new") == [1.0]


def test_an_endpoint_that_left_has_no_room_and_its_programs_move_with_their_next_turn() -> None:
    world = World(endpoints=2)
    world.hold("a", 300, row=1)
    world.pool = candidates({"waiting_requests": [0.0]})
    world.agent.saturation(world.pool)
    world.wait("new", size=3604)  # 901 tokens
    assert world.next() is None
    assert world.scores("a") == [1.0]


def test_gauges_show_programs_and_endpoints() -> None:
    world = World(endpoints=2, shedIdleSeconds=1)
    world.hold("a", 950)
    world.hold("b", 250, row=1)
    world.wait("x", at=5.0, size=1)
    world.next(5.0)  # sheds a
    (show,) = (act for seconds, act in world.services.periodic if seconds == 1.0)
    show()
    shown = world.services.shown
    assert shown["thunder_agent_programs"].values == {("bound",): 1, ("unbound",): 2}
    assert shown["thunder_agent_pod_utilization"].values == {("default/pod-0",): 0.0, ("default/pod-1",): 0.25}
    assert shown["thunder_agent_pod_capacity_tokens"].values["default/pod-0", "fallback"] == 1000.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "answer", "shed", "sweep"]), st.integers(0, 4), st.integers(0, 2), st.integers(0, 900)),
        max_size=60,
    )
)
@examples(80)
def test_the_sums_of_the_endpoints_are_those_of_their_programs(steps: list[tuple[str, int, int, int]]) -> None:
    world = World(endpoints=3, actingHalfLifeSeconds=5, evictionTtlSeconds=20)
    running: list[tuple[Request, Decision]] = []
    now = 100.0
    for step, which, row, tokens in steps:
        now += 0.5 + tokens / 100
        if step == "send":
            running.append(world.send(f"p{which}", row, at=now, size=4 * tokens))
        elif step == "answer" and running:
            world.answer(running.pop(which % len(running)), tokens, now)
        elif step == "sweep":
            world.agent.programs.sweep()
        else:
            for pod in world.agent.programs.pods.values():
                world.agent.programs.shed(pod, float(tokens), 1.0, 0.0, now)
        for pod in world.agent.programs.pods.values():
            held = sum(world.agent.programs.tokens(program, now) for program in pod.programs.values())
            assert isclose(world.agent.programs.load(pod, now), held, rel_tol=1e-6, abs_tol=1e-3)
            assert all(program.pod is pod for program in pod.programs.values())


# The configuration

CONFIG = """
    featureGates: [flowControl]
    plugins: [{type: thunder-agent, name: thunder}, {type: utilization-detector, name: u}, {type: max-score-picker}]
    flowControl:
      saturationDetector: {pluginRef: DETECTOR}
      defaultPriorityBand: {fairnessPolicyRef: POLICY}
    schedulingProfiles: [{name: default, plugins: [{pluginRef: thunder}, {pluginRef: u}, {pluginRef: max-score-picker}]}]
"""


@pytest.mark.parametrize(
    ("detector", "policy", "words"),
    [
        ("thunder", "thunder", ""),
        ("u", "thunder", "it learns the endpoints only as the saturation detector"),
        ("thunder", "round-robin-fairness-policy", "it holds them back only as the fairness policy"),
    ],
)
def test_a_plugin_that_is_named_in_one_of_its_two_places_only_gets_a_warning(detector: str, policy: str, words: str) -> None:
    text = dedent(CONFIG).replace("DETECTOR", detector).replace("POLICY", policy)
    if policy != "thunder":
        text = text.replace("{type: max-score-picker}]", f"{{type: max-score-picker}}, {{type: {policy}}}]", 1)
    told = [w.message for w in load(text, "c.yaml", allow_experimental=True).warnings if "lets all requests in" in w.message]
    assert (words in told[0]) if words else not told


@pytest.mark.parametrize(("field", "words"), [("sessionFinalHeader", "sessionFinalHeader: is empty")])
def test_an_empty_header_is_refused(field: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        World(**{field: " "})
