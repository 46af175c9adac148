"""However a waiting request ends, nothing of it stays in the queue."""

import pytest

from epp.flow.outcomes import EVICTED_FAULT, EVICTED_SHUT_DOWN, REJECTED_SHUT_DOWN
from tests.epp.flow.shards import FakeFuture, FakeGate, Shard, Thing, outcomes


def test_a_client_that_leaves_leaves_nothing_in_the_queue() -> None:
    shard = Shard()
    call, other = shard.call(), shard.call()
    call.leave()
    assert (shard.controller.waiting, shard.controller.waiting_bytes) == (1, 10)
    assert shard.seen.names == ["EvictedContextCancelled"]
    shard.room(1)
    assert other.outcome == "Dispatched", "the room is not lost on a request that has left"


def test_a_request_that_leaves_after_its_dispatch_is_no_longer_pending() -> None:
    shard = Shard()
    call = shard.call()
    shard.room(1)
    assert shard.peers.area.pending == 1
    call.leave()
    assert shard.peers.area.pending == 0
    assert shard.seen.names == ["Dispatched"], "exactly one outcome"


def test_an_exception_thrown_into_the_coroutine_counts_as_leaving_and_propagates() -> None:
    shard = Shard()
    coroutine = shard.controller.enqueue_and_wait(Thing())
    coroutine.send(None)
    with pytest.raises(KeyboardInterrupt):
        coroutine.throw(KeyboardInterrupt)
    assert shard.seen.names == ["EvictedContextCancelled"]
    assert shard.controller.waiting == 0


def test_a_future_that_cannot_be_created_leaves_nothing_in_the_queue() -> None:
    shard = Shard()

    def failing(_item: object) -> FakeFuture:
        raise MemoryError

    shard.controller._make_future = failing
    with pytest.raises(MemoryError):
        shard.call()
    assert shard.controller.waiting == 0


@pytest.mark.parametrize("places", [0, 1], ids=["it waits", "it is dispatched"])
def test_a_cycle_that_fails_leaves_nothing_in_the_queue_and_nothing_pending(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = Shard()
    earlier = shard.call()

    def failing(_seconds: float) -> None:
        raise OSError("not caught")

    monkeypatch.setattr(shard.seen, "cycled", failing)  # the end of a cycle
    shard.gate.places = 1 + places
    with pytest.raises(OSError, match="not caught"):
        shard.controller.enqueue_and_wait(Thing()).send(None)
    monkeypatch.undo()
    assert earlier.ready
    assert shard.controller.waiting == 0
    assert shard.controller._pending == 1, "of the earlier request"


def test_an_outcome_that_was_decided_before_the_client_left_stands() -> None:
    shard = Shard()
    call = shard.call(ttl_s=1.0)
    shard.after(1.0)
    call.leave()
    assert shard.seen.names == ["EvictedTTL"]


def test_a_future_that_other_code_has_set_ends_as_a_fault() -> None:
    shard = Shard()
    call = shard.call()
    assert call.future is not None
    call.future.set_result(None)
    assert call.outcome == "EvictedOther"
    assert call.error.ending is EVICTED_FAULT
    assert shard.controller.waiting == 0


def test_the_queue_is_dispatched_while_draining_and_evicted_at_the_shut_down() -> None:
    shard = Shard()
    first, second = shard.call(), shard.call("b")
    shard.room(1)
    shard.controller.shut_down()
    late = shard.call()
    assert outcomes(first, second, late) == ["Dispatched", "EvictedOther", "RejectedOther"]
    assert second.error.ending is EVICTED_SHUT_DOWN
    assert late.error.ending is REJECTED_SHUT_DOWN
    assert shard.controller.waiting == 0


def test_a_closed_controller_rejects_even_if_there_is_room() -> None:
    shard = Shard(gate=FakeGate(9))
    shard.controller.shut_down()
    assert shard.call().outcome == "RejectedOther"
