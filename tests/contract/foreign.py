"""A queue and a fairness policy as a third party would write them."""

from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

from epp.plugin import FairnessPolicy, FlowQueue
from epp.request.flows import Capability, FlowKey, FlowView, HandleVoid, Queued


class SortedItems(FlowQueue):
    """A list that is kept sorted: simple, but slow if it is long."""

    capabilities = Capability.HEAD | Capability.TAIL | Capability.PRIORITY_ORDER | Capability.SCAN

    def make(self, key: Callable[[Queued], Any]) -> "SortedQueue":
        return SortedQueue(key)


class SortedQueue:
    def __init__(self, key: Callable[[Queued], Any]) -> None:
        self._key = key
        self._items: list[tuple[Any, int, Queued]] = []
        self._number = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Queued) -> Any:
        self._number += 1
        entry = (self._key(item), self._number, item)
        insort(self._items, entry)
        self.bytes += item.bytes
        return entry

    def head(self) -> Queued | None:
        return self._items[0][2] if self._items else None

    def tail(self) -> Queued | None:
        return self._items[-1][2] if self._items else None

    def take(self) -> Queued:
        if not self._items:
            raise IndexError("take from an empty queue")
        return self.remove(self._items[0])

    def remove(self, handle: Any) -> Queued:
        if not any(handle is entry for entry in self._items):
            raise HandleVoid("sorted")
        self._items.remove(handle)
        self.bytes -= handle[2].bytes
        item: Queued = handle[2]
        return item

    def void(self, handle: Any) -> None:
        if any(handle is entry for entry in self._items):
            self.remove(handle)

    def scan(self) -> Iterable[Queued]:
        return [item for _, _, item in self._items]


class LongestFirst(FairnessPolicy):
    """Picks the flow with the most items. It isolates no flow."""

    isolates = False

    def share(self, key: Callable[[Queued], Any]) -> "Longest":
        return Longest()


class Longest:
    def __init__(self) -> None:
        self._flows: dict[FlowKey, FlowView] = {}

    def changed(self, flow: FlowView) -> None:
        self._flows.pop(flow.key, None)
        if len(flow):
            self._flows[flow.key] = flow

    def pick(self, now: float) -> FlowView | None:
        return max(self._flows.values(), key=len, default=None)

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        """Nothing to do: the policy only looks at what waits."""

    def forget(self, key: FlowKey) -> None:
        """Nothing to do: the policy keeps no state of flows that are gone."""
