"""How full the pool is, and who has room: by what servers report, and by what is in flight."""

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


# What servers report


def test_saturation_is_the_mean_of_each_endpoints_worse_ratio() -> None:
    # max(5/5, .4/.8) = 1; max(1/5, .6/.8) = .75; max(20/5, 0) = 4
    c = pool([5, 1, 20], [0.4, 0.6, 0.0])
    assert made(Utilization).saturation(c) == pytest.approx(5.75 / 3)
    assert made(Utilization).saturation(only(c, 0, 1)) == pytest.approx(1.75 / 2)


def test_thresholds_say_what_full_is() -> None:
    detector = made(Utilization, queueDepthThreshold=10, kvCacheUtilThreshold=0.5)
    assert detector.saturation(pool([5, 1], [0.1, 0.4])) == pytest.approx((0.5 + 0.8) / 2)


def test_what_was_sent_since_the_scrape_waits_too() -> None:
    c = pool([2, 2], [0.0, 0.0], inflight=[9, 1], inflight_at_scrape=[6, 6])
    assert made(Utilization).saturation(c) == pytest.approx((5 / 5 + 2 / 5) / 2)


def test_a_stale_or_unknown_endpoint_counts_by_what_is_in_flight_alone() -> None:
    c = pool([50, 50, 1], [0.9, 0.9, 0.0], fresh=[False, False, True], known=[True, False, True], inflight=[0, 4, 0])
    detector = made(Utilization)
    assert detector.saturation(c) == pytest.approx((0 + 4 / 5 + 1 / 5) / 3)
    assert (detector.stale(c), detector.stale(only(c, 0, 2))) == (2, 1)


def test_a_value_that_an_engine_does_not_report_counts_by_what_is_in_flight_alone() -> None:
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
def test_a_threshold_of_its_own_replaces_the_pickers_limit(ages: list[float], saturation: float) -> None:
    c = pool([5, 0], [0.0, 0.0], ages=ages, inflight=[1, 3], inflight_at_scrape=[1, 3])
    detector = made(Utilization, metricsStalenessThreshold="200ms")
    assert detector.saturation(c) == pytest.approx(saturation)
    assert made(Utilization).saturation(c) == 0.5
    late = made(Utilization, metricsStalenessThreshold="10s")
    stale = pool([5, 0], [0.0, 0.0], ages=[9.0, 9.0], fresh=[False] * 2, inflight=[2, 3], inflight_at_scrape=[1, 3])
    assert late.saturation(stale) == pytest.approx((6 / 5 + 0) / 2), "longer than the picker's: its scrape still counts"
    unknown = pool([5, 0], [0.0, 0.0], ages=[0.0, 0.0], fresh=[False] * 2, known=[False] * 2, inflight=[1, 0])
    assert late.saturation(unknown) == pytest.approx(1 / 5 / 2), "never scraped is never fresh"


def test_an_interval_above_the_threshold_slows_to_counting_and_never_stops() -> None:
    """Scrapes every second, a threshold of 200 ms: most of the time everything is stale."""
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
        assert in_flight <= 5, "and it does not let everything through"
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
def test_thresholds_that_make_no_sense_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(Utilization, **parameters)


def test_the_filter_keeps_who_is_below_both_thresholds() -> None:
    c = pool([4, 5, 0, 0], [0.0, 0.0, 0.79, 0.8])
    assert kept(made(Utilization), c) == [0, 2]
    assert kept(made(Utilization, headroom=0.2), c) == [0, 1, 2, 3]
    assert kept(made(Utilization), only(c, 1, 2)) == [1]


def test_the_filter_keeps_everyone_when_nobody_is_left() -> None:
    assert kept(made(Utilization), pool([5, 9], [0.0, 0.9])) == [0, 1]


def test_the_filter_looks_at_stale_endpoints_by_what_is_in_flight() -> None:
    c = pool([0, 50, 50], [0.0, 0.9, 0.9], fresh=[True, False, False], inflight=[0, 4, 5])
    assert kept(made(Utilization), c) == [0, 1]


def test_a_new_snapshot_is_looked_at_anew() -> None:
    detector = made(Utilization)
    assert [detector.saturation(pool([n], [0.0])) for n in (0, 5, 10)] == [0.0, 1.0, 2.0]


# What is in flight


@pytest.mark.parametrize(
    ("mode", "saturation"),
    [
        ("requests", (50 + 150) / 200),
        ("tokens", (900 + 0) / 2000),
        ("hybrid", (0.9 + 1.5) / 2),
    ],
)
def test_saturation_is_what_is_in_flight_of_what_may_be(mode: str, saturation: float) -> None:
    detector = made(Concurrency, concurrencyMode=mode, maxTokenConcurrency=1000)
    c = candidates({}, count=2, inflight=[50, 150], tokens=[900, 0])
    assert detector.saturation(c) == pytest.approx(saturation)
    assert detector.stale(candidates({}, count=1, fresh=[False])) == 0


@pytest.mark.parametrize(("mode", "indices"), [("requests", [0, 1]), ("tokens", [0, 3]), ("hybrid", [0])])
def test_the_filter_keeps_who_is_below_its_limit_with_headroom_rounded_down(mode: str, indices: list[int]) -> None:
    detector = made(Concurrency, concurrencyMode=mode, maxConcurrency=3, maxTokenConcurrency=10, headroom=0.5)
    c = candidates({}, count=4, inflight=[3, 3, 4, 4], tokens=[14, 15, 20, 0])
    assert kept(detector, c) == indices


def test_nobody_may_be_left() -> None:
    c = candidates({}, count=2, inflight=[100, 101])
    assert kept(made(Concurrency), c) == []


def test_it_reads_what_its_mode_needs() -> None:
    assert made(Concurrency).consumes == (INFLIGHT_REQUESTS,)
    assert INFLIGHT_TOKENS in made(Concurrency, concurrencyMode="tokens").consumes
    assert INFLIGHT_TOKENS in made(Concurrency, concurrencyMode="hybrid").consumes
    assert list(made(Concurrency, inFlightLoadProducerName="mine").needs) == ["load"]
    assert not made(Concurrency, inFlightLoadProducerName="inflight-load-producer").needs


def test_one_more_request_adds_a_request_or_as_many_tokens_as_those_in_flight_have() -> None:
    c = candidates({}, count=2, inflight=[3, 1], tokens=[300, 100])
    assert made(Utilization).step(c) == pytest.approx(1 / 5 / 2)
    assert made(Concurrency).step(c) == pytest.approx(1 / 100 / 2)
    assert made(Concurrency, concurrencyMode="tokens", maxTokenConcurrency=1000).step(c) == pytest.approx(0.1 / 2)
    assert made(Concurrency, concurrencyMode="hybrid", maxTokenConcurrency=1000).step(c) == pytest.approx(0.1 / 2)
    assert made(Concurrency, concurrencyMode="tokens").step(candidates({}, count=1)) == 0.0


@pytest.mark.parametrize(
    "parameters",
    [{"concurrencyMode": "both"}, {"maxConcurrency": 0}, {"maxTokenConcurrency": 0}, {"headroom": -1}, {"max": 1}],
)
def test_limits_that_make_no_sense_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(Concurrency, **parameters)
