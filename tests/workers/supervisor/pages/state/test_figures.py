"""The figures that are computed from looks."""

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.metrics.areas import REQUEST_PROCESSING
from epp.metrics.request_series import TIME_TO_FIRST
from epp.prefix.divergence import Sums
from epp.prefix.streams import of_ranks
from shm.table import DOWN, DRAINING, EJECTED, FAILING_AT, State, trial
from tests.cases import cases
from tests.workers.supervisor.pages.state.looks import BOUNDS, area, endpoint, look, of
from workers.supervisor.pages.kv_events import StreamFigures
from workers.supervisor.pages.state.figures import life
from workers.supervisor.pages.state.look import EndpointLook, PoolLook, quantile

COUNTED = {"picks_total": 90, "refusals_total": 6, "faults_total": 4}


def test_rates_are_the_counts_between_two_looks_per_second() -> None:
    before = look(at=100.0, counters={"picks_total": 10}, areas=(area(), area(counters={"picks_total": 10}), area()))
    now = look(at=102.0, counters=COUNTED, areas=(area(), area(counters=COUNTED), area()))
    found = of(now, before)
    assert found.interval_s == 2.0
    assert found.requests.per_s == 45.0
    assert found.requests.errors_per_s == 5.0
    assert [worker.requests_per_s for worker in found.workers] == [45.0, 0.0]


def test_after_the_first_look_rates_and_quantiles_are_unknown() -> None:
    found = of(look(counters=COUNTED, histograms={REQUEST_PROCESSING.name: (5, 0, 0, 0)}, endpoints=[endpoint("a")]))
    requests = found.requests
    assert found.interval_s is None
    assert (requests.per_s, requests.errors_per_s, requests.processing_p50_s, requests.processing_p99_s) == (None,) * 4
    assert [worker.requests_per_s for worker in found.workers] == [None, None]
    assert (found.endpoints[0].picks_per_s, found.endpoints[0].traffic_share) == (None, None)


def test_quantiles_are_of_the_requests_since_the_look_before() -> None:
    before = look(histograms={REQUEST_PROCESSING.name: (1000, 0, 0, 0)})
    now = look(at=101.0, histograms={REQUEST_PROCESSING.name: (1000, 10, 0, 0)})
    requests = of(now, before).requests
    assert requests.processing_p50_s == pytest.approx(0.0015)
    assert requests.processing_p99_s == pytest.approx(0.00199)


def test_each_pool_has_its_own_times_to_the_first_token_since_the_look_before() -> None:
    def pools(busy: int, quiet: int) -> list[PoolLook]:
        return [PoolLook(name="busy", first_token=(busy, 0, 0, 0)), PoolLook(name="quiet", first_token=(0, 0, quiet, 0)), PoolLook(name="")]

    bounds = {TIME_TO_FIRST.name: BOUNDS}
    before, now = look(pools=pools(5, 1), bounds=bounds, histograms={}), look(at=101.0, pools=pools(9, 2), bounds=bounds, histograms={})
    assert [(each.name, each.first_token_p50_s) for each in of(now).pools] == [("busy", None), ("quiet", None)]
    busy, quiet = of(now, before).pools
    assert busy.first_token_p50_s == pytest.approx(0.0005) and quiet.first_token_p50_s == pytest.approx(0.003)
    assert of(now, now).pools[0].first_token_p95_s is None, "nothing has been counted since"


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert quantile(0.5, BOUNDS, (0, 0, 0, 3)) == BOUNDS[-1]
    assert quantile(0.5, BOUNDS, (0, 0, 0, 0)) is None


@given(st.lists(st.integers(0, 1000), min_size=4, max_size=4).filter(any), st.floats(0.01, 0.99))
def test_a_quantile_is_in_the_bucket_with_its_rank(counts: list[int], q: float) -> None:
    value = quantile(q, BOUNDS, counts)
    assert value is not None
    rank = q * sum(counts)
    edges = (0.0, *BOUNDS)
    if value < BOUNDS[-1]:
        bucket = next(n for n in range(4) if sum(counts[: n + 1]) >= rank)
        assert edges[bucket] <= value <= edges[bucket + 1] * (1 + 1e-9)


def test_ordinals_that_never_had_a_worker_are_left_out() -> None:
    areas = (area(), area(), area(serving=False, starts=3), area(serving=False, starts=0, heartbeat_age_s=math.inf))
    found = of(look(areas=areas))
    assert [worker.state for worker in found.workers] == ["serving", "not serving"]
    assert found.workers_serving == 1


def test_the_state_of_a_worker_that_leaves_is_leaving() -> None:
    found = of(look(areas=(area(), area(gauges={"leaving": 2, "loop_lag_us": 1500}), area())))
    assert [worker.state for worker in found.workers] == ["leaving", "serving"]
    assert [worker.loop_lag_s for worker in found.workers] == [0.0015, None]


def test_workers_that_ended_on_purpose_are_removed_or_ended_and_have_no_age() -> None:
    removed, ended = ({"serving": False, "gauges": {"leaving": state}} for state in (2, 3))
    found = of(look(areas=(area(), area(), area(**removed), area(**ended))))
    assert [(w.state, w.heartbeat_age_s) for w in found.workers] == [("serving", 0.05), ("removed", None), ("ended", None)]


def test_a_picker_that_stops_is_draining() -> None:
    drains = look(areas=(area(), area(gauges={"leaving": 3}), area()))
    assert of(drains).workers[0].state == "draining"
    assert life(drains) == "draining"


def test_each_worker_has_its_share_of_connections() -> None:
    areas = (area(), area(counters={"connections_total": 3}), area(counters={"connections_total": 1}))
    found = of(look(areas=areas, counters={"connections_total": 4}))
    assert [worker.accepted_share for worker in found.workers] == [0.75, 0.25]
    assert of(look()).workers[0].accepted_share is None


@cases(
    ("state", "flags", "shown"),
    [
        (State.FRESH, 0, "fresh"),
        (State.STALE, 0, "stale"),
        (State.UNKNOWN, 0, "unknown"),
        (State.STALE, DOWN, "down"),
        (State.FRESH, DOWN | DRAINING, "draining"),
        (State.FRESH, EJECTED, "ejected"),
        (State.FRESH, trial(2, 7), "on trial"),
        (State.FRESH, 3 << FAILING_AT, "failing"),
        (State.STALE, 3 << FAILING_AT, "stale"),
        (State.STALE, DOWN | EJECTED, "down"),
    ],
)
def test_the_shown_state_is_the_strongest_reason_against_requests(state: State, flags: int, shown: str) -> None:
    assert of(look(endpoints=[endpoint("a", state=state, flags=flags)])).endpoints[0].state == shown


def test_without_a_supervisor_rows_with_old_values_are_stale() -> None:
    areas = (area(heartbeat_age_s=30.0), area(), area())
    endpoints = [endpoint("a", age_s=30.0), endpoint("b", age_s=0.5), endpoint("c", state=State.UNKNOWN, age_s=None)]
    assert [e.state for e in of(look(areas=areas, endpoints=endpoints)).endpoints] == ["stale", "fresh", "unknown"]


def test_endpoints_are_in_the_order_of_their_names() -> None:
    endpoints = [endpoint("b"), endpoint("a", address="10.0.0.2:1"), endpoint("a", address="10.0.0.1:1")]
    assert [(e.name, e.address) for e in of(look(endpoints=endpoints)).endpoints] == [
        ("a", "10.0.0.1:1"),
        ("a", "10.0.0.2:1"),
        ("b", "10.0.0.1:8000"),
    ]


def test_traffic_shares_are_of_the_decisions_since_the_look_before() -> None:
    before = look(endpoints=[endpoint("a", picks=100), endpoint("b", picks=100)])
    now = look(at=102.0, endpoints=[endpoint("a", picks=130), endpoint("b", picks=110), endpoint("new", picks=5)])
    found = of(now, before).endpoints
    assert [(e.picks_per_s, e.traffic_share) for e in found] == [(15.0, 0.75), (5.0, 0.25), (None, None)]


def test_traffic_shares_are_unknown_if_decisions_per_endpoint_are_not_counted() -> None:
    before = look(endpoints=[endpoint("a", picks=None)])
    now = look(at=101.0, endpoints=[endpoint("a", picks=None)])
    assert of(now, before).endpoints[0].traffic_share is None


def test_load_in_flight_and_the_cached_share_are_sums() -> None:
    endpoints = [endpoint("a", inflight_requests=2, inflight_tokens=100), endpoint("b", inflight_requests=1)]
    counters = {"prompt_tokens_total": 200, "cached_prompt_tokens_total": 50}
    requests = of(look(endpoints=endpoints, counters=counters)).requests
    assert (requests.in_flight, requests.tokens_in_flight, requests.cached_share) == (3, 100, 0.25)
    assert of(look()).requests.cached_share is None


def test_predicted_and_reported_are_shares_of_the_compared_prompt_tokens() -> None:
    endpoints = [
        endpoint("a", cached=Sums(requests=2, prompt=100, predicted=80, reported=60)),
        endpoint("b", cached=Sums(requests=3, prompt=300, predicted=0, reported=30)),
        endpoint("c"),
    ]
    found = of(look(endpoints=endpoints))
    shares = [(e.predicted_share, e.reported_share) for e in found.endpoints]
    assert shares == [(0.8, 0.6), (0.0, 0.1), (None, None)]
    assert [e.predicted_tokens for e in found.endpoints] == [40, 0, None]
    assert (found.requests.predicted_share, found.requests.reported_share) == (0.2, 0.225)
    assert of(look(endpoints=[endpoint("c")])).requests.predicted_share is None


def test_figures_can_be_encoded_as_json_before_the_first_heartbeat() -> None:
    areas = (area(heartbeat_age_s=math.inf), area(heartbeat_age_s=math.inf))
    document = json.loads(msgspec.json.encode(of(look(areas=areas, endpoints=[endpoint("a", age_s=None)]))))
    assert document["supervisor"]["heartbeat_age_s"] is None
    assert document["index"]["used_share"] == 0.25
    assert document["endpoints"][0]["scraped"]["kv_cache_usage"] == 0.25


@pytest.mark.parametrize(("age_s", "expected"), [(0.1, "running"), (60.0, "silent"), (math.inf, "starting")])
def test_the_most_recent_heartbeat_decides_the_state_of_an_instance(age_s: float, expected: str) -> None:
    assert life(look(areas=(area(heartbeat_age_s=math.inf), area(heartbeat_age_s=age_s)))) == expected


def refused(requests: int) -> dict[str, int]:
    return {"requests_without_tokens_total@r:80 403 from /render: fix it": requests}


@pytest.mark.parametrize(
    ("then", "now", "picks", "why"),
    [
        (refused(1), refused(5), 4, "no tokens (403 from /render: fix it)"),
        (refused(1), refused(2), 4, ""),
        (refused(100), refused(100), 4, ""),
        # An idle picker, of which a warm-up was refused.
        ({}, refused(1), 0, "no tokens (403 from /render: fix it)"),
    ],
)
def test_no_endpoint_is_precise_while_most_requests_have_no_tokens(then: dict[str, int], now: dict[str, int], picks: int, why: str) -> None:
    def picked(number: int) -> list[EndpointLook]:
        known, unknown = StreamFigures(why="", age_s=1.0, held=5), StreamFigures(why="no connection", age_s=None, held=0)
        return [endpoint("a", stream=known, picks=number), endpoint("b", stream=unknown), endpoint("c")]

    before = look(at=100.0, counters=then, endpoints=picked(0))
    found = of(look(at=102.0, counters=now, endpoints=picked(picks)), before)
    assert [each.not_precise for each in found.endpoints] == [why, "no connection", None]


def test_an_endpoint_with_several_ranks_is_not_precise() -> None:
    known = StreamFigures(why="", age_s=1.0, held=5)
    found = of(look(at=100.0, endpoints=[endpoint("a", stream=known, scraped={"cache_ranks": 2.0})]), None)
    assert [each.not_precise for each in found.endpoints] == [of_ranks(2.0)]
