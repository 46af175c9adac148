"""The controller alone: a fake gate, a fake board, no clock but the test's, and objects of the test's own class in the queue."""

from math import inf

import pytest

from epp.flow.controller import CYCLE_MAX
from epp.flow.outcomes import (
    Displaced,
    Evicted,
    NoEndpoints,
    Other,
    QueueAtCapacity,
    Rejected,
    ShuttingDown,
    TTLExpired,
)
from epp.flows import FlowKey
from tests.epp.flow.shards import (
    Board,
    BoardLedger,
    BoardPeers,
    Call,
    FakeFuture,
    FakeGate,
    OneBand,
    Shard,
    Thing,
    band,
    plan,
)


def outcomes(*calls: Call) -> list[str]:
    return [call.outcome for call in calls]


def test_with_room_and_nobody_waiting_a_request_passes_without_a_future() -> None:
    shard = Shard(gate=FakeGate(1))
    call = shard.call()
    assert call.outcome == "Dispatched"
    assert call.future is None
    assert shard.controller.waiting == 0
    assert shard.seen.flows == {}, "no flow was made"
    assert shard.seen.outcomes == [(FlowKey("a", 0), call.ended, 0.0, 10)]


def test_an_item_is_any_object_with_flow_bytes_ttl_and_id() -> None:
    class Mine:
        __slots__ = ()
        flow = FlowKey("mine", 0)
        bytes = 5
        ttl_s = None
        id = "x"

    shard = Shard()
    mine = Mine()
    call = Call(shard.controller, mine)
    (entry,) = shard.controller._registry.order[0].entries()
    assert (entry.request, entry.flow, entry.bytes, entry.arrival, entry.ttl_s) == (mine, mine.flow, 5, 1_000.0, 60.0)
    shard.room(1)
    assert call.outcome == "Dispatched"


def test_a_fake_registry_and_gate_are_all_that_the_controller_needs_and_each_lease_is_given_back() -> None:
    registry = OneBand(BoardLedger(BoardPeers(Board(1)), 0))
    shard = Shard(registry=registry)
    served, late, gone = shard.call("a", 5), shard.call("b", -1, ttl_s=1.0), shard.call("c")
    assert registry.leases == 3
    shard.room(1)
    shard.after(1.0)
    gone.leave()
    assert outcomes(served, late) == ["Dispatched", "EvictedTTL"]
    assert registry.leases == 0


def test_without_room_a_request_waits_and_is_served_when_there_is_some() -> None:
    shard = Shard()
    first, second = shard.call(), shard.call()
    assert outcomes(first, second) == ["", ""]
    assert shard.controller.waiting_bytes == 20
    shard.clock.now += 1.5
    shard.room(1)
    assert outcomes(first, second) == ["Dispatched", ""]
    assert shard.seen.outcomes[0][2] == 1.5
    shard.room(1)
    assert second.outcome == "Dispatched"
    assert (shard.controller.waiting, shard.controller.waiting_bytes) == (0, 0)
    assert shard.seen.flows == {FlowKey("a", 0): (0, 0)}


def test_who_comes_while_others_wait_does_not_overtake_them() -> None:
    shard = Shard()
    early = shard.call()
    shard.gate.places = 1
    late = shard.call()
    assert outcomes(early, late) == ["Dispatched", ""]


def test_several_are_served_by_one_cycle_but_not_without_end() -> None:
    shard = Shard()
    calls = [shard.call() for _ in range(CYCLE_MAX + 1)]
    shard.room(CYCLE_MAX + 1)
    assert outcomes(*calls).count("Dispatched") == CYCLE_MAX
    shard.controller.woken()
    assert outcomes(*calls).count("Dispatched") == CYCLE_MAX + 1


def test_a_freed_place_serves_the_queue_at_once() -> None:
    shard = Shard()
    call = shard.call()
    shard.gate.places = 1
    shard.controller.released()
    assert call.outcome == "Dispatched"
    assert shard.gate.freed_count == 1


def test_minus_one_zero_and_five_are_served_by_rank() -> None:
    shard = Shard(plan(band(-1), band(5)))
    low, middle, high = shard.call(priority=-1), shard.call(priority=0), shard.call(priority=5)
    for expected in (["", "", "Dispatched"], ["", "Dispatched", "Dispatched"], ["Dispatched"] * 3):
        shard.room(1)
        assert outcomes(low, middle, high) == expected


def test_minus_one_zero_and_five_give_way_by_rank() -> None:
    shard = Shard(plan(band(-1), band(5), max_requests=3))
    low, middle, high = shard.call(priority=-1), shard.call(priority=0), shard.call(priority=5)
    more = shard.call(priority=5)
    assert outcomes(low, middle, high, more) == ["EvictedDisplaced", "", "", ""]
    last = shard.call(priority=5)
    assert outcomes(middle, high, last) == ["EvictedDisplaced", "", ""]
    assert shard.call(priority=5).outcome == "RejectedCapacity", "equals do not give way"


def test_a_blocked_band_blocks_all_below_it() -> None:
    shard = Shard(plan(band(-1), band(5)))
    low, high = shard.call(priority=-1), shard.call(priority=5)
    shard.gate.closed = {5}
    shard.room(2)
    assert outcomes(low, high) == ["", ""]
    assert shard.seen.blocks[-1] == 5, "in-flight eviction is told which band waits"


def test_a_priority_without_a_band_waits_in_band_zero_and_keeps_its_name() -> None:
    shard = Shard()
    shard.call("x", priority=9)
    assert shard.seen.flows == {FlowKey("x", 0): (1, 10)}
    shard.room(1)
    assert shard.seen.outcomes[0][0] == FlowKey("x", 9)


# Limits.


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_bytes": 20}], ids=["requests", "bytes"])
def test_a_full_band_rejects_and_takes_in_again_when_there_is_space(limits: dict[str, int]) -> None:
    shard = Shard(plan(band(0, **limits)))
    first, second, third = shard.call(), shard.call(), shard.call()
    assert outcomes(first, second, third) == ["", "", "RejectedCapacity"]
    assert isinstance(third.error, Rejected)
    assert isinstance(third.error, QueueAtCapacity)
    first.leave()
    assert shard.call().outcome == ""


def test_a_bands_own_limit_is_not_helped_by_what_is_less_important() -> None:
    shard = Shard(plan(band(5, max_requests=1), band(-1)))
    low, high = shard.call(priority=-1), shard.call(priority=5)
    assert shard.call(priority=5).outcome == "RejectedCapacity"
    assert outcomes(low, high) == ["", ""]


def test_without_limits_over_all_bands_nobody_gives_way() -> None:
    shard = Shard(plan(band(-1)))
    low = shard.call(priority=-1)
    for _ in range(50):
        shard.call()
    assert low.outcome == ""


def test_as_many_give_way_as_the_bytes_of_the_arrival_need() -> None:
    shard = Shard(plan(band(-1), band(5), max_bytes=100))
    low = [shard.call(priority=-1, size=20) for _ in range(5)]
    high = shard.call(priority=5, size=45)
    assert outcomes(*low) == ["", "", "EvictedDisplaced", "EvictedDisplaced", "EvictedDisplaced"], "the newest first"
    assert high.outcome == ""
    assert shard.controller.waiting_bytes == 85


def test_if_not_enough_can_be_freed_nobody_gives_way() -> None:
    shard = Shard(plan(band(-1), band(5), max_bytes=100))
    low, middle = shard.call(priority=-1, size=20), shard.call(size=80)
    assert shard.call(size=30).outcome == "RejectedCapacity"
    assert shard.call(priority=5, size=101).outcome == "RejectedCapacity"
    assert outcomes(low, middle) == ["", ""]


def test_who_gives_way_is_answered_429_displaced() -> None:
    shard = Shard(plan(band(-1), max_requests=1))
    low = shard.call(priority=-1)
    shard.call()
    assert low.outcome == "EvictedDisplaced"
    assert isinstance(low.error, Evicted)
    assert isinstance(low.error, Displaced)


def test_a_full_queue_over_an_empty_pool_says_that_nobody_serves() -> None:
    shard = Shard(plan(band(0, max_requests=1)))
    shard.gate.empty = True
    shard.call()
    rejected = shard.call()
    assert rejected.outcome == "RejectedNoEndpoints"
    assert isinstance(rejected.error, NoEndpoints)


def test_a_broken_item_is_a_fault_and_leaves_nothing_behind() -> None:
    shard = Shard()
    call = shard.call(size=-1)
    assert call.outcome == "RejectedOther"
    assert isinstance(call.error, Other)
    assert shard.seen.flows == {}


# Time.


def test_who_waits_for_as_long_as_it_may_is_ended() -> None:
    shard = Shard()
    call = shard.call()
    shard.after(59.9)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == "EvictedTTL"
    assert isinstance(call.error, TTLExpired)
    assert not isinstance(call.error, NoEndpoints)


@pytest.mark.parametrize(
    ("wish", "of_band", "of_all", "expected"),
    [
        (None, None, 60.0, 60.0),
        (5.0, None, 60.0, 5.0),
        (90.0, None, 60.0, 60.0),
        (None, 7.0, 60.0, 7.0),
        (9.0, 7.0, 60.0, 7.0),
        (None, 90.0, 60.0, 90.0),
        (80.0, 90.0, 60.0, 80.0),
        (None, inf, 60.0, inf),
        (5.0, inf, 60.0, 5.0),
        (None, None, inf, inf),
        (5.0, None, inf, 5.0),
    ],
)
def test_a_wish_shortens_what_the_next_level_allows_and_never_lengthens_it(
    wish: float | None, of_band: float | None, of_all: float, expected: float
) -> None:
    shard = Shard(plan(band(0, request_ttl_s=of_band), request_ttl_s=of_all))
    call = shard.call(ttl_s=wish)
    (entry,) = shard.controller._registry.order[0].entries()
    assert entry.ttl_s == expected
    shard.after(min(expected, 1e6) - 0.1)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == ("" if expected == inf else "EvictedTTL")


def test_while_the_pool_is_empty_the_other_time_to_live_is_in_force() -> None:
    shard = Shard(plan(no_endpoint_ttl_s=300.0))
    shard.gate.empty = True
    call = shard.call()
    shard.after(299.0)
    assert call.outcome == ""
    shard.after(1.0)
    assert call.outcome == "EvictedNoEndpoints"
    assert isinstance(call.error, TTLExpired)
    assert isinstance(call.error, NoEndpoints)


def test_a_pool_that_comes_back_gives_everybody_a_full_turn() -> None:
    shard = Shard(plan(request_ttl_s=10.0, no_endpoint_ttl_s=100.0))
    shard.gate.empty = True
    call = shard.call()
    shard.after(50.0)
    shard.gate.empty = False
    shard.after(0.0)
    shard.after(9.9)
    assert call.outcome == ""
    shard.after(0.1)
    assert call.outcome == "EvictedTTL"


def test_however_often_the_pool_comes_and_goes_a_wait_ends() -> None:
    shard = Shard(plan(request_ttl_s=10.0, no_endpoint_ttl_s=20.0))
    call = shard.call()
    for _ in range(5):
        shard.gate.empty = not shard.gate.empty
        shard.after(0.0)
        shard.after(4.3)
    assert call.outcome == "", "21.5 s of 22"
    shard.after(0.6)
    assert call.outcome == "EvictedNoEndpoints"


def test_a_sweep_says_when_the_next_one_is_due() -> None:
    shard = Shard()
    shard.call(ttl_s=3.0)
    shard.call(ttl_s=2.0)
    assert shard.controller.sweep(1_000.0) == 1_002.0
    shard.clock.now = 1_002.0
    assert shard.controller.sweep(1_002.0) == 1_003.0
    shard.clock.now = 1_003.0
    assert shard.controller.sweep(1_003.0) == 1_063.0, "then the flow is given up"
    assert shard.controller.sweep(1_063.0) == inf


def test_a_wish_of_nothing_is_served_at_once_or_ended_even_if_the_sweep_comes_with_the_future() -> None:
    shard = Shard()

    def sweeping() -> FakeFuture:
        shard.controller.sweep(shard.clock.now)
        return FakeFuture()

    shard.controller._make_future = sweeping
    assert shard.call(ttl_s=0.0).outcome == "EvictedTTL"
    shard.gate.places = 1
    assert shard.call(ttl_s=0.0).outcome == "Dispatched"


# Endings.


def test_a_client_that_leaves_leaves_nothing_in_the_queue() -> None:
    shard = Shard()
    call, other = shard.call(), shard.call()
    call.leave()
    assert (shard.controller.waiting, shard.controller.waiting_bytes) == (1, 10)
    assert shard.seen.names == ["EvictedContextCancelled"]
    shard.room(1)
    assert other.outcome == "Dispatched", "the place is not lost on who has left"


def test_who_leaves_after_its_turn_came_gives_the_place_back() -> None:
    shard = Shard()
    call = shard.call()
    shard.room(1)
    assert shard.peers.lane.pending == 1
    call.leave()
    assert shard.peers.lane.pending == 0
    assert shard.seen.names == ["Dispatched"], "one outcome, once"


def test_an_exception_that_is_thrown_in_counts_as_leaving_and_passes_through() -> None:
    shard = Shard()
    coroutine = shard.controller.enqueue_and_wait(Thing())
    coroutine.send(None)
    with pytest.raises(KeyboardInterrupt):
        coroutine.throw(KeyboardInterrupt)
    assert shard.seen.names == ["EvictedContextCancelled"]
    assert shard.controller.waiting == 0


def test_a_future_that_cannot_be_made_leaves_nothing_in_the_queue() -> None:
    shard = Shard()

    def failing() -> FakeFuture:
        raise MemoryError

    shard.controller._make_future = failing
    with pytest.raises(MemoryError):
        shard.call()
    assert shard.controller.waiting == 0


@pytest.mark.parametrize("places", [0, 1], ids=["it waits", "its turn has come"])
def test_a_cycle_that_fails_leaves_nobody_in_the_queue_and_no_place_taken(
    places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Shard()
    earlier = shard.call()
    whole = shard.controller.cycle

    def failing() -> None:
        whole()
        raise OSError("nobody catches it")

    monkeypatch.setattr(shard.controller, "cycle", failing)
    shard.gate.places = 1 + places
    with pytest.raises(OSError, match="nobody catches it"):
        shard.controller.enqueue_and_wait(Thing()).send(None)
    monkeypatch.undo()
    assert earlier.ready
    assert shard.controller.waiting == 0
    assert shard.controller._pending == 1, "of who came earlier"


def test_an_end_that_was_decided_before_the_client_left_stands() -> None:
    shard = Shard()
    call = shard.call(ttl_s=1.0)
    shard.after(1.0)
    call.leave()
    assert shard.seen.names == ["EvictedTTL"]


def test_a_future_that_was_set_by_somebody_else_ends_as_a_fault() -> None:
    shard = Shard()
    call = shard.call()
    assert call.future is not None
    call.future.set_result(None)
    assert call.outcome == "EvictedOther"
    assert isinstance(call.error, Other)
    assert shard.controller.waiting == 0


def test_while_it_drains_the_queue_goes_on_and_after_that_all_are_told() -> None:
    shard = Shard()
    first, second = shard.call(), shard.call("b")
    shard.room(1)
    shard.controller.shut_down()
    late = shard.call()
    assert outcomes(first, second, late) == ["Dispatched", "EvictedOther", "RejectedOther"]
    assert isinstance(second.error, Evicted)
    assert isinstance(second.error, ShuttingDown)
    assert isinstance(late.error, Rejected)
    assert isinstance(late.error, ShuttingDown)
    assert shard.controller.waiting == 0


def test_a_closed_controller_rejects_even_if_there_is_room() -> None:
    shard = Shard(gate=FakeGate(9))
    shard.controller.shut_down()
    assert shard.call().outcome == "RejectedOther"


# What is told to the client about when to come again.


def test_retry_after_is_what_waits_over_what_was_served_lately() -> None:
    shard = Shard(plan(band(0, max_requests=20)))
    shard.gate.places = 10
    for _ in range(10):
        shard.call()
    for _ in range(20):
        shard.call()
    shard.clock.now += 1.0
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 3, "20 wait, and 10 were served in the last second"


def test_retry_after_is_a_minute_at_most_and_a_second_at_least() -> None:
    shard = Shard(plan(band(0, max_requests=1)))
    shard.call()
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 60, "nothing moves"
    shard.room(1_001)
    for _ in range(1_000):
        shard.call()
    shard.call()
    rejected = shard.call()
    assert rejected.error is not None
    assert rejected.error.retry_after_s == 1


# Pending.


def test_pending_counts_who_has_no_endpoint_yet() -> None:
    shard = Shard(gate=FakeGate(2))
    shard.call()
    shard.call()
    assert (shard.peers.lane.pending, shard.peers.lane.progress) == (2, 2)
    shard.controller.settled(placed=True)
    assert shard.peers.lane.pending == 1
    waits = shard.call()
    shard.gate.places = 1
    shard.controller.settled(placed=False)
    assert waits.outcome == "Dispatched", "who ended without an endpoint has left room"


def test_where_one_goes_at_a_time_the_next_goes_when_the_one_before_is_placed() -> None:
    shard = Shard(gate=FakeGate(1))
    shard.gate.one_by_one = True
    shard.call()
    waits = shard.call()
    shard.gate.places = 1
    shard.controller.settled(placed=True)
    assert waits.outcome == "Dispatched"


def test_every_ending_gives_back_what_was_held_of_the_request() -> None:
    shard = Shard()
    calls = [shard.call("a"), shard.call("b"), shard.call("a", ttl_s=1.0)]
    calls[0].leave()
    shard.after(1.0)
    shard.room(1)
    order = shard.controller._registry.order[0]
    assert list(order.entries()) == []
    assert all(entry.request is None for entry in order._arrivals)
