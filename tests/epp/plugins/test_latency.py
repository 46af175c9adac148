"""Plugins that decide by predicted latencies: two filters, a scorer and an admitter."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.errors import Cause, Refused
from epp.learning.latency import PREDICTOR, TTFT_HEADERS, LatencyPredictions, latency_predictions, objective_ms
from epp.plugins.admitters.latency_slo import LatencySlo
from epp.plugins.filters.headroom_tier import HeadroomTier
from epp.plugins.filters.prefix_affinity import PrefixCacheAffinity
from epp.plugins.scorers.latency import Latency
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request

PREDICTED = latency_predictions("")
MATCH = prefix_match(APPROXIMATE)
NAN = float("nan")


def made(cls: type, **params: object):
    plugin = cls(cls.type_name, msgspec.convert(params, cls.Params))
    plugin.start(FakeServices())
    return plugin


def predicted(ttft_headroom: list[float], tpot_headroom: list[float] | None = None, **fields: object) -> Request:
    r = request(**{name: value for name, value in fields.items() if name != "ttft_ms"})
    ttft = np.array(ttft_headroom)
    tpot = np.where(np.isnan(ttft), NAN, 0.0) if tpot_headroom is None else np.array(tpot_headroom)
    ms = np.array(fields.get("ttft_ms", ttft_headroom))
    r[PREDICTED] = LatencyPredictions(ttft_ms=ms, tpot_ms=ms, ttft_headroom=ttft, tpot_headroom=tpot)
    return r


def matched(r: Request, blocks: list[float] | None, total: int = 10) -> Request:
    r[MATCH] = PrefixMatch(None if blocks is None else np.array(blocks), np.zeros(total, np.uint64), 64)
    return r


def some(count: int, **more: object) -> Candidates:
    return candidates({"waiting_requests": [0.0] * count}, **more)


# The datum


def test_predictions_are_keyed_by_the_name_of_their_producer() -> None:
    assert latency_predictions("") == latency_predictions(PREDICTOR) != latency_predictions("mine")


def test_the_masks_name_the_endpoints_with_a_prediction_and_those_that_meet_both_objectives() -> None:
    predictions = predicted([5, 5, -1, NAN], [0, -1, 5, NAN])[PREDICTED]
    assert predictions.known().tolist() == [True, True, True, False]
    assert predictions.kept().tolist() == [True, False, False, False]


@pytest.mark.parametrize(
    ("headers", "objective"),
    [
        ({}, 0.0),
        ({"x-llm-d-slo-ttft-ms": "200"}, 200.0),
        ({"x-slo-ttft-ms": "1.5"}, 1.5),
        ({"x-llm-d-slo-ttft-ms": "soon", "x-slo-ttft-ms": "100"}, 0.0),
        ({"x-slo-ttft-ms": "inf"}, 0.0),
        ({"x-slo-ttft-ms": "nan"}, 0.0),
    ],
)
def test_an_objective_is_the_number_in_the_first_header_that_is_present(headers: dict[str, str], objective: float) -> None:
    assert objective_ms(request(headers=headers), TTFT_HEADERS) == objective


# slo-headroom-tier-filter


def kept(plugin: object, r: Request, c: Candidates) -> list[bool]:
    return plugin.keep(r, c, PROFILE).tolist()


def test_the_tier_that_meets_its_objectives_stays() -> None:
    tier = made(HeadroomTier, epsilonExploreNeg=0)
    assert kept(tier, predicted([5, -5, NAN, 0], [1, 1, NAN, 0]), some(4)) == [True, False, False, True]


def test_a_single_tier_or_no_prediction_keeps_all() -> None:
    tier = made(HeadroomTier, epsilonExploreNeg=0)
    for r in (predicted([-1, NAN, -2]), predicted([1, 2, 3]), predicted([NAN] * 3), request()):
        assert kept(tier, r, some(3)) == [True] * 3
    assert kept(tier, predicted([-1]), some(1)) == [True]


def test_the_other_tier_is_explored_as_often_as_configured() -> None:
    r = predicted([5, -5])
    assert kept(made(HeadroomTier, epsilonExploreNeg=1), r, some(2)) == [False, True]
    tier = made(HeadroomTier, epsilonExploreNeg=0.1)
    explored = sum(kept(tier, r, some(2)) == [False, True] for _ in range(3000))
    assert 230 < explored < 370  # 300 expected, 4 standard deviations are 66


def test_a_filter_reads_the_predictions_of_the_remaining_candidates() -> None:
    c = some(4).keep(np.array([False, True, True, False]))
    assert kept(made(HeadroomTier, epsilonExploreNeg=0), predicted([5, -5, 5, -5]), c) == [False, True]


# prefix-cache-affinity-filter


def test_only_endpoints_with_enough_of_the_prompt_stay() -> None:
    affinity = made(PrefixCacheAffinity)  # 8 of 10 is the threshold of 0.80
    assert kept(affinity, matched(request(), [8, 7.9, 10, 0]), some(4)) == [True, False, True, False]


@pytest.mark.parametrize(
    ("params", "blocks", "count"),
    [({}, [7, 7], 2), ({}, None, 2), ({}, [10], 1), ({"affinityThreshold": 0}, [10, 0], 2), ({"affinityThreshold": -1}, [10, 0], 2)],
)
def test_without_a_sticky_endpoint_or_a_choice_all_are_kept(params: dict[str, float], blocks: list[float] | None, count: int) -> None:
    assert kept(made(PrefixCacheAffinity, **params), matched(request(), blocks), some(count)) == [True] * count
    assert kept(made(PrefixCacheAffinity), request(), some(2)) == [True, True]


@pytest.mark.parametrize(
    ("tokens", "stays"), [([18_000, 0], True), ([18_001, 0], False), ([28_001, 10_000], False), ([28_000, 10_000], True)]
)
def test_the_gate_compares_tokens_in_flight_at_this_decision(tokens: list[float], stays: bool) -> None:
    # At 1,000 tokens/s a token takes 1 ms. The sticky endpoint may be 18,000 ms slower than the best other one.
    affinity = made(PrefixCacheAffinity, peakPrefillThroughput=1000)
    assert kept(affinity, matched(request(), [10, 0]), some(2, tokens=tokens)) == ([True, False] if stays else [True, True])


def test_the_best_endpoint_of_each_side_counts_and_without_a_gate_load_is_ignored() -> None:
    r = matched(request(), [10, 10, 0, 0])
    c = some(4, tokens=[90_000, 10_000, 50_000, 5_000])
    assert kept(made(PrefixCacheAffinity, peakPrefillThroughput=1000), r, c) == [True, True, False, False]
    assert kept(made(PrefixCacheAffinity, peakPrefillThroughput=1000, maxTTFTPenaltyMs=4999), r, c) == [True] * 4
    assert kept(made(PrefixCacheAffinity, peakPrefillThroughput=0, maxTTFTPenaltyMs=0), r, c) == [True, True, False, False]


@pytest.mark.parametrize(
    ("ttft_ms", "sticky"), [([500, 400], True), ([501, 400], False), ([NAN, 400], False), ([500, NAN], True), ([NAN, NAN], True)]
)
def test_the_gate_can_compare_predictions_and_a_missing_one_is_infinite(ttft_ms: list[float], sticky: bool) -> None:
    affinity = made(PrefixCacheAffinity, ttftSource="latencyPredictor", maxTTFTPenaltyMs=100)
    r = matched(predicted(ttft_ms, ttft_ms=ttft_ms), [10, 0])
    assert kept(affinity, r, some(2)) == ([True, False] if sticky else [True, True])
    assert kept(affinity, matched(request(), [10, 0]), some(2)) == [True, False]


def test_exploration_keeps_all_as_often_as_configured() -> None:
    r = matched(request(), [10, 0])
    assert kept(made(PrefixCacheAffinity, explorationProbability=1), r, some(2)) == [True, True]
    affinity = made(PrefixCacheAffinity, explorationProbability=0.2)
    assert 240 < sum(kept(affinity, r, some(2)) == [True, True] for _ in range(1500)) < 360  # 300, 4 deviations are 62


@pytest.mark.parametrize(
    ("params", "blocks", "size", "outcome"),
    [
        ({}, [10, 0], 2, "sticky"),
        ({}, [10, 10], 2, "sticky"),
        ({}, [7, 0], 2, "no_match"),
        ({}, None, 2, "no_match"),
        ({}, [10], 1, "not_applicable"),
        ({"affinityThreshold": 0}, [10, 0], 2, "not_applicable"),
        ({"explorationProbability": 1}, [10, 0], 2, "exploration"),
        ({"peakPrefillThroughput": 1, "maxTTFTPenaltyMs": 1}, [10, 0], 2, "load_override"),
    ],
)
def test_each_decision_is_counted_with_its_outcome(params: dict[str, float], blocks: list[float] | None, size: int, outcome: str) -> None:
    services = FakeServices()
    affinity = PrefixCacheAffinity("p", msgspec.convert(params, PrefixCacheAffinity.Params))
    affinity.start(services)
    affinity.keep(matched(request(), blocks), some(size, tokens=[1000.0, 0.0][:size]), PROFILE)
    assert services.counted["prefix_cache_affinity_filter_decisions_total"].values == {(outcome,): 1}


def test_the_filter_reads_only_what_its_gate_needs() -> None:
    names = [[key.name for key in made(PrefixCacheAffinity, **p).consumes][1:] for p in (
        {}, {"maxTTFTPenaltyMs": 0}, {"ttftSource": "latencyPredictor", "latencyPredictionInfoProducerName": "p"},
    )]  # fmt: skip
    assert names == [["inflight_tokens"], [], ["latency_predictions/p"]]


def test_a_gate_without_a_throughput_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^peakPrefillThroughput: must be above 0"):
        made(PrefixCacheAffinity, peakPrefillThroughput=0)


# latency-scorer


def score(r: Request, c: Candidates, **params: object) -> list[float]:
    return made(Latency, **params).score(r, c, PROFILE).tolist()


def test_among_endpoints_that_meet_their_objectives_the_least_headroom_scores_best() -> None:
    # |ttft| 0..100 -> n = 0, .5, 1; all tpot equal, so ttft has all the weight; least: floor((1 - n) * 100) + 1 hundredths.
    assert score(predicted([0, 50, 100]), some(3)) == [1.0, 0.51, 0.01]
    assert score(predicted([0, 50, 100]), some(3), headroomSelectionStrategy="most") == [0.01, 0.51, 1.0]


def test_both_headrooms_count_by_their_weights() -> None:
    # n_ttft = 0, .25, 1 and n_tpot = 1, .5, 0; c = .8 n_ttft + .2 n_tpot = .2, .3, .8; most: floor(c * 100) + 1.
    r = predicted([0, 25, 100], [10, 5, 0])
    assert score(r, some(3), headroomSelectionStrategy="most") == [0.21, 0.31, 0.81]
    # weights 4 and 1 become .8 and .2; with 0 and 0 only ttft counts: c = 0, .25, 1.
    assert score(r, some(3), headroomSelectionStrategy="most", ttftWeight=4, tpotWeight=1) == [0.21, 0.31, 0.81]
    assert score(r, some(3), headroomSelectionStrategy="most", ttftWeight=0, tpotWeight=0) == [0.01, 0.26, 1.0]


def test_equal_headrooms_count_half_and_a_headroom_that_is_equal_for_all_does_not_count() -> None:
    assert score(predicted([7, 7], [3, 3]), some(2)) == [0.51, 0.51]
    assert score(predicted([7, 7], [0, 4]), some(2)) == [1.0, 0.01]


def test_an_endpoint_without_a_prediction_counts_as_having_no_headroom() -> None:
    assert score(predicted([NAN, 50, 100]), some(3)) == [1.0, 0.51, 0.01]


def test_an_endpoint_that_misses_an_objective_scores_0_while_others_meet_it() -> None:
    assert score(predicted([-1, 10, 20]), some(3)) == [0.0, 1.0, 0.01]
    assert score(predicted([5, 10, 20], [-1, 0, 0]), some(3)) == [0.0, 1.0, 0.01]


@pytest.mark.parametrize(
    ("ttft", "tpot", "inflight", "expected"),
    [
        ([-10, -20, -30], [0, 0, 0], [1, 0, 0], [0.0, 1.0, 0.01]),  # idle endpoints, the smallest miss first
        ([10, 10, -5, -5], [-10, -20, 1, -1], [1] * 4, [1.0, 0.01, 0.0, 0.0]),  # TPOT only
        ([-10, -20, -5], [1, 1, -1], [1] * 3, [1.0, 0.01, 0.0]),  # TTFT only
        ([-10, -20], [-1, -1], [1] * 2, [1.0, 0.01]),  # both
    ],
)
def test_if_all_miss_an_objective_one_bucket_is_scored_by_least(
    ttft: list[float], tpot: list[float], inflight: list[float], expected: list[float]
) -> None:
    c = some(len(ttft), inflight=inflight, inflight_at_scrape=inflight)
    assert score(predicted(ttft, tpot), c, headroomSelectionStrategy="most") == expected


def test_without_any_prediction_free_cache_queue_and_prefix_decide() -> None:
    c = candidates({"waiting_requests": [0, 4, 2], "kv_cache_usage": [0.5, 0.25, 1.0]})
    # free KV .5 .75 0; queue 1 0 .5; prefix 0 1 .4: means .5, .58333, .3
    assert score(matched(request(), [0, 10, 4]), c) == [0.5, 0.58, 0.3]
    assert score(matched(predicted([NAN] * 3), [0, 10, 4]), c) == [0.5, 0.58, 0.3]
    # weights 2 : 1 : 1: (1 + 1 + 0) / 4, (1.5 + 0 + 1) / 4 = .625 -> .63, (0 + .5 + .5) / 4
    assert score(matched(request(), [0, 10, 5]), c, compositeKVWeight=2) == [0.5, 0.63, 0.25]
    assert score(request(), c, compositeKVWeight=0, compositePrefixWeight=0) == [1.0, 0.0, 0.5]
    # weights -1 : 1 : 1: -.5 + 1, -.75 + 0 -> 0, 0 + .5
    assert score(request(), c, compositeKVWeight=-1) == [0.5, 0.0, 0.5]
    assert score(request(), c, compositeKVWeight=0, compositeQueueWeight=0, compositePrefixWeight=0) == [0.5, 0.75, 0.0]


def test_if_no_endpoint_has_a_queue_all_get_the_best_queue_score() -> None:
    c = candidates({"waiting_requests": [0, 0], "kv_cache_usage": [1.0, 0.0]})
    assert score(request(), c, compositePrefixWeight=0) == [0.5, 1.0]


headrooms = st.one_of(st.floats(-1e6, 1e6), st.just(NAN))


@given(
    rows=st.lists(st.tuples(headrooms, st.floats(-1e6, 1e6), st.integers(0, 2)), min_size=1, max_size=9),
    most=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_scores_are_in_range_and_move_with_their_endpoints(rows: list[tuple], most: bool, order) -> None:
    def scores(rows: list[tuple]) -> list[float]:
        ttft, inflight = [row[0] for row in rows], [row[2] for row in rows]
        tpot = [NAN if np.isnan(row[0]) else row[1] for row in rows]
        c = some(len(rows), inflight=inflight, inflight_at_scrape=inflight)
        return score(predicted(ttft, tpot), c, headroomSelectionStrategy="most" if most else "least")

    plain = scores(rows)
    assert all(0 <= s <= 1 for s in plain)
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)
    assert scores([rows[i] for i in shuffled]) == [plain[i] for i in shuffled]


# latency-slo-admitter

BUSY = {"running_requests": [1, 1], "kv_cache_usage": [0.5, 0.5]}


def admits(r: Request, c: Candidates) -> bool:
    try:
        made(LatencySlo).admit(r, c)
    except Refused as refused:
        assert refused.cause is Cause.NOT_ADMITTED
        return False
    return True


def late(ttft: list[float], priority: int = -1, **headers: str) -> Request:
    return predicted(ttft, priority=priority, headers=headers or {"x-slo-tpot-ms": "10"})


def test_a_sheddable_request_is_refused_if_no_endpoint_meets_its_objectives() -> None:
    assert not admits(late([-1, -2]), candidates(BUSY))
    assert not admits(late([-1, NAN]), candidates(BUSY))
    assert admits(late([-1, 0]), candidates(BUSY))


def test_requests_that_do_not_qualify_for_the_check_are_admitted() -> None:
    c = candidates(BUSY)
    assert admits(late([-1, -2], priority=0), c)
    assert admits(late([-1, -2], **{"x-slo-ttft-ms": "0"}), c)
    assert admits(late([-1, -2], **{"x-other": "1"}), c)
    assert admits(late([NAN, NAN]), c)
    assert admits(request(priority=-1, headers={"x-slo-ttft-ms": "5"}), c)


@pytest.mark.parametrize("changed", [{"running_requests": [1, 0]}, {"kv_cache_usage": [0.019, 0.5]}])
def test_an_idle_or_cold_endpoint_admits(changed: dict[str, list[float]]) -> None:
    assert admits(late([-1, -2]), candidates({**BUSY, **changed}))


def test_only_the_candidates_count() -> None:
    c = candidates({"running_requests": [1, 1, 0], "kv_cache_usage": [0.5] * 3}).keep(np.array([True, True, False]))
    assert not admits(late([-1, -2, 5]), c)
