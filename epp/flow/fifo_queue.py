"""A queue in order of arrival. The plugin `fifo-queue` uses it, and it also replaces a queue that failed."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from epp.request.flows import HandleVoid, Queued


class Handle:
    """Identifies an item in its queue. A handle is opaque, and becomes void when its item leaves the queue."""

    __slots__ = ("size",)

    def __init__(self, item: Queued) -> None:
        # The item's size at arrival. The queue adds and subtracts this size, so the sum stays exact even if the item's size changes.
        self.size = item.bytes


class FifoQueue:
    """Holds the items of one flow, in order of arrival. `_items` has exactly the items of the queue."""

    __slots__ = ("_items", "_name", "bytes")

    def __init__(self, name: str) -> None:
        self._name = name
        self._items: dict[Handle, Queued] = OrderedDict()  # a dict is slow to find its first item after many have left
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
        return self.remove(next(iter(self._items)))

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
