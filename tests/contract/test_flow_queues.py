"""Every registered queue keeps its promises about order, handles and sums. A new queue is tested because it is registered."""

from bisect import insort
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test

from epp.plugin import FlowQueue, Queue
from epp.request.flows import Capability, HandleVoid
from tests.contract.waiting import Waits, every, made
from tests.examples import examples

QUEUES = every(FlowQueue)
LIMITED = examples(60, stateful_step_count=40)
OURS = [cls for cls in QUEUES if cls.__module__.startswith("epp.")]
each_of_ours = pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.type_name)
each_queue = pytest.mark.parametrize("cls", QUEUES, ids=lambda cls: cls.type_name)


def empty(cls: type[FlowQueue]) -> Queue:
    return made(cls).make(lambda item: item.arrival)


def ordered(cls: type[FlowQueue]) -> bool:
    return Capability.PRIORITY_ORDER in cls.capabilities


def test_our_queues_and_a_third_partys_are_tested() -> None:
    assert {"fifo-queue", "priority-queue", "example-sorted-queue"} <= {cls.type_name for cls in QUEUES}


class Compared(RuleBasedStateMachine):
    """Compares two queues with sorted lists, and tries the handles of one on the other."""

    cls: type[FlowQueue]
    handles: Bundle[Any] = Bundle("handles")
    gone: Bundle[Any] = Bundle("gone")

    def __init__(self) -> None:
        super().__init__()
        self.queues = (empty(self.cls), empty(self.cls))
        self.oracle: tuple[list[Any], list[Any]] = ([], [])
        self.number = 0

    def left(self, which: int, item: Waits) -> tuple[int, Any]:
        self.oracle[which][:] = [entry for entry in self.oracle[which] if entry[2] is not item]
        return which, item

    @rule(target=handles, which=st.integers(0, 1), arrival=st.integers(0, 5), bytes=st.integers(0, 100))
    def offer(self, which: int, arrival: int, bytes: int) -> Any:
        self.number += 1
        item = Waits(arrival=float(arrival), bytes=bytes)
        insort(self.oracle[which], (arrival if ordered(self.cls) else 0, self.number, item))
        return which, item, self.queues[which].offer(item)

    @rule(target=gone, handle=consumes(handles))
    def remove(self, handle: Any) -> Any:
        which, item, token = handle
        if any(entry[2] is item for entry in self.oracle[which]):
            assert self.queues[which].remove(token) is item
            self.left(which, item)
        else:  # the item was taken
            with pytest.raises(HandleVoid):
                self.queues[which].remove(token)
        return handle

    @rule(target=gone, handle=consumes(handles))
    def void(self, handle: Any) -> Any:
        which, item, token = handle
        self.queues[which].void(token)
        self.left(which, item)
        return handle

    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        if self.oracle[which]:
            first = self.oracle[which].pop(0)[2]
            assert self.queues[which].take() is first
        else:
            with pytest.raises(IndexError):
                self.queues[which].take()

    @rule(handle=gone)
    def use_a_void_handle(self, handle: Any) -> None:
        which, _, token = handle
        self.queues[which].void(token)
        with pytest.raises(HandleVoid):
            self.queues[which].remove(token)

    @rule(handle=handles)
    def use_a_handle_of_another_queue(self, handle: Any) -> None:
        which, _, token = handle
        self.queues[1 - which].void(token)
        with pytest.raises(HandleVoid):
            self.queues[1 - which].remove(token)

    @invariant()
    def queues_equal_the_lists(self) -> None:
        for queue, entries in zip(self.queues, self.oracle, strict=True):
            items = [entry[2] for entry in entries]
            assert len(queue) == len(items)
            assert queue.bytes == sum(item.bytes for item in items)
            assert queue.head() is (items[0] if items else None)
            if Capability.TAIL in self.cls.capabilities:
                assert queue.tail() is (items[-1] if items else None)
            if Capability.SCAN in self.cls.capabilities:
                assert sorted(map(id, queue.scan())) == sorted(map(id, items))


def machine(cls: type[FlowQueue]) -> type[RuleBasedStateMachine]:
    """The comparison for one class of queues."""
    return type("Compared", (Compared,), {"cls": cls})


@each_queue
def test_a_queue_behaves_like_a_sorted_list_under_any_sequence_of_calls(cls: type[FlowQueue]) -> None:
    run_state_machine_as_test(machine(cls), settings=LIMITED)


@each_queue
def test_an_empty_queue_has_no_head_and_refuses_take(cls: type[FlowQueue]) -> None:
    queue = empty(cls)
    assert (len(queue), queue.bytes, queue.head()) == (0, 0, None)
    with pytest.raises(IndexError):
        queue.take()


@each_queue
def test_a_single_item_is_first_and_last_and_leaves_nothing_behind(cls: type[FlowQueue]) -> None:
    queue, item = empty(cls), Waits(bytes=7)
    handle = queue.offer(item)
    assert queue.head() is item and queue.bytes == 7
    assert queue.take() is item
    assert (len(queue), queue.bytes, queue.head()) == (0, 0, None)
    with pytest.raises(HandleVoid, match="void"):
        queue.remove(handle)


@each_queue
@given(arrivals=st.lists(st.integers(0, 9), min_size=1, max_size=60), data=st.data())
@examples(40)
def test_cancels_in_any_order_do_not_affect_other_items(cls: type[FlowQueue], arrivals: list[int], data: st.DataObject) -> None:
    queue = empty(cls)
    items = [Waits(arrival=float(arrival), bytes=arrival) for arrival in arrivals]
    handles = {id(item): queue.offer(item) for item in items}
    cancelled = data.draw(st.permutations(items))[: data.draw(st.integers(0, len(items)))]
    for item in cancelled:
        assert queue.remove(handles[id(item)]) is item
    left = [item for item in items if item not in cancelled]
    if ordered(cls):
        left.sort(key=lambda item: item.arrival)  # stable, so ties stay in order of arrival
    assert [queue.take() for _ in left] == left
    assert (len(queue), queue.bytes) == (0, 0)


@each_of_ours
def test_an_item_whose_size_changes_later_does_not_corrupt_the_sum(cls: type[FlowQueue]) -> None:
    queue = empty(cls)
    items = [Waits(bytes=10), Waits(bytes=20), Waits(bytes=30)]
    handles = [queue.offer(item) for item in items]
    for item in items:
        item.bytes = 0
    queue.take()
    queue.remove(handles[1])
    assert queue.bytes == 30


@each_of_ours
def test_the_memory_for_removed_items_is_bounded(cls: type[FlowQueue]) -> None:
    """Thousands of cancels behind the head leave few void entries."""
    queue = empty(cls)
    queue.offer(Waits(arrival=-1.0))
    queue.tail()
    for number in range(5_000):
        queue.remove(queue.offer(Waits(arrival=float(number))))
    held = [len(getattr(queue, name) or ()) for name in ("_items", "_first", "_last") if hasattr(queue, name)]
    assert max(held) <= 2 * len(queue) + 64


def test_the_first_of_equal_keys_goes_first() -> None:
    for cls in QUEUES:
        queue = empty(cls)
        items = [Waits(arrival=1.0) for _ in range(5)]
        for item in items:
            queue.offer(item)
        assert [queue.take() for _ in items] == items


def test_exactly_the_queues_that_declare_priority_order_have_it() -> None:
    for cls in QUEUES:
        queue, late, early = empty(cls), Waits(arrival=2.0), Waits(arrival=1.0)
        queue.offer(late)
        queue.offer(early)
        assert (queue.head() is early) == ordered(cls)
