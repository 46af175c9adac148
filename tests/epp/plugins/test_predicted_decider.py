"""The decider that asks the learned model whether disaggregation pays."""

from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates
from epp.decision.decision import PREFILL, Decision, ProfileRun, Response, Usage
from epp.learning.costs import FEW, learned_costs
from epp.plugins._parameters import LearnedLatencyParameters
from epp.plugins.deciders.predicted import Predicted
from epp.plugins.producers.learned_latency import LearnedLatency
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.stages import servers
from tests.fakes import FakeServices, candidates, predictions, request

TOKENS = 1_000
POOL = servers("decode", "prefill", "both", "encode")
DECODE = ProfileRun(POOL, POOL.zeros(), [0])


def decider(**params: Any) -> Predicted:
    return Predicted("d", msgspec.convert(params, Predicted.Params))


def asked(*seconds: float, blocks: float = 0.0, why_not: str = "") -> Request:
    """Returns a request of 1,000 tokens with predictions for the four servers. `blocks`: of 64 tokens, cached by the first one."""
    made = request(b"x" * (4 * TOKENS))
    if seconds:
        made[learned_costs("")] = predictions(seconds, why_not=why_not)
    if blocks:
        made[prefix_match(APPROXIMATE)] = PrefixMatch(np.array([blocks, 0.0, 0.0, 0.0]), np.zeros(16, np.uint64), 64)
    return made


@pytest.mark.parametrize(
    ("params", "seconds", "wanted"),
    [
        ({"transferMsPerThousandTokens": 0, "minGainMs": 0}, (0.2, 0.1, 0.3, 0.0), True),
        ({"transferMsPerThousandTokens": 0, "minGainMs": 0}, (0.2, 0.3, 0.1, 0.0), True),  # role `both` computes prompts, too
        ({"transferMsPerThousandTokens": 0, "minGainMs": 0}, (0.2, 0.3, 0.3, 0.0), False),  # an encode server does not
        ({"transferMsPerThousandTokens": 99, "minGainMs": 0}, (0.2, 0.1, 0.3, 0.0), True),
        ({"transferMsPerThousandTokens": 101, "minGainMs": 0}, (0.2, 0.1, 0.3, 0.0), False),
        ({"transferMsPerThousandTokens": 0, "minGainMs": 99}, (0.2, 0.1, 0.3, 0.0), True),
        ({"transferMsPerThousandTokens": 0, "minGainMs": 101}, (0.2, 0.1, 0.3, 0.0), False),
    ],
)
def test_prefill_runs_elsewhere_if_the_first_token_then_comes_sooner(
    params: dict[str, Any], seconds: tuple[float, ...], wanted: bool
) -> None:
    assert decider(**params).wanted(asked(*seconds), DECODE) is wanted


def test_only_tokens_that_are_not_cached_are_transferred() -> None:
    slow = decider(transferMsPerThousandTokens=200, minGainMs=0)
    assert not slow.wanted(asked(0.2, 0.1, 0.3, 0.0), DECODE)
    assert slow.wanted(asked(0.2, 0.1, 0.3, 0.0, blocks=8), DECODE)


@pytest.mark.parametrize("seconds", [(), (0.1, 0.2, 0.3, 0.4)])
def test_while_the_model_is_not_used_uncached_tokens_decide(seconds: tuple[float, ...]) -> None:
    some = decider(nonCachedTokens=500)
    assert some.wanted(asked(*seconds, why_not=FEW), DECODE)
    assert not some.wanted(asked(*seconds, why_not=FEW, blocks=8), DECODE)


def test_without_prefill_servers_or_before_decode_nothing_is_wanted() -> None:
    alone = servers("decode", "decode")
    run = ProfileRun(alone, alone.zeros(), [0])
    made = request(b"x" * 4_000)
    made[learned_costs("")] = predictions([1.0, 1.0])
    assert not decider().wanted(made, run)
    assert not decider().wanted(asked(0.2, 0.1, 0.3, 0.0), None)


def test_the_prefill_endpoint_learns_the_first_token_and_the_decode_endpoint_the_time_per_token() -> None:
    services = FakeServices()
    producer = LearnedLatency("learned-latency-producer", LearnedLatencyParameters())
    producer.start(services)
    pool: Candidates = candidates({"waiting_requests": [0, 0], "running_requests": [0, 0]})
    made = request(b"x" * 4_000, streaming=True)
    made.now = made.sent_at = 10.0
    producer.produce(made, pool)
    runs: dict[str, ProfileRun | None] = {"decode": ProfileRun(pool, pool.zeros(), [0]), PREFILL: ProfileRun(pool, pool.zeros(), [1])}
    decision = Decision(runs["decode"].targets, runs, "decode")  # type: ignore[union-attr]
    decision.prefill = PREFILL
    producer.before_send(made, decision)
    answer = Response(200, streaming=True)
    producer.response_received(made, decision, answer)
    made.now = 10.2
    producer.response_streaming(made, decision)
    answer.usage, answer.whole, made.now = Usage(1_000, 11), True, 10.7
    producer.response_complete(made, decision, answer)
    known = services.learning.model().endpoints
    assert {slot: (each.speed.samples, each.token_speed.samples) for slot, each in known.items()} == {0: (0, 1), 1: (1, 0)}
