"""When TTLs end: in which order, in how many steps, and what a change of the TTL in force does to them."""

import random
from math import inf

import pytest

from epp.flow.deadlines import GRACE_S, STEPS_MAX
from epp.flow.rate import LONGEST_S, WINDOW_S, DrainRate
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Shard


def test_requests_expire_by_deadline_whatever_the_order_of_arrival() -> None:
    shard = Shard()
    ttls = [float(ttl_s) for ttl_s in range(1, 41)]
    random.Random(3).shuffle(ttls)
    calls = {ttl_s: shard.call(ttl_s=ttl_s) for ttl_s in ttls}
    for second in range(1, 41):
        shard.after(1.0)
        assert {ttl_s for ttl_s, call in calls.items() if call.outcome} == {float(each) for each in range(1, second + 1)}


def test_a_sweep_takes_a_bounded_number_of_steps_and_is_due_again_at_once() -> None:
    shard = Shard()
    calls = [shard.call(ttl_s=1.0) for _ in range(STEPS_MAX + 10)]
    shard.clock.now += 2.0
    assert shard.controller.sweep(shard.clock.now) <= shard.clock.now
    assert sum(bool(call.outcome) for call in calls) == STEPS_MAX
    shard.controller.sweep(shard.clock.now)
    assert shard.controller.waiting == 0


def test_each_band_has_its_own_ttl() -> None:
    shard = Shard(plan(band(1, request_ttl_s=1.0), band(2, request_ttl_s=inf), request_ttl_s=5.0))
    short, never, usual = shard.call(priority=1), shard.call(priority=2), shard.call()
    shard.after(1.0)
    assert (short.outcome, never.outcome, usual.outcome) == ("EvictedTTL", "", "")
    shard.after(4.0)
    assert (never.outcome, usual.outcome) == ("", "EvictedTTL")
    shard.after(1e9)
    assert never.outcome == ""


@pytest.mark.parametrize(("ttl_s", "empty_ttl_s"), [(inf, 3.0), (3.0, inf)])
def test_an_endless_ttl_in_one_case_ends_in_the_other(ttl_s: float, empty_ttl_s: float) -> None:
    shard = Shard(plan(request_ttl_s=ttl_s, no_endpoint_ttl_s=empty_ttl_s))
    shard.gate.empty = ttl_s != inf
    call = shard.call()
    shard.after(1_000.0)
    assert call.outcome == ""
    shard.gate.empty = not shard.gate.empty
    shard.after(0.0)
    shard.after(2.9)
    assert call.outcome == ""
    shard.after(0.2)
    assert call.outcome == ("EvictedNoEndpoints" if shard.gate.empty else "EvictedTTL")


def test_the_ttl_of_a_request_after_a_change_runs_from_its_arrival() -> None:
    shard = Shard(plan(request_ttl_s=10.0))
    shard.gate.empty = True
    shard.after(0.0)
    shard.gate.empty = False
    shard.after(0.0)
    shard.after(8.0)
    call = shard.call()
    shard.after(9.9)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == "EvictedTTL"


def test_a_requested_ttl_bounds_the_total_wait_too() -> None:
    shard = Shard(plan(request_ttl_s=100.0, no_endpoint_ttl_s=100.0))
    call = shard.call(ttl_s=1.0)
    waited = 0.0
    while not call.outcome:
        shard.gate.empty = not shard.gate.empty
        shard.after(0.0)
        shard.after(0.4)
        waited += 0.4
    assert waited == pytest.approx(1.0 + GRACE_S, abs=0.41)


# The drain rate.


def test_the_drain_rate_is_that_of_the_last_one_or_two_windows() -> None:
    rate = DrainRate()
    for i in range(100):
        rate.count(100.0 + i * 0.1)  # 10 a second
    assert rate.retry_after_s(50, 110.0) in (5, 6, 7)
    assert rate.retry_after_s(0, 110.0) == 1
    assert rate.retry_after_s(10**6, 110.0) == LONGEST_S
    assert rate.retry_after_s(50, 110.0 + 2 * WINDOW_S) == LONGEST_S, "nothing was dispatched since"
