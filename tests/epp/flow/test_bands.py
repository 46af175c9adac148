"""A band dispatches what it holds even if its policies fail, and it counts every failure."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from epp.flow.failure_breaker import FAILURES_MAX, WITHIN_S, FailureBreaker, Unranked
from epp.flow.fifo_queue import FifoQueue
from epp.plugin import FairShare, NoParams
from epp.plugins.queues import Priority
from epp.request.flows import BandView, FlowKey, FlowView, Queued
from tests.cases import cases
from tests.epp.flow.policies import ByArrival, InTurn, Newest, Plain, Turns, band, plan
from tests.epp.flow.shards import Shard


class Broken:
    """Raises in one of its calls: always, or for the first `times` calls."""

    def __init__(self, inner: Any, call: str, times: int = 10**9) -> None:
        self._inner = inner
        self._call = call
        self._left = times

    def __getattr__(self, name: str) -> Any:
        if name == self._call and self._left > 0:
            self._left -= 1
            raise RuntimeError(f"{name} is broken")
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)


def with_fairness(call: str, times: int = 10**9) -> Shard:
    class Policy(InTurn):
        def share(self, key: Callable[[Queued], Any]) -> FairShare:
            return Broken(Turns(), call, times)

    return Shard(plan(band(0, fairness=Policy("fair", NoParams())), band(-1)))


@pytest.mark.parametrize("call", ["pick", "changed", "dispatched", "forget"])
@pytest.mark.parametrize("times", [1, 10**9])
def test_a_fairness_policy_that_raises_is_counted_and_all_requests_are_served(call: str, times: int) -> None:
    shard = with_fairness(call, times)
    calls = [shard.call(f"t{i % 3}", priority=0 if i < 6 else -1) for i in range(8)]
    shard.room(6)
    assert [c.outcome for c in calls] == ["Dispatched"] * 6 + [""] * 2, "its band is not skipped"
    shard.room(2)
    assert calls[-1].outcome == "Dispatched"
    shard.after(100.0)
    assert {name for name, _ in shard.seen.failures} == {"fair"}


def test_a_band_without_its_policy_dispatches_in_order_of_arrival() -> None:
    shard = with_fairness("pick")
    calls = [shard.call(name) for name in "aabc"]
    for served in range(1, 5):
        shard.room(1)
        assert [c.outcome for c in calls].count("Dispatched") == served == len([c for c in calls[:served] if c.outcome])


def test_a_policy_that_fails_five_times_in_a_minute_is_not_called_again() -> None:
    shard = with_fairness("pick")
    for _ in range(20):
        shard.call()
    shard.room(20)
    assert len(shard.seen.failures) == FAILURES_MAX


def test_failures_that_are_far_apart_do_not_trip_the_breaker() -> None:
    reports: list[str] = []
    breaker = FailureBreaker("rare", lambda name, problem: reports.append(name))
    for i in range(100):
        breaker.failed(RuntimeError(), now=i * WITHIN_S / (FAILURES_MAX - 2))
    assert not breaker.tripped
    assert len(reports) == 100
    for _ in range(FAILURES_MAX):
        breaker.failed(RuntimeError(), now=1e9)
    assert breaker.tripped


@pytest.mark.parametrize("answer", [None, "stranger"])
def test_a_pick_that_names_no_waiting_flow_is_a_failure(answer: str | None) -> None:
    class Odd(Turns):
        def pick(self, now: float) -> FlowView | None:
            return None if answer is None else Stranger()  # type: ignore[return-value]

    class Stranger:
        key = FlowKey(str(answer), 0)

    class Policy(InTurn):
        def share(self, key: Callable[[Queued], Any]) -> FairShare:
            return Odd()

    shard = Shard(plan(band(0, fairness=Policy("odd", NoParams()))))
    call = shard.call()
    shard.room(1)
    assert call.outcome == "Dispatched"
    assert shard.seen.failures[0][0] == "odd"


def test_an_ordering_policy_that_raises_puts_the_item_after_the_others() -> None:
    class Picky(ByArrival):
        def key(self, item: Queued) -> Any:
            if item.bytes == 13:
                raise ValueError("unlucky")
            return -item.arrival

    queue = Priority("priority", NoParams())
    shard = Shard(plan(band(0, ordering=Picky("picky", NoParams()), queue=queue)))
    calls = []
    for size in (13, 1, 13, 2):
        calls.append(shard.call(size=size))
        shard.clock.now += 1.0
    order = []
    for _ in range(4):
        shard.room(1)
        order.append(next(i for i, c in enumerate(calls) if c.outcome and i not in order))
    assert order == [3, 1, 0, 2]
    assert shard.seen.failures == [("picky", "unlucky")] * 2


@cases("call", ["offer", "take", "remove", "head"])
@cases("times", [1, 2, 10**9])
def test_a_queue_that_fails_is_replaced_and_keeps_its_items(call: str, times: int) -> None:
    class Fragile(Plain):
        def make(self, key: Callable[[Queued], Any]) -> Any:
            return Broken(FifoQueue("fragile"), call, times)

    shard = Shard(plan(band(0, queue=Fragile("fragile", NoParams()))))
    calls = [shard.call(f"t{i % 2}") for i in range(6)]
    calls[2].leave()
    shard.room(10)
    assert [c.outcome for i, c in enumerate(calls) if i != 2] == ["Dispatched"] * 5
    assert shard.controller.waiting == shard.controller.waiting_bytes == 0
    assert {name for name, _ in shard.seen.failures} == {"fragile"}
    assert len(shard.seen.failures) <= 2, "once for each flow"


def test_a_queue_that_cannot_be_created_is_replaced() -> None:
    class Never(Plain):
        def make(self, key: Callable[[Queued], Any]) -> Any:
            raise MemoryError

    shard = Shard(plan(band(0, queue=Never("never", NoParams()))))
    call = shard.call()
    shard.room(1)
    assert call.outcome == "Dispatched"
    assert shard.seen.failures[0][0] == "never"


def test_a_queue_that_returns_an_item_that_does_not_wait_in_it_is_replaced() -> None:
    class Repeating(FifoQueue):
        def take(self) -> Queued:
            item = super().take()
            self.offer(item)
            return item

    class Twice(Plain):
        def make(self, key: Callable[[Queued], Any]) -> FifoQueue:
            return Repeating(self.name)

    shard = Shard(plan(band(0, queue=Twice("twice", NoParams()))))
    calls = [shard.call(), shard.call(), shard.call()]
    shard.room(3)
    assert [c.outcome for c in calls] == ["Dispatched"] * 3
    assert shard.seen.names == ["Dispatched"] * 3


@pytest.mark.parametrize("chosen", ["raises", "none", "an unknown item"])
def test_when_a_displacement_policy_fails_the_newest_request_is_displaced(chosen: str) -> None:
    class Odd(Newest):
        def victim(self, band: BandView) -> Queued | None:
            if chosen == "raises":
                raise RuntimeError
            return None if chosen == "none" else object()  # type: ignore[return-value]

    shard = Shard(plan(band(-1, displacement=Odd("odd", NoParams())), max_requests=2))
    old, new = shard.call(priority=-1), shard.call(priority=-1)
    shard.call()
    assert (old.outcome, new.outcome) == ("", "EvictedDisplaced")
    assert shard.seen.failures[0][0] == "odd"


def test_entries_that_ended_are_not_kept() -> None:
    shard = Shard()
    keeps = shard.call()
    for _ in range(1_000):
        shard.call().leave()
    the_band = shard.controller._registry.order[0]
    assert len(the_band._arrivals) < 100
    assert sum(len(heap) for heap in shard.controller._deadlines._heaps) < 200
    assert the_band.oldest == 1_000.0
    keeps.leave()
    assert the_band.oldest == 0.0


def test_the_share_receives_every_change_of_a_head_and_no_other() -> None:
    calls: list[str] = []

    class Listening(Turns):
        def changed(self, flow: FlowView) -> None:
            calls.append(f"{flow.key.fairness_id} {len(flow)}")
            super().changed(flow)

        def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
            calls.append(f"served {flow.key.fairness_id}")
            super().dispatched(flow, item, now)

    class Policy(InTurn):
        def share(self, key: Callable[[Queued], Any]) -> FairShare:
            return Listening()

    shard = Shard(plan(band(0, fairness=Policy("fair", NoParams()))))
    first, second, third = shard.call(), shard.call(), shard.call()
    assert calls == ["a 1"], "the others did not change the head"
    third.leave()
    assert calls == ["a 1"]
    first.leave()
    assert calls == ["a 1", "a 1"], "another head"
    shard.room(1)
    assert calls == ["a 1", "a 1", "served a", "a 0"]
    assert second.outcome == "Dispatched"


# The plain rules themselves.


def test_items_without_a_key_sort_after_all_others_in_order_of_arrival() -> None:
    keys: list[Any] = [3.0, Unranked(2.0), 1.0, Unranked(1.0), 2.0]
    random.Random(1).shuffle(keys)
    ordered = sorted(keys)
    assert ordered[:3] == [1.0, 2.0, 3.0]
    assert ordered[3:] == [Unranked(1.0), Unranked(2.0)]
    assert len({Unranked(1.0), Unranked(1.0)}) == 1
    assert Unranked(1.0) != 1.0
