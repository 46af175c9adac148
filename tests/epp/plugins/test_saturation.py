"""How full the pool is, and which endpoints have room: by the reports of servers, and by the load in flight."""

from typing import Any

import msgspec
import numpy as np
import pytest

from epp.candidates import Candidates
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS
from epp.plugins.saturation.concurrency import Concurrency
from epp.plugins.saturation.utilization import Utilization
from tests.contract.waiting import made
from tests.epp.plugins.calls import kept, only
from tests.fakes import candidates

NAN = float("nan")


def pool(waiting: list[float], kv: list[float], **more: Any) -> Candidates:
    return candidates({"waiting_requests": waiting, "kv_cache_usage": kv}, **more)


# By the reports of servers


def test_saturation_is_the_mean_of_each_endpoints_worse_ratio() -> None:
    # max(5/5, .4/.8) = 1; max(1/5, .6/.8) = .75; max(20/5, 0) = 4
    c = pool([5, 1, 20], [0.4, 0.6, 0.0])
    assert made(Utilization).saturation(c) == pytest.approx(5.75 / 3)
    assert made(Utilization).saturation(only(c, 0, 1)) == pytest.approx(1.75 / 2)


def test_thresholds_define_what_is_full() -> None:
    detector = made(Utilization, queueDepthThreshold=10, kvCacheUtilThreshold=0.5)
    assert detector.saturation(pool([5, 1], [0.1, 0.4])) == pytest.approx((0.5 + 0.8) / 2)


def test_requests_sent_since_the_scrape_count_as_waiting() -> None:
    c = pool([2, 2], [0.0, 0.0], inflight=[9, 1], inflight_at_scrape=[6, 6])
    assert made(Utilization).saturation(c) == pytest.approx((5 / 5 + 2 / 5) / 2)


def test_a_stale_or_unknown_endpoint_counts_by_its_load_in_flight_alone() -> None:
    c = pool([50, 50, 1], [0.9, 0.9, 0.0], fresh=[False, False, True], known=[True, False, True], inflight=[0, 4, 0])
    detector = made(Utilization)
    assert detector.saturation(c) == pytest.approx((0 + 4 / 5 + 1 / 5) / 3)
    assert (detector.stale(c), detector.stale(only(c, 0, 2))) == (2, 1)


@pytest.mark.parametrize(
    ("policy", "mixed", "all_stale", "step"),
    [
        ("saturated", (1 + 1 + 1 / 5) / 3, 1.0, 1 / 15),  # as in the reference picker: a stale endpoint is full
        ("ignore", 1 / 5, 0.0, 1 / 5),  # as there: the mean of the fresh ones
    ],
)
def test_the_staleness_policy_says_what_a_stale_or_unknown_endpoint_counts_as(
    policy: str, mixed: float, all_stale: float, step: float
) -> None:
    c = pool([50, 50, 1], [0.9, 0.9, 0.0], fresh=[False, False, True], known=[True, False, True], inflight=[0, 4, 0])
    detector = made(Utilization, stalenessPolicy=policy)
    assert detector.saturation(c) == pytest.approx(mixed)
    assert detector.saturation(only(c, 0, 1)) == all_stale
    assert detector.saturation(only(c)) == 1.0
    assert detector.step(c) == pytest.approx(step)
    assert (detector.stale(c), kept(detector, c)) == (2, kept(made(Utilization), c))


def test_a_value_that_an_engine_does_not_report_counts_by_the_load_in_flight_alone() -> None:
    c = pool([NAN, NAN, 3], [0.4, NAN, NAN], inflight=[1, 2, 0])
    assert made(Utilization).saturation(c) == pytest.approx((0.4 / 0.8 + 2 / 5 + 3 / 5) / 3)
    assert made(Utilization).saturation(candidates({}, count=2, inflight=[5, 5])) == 1.0


@pytest.mark.parametrize(
    ("ages", "saturation"),
    [
        ([0.1, 0.1], (5 / 5 + 0) / 2),
        ([0.3, 0.1], (1 / 5 + 0) / 2),  # stale for this detector, fresh for the picker
        ([9.0, 9.0], (1 / 5 + 3 / 5) / 2),
    ],
)
def test_the_detectors_staleness_threshold_replaces_the_pickers_limit(ages: list[float], saturation: float) -> None:
    c = pool([5, 0], [0.0, 0.0], ages=ages, inflight=[1, 3], inflight_at_scrape=[1, 3])
    detector = made(Utilization, metricsStalenessThreshold="200ms")
    assert detector.saturation(c) == pytest.approx(saturation)
    assert made(Utilization).saturation(c) == 0.5
    late = made(Utilization, metricsStalenessThreshold="10s")
    stale = pool([5, 0], [0.0, 0.0], ages=[9.0, 9.0], fresh=[False] * 2, inflight=[2, 3], inflight_at_scrape=[1, 3])
    assert late.saturation(stale) == pytest.approx((6 / 5 + 0) / 2), "above the picker's limit, so its scrape counts"
    unknown = pool([5, 0], [0.0, 0.0], ages=[0.0, 0.0], fresh=[False] * 2, known=[False] * 2, inflight=[1, 0])
    assert late.saturation(unknown) == pytest.approx(1 / 5 / 2), "an unknown endpoint is never fresh"


def test_a_scrape_interval_above_the_threshold_slows_dispatch_and_never_stops_it() -> None:
    """Scrapes come every second, the threshold is 200 ms. Most of the time everything is stale."""
    detector = made(Utilization, metricsStalenessThreshold="200ms")
    room = 0
    for age in np.arange(0.0, 1.0, 0.05):
        in_flight = 0
        while True:
            c = pool([4, 4], [0.5, 0.5], ages=[age, age], inflight=[in_flight, in_flight], inflight_at_scrape=[0, 0])
            if detector.saturation(c) >= 1.0:
                break
            in_flight += 1
        room += in_flight > 0
        assert in_flight <= 5, "the limit still holds"
    assert room == 20


@pytest.mark.parametrize("text", ["200", "soon", "0s", "-1s"])
def test_a_threshold_is_a_duration_above_0(text: str) -> None:
    with pytest.raises(ValueError, match=r"^metricsStalenessThreshold: "):
        made(Utilization, metricsStalenessThreshold=text)


@pytest.mark.parametrize(
    "parameters",
    [
        {"queueDepthThreshold": 0},
        {"queueDepthThreshold": 1.5},
        {"kvCacheUtilThreshold": 0},
        {"kvCacheUtilThreshold": 1.1},
        {"headroom": -0.1},
        {"threshold": 1},
    ],
)
def test_invalid_thresholds_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(Utilization, **parameters)


def test_the_filter_keeps_endpoints_below_both_thresholds() -> None:
    c = pool([4, 5, 0, 0], [0.0, 0.0, 0.79, 0.8])
    assert kept(made(Utilization), c) == [0, 2]
    assert kept(made(Utilization, headroom=0.2), c) == [0, 1, 2, 3]
    assert kept(made(Utilization), only(c, 1, 2)) == [1]


def test_the_filter_keeps_all_endpoints_if_none_is_below_the_thresholds() -> None:
    assert kept(made(Utilization), pool([5, 9], [0.0, 0.9])) == [0, 1]


def test_the_filter_judges_stale_endpoints_by_their_load_in_flight() -> None:
    c = pool([0, 50, 50], [0.0, 0.9, 0.9], fresh=[True, False, False], inflight=[0, 4, 5])
    assert kept(made(Utilization), c) == [0, 1]


def test_a_new_snapshot_is_read() -> None:
    detector = made(Utilization)
    assert [detector.saturation(pool([n], [0.0])) for n in (0, 5, 10)] == [0.0, 1.0, 2.0]


# By the load in flight


@pytest.mark.parametrize(
    ("mode", "saturation"), [("requests", (50 + 150) / 200), ("tokens", (900 + 0) / 2000), ("hybrid", (0.9 + 1.5) / 2)]
)
def test_saturation_is_the_load_in_flight_divided_by_its_limit(mode: str, saturation: float) -> None:
    detector = made(Concurrency, concurrencyMode=mode, maxTokenConcurrency=1000)
    c = candidates({}, count=2, inflight=[50, 150], tokens=[900, 0])
    assert detector.saturation(c) == pytest.approx(saturation)
    assert detector.stale(candidates({}, count=1, fresh=[False])) == 0


@pytest.mark.parametrize(("mode", "indices"), [("requests", [0, 1]), ("tokens", [0, 3]), ("hybrid", [0])])
def test_the_filter_keeps_endpoints_below_their_limit_with_headroom_rounded_down(mode: str, indices: list[int]) -> None:
    detector = made(Concurrency, concurrencyMode=mode, maxConcurrency=3, maxTokenConcurrency=10, headroom=0.5)
    c = candidates({}, count=4, inflight=[3, 3, 4, 4], tokens=[14, 15, 20, 0])
    assert kept(detector, c) == indices


def test_the_filter_may_keep_no_endpoint() -> None:
    c = candidates({}, count=2, inflight=[100, 101])
    assert kept(made(Concurrency), c) == []


def test_the_detector_reads_only_what_its_mode_needs() -> None:
    assert made(Concurrency).consumes == (INFLIGHT_REQUESTS,)
    assert INFLIGHT_TOKENS in made(Concurrency, concurrencyMode="tokens").consumes
    assert INFLIGHT_TOKENS in made(Concurrency, concurrencyMode="hybrid").consumes
    assert list(made(Concurrency, inFlightLoadProducerName="mine").needs) == ["load"]
    assert not made(Concurrency, inFlightLoadProducerName="inflight-load-producer").needs


def test_a_step_is_one_request_or_the_mean_tokens_of_those_in_flight() -> None:
    c = candidates({}, count=2, inflight=[3, 1], tokens=[300, 100])
    assert made(Utilization).step(c) == pytest.approx(1 / 5 / 2)
    assert made(Concurrency).step(c) == pytest.approx(1 / 100 / 2)
    assert made(Concurrency, concurrencyMode="tokens", maxTokenConcurrency=1000).step(c) == pytest.approx(0.1 / 2)
    assert made(Concurrency, concurrencyMode="hybrid", maxTokenConcurrency=1000).step(c) == pytest.approx(0.1 / 2)
    assert made(Concurrency, concurrencyMode="tokens").step(candidates({}, count=1)) == 0.0


@pytest.mark.parametrize(
    "parameters", [{"concurrencyMode": "both"}, {"maxConcurrency": 0}, {"maxTokenConcurrency": 0}, {"headroom": -1}, {"max": 1}]
)
def test_invalid_limits_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(Concurrency, **parameters)
