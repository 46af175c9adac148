"""Times to the first token, observed by the producer and turned into scores; all expected values are computed by hand."""

from math import isclose
from textwrap import dedent

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config.load import ConfigErrors, load
from epp.decision.decision import Decision, ProfileRun, Response
from epp.learning.ttft import OBSERVER, TtftPercentiles, ttft_percentiles
from epp.plugins.producers._observations import percentile
from epp.plugins.producers.latency_observer import LatencyObserver
from epp.plugins.scorers.latency_observation import LatencyObservation
from epp.request import Request
from tests.epp.plugins.calls import PROFILE
from tests.fakes import FakeServices, candidates, request

KEY = ttft_percentiles("")


def observer(**params: object) -> LatencyObserver:
    made = LatencyObserver(OBSERVER, msgspec.convert(params, LatencyObserver.Params))
    made.start(FakeServices())
    return made


def scorer(**params: object) -> LatencyObservation:
    made = LatencyObservation("s", msgspec.convert({"explorationRate": 0, **params}, LatencyObservation.Params))
    made.start(FakeServices())
    return made


def some(*load: float) -> Candidates:
    return candidates({"waiting_requests": [0.0] * len(load)}, inflight=load)


def sent(plugin: LatencyObserver, at: float, pool: Candidates, row: int = 0) -> tuple[Request, Decision]:
    r = request()
    r.now = r.sent_at = at
    plugin.produce(r, pool)
    run = ProfileRun(pool, np.zeros(len(pool)), [row])
    decision = Decision(run.targets, {"default": run}, "default")
    plugin.before_send(r, decision)
    return r, decision


def answered(plugin: LatencyObserver, r: Request, decision: Decision, at: float, *, status: int = 200, streaming: bool = True) -> None:
    r.now = at
    plugin.response_received(r, decision, Response(status, streaming=streaming))
    plugin.response_streaming(r, decision)


def observe(plugin: LatencyObserver, at: float, ttft_s: float, pool: Candidates, row: int = 0) -> None:
    r, decision = sent(plugin, at - ttft_s, pool, row)
    answered(plugin, r, decision, at)


def seen(plugin: LatencyObserver, at: float, pool: Candidates) -> TtftPercentiles:
    r = request()
    r.now = at
    plugin.produce(r, pool)
    found = r[KEY]
    assert isinstance(found, TtftPercentiles)
    return found


# The producer


def test_the_percentiles_interpolate_and_carry_the_mean_load_around_them() -> None:
    plugin = observer(minRequests=5)
    for n in range(5):  # 0.1 s at 2 in flight, 0.2 s at 4, ... 0.5 s at 10
        observe(plugin, 100.0 + n / 100, 0.1 * (n + 1), some(2.0 * (n + 1), 0.0))
    got = seen(plugin, 102.0, some(0.0, 0.0))
    # P10 of 5 values stands at 0.4: 0.1 + 0.4 x 0.1. P25 stands at 1.0, its band from 0.6 to 1.4, that is values 0 and 1.
    # P50 stands at 2.0, its band from 1.6 to 2.4, that is values 1 and 2.
    assert [round(float(a[0]), 9) for a in (got.floor_s, got.low_s, got.low_load, got.typical_s, got.typical_load)] == [
        0.14, 0.2, 3.0, 0.3, 5.0,
    ]  # fmt: skip
    assert got.recent.tolist() == [True, False]
    assert got.floor_s[1] == got.typical_s[1] == 0.0, "nothing was observed of the second endpoint"


def test_fewer_requests_than_the_threshold_leave_an_endpoint_cold() -> None:
    plugin = observer(minRequests=3)
    pool = some(1.0)
    observe(plugin, 10.0, 0.2, pool)
    observe(plugin, 10.1, 0.2, pool)
    assert seen(plugin, 12.0, pool).floor_s.tolist() == [0.0]
    observe(plugin, 12.5, 0.2, pool)
    assert [round(v, 9) for v in seen(plugin, 14.0, pool).floor_s.tolist()] == [0.2]


def test_recent_requests_age_out_while_the_floor_stays() -> None:
    plugin = observer(minRequests=2, maxObservationAge="10s", bucketDuration="5s")
    pool = some(3.0)
    for at in (100.0, 101.0, 102.0):
        observe(plugin, at, 0.3, pool)
    later = seen(plugin, 500.0, pool)
    assert later.recent.tolist() == [False] and later.typical_s.tolist() == [0.0]
    assert isclose(later.floor_s[0], 0.3), "the bucket of the last requests joined the history"


def test_only_the_newest_requests_are_recent() -> None:
    plugin = observer(minRequests=1, maxRequests=2, windowSize=10)
    pool = some(0.0)
    for n, ttft in enumerate((9.0, 9.0, 0.1, 0.3)):
        observe(plugin, 100.0 + n / 10, ttft, pool)
    assert isclose(seen(plugin, 103.0, pool).typical_s[0], 0.2)


def test_the_floor_is_the_tenth_percentile_of_the_buckets_and_a_full_history_gives_up_its_largest() -> None:
    plugin = observer(minRequests=1, bucketDuration="10s", bucketHistorySize=2, maxObservationAge="10s")
    pool = some(0.0)
    floors = []
    for start, ttft in ((100.0, 0.4), (111.0, 0.2), (122.0, 0.8)):  # one bucket each
        observe(plugin, start, ttft, pool)
        floors.append(round(float(seen(plugin, start + 10.5, pool).floor_s[0]), 9))
    # 0.2 + 0.1 x 0.2 of the first two; 0.8 joins and is given up again.
    assert floors == [0.4, 0.22, 0.22]


@pytest.mark.parametrize(("status", "streaming"), [(500, True), (429, True), (200, False)])
def test_an_answer_that_failed_or_is_not_streamed_does_not_count(status: int, streaming: bool) -> None:
    plugin = observer(minRequests=1)
    pool = some(0.0)
    r, decision = sent(plugin, 100.0, pool)
    answered(plugin, r, decision, 100.1, status=status, streaming=streaming)
    assert seen(plugin, 102.0, pool).floor_s.tolist() == [0.0]


def test_the_load_is_that_of_the_decision_also_among_some_of_the_endpoints() -> None:
    plugin = observer(minRequests=1)
    pool = some(5.0, 6.0, 7.0)
    kept = pool.keep(np.array([False, True, True]))
    r, decision = sent(plugin, 100.0, kept, row=1)  # the third endpoint
    answered(plugin, r, decision, 100.5)
    got = seen(plugin, 102.0, pool)
    assert got.typical_load.tolist() == [0.0, 0.0, 7.0] and got.typical_s.tolist() == [0.0, 0.0, 0.5]


def test_percentiles_are_computed_once_per_interval() -> None:
    plugin = observer(minRequests=1, intervalDuration="2s")
    pool = some(0.0)
    first = seen(plugin, 100.0, pool)
    r, decision = sent(plugin, 100.1, pool)
    answered(plugin, r, decision, 100.2)
    assert seen(plugin, 101.9, pool) is first
    assert seen(plugin, 102.0, pool).floor_s[0] > 0.0


def test_an_endpoint_that_left_is_forgotten() -> None:
    plugin = observer(minRequests=1)
    two, one = some(0.0, 0.0), some(0.0)
    observe(plugin, 100.0, 0.1, two, row=1)
    r, decision = sent(plugin, 100.0, two, row=1)
    seen(plugin, 101.0, one)
    answered(plugin, r, decision, 101.5)  # arrives when the endpoint is gone
    assert seen(plugin, 103.0, two).floor_s.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"maxRequests": 20, "windowSize": 10}, "maxRequests: 20 is more than windowSize, 10"),
        ({"lowPercentile": 50}, "lowPercentile: 50 is not below typicalPercentile, 50"),
        ({"intervalDuration": "0s"}, "intervalDuration: '0s' is not above 0"),
        ({"bucketDuration": "soon"}, "bucketDuration: 'soon' is not a duration"),
    ],
)
def test_impossible_parameters_are_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        observer(**params)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_the_extremes_and_agrees_with_numpy(values: list[float], fraction: float) -> None:
    got = percentile(sorted(values), fraction)
    assert min(values) <= got <= max(values) * (1 + 1e-12)
    assert isclose(got, float(np.percentile(values, fraction * 100)), rel_tol=1e-6, abs_tol=1e-6)


# The scorer


def curves(*points: tuple[float, float, float, float, float, bool]) -> Request:
    floor, low, low_load, typical, typical_load, recent = (np.array(column) for column in zip(*points, strict=True))
    r = request()
    r[KEY] = TtftPercentiles(floor_s=floor, low_s=low, low_load=low_load, typical_s=typical, typical_load=typical_load, recent=recent)
    return r


A = (0.1, 0.2, 4.0, 0.6, 8.0, True)  # bends at 4 in flight


@pytest.mark.parametrize(
    ("point", "load", "predicted"),
    [
        (A, 0.0, 0.1),
        (A, 2.0, 0.15),  # half way from 0.1 to 0.2
        (A, 4.0, 0.2),
        (A, 6.0, 0.4),  # half way from 0.2 to 0.6
        (A, 12.0, 1.0),  # 0.2 + 8 x 0.1
        ((0.1, 0.2, 7.0, 0.5, 8.0, True), 4.0, 0.3),  # loads too close: straight, 0.1 + 4 x 0.4 / 8
        ((0.1, 0.7, 4.0, 0.5, 8.0, True), 4.0, 0.3),  # low above typical
        ((0.1, 0.1, 4.0, 0.5, 8.0, True), 4.0, 0.3),  # low not above the floor
        ((0.1, 0.2, 0.0, 0.5, 8.0, True), 4.0, 0.3),  # no load at the low point
    ],
)
def test_the_prediction_follows_the_observed_curve(
    point: tuple[float, float, float, float, float, bool], load: float, predicted: float
) -> None:
    # Beside endpoints that are predicted at exactly 0.05 and 2.05 the score gives the prediction away.
    fast, slow = (0.05, 0.0, 0.0, 0.06, 1.0, True), (2.05, 0.0, 0.0, 3.0, 1.0, True)
    scores = scorer().score(curves(point, fast, slow), some(load, 0.0, 0.0), PROFILE)
    assert np.allclose(scores, [(2.05 - predicted) / 2.0, 1.0, 0.0])


def test_too_few_recent_requests_predict_the_floor_and_a_cold_endpoint_counts_as_the_fastest() -> None:
    seed, cold, slow = ((0.3, 0.4, 1.0, 0.9, 2.0, False), (0.0, 0.0, 0.0, 0.0, 0.0, False), (0.5, 0.0, 0.0, 0.6, 1.0, True))
    scores = scorer().score(curves(seed, cold, slow), some(50.0, 50.0, 0.0), PROFILE)
    assert scores.tolist() == [1.0, 1.0, 0.0]


def test_all_cold_or_all_equal_score_1() -> None:
    cold = (0.0, 0.0, 0.0, 0.0, 0.0, False)
    assert scorer(explorationRate=0.1).score(curves(cold, cold), some(0.0, 0.0), PROFILE).tolist() == [1.0, 1.0]
    assert scorer().score(curves(A, A), some(3.0, 3.0), PROFILE).tolist() == [1.0, 1.0]
    assert scorer().score(request(), some(0.0, 0.0), PROFILE).tolist() == [1.0, 1.0], "nothing was observed yet"


def test_predictions_are_rounded_to_steps() -> None:
    one, other, far = ((0.100, 0.0, 0.0, 0.2, 1.0, True), (0.104, 0.0, 0.0, 0.2, 1.0, True), (0.3, 0.0, 0.0, 0.4, 1.0, True))
    scores = scorer(roundTTFTStep=0.01).score(curves(one, other, far), some(0.0, 0.0, 0.0), PROFILE)
    assert scores.tolist() == [1.0, 1.0, 0.0]


def test_an_endpoint_without_a_curve_is_tried_as_often_as_configured() -> None:
    cold, trusted = (0.0, 0.0, 0.0, 0.0, 0.0, False), (0.2, 0.0, 0.0, 0.4, 2.0, True)
    plugin = scorer(explorationRate=0.25)
    got = [plugin.score(curves(cold, trusted), some(0.0, 0.0), PROFILE).tolist() for _ in range(2000)]
    assert {tuple(scores) for scores in got} == {(1.0, 1.0), (0.0, 1.0)}
    assert 400 < sum(scores[0] for scores in got) < 600


# The configuration


@pytest.mark.parametrize("sources", ["", "dataLayer: {sources: [{pluginRef: o}]}"])
def test_the_scorer_reads_the_named_observer_whether_it_is_listed_as_a_source_or_not(sources: str) -> None:
    text = f"""
        plugins:
        - {{type: latency-observer-producer-hub, name: o}}
        - {{type: latency-observation-scorer-hub, parameters: {{ttftPercentilesProducerName: o}}}}
        {sources}
    """
    effective = load(dedent(text), "c.yaml", allow_experimental=True)
    assert [producer.name for producer in effective.pipeline.wiring.producers] == ["o"]
    assert bool(effective.sources) != bool(sources), "with the observer as the source nothing is scraped"


def test_without_a_named_observer_the_scorer_gets_one() -> None:
    effective = load("plugins: [{type: latency-observation-scorer-hub}]", "c.yaml", allow_experimental=True)
    assert OBSERVER in [producer.name for producer in effective.pipeline.wiring.producers]


def test_an_observer_takes_no_extractors() -> None:
    text = f"""
        plugins: [{{type: {OBSERVER}}}, {{type: latency-observation-scorer-hub}}, {{type: core-metrics-extractor}}]
        dataLayer: {{sources: [{{pluginRef: {OBSERVER}, extractors: [{{pluginRef: core-metrics-extractor}}]}}]}}
    """
    with pytest.raises(ConfigErrors, match=f"data source '{OBSERVER}' takes no extractors"):
        load(dedent(text), "c.yaml", allow_experimental=True)
