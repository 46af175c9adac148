"""The controller alone, with a fake gate, a fake board, the test's clock, and objects of a test class in the queue."""

from epp.flow.controller import CYCLE_MAX
from epp.request.flows import FlowKey
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Call, FakeGate, Shard, outcomes


def test_a_request_passes_without_a_future_if_there_is_room_and_nothing_waits() -> None:
    shard = Shard(gate=FakeGate(1))
    call = shard.call()
    assert call.outcome == "Dispatched"
    assert call.future is None
    assert shard.controller.waiting == 0
    assert shard.seen.flows == {}, "no flow was created"
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


def test_each_request_that_leaves_the_queue_releases_its_lease() -> None:
    shard = Shard()
    served, late, gone = shard.call("a", 5), shard.call("b", -1, ttl_s=1.0), shard.call("c")
    flows = [flow for band in shard.controller._registry.order for flow in band.known.values()]
    assert [flow.leases for flow in flows] == [1, 1, 1]
    shard.room(1)
    shard.after(1.0)
    gone.leave()
    assert outcomes(served, late) == ["Dispatched", "EvictedTTL"]
    assert [flow.leases for flow in flows] == [0, 0, 0]


def test_a_request_without_room_waits_and_is_dispatched_when_there_is_room() -> None:
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


def test_a_request_that_arrives_while_others_wait_does_not_overtake_them() -> None:
    shard = Shard()
    early = shard.call()
    shard.gate.places = 1
    late = shard.call()
    assert outcomes(early, late) == ["Dispatched", ""]


def test_one_cycle_dispatches_several_requests_but_a_bounded_number() -> None:
    shard = Shard()
    calls = [shard.call() for _ in range(CYCLE_MAX + 1)]
    shard.room(CYCLE_MAX + 1)
    assert outcomes(*calls).count("Dispatched") == CYCLE_MAX
    shard.controller.woken()
    assert outcomes(*calls).count("Dispatched") == CYCLE_MAX + 1


def test_a_request_that_ends_lets_the_next_one_go_at_once() -> None:
    shard = Shard()
    call = shard.call()
    shard.gate.places = 1
    shard.controller.released()
    assert call.outcome == "Dispatched"
    assert shard.gate.freed_count == 1


def test_priorities_minus_one_zero_and_five_are_dispatched_by_rank() -> None:
    shard = Shard(plan(band(-1), band(5)))
    low, middle, high = shard.call(priority=-1), shard.call(priority=0), shard.call(priority=5)
    for expected in (["", "", "Dispatched"], ["", "Dispatched", "Dispatched"], ["Dispatched"] * 3):
        shard.room(1)
        assert outcomes(low, middle, high) == expected


def test_priorities_minus_one_zero_and_five_are_displaced_by_rank() -> None:
    shard = Shard(plan(band(-1), band(5), max_requests=3))
    low, middle, high = shard.call(priority=-1), shard.call(priority=0), shard.call(priority=5)
    more = shard.call(priority=5)
    assert outcomes(low, middle, high, more) == ["EvictedDisplaced", "", "", ""]
    last = shard.call(priority=5)
    assert outcomes(middle, high, last) == ["EvictedDisplaced", "", ""]
    assert shard.call(priority=5).outcome == "RejectedCapacity", "equal requests do not give way"


def test_a_blocked_band_blocks_all_below_it() -> None:
    shard = Shard(plan(band(-1), band(5)))
    low, high = shard.call(priority=-1), shard.call(priority=5)
    shard.gate.closed = {5}
    shard.room(2)
    assert outcomes(low, high) == ["", ""]
    assert shard.seen.blocks[-1] == 5, "in-flight eviction learns which band waits"


def test_a_priority_without_a_band_waits_in_band_zero_and_keeps_its_name() -> None:
    shard = Shard()
    shard.call("x", priority=9)
    assert shard.seen.flows == {FlowKey("x", 0): (1, 10)}
    shard.room(1)
    assert shard.seen.outcomes[0][0] == FlowKey("x", 9)


def test_pending_counts_requests_without_an_endpoint() -> None:
    shard = Shard(gate=FakeGate(2))
    shard.call()
    shard.call()
    assert (shard.peers.area.pending, shard.peers.area.progress) == (2, 2)
    shard.controller.settled(placed=True)
    assert shard.peers.area.pending == 1
    waits = shard.call()
    shard.gate.places = 1
    shard.controller.settled(placed=False)
    assert waits.outcome == "Dispatched", "a request that ended without an endpoint has left room"


def test_one_at_a_time_the_next_request_goes_when_the_previous_one_is_placed() -> None:
    shard = Shard(gate=FakeGate(1))
    shard.gate.one_by_one = True
    shard.call()
    waits = shard.call()
    shard.gate.places = 1
    shard.controller.settled(placed=True)
    assert waits.outcome == "Dispatched"


def test_every_ending_releases_the_request() -> None:
    shard = Shard()
    calls = [shard.call("a"), shard.call("b"), shard.call("a", ttl_s=1.0)]
    calls[0].leave()
    shard.after(1.0)
    shard.room(1)
    order = shard.controller._registry.order[0]
    assert list(order.entries()) == []
    assert all(entry.request is None for entry in order._arrivals)
