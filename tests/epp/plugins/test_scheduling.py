"""Scorers, pickers and producers, one behaviour per test."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled.outlook import PROMPTS
from epp.decision.decision import Decision, ProfileRun, Response
from epp.learning.costs import FEW, learned_costs
from epp.plugin import NoParams, Plugin
from epp.plugins import pickers
from epp.plugins.pickers.by_chance import RandomChoice, WeightedRandom
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.plugins.producers.inflight import InflightLoad
from epp.plugins.scorers.lora_affinity import LoraAffinity
from epp.plugins.scorers.prefix_cache import PrefixCache
from epp.plugins.scorers.reported import KvUtilization, QueueDepth, RunningRequests
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, predictions, request

MATCH = prefix_match(APPROXIMATE)


def started(plugin: Plugin, services: FakeServices | None = None) -> Plugin:
    plugin.start(services or FakeServices())
    return plugin


def score(scorer: Plugin, c: object, r: object = None) -> list[float]:
    scores = scorer.score(r or request(), c, PROFILE)  # type: ignore[attr-defined]
    return [0.0] * len(c) if scores is None else scores.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scorer", "column"), [(QueueDepth("q", NoParams()), "waiting_requests"), (RunningRequests("r", NoParams()), "running_requests")]
)
def test_the_fewest_requests_score_best_and_equal_numbers_score_one(scorer: Plugin, column: str) -> None:
    assert score(scorer, candidates({column: [4, 0, 2]})) == [0.0, 1.0, 0.5]
    assert score(scorer, candidates({column: [3, 3]})) == [1.0, 1.0]


def test_the_most_free_kv_cache_scores_best() -> None:
    assert score(KvUtilization("k", NoParams()), candidates({"kv_cache_usage": [0.25, 1.0, 1.5]})) == [0.75, 0.0, 0.0]


def test_lora_affinity_prefers_loaded_then_room_then_queued() -> None:
    names = {
        "active_models": [frozenset({"a"}), frozenset({"b"}), frozenset({"b", "c"}), frozenset({"b", "c"})],
        "waiting_models": [frozenset(), frozenset(), frozenset({"a"}), frozenset()],
    }
    c = candidates({"max_lora": [2, 2, 2, 2]}, names=names)
    assert score(LoraAffinity("l", NoParams()), c, request(target_model="a")) == [1.0, 0.8, 0.6, 0.0]


def matched(blocks: list[float] | None, total: int) -> object:
    """A request whose prompt has one token more than its blocks: the one that every server computes."""
    r = request()
    hashes = np.zeros(total, np.uint64)
    r[MATCH] = PrefixMatch(None if blocks is None else np.array(blocks), hashes, 64, 64 * total + 1)
    return r


def test_a_cached_prefix_scores_its_share_of_the_prompt() -> None:
    scorer = PrefixCache("p", PrefixCache.Params())
    c = candidates({"waiting_requests": [0, 0, 0]})
    assert score(scorer, c, matched([0, 5, 10], 10)) == [0.0, 0.5, 1.0]
    assert score(scorer, c, matched(None, 10)) == [0.0, 0.0, 0.0]
    assert score(scorer, c, request()) == [0.0, 0.0, 0.0]


def test_the_length_of_a_match_can_count_besides_its_share() -> None:
    scorer = PrefixCache("p", PrefixCache.Params(match_length_weight=0.5, match_length_scale_tokens=1280))
    c = candidates({"waiting_requests": [0, 0]})
    assert score(scorer, c, matched([10, 20], 20)) == pytest.approx([0.5 * 0.25 + 0.5 * 0.5, 1.0])


def test_narrowed_candidates_score_by_their_own_matches() -> None:
    c = candidates({"waiting_requests": [0, 0, 0]}).keep(np.array([True, False, True]))
    assert score(PrefixCache("p", PrefixCache.Params()), c, matched([1, 2, 4], 4)) == [0.25, 1.0]


def pick(picker: Plugin, totals: list[float]) -> list[int]:
    c = candidates({"waiting_requests": [0.0] * len(totals)})
    return list(picker.pick(request(), c, np.array(totals), PROFILE))  # type: ignore[attr-defined]


def test_max_score_picks_the_best_and_breaks_ties_at_random() -> None:
    picker = started(MaxScore("m", pickers.Parameters()))
    assert pick(picker, [1, 3, 2]) == [1]
    counts = Counter(pick(picker, [1, 3, 3, 3])[0] for _ in range(3000))
    assert set(counts) == {1, 2, 3} and min(counts.values()) > 800


def test_max_score_picks_fallbacks_best_first() -> None:
    picker = started(MaxScore("m", pickers.Parameters(max_num_of_endpoints=3)))
    assert pick(picker, [1, 3, 2, 0]) == [1, 2, 0]
    assert Counter(pick(picker, [1, 1, 9])[1] for _ in range(1000)).keys() == {0, 1}


def test_the_random_picker_ignores_scores_except_for_top_k() -> None:
    assert {pick(started(RandomChoice("r", pickers.DrawParameters()), FakeServices(s)), [9, 0, 0])[0] for s in range(60)} == {0, 1, 2}
    top = started(RandomChoice("r", pickers.DrawParameters(top_k=2)))
    assert {pick(top, [9, 0, 8])[0] for _ in range(100)} == {0, 2}


def test_weighted_random_follows_the_scores() -> None:
    picker = started(WeightedRandom("w", pickers.DrawParameters()))
    counts = Counter(pick(picker, [3, 1, 0])[0] for _ in range(8000))
    assert counts[2] == 0
    assert 2.5 < counts[0] / counts[1] < 3.6


def test_weighted_random_without_any_score_is_random() -> None:
    picker = started(WeightedRandom("w", pickers.DrawParameters()))
    assert {pick(picker, [0, 0, -1])[0] for _ in range(200)} == {0, 1, 2}


def test_weighted_random_draws_among_the_top_k_only() -> None:
    picker = started(WeightedRandom("w", pickers.DrawParameters(top_k=1)))
    assert {pick(picker, [1, 2, 1.9])[0] for _ in range(100)} == {1}


@given(
    st.lists(st.floats(-2, 5), min_size=1, max_size=12),
    st.integers(-1, 15),
    st.integers(0, 15),
    st.sampled_from([MaxScore, RandomChoice, WeightedRandom]),
)
def test_every_picker_returns_distinct_candidates(totals: list[float], count: int, top: int, kind: type[Plugin]) -> None:
    params = pickers.Parameters(count) if kind is MaxScore else pickers.DrawParameters(count, top)
    picked = pick(started(kind("x", params)), totals)
    allowed = min(len(totals), top) if top and kind is not MaxScore else len(totals)
    assert 1 <= len(picked) == len(set(picked)) <= len(totals)
    assert len(picked) == min(max(1, count), allowed)
    assert all(0 <= index < len(totals) for index in picked)


def decision_for(index: int, size: int = 3) -> Decision:
    run = ProfileRun(candidates({"waiting_requests": [0.0] * size}), np.zeros(size), (index,))
    return Decision(run.targets, {"default": run}, "default")


def test_a_prompt_is_found_at_the_endpoint_that_it_was_sent_to() -> None:
    services = FakeServices()
    producer = started(ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params()), services)
    first, longer, other = (request(p) for p in (b"a" * 1024, b"a" * 1024 + b"b" * 512, b"c" * 1024))
    c = candidates({"waiting_requests": [0, 0, 0]})
    producer.produce(first, c)  # type: ignore[attr-defined]
    assert first[MATCH].blocks is None
    producer.before_send(first, decision_for(1))  # type: ignore[attr-defined]
    for later, expected in ((first, [0, 4, 0]), (longer, [0, 4, 0])):
        producer.produce(later, c)  # type: ignore[attr-defined]
        assert later[MATCH].blocks.tolist() == expected
    producer.produce(other, c)  # type: ignore[attr-defined]
    assert other[MATCH].blocks is None
    producer.before_send(longer, decision_for(1))  # type: ignore[attr-defined]
    assert services.measured["prefix_indexer_hit_ratio"].values[-1] == pytest.approx(4 * 64 / (6 * 64 - 1))
    assert services.measured["prefix_indexer_hit_bytes"].values[-1] == 1024


def test_prompts_match_only_up_to_the_configured_length() -> None:
    producer = started(ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params(max_prefix_tokens_to_match=128)))
    r = request(b"a" * 4096)
    producer.produce(r, candidates({"waiting_requests": [0]}))  # type: ignore[attr-defined]
    assert r[MATCH].total == 2


@pytest.mark.parametrize(
    ("params", "tokens"), [({}, 64), ({"block_size_tokens": 128}, 128), ({"block_size": 256}, 256), ({"block_size_tokens": 32}, 64)]
)
def test_blocks_are_at_least_64_tokens(params: dict[str, int], tokens: int) -> None:
    assert ApproximatePrefix(APPROXIMATE, ApproximatePrefix.Params(**params)).block_tokens == tokens


def in_flight(services: FakeServices) -> dict[int, tuple[int, int]]:
    """Returns slot -> the tokens in flight, and of how many prompts they are."""
    prompts = services.learning.starts()[:, PROMPTS].sum(axis=0)
    return {slot: (tokens, int(prompts[slot])) for slot, tokens in services.tokens.items()}


def test_tokens_in_flight_are_released_once_at_the_first_chunk_or_the_end() -> None:
    services = FakeServices()
    load = started(InflightLoad("i", InflightLoad.Params()), services)
    r = request(b"x" * 400)
    decision = decision_for(2)
    load.before_send(r, decision)  # type: ignore[attr-defined]
    assert in_flight(services) == {2: (100, 1)}
    load.response_streaming(r, decision)  # type: ignore[attr-defined]
    load.response_streaming(r, decision)  # type: ignore[attr-defined]
    load.response_complete(r, decision, Response())  # type: ignore[attr-defined]
    assert in_flight(services) == {2: (0, 0)}


@pytest.mark.parametrize("estimated", [False, True])
def test_tokens_of_a_prefill_target_are_released_at_the_first_chunk_in_any_case(estimated: bool) -> None:
    services = FakeServices()
    params = InflightLoad.Params(add_estimated_output_tokens=estimated, output_ratio=0)
    load = started(InflightLoad("i", params), services)
    decode, prefill = decision_for(0).runs["default"], decision_for(2).runs["default"]
    decision = Decision(decode.targets, {"decode": decode, "prefill": prefill, "encode": None}, "decode")  # type: ignore[union-attr]
    r = request(b"x" * 400)
    load.before_send(r, decision)  # type: ignore[attr-defined]
    assert in_flight(services) == {0: (100, 1), 2: (100, 1)}
    for _ in range(2):
        load.response_streaming(r, decision)  # type: ignore[attr-defined]
        assert in_flight(services) == {0: (100, 1) if estimated else (0, 0), 2: (0, 0)}
    load.response_complete(r, decision, Response())  # type: ignore[attr-defined]
    assert in_flight(services) == {0: (0, 0), 2: (0, 0)}


@pytest.mark.parametrize(
    ("streaming", "why_not", "kept"),
    [(False, "", 0), (True, "", 100), (False, FEW, 0)],
    ids=["not streamed", "streamed", "too few answers"],
)
def test_tokens_of_answers_that_are_not_streamed_are_released_when_the_first_token_is_predicted(
    streaming: bool, why_not: str, kept: int
) -> None:
    services = FakeServices()
    load = started(InflightLoad("i", InflightLoad.Params()), services)
    r = request(b"x" * 400, streaming=streaming)
    r.now = 5.0
    r[learned_costs("")] = predictions([9.0, 9.0, 0.015], why_not=why_not)
    decision = decision_for(2)
    load.before_send(r, decision)  # type: ignore[attr-defined]
    for looks in range(3):
        assert in_flight(services) == {2: (100, 1) if looks < 2 or kept else (0, 0)}
        if looks < len(services.pauses):
            services.pauses[looks][1].finish()
    load.response_complete(r, decision, Response())  # type: ignore[attr-defined]
    assert in_flight(services) == {2: (0, 0)}
    assert len(services.pauses) == (2 if kept == 0 else 0), "nothing looks while nothing is due"
    assert float(services.learning.starts()[0, 0, 2]) == (5.015 if kept == 0 else 0.0)


def test_estimated_output_tokens_stay_until_the_end() -> None:
    services = FakeServices()
    load = started(InflightLoad("i", InflightLoad.Params(add_estimated_output_tokens=True)), services)
    r = request(b"x" * 400, max_tokens=20)
    load.before_send(r, decision_for(0))  # type: ignore[attr-defined]
    load.response_streaming(r, decision_for(0))  # type: ignore[attr-defined]
    assert in_flight(services) == {0: (120, 1)}
    load.response_complete(r, decision_for(0), Response())  # type: ignore[attr-defined]
    assert in_flight(services) == {0: (0, 0)}
