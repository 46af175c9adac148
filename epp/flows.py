"""What flow control's plugins see: flow keys, waiting items, flows and bands, all read-only.

A *flow* is what requests of one fairness id and one priority have in common; a *band* is all flows of one priority. A higher
number is more important, below zero is sheddable. `rank` is the one order of bands: dispatch, displacement and eviction use it.
"""

import enum
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Protocol


class FlowKey(NamedTuple):
    """Whose request it is, and how important."""

    fairness_id: str
    priority: int


def rank(priority: int) -> int:
    """The order of bands: who has the smaller rank goes first, and gives way last."""
    return -priority


def sheddable(priority: int) -> bool:
    """Whether a request of this priority may be given up for others after it was sent."""
    return priority < 0


class Item(Protocol):
    """What a caller hands to flow control; any object with these."""

    @property
    def flow(self) -> FlowKey: ...
    @property
    def bytes(self) -> int:
        """Size of the request's body, as received."""

    @property
    def ttl_s(self) -> float | None:
        """The longest wait that the caller wishes for; None: no wish."""


class Queued(Protocol):
    """An item as queues and policies see it. `request` leads back to what the caller handed in."""

    @property
    def flow(self) -> FlowKey: ...
    @property
    def arrival(self) -> float:
        """When `enqueue_and_wait` was called, monotonic seconds."""

    @property
    def ttl_s(self) -> float:
        """The wait that is granted; infinite: none is set."""

    @property
    def bytes(self) -> int: ...
    @property
    def request(self) -> Any: ...


def original(item: Queued) -> Any:
    """The request that waits: what was handed in, or what that says its `request` is."""
    handed = item.request
    return getattr(handed, "request", handed)


class HandleVoid(LookupError):
    """A queue was asked to remove by a handle that is void, or another queue's."""

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue '{queue}': this handle is void or another queue's; a handle ends when its item leaves, by take, remove or void, "
            "so forget it then, or call void, which is harmless"
        )


class Capability(enum.Flag):
    """What a queue can do, and what a policy needs of one."""

    HEAD = enum.auto()  # the first item, in O(1)
    TAIL = enum.auto()  # the last item, in O(1)
    PRIORITY_ORDER = enum.auto()  # items leave by the ordering policy's key, not by arrival
    SCAN = enum.auto()  # all items, in any order


class FlowView(Protocol):
    """One flow of a band in this worker."""

    @property
    def key(self) -> FlowKey: ...
    @property
    def bytes(self) -> int: ...
    @property
    def head(self) -> Queued | None:
        """The item that leaves next."""

    @property
    def tail(self) -> Queued | None:
        """The item that leaves last; only of queues with TAIL."""

    def __len__(self) -> int: ...
    def scan(self) -> Iterable[Queued]:
        """All items; only of queues with SCAN."""


class BandView(Protocol):
    """All flows of one priority in this worker that have something waiting."""

    @property
    def priority(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def flows(self) -> Collection[FlowView]: ...
    def __len__(self) -> int:
        """Items that wait."""
