"""Queues hold the items of one flow in one worker, in the order in which they leave."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any

from epp.flow.fifo_queue import FifoQueue, Handle
from epp.plugin import FlowQueue, plugin
from epp.request.flows import Capability, Queued


@plugin("fifo-queue", "listqueue", "ListQueue")
class Fifo(FlowQueue):
    """Keeps a flow's requests in order of arrival, for ordering policies that order by arrival."""

    capabilities = Capability.HEAD | Capability.TAIL | Capability.SCAN

    def make(self, key: Callable[[Queued], Any]) -> FifoQueue:
        return FifoQueue(self.name)


VOID_MIN = 64  # a heap may have this many void entries, even if it has few valid ones

Entry = tuple[Any, int, Handle]


@plugin("priority-queue", "maxminheap", "MaxMinHeap")
class Priority(FlowQueue):
    """Keeps a flow's requests in the order of the ordering policy's key, smallest first; requests with equal keys, in order of arrival."""

    capabilities = Capability.HEAD | Capability.TAIL | Capability.PRIORITY_ORDER | Capability.SCAN

    def make(self, key: Callable[[Queued], Any]) -> "PriorityQueue":
        return PriorityQueue(self.name, key)


class _Last:
    """Wraps a heap entry to give it the opposite order."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def __lt__(self, other: "_Last") -> bool:
        return other.entry < self.entry


class PriorityQueue(FifoQueue):
    """A queue that the item with the smallest key leaves first. The keys are in a heap."""

    __slots__ = ("_first", "_key", "_last", "_number")

    def __init__(self, name: str, key: Callable[[Queued], Any]) -> None:
        super().__init__(name)
        self._items = {}
        self._key = key
        self._first: list[Entry] = []
        self._last: list[_Last] | None = None
        self._number = 0

    def offer(self, item: Queued) -> Handle:
        handle = Handle(item)
        self._number += 1
        entry = (self._key(item), self._number, handle)
        heappush(self._first, entry)
        if self._last is not None:
            heappush(self._last, _Last(entry))
        self._items[handle] = item
        self.bytes += handle.size
        return handle

    def head(self) -> Queued | None:
        first, items = self._first, self._items
        while first:
            item = items.get(first[0][2])
            if item is not None:
                return item
            heappop(first)
        return None

    def tail(self) -> Queued | None:
        last, items = self._last, self._items
        if last is None:
            last = self._last = [_Last(entry) for entry in self._first if entry[2] in items]
            heapify(last)
        while last:
            item = items.get(last[0].entry[2])
            if item is not None:
                return item
            heappop(last)
        return None

    def take(self) -> Queued:
        if self.head() is None:
            raise IndexError(f"take from queue '{self._name}', which is empty")
        return self.remove(heappop(self._first)[2])

    def remove(self, handle: Any) -> Queued:
        item = super().remove(handle)
        self._tidy()
        return item

    def _tidy(self) -> None:
        """Keeps the number of void entries at no more than the number of valid ones plus VOID_MIN."""
        items, most = self._items, 2 * len(self._items) + VOID_MIN
        if not items:
            self._first.clear()
            self._last = None
        if len(self._first) > most:
            self._first = [entry for entry in self._first if entry[2] in items]
            heapify(self._first)
        if self._last is not None and len(self._last) > most:
            self._last = [last for last in self._last if last.entry[2] in items]
            heapify(self._last)
