"""Tests of the learned latency producer and scorer: what a request observes, and which endpoint it prefers."""

import random
import re

import numpy as np
import pytest

from compiled.outlook import LATE
from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.learning.costs import FEW, WORSE, learned_costs
from epp.learning.model import YOUNG, FirstToken
from epp.plugins._parameters import LearnedLatencyParameters
from epp.plugins._parameters import LearnedLatencyScorerParameters as ScoreParameters
from epp.plugins.producers.learned_latency import LearnedLatency
from epp.plugins.scorers.learned_latency import LearnedLatency as Score
from epp.prefix.match import APPROXIMATE, Prefill, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request

COSTS = learned_costs("learned-latency-producer")
MATCH = prefix_match(APPROXIMATE)
PROMPT = b"x" * 4000  # 1000 tokens
STREAM = Response(200, streaming=True)


class Site:
    """A producer and a scorer over the same services."""

    def __init__(self, exploration: float = 0.0) -> None:
        self.services = FakeServices()
        self.producer = LearnedLatency("learned-latency-producer", LearnedLatencyParameters())
        self.scorer = Score("learned-latency-scorer", ScoreParameters(exploration_rate=exploration))
        for plugin in (self.producer, self.scorer):
            plugin.start(self.services)
        self.model = self.services.learning.model()

    def teach(self, speeds: tuple[float, ...] = (1.0, 1.0, 1.0), answers: int = 30) -> None:
        """Lets endpoints answer prompts of different lengths: 20 ms, and 0.1 ms per token, times their speed."""
        for step in range(answers * len(speeds)):
            slot, tokens = step % len(speeds), 100.0 + 50.0 * (step % 37)
            seconds = speeds[slot] * (0.02 + 1e-4 * tokens)
            predicted = self.model.first_token_s(slot, tokens, 0.0, 0.0, 0.0, 1.0)
            self.model.learn_first(FirstToken(1.0 + step * 0.05, slot, 0, tokens, 0.0, 0.0, 0.0, predicted, seconds))

    def asked(self, at: Candidates, *, held: tuple[float, ...] = (), now: float = 5.0, **fields: object) -> Request:
        asked = request(PROMPT, streaming=True, **fields)
        asked.now = now
        if held:
            asked[MATCH] = PrefixMatch(np.array(held), np.zeros(16, np.uint64), 64)
        self.producer.produce(asked, at)
        return asked

    def scores(self, asked: Request, at: Candidates) -> list[float]:
        scores = self.scorer.score(asked, at, PROFILE)
        assert scores is not None
        return scores.tolist()

    def sent(self, asked: Request, at: Candidates, picked: int) -> Decision:
        run = ProfileRun(at, at.zeros(), (picked,))
        decision = Decision(run.targets, {"default": run}, "default")
        self.producer.before_send(asked, decision)
        return decision


def three(**columns: object) -> Candidates:
    return candidates({"waiting_requests": [0, 0, 0], "running_requests": [0, 0, 0]}, **columns)  # type: ignore[arg-type]


def test_the_endpoint_with_the_soonest_first_token_scores_1() -> None:
    site = Site()
    site.teach((1.0, 3.0, 1.0))
    at = three(tokens=[5000.0, 0.0, 0.0])
    scores = site.scores(site.asked(at), at)
    assert scores[2] == 1.0
    assert max(scores[:2]) < 0.7


def test_a_cached_prefix_counts_as_the_time_that_it_saves() -> None:
    site = Site()
    site.teach()
    at = three()
    scores = site.scores(site.asked(at, held=(0.0, 15.0, 4.0)), at)
    assert scores[1] == 1.0 > scores[2] > scores[0]


def test_without_answers_a_rule_decides_and_says_why() -> None:
    site = Site()
    at = three(inflight=[3.0, 0.0, 2.0])
    asked = site.asked(at)
    assert asked[COSTS].why_not == FEW
    assert site.scores(asked, at)[1] == 1.0


def test_a_model_worse_than_the_mean_is_not_used() -> None:
    site = Site()
    site.teach(answers=YOUNG // 3)
    for _ in range(200):
        site.model.learn_first(FirstToken(5.0, 0, 0, 500.0, 0.0, 0.0, 0.0, 5.0, 0.07))
    at = three()
    asked = site.asked(at)
    assert asked[COSTS].why_not == WORSE
    assert f"not used: {WORSE}" in asked[COSTS].in_words(0, 0, 5.0)


def test_the_time_to_the_first_chunk_is_learned_at_the_endpoint_that_answered() -> None:
    site = Site()
    at = three(tokens=[0.0, 800.0, 0.0], inflight=[0.0, 2.0, 0.0])
    asked = site.asked(at, held=(0.0, 10.0, 0.0))
    asked.sent_at = 5.01
    decision = site.sent(asked, at, 1)
    site.producer.response_received(asked, decision, STREAM)
    asked.now = 5.31
    site.producer.response_streaming(asked, decision)
    answer = Response(200, streaming=True)
    answer.usage, answer.whole = Usage(1000, 11), True
    asked.now = 5.51
    site.producer.response_complete(asked, decision, answer)
    assert set(site.model.endpoints) == {1}
    assert site.model.mean_s == pytest.approx(0.3)
    assert site.model.endpoints[1].token_speed.samples == 1
    assert site.services.learning.starts()[0, 0, 1] == 5.31


@pytest.mark.parametrize(("took", "learned"), [(0.05, 0.05), (1.0, 0.13), (2.6, 0.6)])
def test_what_a_prompt_waits_for_memory_says_nothing_of_the_endpoint(took: float, learned: float) -> None:
    """The prompt of 1,000 tokens finds a full KV cache of 1,000 tokens, so all of that has to end: 2 s."""
    site = Site()
    for _ in range(500):
        site.model.learn_token(2, 0, 1.0, 0.02, 2.0)
    at = candidates({"kv_cache_usage": [1.0], "cache_tokens": [1000]})
    asked = site.asked(at)
    assert asked[COSTS].predicted_s(0) == pytest.approx(2.13, rel=0.01)
    assert re.match(r"first token in 21\d\d ms.* = 2000 ms until its KV cache has room \+ 30 ms", asked[COSTS].in_words(0, 0, 5.0))
    decision = site.sent(asked, at, 0)
    site.producer.response_received(asked, decision, STREAM)
    asked.now += took
    site.producer.response_streaming(asked, decision)
    assert site.model.mean_s == pytest.approx(learned, rel=0.05)


@pytest.mark.parametrize(
    "response", [Response(500, streaming=True), Response(200), Response(429, streaming=True)], ids=["error", "not streamed", "refused"]
)
def test_answers_that_say_nothing_about_the_first_token_are_not_learned(response: Response) -> None:
    site = Site()
    at = three()
    asked = site.asked(at)
    decision = site.sent(asked, at, 0)
    site.producer.response_received(asked, decision, response)
    asked.now = 9.0
    site.producer.response_streaming(asked, decision)
    response.usage, response.whole = Usage(1000, 11), True
    site.producer.response_complete(asked, decision, response)
    assert not site.model.endpoints


def test_an_answer_from_another_endpoint_than_the_picked_one_is_not_learned() -> None:
    site = Site()
    at = three()
    asked = site.asked(at)
    decision = site.sent(asked, at, 0)
    elsewhere = Response(200, streaming=True)
    elsewhere.gateway = {"x-gateway-destination-endpoint-served": "10.0.0.3:8000"}
    site.producer.response_received(asked, decision, elsewhere)
    site.producer.response_streaming(asked, decision)
    assert not site.model.endpoints


def test_an_idle_endpoint_begins_with_a_prompt_when_it_is_sent() -> None:
    site = Site()
    at = three(tokens=[0.0, 800.0, 0.0])
    site.sent(site.asked(at, now=7.0), at, 0)
    site.sent(site.asked(at, now=8.0), at, 1)
    assert site.services.learning.starts()[0, 0, :2].tolist() == [7.0, 0.0]


def test_what_is_sent_to_an_endpoint_that_works_counts_as_sent_after_its_start() -> None:
    """But not if it comes together with the first prompt: then the server begins with both."""
    site = Site()
    idle, at = three(), three(tokens=[1000.0, 0.0, 0.0])
    site.sent(site.asked(idle, now=7.0), idle, 0)
    for now, late in ((7.0, 0.0), (7.004, 0.0), (7.006, 1000.0), (7.5, 2000.0)):
        site.sent(site.asked(at, now=now), at, 0)
        assert site.services.learning.starts()[0, : LATE + 1, 0].tolist() == [7.0, 7.0 if late else 0.0, late]


@pytest.mark.parametrize(
    ("ago", "blocks", "differs"), [(0.01, 70, True), (1.0, 70, False), (0.01, 60, False)], ids=["sibling", "old", "short"]
)
def test_a_second_copy_of_a_prefix_costs_more_for_siblings_only(ago: float, blocks: int, differs: bool) -> None:
    """A block has 64 tokens, so that 70 blocks are a long prefix."""
    site, seconds = Site(), []
    site.teach()
    at = three(tokens=[5000.0, 0.0, 0.0])
    for under_way in ((), (Prefill(at.endpoint(0).owner, blocks, 5.0 - ago, 5000.0),)):
        asked = request(PROMPT * 5, streaming=True)
        asked.now = 5.0
        asked[MATCH] = PrefixMatch(None, np.zeros(78, np.uint64), 64, under_way=under_way)
        site.producer.produce(asked, at)
        seconds.append(asked[COSTS].seconds.tolist())
    assert (seconds[0][1:] != seconds[1][1:]) is differs


@pytest.mark.parametrize(("answers", "in_turn"), [(0, False), (120, False), (120, True)], ids=["unknown", "side by side", "in turn"])
def test_a_first_token_that_waits_for_the_prefix_of_another_prompt_teaches_nothing_unless_prompts_wait_anyway(
    answers: int, in_turn: bool
) -> None:
    site = Site()
    for step in range(answers):
        tokens, ahead = 100.0 + 50.0 * (step % 37), 4000.0 * (step % 2)
        seconds = 0.02 + 1e-4 * (tokens + ahead * in_turn)
        site.model.learn_first(FirstToken(1.0 + step * 0.05, step % 3, 0, tokens, ahead, 0.0, 0.0, seconds, seconds))
    at = three(tokens=[5000.0, 0.0, 0.0])
    asked = request(PROMPT, streaming=True)
    asked.now = 5.0
    under_way = (Prefill(at.endpoint(0).owner, 15, 4.99, 5000.0),)
    asked[MATCH] = PrefixMatch(np.array([15.0, 0.0, 0.0]), np.zeros(16, np.uint64), 64, under_way=under_way)
    site.producer.produce(asked, at)
    if answers:
        assert asked[COSTS].predicted_s(0) == pytest.approx(0.02 + 0.5 + (0.02 + 4e-3), rel=0.2)
    decision, learned = site.sent(asked, at, 0), site.model.first.count
    site.producer.response_received(asked, decision, STREAM)
    asked.now = 5.54
    site.producer.response_streaming(asked, decision)
    assert site.model.first.count == learned + in_turn


def test_dropped_candidates_have_no_cost_and_are_never_sent_to() -> None:
    site = Site()
    site.teach((1.0, 1.0, 2.0))
    at = three().keep(np.array([True, False, True]))
    asked = site.asked(at)
    assert asked[COSTS].costs[1] == np.inf
    assert len(site.scores(asked, at)) == 2
    site.sent(asked, at, 1)
    assert asked[COSTS].sent.slot == 2


def test_a_part_of_the_requests_tries_endpoints_that_are_nearly_as_good() -> None:
    site = Site(exploration=1.0)
    site.teach((1.0, 1.3, 3.0))
    at = three()
    assert site.scores(site.asked(at), at) == [1.0, 1.0, 0.0]


def test_workers_do_not_all_choose_the_same_endpoint() -> None:
    site = Site()
    site.teach()
    at = three()
    scores = site.scores(site.asked(at), at)
    rng = random.Random(1)
    chosen = {rng.choice([i for i, score in enumerate(scores) if score == max(scores)]) for _ in range(50)}
    assert chosen == {0, 1, 2}
