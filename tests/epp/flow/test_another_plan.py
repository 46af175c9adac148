"""Flow control goes on with the plan of a later configuration: nobody who waits loses their place."""

from hypothesis import given
from hypothesis import strategies as st

from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import FakeGate, Shard


def test_waiting_requests_keep_their_order_under_another_plan() -> None:
    shard = Shard(plan(band(0)))
    calls = [shard.call() for _ in range(3)]
    shard.controller.use(plan(band(0, max_requests=10)), shard.gate)
    late = shard.call()
    for count in range(1, 4):
        shard.room(1)
        assert [call.outcome for call in (*calls, late)] == ["Dispatched"] * count + [""] * (4 - count)


def test_waiting_requests_keep_their_deadlines_and_later_ones_get_the_new_one() -> None:
    shard = Shard(plan(request_ttl_s=10.0))
    early = shard.call()
    shard.after(6.0)
    shard.controller.use(plan(request_ttl_s=2.0), shard.gate)
    late = shard.call()
    shard.after(2.5)
    assert (early.outcome, late.outcome) == ("", "EvictedTTL")
    shard.after(1.5)
    assert early.outcome == "EvictedTTL"


def test_new_limits_end_nobody_who_waits() -> None:
    shard = Shard(plan(band(0, max_requests=5)))
    calls = [shard.call() for _ in range(5)]
    shard.controller.use(plan(band(0, max_requests=2)), shard.gate)
    assert shard.controller.waiting == 5
    assert shard.call().outcome == "RejectedCapacity"
    shard.room(5)
    assert {call.outcome for call in calls} == {"Dispatched"}


def test_requests_of_a_band_that_is_gone_wait_in_band_0() -> None:
    shard = Shard(plan(band(5), band(0)))
    important, plain = shard.call(priority=5), shard.call(priority=0)
    shard.controller.use(plan(band(0)), shard.gate)
    shard.room(2)
    assert (important.outcome, plain.outcome) == ("Dispatched", "Dispatched")


def test_room_under_the_new_plan_is_used_at_once() -> None:
    shard = Shard()
    call = shard.call()
    shard.controller.use(plan(), FakeGate(1))
    assert call.outcome == "Dispatched"
    assert shard.controller.waiting == 0


def test_a_caller_that_leaves_after_the_change_is_forgotten() -> None:
    shard = Shard()
    gone, stays = shard.call(), shard.call()
    shard.controller.use(plan(), shard.gate)
    gone.leave()
    assert shard.controller.waiting == 1
    shard.room(1)
    assert stays.outcome == "Dispatched"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 5, -1]), st.booleans()), max_size=30))
def test_every_request_ends_once_however_often_the_plan_changes(steps: list[tuple[str, int, bool]]) -> None:
    shard = Shard(plan(band(5), band(0)))
    plans = [plan(band(0)), plan(band(5), band(-1), band(0)), plan()]
    for number, (fairness_id, priority, change) in enumerate(steps):
        shard.call(fairness_id, priority)
        if change:
            shard.controller.use(plans[number % len(plans)], shard.gate)
        if number % 4 == 3:
            shard.room(1)
    shard.room(len(steps))
    assert [call.outcome for call in shard.calls] == ["Dispatched"] * len(steps)
    assert (shard.controller.waiting, shard.controller.waiting_bytes) == (0, 0)
