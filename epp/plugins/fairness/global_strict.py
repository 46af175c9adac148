"""No fairness: one line for all flows of a band."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from epp.flows import FlowKey, FlowView, Queued
from epp.plugin import FairnessPolicy, plugin

VOID_MIN = 64  # so many void entries the heap may have, however few others there are


class _Head:
    """The head of one flow, as it stands in the line."""

    __slots__ = ("flow", "item")

    def __init__(self, flow: FlowView, item: Queued) -> None:
        self.flow = flow
        self.item = item


@plugin("global-strict-fairness-policy")
class GlobalStrict(FairnessPolicy):
    """The flow whose head is first by the band's ordering policy. Isolates nobody: who sends the most gets the most."""

    isolates = False

    def share(self, key: Callable[[Queued], Any]) -> "Line":
        return Line(key)


class Line:
    """A heap over the heads. Entries of heads that are none any more are void, and fewer than the others but for a few."""

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
        """What was served before does not matter."""

    def forget(self, key: FlowKey) -> None:
        """Nothing is kept of a flow that is empty."""

    def _tidy(self) -> None:
        heads = self._heads
        if len(self._heap) > 2 * len(heads) + VOID_MIN:
            self._heap = [entry for entry in self._heap if heads.get(entry[2].flow.key) is entry[2]]
            heapify(self._heap)
