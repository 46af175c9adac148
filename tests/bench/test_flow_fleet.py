"""The overload and fairness benchmarks in virtual time: the results follow from the seed, not from the machine."""

import random
from collections.abc import Mapping

from epp.plugins.fairness.token_weighted import TokenWeighted
from tests.bench.fairness import FIRST, SMALL_NAME, Shares, arrivals, shares
from tests.bench.flow_fleet import FlowFleet
from tests.bench.overload import HIGH, MIX, SLO_S, good
from tests.bench.overload_stack import FAIR, SERVERS, STRICT, WORKERS, estimate, flow_control
from tests.bench.overload_traffic import Result, between, firsts, percentile, plan, reasons
from tests.epp.flow.policies import band
from tests.epp.flow.policies import plan as flow_plan
from tests.epp.flow.shards import Shard

CAPACITY = estimate()
WARM_UP_S, SECONDS = 6.0, 10.0
LOAD_SECONDS = 20.0


def overloaded(times: float) -> list[Result]:
    calls = plan(random.Random("test"), MIX, times * CAPACITY, WARM_UP_S + LOAD_SECONDS)
    return FlowFleet(flow_control(FAIR), patience_s=SLO_S).run(calls)


def goodput(results: list[Result]) -> float:
    end = WARM_UP_S + LOAD_SECONDS
    return sum(good(r) and WARM_UP_S <= r.call.at + r.whole_s < end for r in results) / LOAD_SECONDS


def tenants(fairness: str, *, both: bool, servers: int = SERVERS, weights: Mapping[str, float] | None = None) -> Shares:
    flow = flow_control(fairness, waiting_max=5000, weights=weights)
    calls = arrivals(estimate(servers), WARM_UP_S + SECONDS, both=both)
    results = FlowFleet(flow, servers=servers, patience_s=10.0).run(calls)
    return shares("", results, WARM_UP_S, SECONDS)


def test_equal_seeds_give_equal_figures() -> None:
    assert overloaded(0.5) == overloaded(0.5)


def test_overload_costs_no_goodput_and_does_not_delay_high_priority() -> None:
    peak = goodput(overloaded(4 / 3))
    twice, four_times = overloaded(2.0), overloaded(4.0)
    assert goodput(twice) >= 0.95 * peak
    assert goodput(four_times) >= 0.85 * peak
    assert not any(r.reason for r in (*twice, *four_times) if r.call.kind.name == HIGH)
    calm = FlowFleet(flow_control(FAIR)).run(plan(random.Random("calm"), MIX, 0.2 * CAPACITY, 30.0))
    counted = between(twice, WARM_UP_S, WARM_UP_S + LOAD_SECONDS)
    assert percentile(firsts(counted, HIGH), 0.95) <= 1.3 * percentile(firsts(calm), 0.95)


def test_waits_return_to_normal_after_overload() -> None:
    rng = random.Random("burst")
    calls = plan(rng, MIX, 2 * CAPACITY, 10.0) + plan(rng, MIX, 0.7 * CAPACITY, 30.0, 10.0)
    late = between(FlowFleet(flow_control(FAIR)).run(calls), 30.0, 40.0)
    assert not reasons(late)
    assert percentile(firsts(late), 0.95) < 0.5


def test_a_tenant_below_its_share_is_served_fully_but_starves_under_strict_order() -> None:
    fair, alone, strict = tenants(FAIR, both=True), tenants(FAIR, both=False), tenants(STRICT, both=True)
    assert fair.small_answered > 0.99
    assert fair.jain >= 0.95
    assert fair.small_whole_p95 <= 1.5 * alone.small_whole_p95
    assert strict.small_answered < 0.4
    assert strict.jain < 0.7


def test_a_tenant_below_its_share_waits_little_longer_than_with_absolute_precedence() -> None:
    fair, first = tenants(FAIR, both=True), tenants(FAIR, both=True, weights=FIRST)
    assert fair.small_p95 <= 1.4 * first.small_p95


def test_with_many_places_a_tenant_below_its_share_waits_about_as_long_as_alone() -> None:
    """With 288 places one becomes free every 4 ms, so the wait for a place hardly counts."""
    fair, alone = tenants(FAIR, both=True, servers=24), tenants(FAIR, both=False, servers=24)
    assert fair.jain >= 0.95
    assert fair.small_answered == 1.0
    assert fair.small_p95 <= 1.5 * alone.small_p95


def test_workers_with_separate_queues_leave_no_request_behind() -> None:
    fleet = FlowFleet(flow_control(FAIR, waiting_max=5000))
    results = fleet.run(arrivals(CAPACITY, 10.0, both=True))
    assert len(fleet.shards) == WORKERS
    assert all(shard.waiting == 0 and shard.waiting_bytes == 0 for shard in fleet.shards)
    assert sum(r.answered for r in results if r.call.kind.name == SMALL_NAME) > 0


def test_fifty_thousand_fairness_ids_leave_bounded_state() -> None:
    shard = Shard(flow_plan(template=band(fairness=TokenWeighted("fair", TokenWeighted.Params()))))
    controller = shard.controller
    for start in range(0, 50_000, 1_000):
        calls = [shard.call(f"tenant-{start + n}") for n in range(1_000)]
        shard.room(1_000)
        while controller.waiting:
            controller.cycle()
        assert {call.outcome for call in calls} == {"Dispatched"}
        for _ in calls:
            controller.settled(placed=True)
        shard.gate.places = 0
        shard.after(0.01)
    known = controller._registry.flows
    assert known <= 10_000
    shard.after(3_600)
    while controller._registry.flows:
        before = controller._registry.flows
        shard.after(0.1)
        assert controller._registry.flows < before
