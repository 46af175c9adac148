"""A queue in order of arrival. Every operation is O(1)."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from epp.plugin import FlowQueue, plugin
from epp.plugins.queues import Handle
from epp.request.flows import Capability, HandleVoid, Queued


@plugin("fifo-queue", "listqueue", "ListQueue")
class Fifo(FlowQueue):
    """Keeps a flow's requests in order of arrival, for ordering policies that order by arrival."""

    capabilities = Capability.HEAD | Capability.TAIL | Capability.SCAN

    def make(self, key: Callable[[Queued], Any]) -> "FifoQueue":
        return FifoQueue(self.name)


class FifoQueue:
    """Holds the items of one flow, in order of arrival. `_items` has exactly the items of the queue."""

    __slots__ = ("_items", "_name", "bytes")

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: OrderedDict[Handle, Queued] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Queued) -> Handle:
        handle = Handle(item)
        self._items[handle] = item
        self.bytes += handle.size
        return handle

    def head(self) -> Queued | None:
        return next(iter(self._items.values()), None)

    def tail(self) -> Queued | None:
        return next(reversed(self._items.values()), None)

    def take(self) -> Queued:
        if not self._items:
            raise IndexError(f"take from queue '{self._name}', which is empty")
        handle, item = self._items.popitem(last=False)
        self.bytes -= handle.size
        return item

    def remove(self, handle: Any) -> Queued:
        item = self._items.pop(handle, None)
        if item is None:
            raise HandleVoid(self._name)
        self.bytes -= handle.size
        return item

    def void(self, handle: Any) -> None:
        if handle in self._items:
            self.remove(handle)

    def scan(self) -> Iterable[Queued]:
        return self._items.values()
