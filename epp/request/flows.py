"""Shows flow control as its plugins see it: flow keys, waiting items, flows and bands, all read-only.

A *flow* is all requests with one fairness id and one priority. A *band* is all flows of one priority. A higher priority is more important;
requests with a priority below 0 are sheddable. `rank` defines the order of bands for dispatch, displacement and eviction.
"""

import enum
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol


class FlowKey(NamedTuple):
    """Identifies a flow: the fairness id (a tenant, a user) and the priority of its requests."""

    fairness_id: str
    priority: int


def rank(priority: int) -> int:
    """Returns a sort key for bands: the band with the smallest rank is dispatched first, and displaced or evicted last."""
    return -priority


def sheddable(priority: int) -> bool:
    """Returns whether a request of this priority may be refused or evicted in favour of more important ones."""
    return priority < 0


class Item(Protocol):
    """Any object that a caller passes to flow control as a request: the attributes that flow control needs."""

    @property
    def flow(self) -> FlowKey: ...
    @property
    def bytes(self) -> int:
        """Returns the size of the request's body, as received."""

    @property
    def ttl_s(self) -> float | None:
        """Returns the longest wait in seconds that the caller wants; None if it does not say."""


class Queued(Protocol):
    """A waiting item as queues and policies see it. `request` is the `Item` that the caller passed in."""

    @property
    def flow(self) -> FlowKey: ...
    @property
    def arrival(self) -> float:
        """Returns when the item arrived at flow control, in monotonic seconds."""

    @property
    def ttl_s(self) -> float:
        """Returns the longest wait in seconds that flow control grants; infinite without a limit."""

    @property
    def bytes(self) -> int: ...
    @property
    def request(self) -> Any: ...


def original(item: Queued) -> Any:
    """Returns the waiting request itself, usually an `epp.request.Request`.

    The `Item` that the caller passed in may have the request as its attribute `request`; otherwise the item is the request.
    """
    passed = item.request
    return getattr(passed, "request", passed)


class HandleVoid(LookupError):
    """Says that `Queue.remove` was called with a handle that is void or of another queue."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue '{queue}': this handle is void or of another queue; take, remove and void end an item's handle, "
            "so drop it then, or call void, which accepts any handle"
        )


class Capability(enum.Flag):
    """Names what a queue can do, or what a policy needs of its queue."""

    HEAD = enum.auto()  # gives the first item in O(1)
    TAIL = enum.auto()  # gives the last item in O(1)
    PRIORITY_ORDER = enum.auto()  # items leave by the ordering policy's key, not by arrival
    SCAN = enum.auto()  # gives all items, in any order


class FlowView(Protocol):
    """Shows one flow of a band in this worker."""

    @property
    def key(self) -> FlowKey: ...
    @property
    def bytes(self) -> int: ...
    @property
    def head(self) -> Queued | None:
        """Returns the item that leaves next, or None if no item waits."""

    @property
    def tail(self) -> Queued | None:
        """Returns the item that leaves last, or None if no item waits. Needs a queue with TAIL."""

    def __len__(self) -> int:
        """Returns the number of waiting items."""

    def scan(self) -> Iterable[Queued]:
        """Returns all waiting items, in any order. Needs a queue with SCAN."""


class BandView(Protocol):
    """Shows one band in this worker. `flows` are its flows with waiting items, `bytes` is the sum over these items."""

    @property
    def priority(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def flows(self) -> Collection[FlowView]: ...
    def __len__(self) -> int:
        """Returns the number of waiting items."""
