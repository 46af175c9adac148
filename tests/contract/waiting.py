"""Items, flows and bands for tests of flow control's plugins, and a list of all registered plugins of a kind.

The lists also have two plugins of a third party and a policy with another strategy, which are registered while the lists are made.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from epp.config import registry
from epp.plugin import FairnessPolicy, FlowQueue, Ledger, Plugin, Queue, plugin
from epp.plugins.fairness.program_aware import Parameters, ProgramAware
from epp.plugins.queues import Fifo, Priority
from epp.points.base import REGISTERED
from epp.request.flows import Capability, FlowKey, Queued
from tests.contract.foreign import LongestFirst, SortedItems
from tests.contract.test_every_plugin import REQUIRED, resolved
from tests.epp.flow.shards import Board, BoardPeers
from tests.fakes import FakeServices, request

K = TypeVar("K", bound=Plugin)


class ByTurn(ProgramAware):
    """The program-aware policy with its other strategy."""

    ranks, isolates = True, False

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, msgspec.structs.replace(params, strategy="turn-priority"))


@contextlib.contextmanager
def registered(*classes: tuple[str, type[Plugin]]) -> Iterator[None]:
    """Registers these classes, as if a distribution with them were installed."""
    registry.known()
    for name, cls in classes:
        plugin(name)(cls)
    try:
        yield
    finally:
        for name, _ in classes:
            del REGISTERED[name]


def every(kind: type[K]) -> list[type[K]]:
    """All registered classes of a kind."""
    variants = (("example-turn-priority", ByTurn),)
    with registered(("example-sorted-queue", SortedItems), ("example-longest-first-policy", LongestFirst), *variants):
        classes = {cls for cls in REGISTERED.values() if issubclass(cls, kind)}
    return sorted(classes, key=lambda cls: cls.type_name)


def made(cls: type[K], **parameters: Any) -> K:
    """A started instance. The parameters are in camelCase."""
    complete = {**REQUIRED.get(cls.type_name, {}), **parameters}
    instance = cls(cls.type_name, msgspec.convert(complete, cls.Params))
    resolved(instance).start(FakeServices())
    return instance


class Waits:
    """A `Queued` item. `request` is a request, or any object of the caller."""

    def __init__(
        self, flow: str = "a", *, arrival: float = 0.0, bytes: int = 1, ttl_s: float = 60.0, priority: int = 0, request: Any = None
    ) -> None:
        self.flow = FlowKey(flow, priority)
        self.arrival = arrival
        self.bytes = bytes
        self.ttl_s = ttl_s
        self.request = request

    def __repr__(self) -> str:
        return f"Waits({self.flow.fairness_id}, arrival={self.arrival:g}, bytes={self.bytes})"


def asking(flow: str, *, arrival: float = 0.0, bytes: int = 1000, **fields: Any) -> Waits:
    """An item for a request."""
    original = request(b"", fairness_id=flow, now=arrival, body_bytes=bytes, **fields)
    return Waits(flow, arrival=arrival, bytes=bytes, request=original)


class Flow:
    """A `FlowView` over a real queue."""

    def __init__(self, key: FlowKey, queue: Queue) -> None:
        self.key = key
        self.queue = queue

    @property
    def bytes(self) -> int:
        return self.queue.bytes

    @property
    def head(self) -> Queued | None:
        return self.queue.head()

    @property
    def tail(self) -> Queued | None:
        return self.queue.tail()

    def __len__(self) -> int:
        return len(self.queue)

    def scan(self) -> Iterable[Queued]:
        return self.queue.scan()

    def __repr__(self) -> str:
        return f"Flow({self.key.fairness_id}, {len(self)} items)"


class Band:
    """A `BandView`. Like a real band, it reports every change of a flow's head to its fairness policy."""

    def __init__(
        self, fairness: FairnessPolicy, ordering: Any, queue: FlowQueue | None = None, priority: int = 0, ledger: Ledger | None = None
    ) -> None:
        self.priority = priority
        self.ordering = ordering
        ordered = Capability.PRIORITY_ORDER in ordering.queue_needs
        self.queue = queue or (made(Priority) if ordered else made(Fifo))
        self.fairness = fairness
        self.share: Any = fairness.share(ordering.key)
        if fairness.ranks:
            self.share.meet(ledger or BoardPeers(Board(1)).ledger(priority))
        self.known: dict[str, Flow] = {}
        self.handles: dict[int, tuple[Flow, Any]] = {}

    @property
    def flows(self) -> Collection[Flow]:
        return [flow for flow in self.known.values() if len(flow)]

    @property
    def bytes(self) -> int:
        return sum(flow.bytes for flow in self.known.values())

    def __len__(self) -> int:
        return sum(map(len, self.known.values()))

    def offer(self, item: Waits) -> Waits:
        name = item.flow.fairness_id
        flow = self.known.get(name)
        if flow is None:
            flow = self.known[name] = Flow(item.flow, self.queue.make(self.ordering.key))
        before = flow.head
        self.handles[id(item)] = (flow, flow.queue.offer(item))
        if flow.head is not before:
            self.share.changed(flow)
        return item

    def remove(self, item: Queued) -> None:
        flow, handle = self.handles.pop(id(item))
        before = flow.head
        assert flow.queue.remove(handle) is item
        if before is item or not len(flow):
            self.share.changed(flow)

    def dispatch(self, now: float = 0.0) -> Waits | None:
        """Takes the next item, as a dispatch cycle does."""
        flow = self.share.pick(now)
        if flow is None:
            return None
        assert isinstance(flow, Flow)
        item = flow.queue.take()
        assert isinstance(item, Waits)
        del self.handles[id(item)]
        self.share.dispatched(flow, item, now)
        self.share.changed(flow)
        return item

    def forget(self, name: str) -> None:
        """Collects an idle flow."""
        flow = self.known[name]
        assert not len(flow)
        del self.known[name]
        self.share.forget(flow.key)
