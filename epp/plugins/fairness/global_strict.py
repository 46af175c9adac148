"""Gives no fairness: the requests of all flows of a band share one order."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from epp.plugin import FairnessPolicy, plugin
from epp.request.flows import FlowKey, FlowView, Queued

VOID_MIN = 64  # the heap may have this many void entries, even if it has few valid ones


class _Head:
    """An entry of the heap, which refers to the head of one flow."""

    __slots__ = ("flow", "item")

    def __init__(self, flow: FlowView, item: Queued) -> None:
        self.flow = flow
        self.item = item


@plugin("global-strict-fairness-policy")
class GlobalStrict(FairnessPolicy):
    """Picks the flow with the first request by the band's ordering policy. A flow that sends more requests gets more turns."""

    isolates = False

    def share(self, key: Callable[[Queued], Any]) -> "Line":
        return Line(key)


class Line:
    """Keeps the heads of all flows in a heap.

    An entry becomes void when its item is no longer the head of its flow. `_tidy` keeps the number of void entries at no more than the
    number of valid ones plus VOID_MIN.
    """

    __slots__ = ("_heads", "_heap", "_key", "_number")

    def __init__(self, key: Callable[[Queued], Any]) -> None:
        self._key = key
        self._heads: dict[FlowKey, _Head] = {}
        self._heap: list[tuple[Any, int, _Head]] = []
        self._number = 0

    def changed(self, flow: FlowView) -> None:
        item, key = flow.head, flow.key
        known = self._heads.get(key)
        if item is None:
            if known is not None:
                del self._heads[key]
                self._tidy()
            return
        if known is not None and known.item is item:
            known.flow = flow
            return
        self._number += 1
        head = _Head(flow, item)
        heappush(self._heap, (self._key(item), self._number, head))
        self._heads[key] = head
        self._tidy()

    def pick(self, now: float) -> FlowView | None:
        heap, heads = self._heap, self._heads
        while heap:
            head = heap[0][2]
            if heads.get(head.flow.key) is head:
                return head.flow
            heappop(heap)
        return None

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        """Does nothing: the order does not depend on earlier requests."""

    def forget(self, key: FlowKey) -> None:
        """Does nothing, because an empty flow has no state."""

    def _tidy(self) -> None:
        heads = self._heads
        if len(self._heap) > 2 * len(heads) + VOID_MIN:
            self._heap = [entry for entry in self._heap if heads.get(entry[2].flow.key) is entry[2]]
            heapify(self._heap)
