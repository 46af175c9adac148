"""Extension points of flow control: queues, order, fairness, displacement, saturation, limits, eviction.

    request ──▶ queue of its flow ──▶ turn in its band ──▶ gate ──────────────▶ in service
                FlowQueue             FairnessPolicy       SaturationDetector   EvictionFilter
                OrderingPolicy        DisplacementPolicy   UsageLimitPolicy     EvictionOrder

Plugin authors import these names from `epp.plugin`. The rules there apply to all extension points, with one difference: an exception
of these plugins does not fail a request. It is counted, and a plain rule replaces the plugin for that call. A queue or a policy of order,
fairness or displacement is replaced for good after five exceptions in a minute. If a detector raises, the pool is treated as not full. If a
usage-limit policy raises, all ceilings are 1.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Protocol

from epp.candidates import Candidates
from epp.points.base import Plugin
from epp.request.flows import BandView, Capability, FlowKey, FlowView, Queued


class SaturationDetector(Plugin):
    """Measures how full the pool is.

    With flow control: called when the gate reads the pool, once per stage if inference is disaggregated. The gate usually keeps a reading
    for 1 ms, or for 10 ms while the pool is far from full. Without flow control: called once per sheddable request.
    """

    def saturation(self, candidates: Candidates) -> float:
        """Returns the saturation of the candidates: 0 is idle, 1 is full, more is overloaded. Returns 1 if there is no candidate.

        For stale and unknown endpoints, use only their load in flight. Then failing scrapes slow dispatch down but never stop it.
        """
        raise NotImplementedError

    def stage_saturation(self, candidates: Candidates, stage: str) -> float:
        """Returns the saturation of one stage of disaggregated inference.

        `candidates`: the endpoints of this stage. `stage`: `prefill` or `decode`; empty if the endpoints have no stages.
        """
        return self.saturation(candidates)

    def step(self, candidates: Candidates) -> float:
        """Returns an upper estimate of the saturation that one more request adds. Between two readings, the gate adds it per request.

        Returns 0 if that is unknown. The gate then lets one request through at a time: the next request follows when the previous one has
        an endpoint and the gate has read the pool again.
        """
        return 0.0

    def stale(self, candidates: Candidates) -> int:
        """Returns for how many candidates only the load in flight is used, because their values are stale or unknown. For metrics."""
        return 0


class UsageLimitPolicy(Plugin):
    """Sets the saturation up to which each band is served. Called once per reading of the gate."""

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """Returns one ceiling per priority, in the order of `priorities` (highest first). A band waits while saturation >= its ceiling."""
        raise NotImplementedError


class Queue(Protocol):
    """Holds the waiting items of one flow in one worker.

    `offer` returns a handle for the item. A handle is valid for its queue only, and becomes void when the item leaves the queue.
    """

    bytes: int  # the sum of the sizes of the queue's items

    def __len__(self) -> int:
        """Returns the number of items."""

    def offer(self, item: Queued) -> Any:
        """Adds an item and returns its opaque handle."""

    def head(self) -> Queued | None:
        """Returns the item that leaves next, or None if the queue is empty."""

    def tail(self) -> Queued | None:
        """Returns the item that leaves last, or None if the queue is empty. Called only if the queue has Capability.TAIL."""

    def take(self) -> Queued:
        """Removes and returns the head. Raises IndexError if the queue is empty."""

    def remove(self, handle: Any) -> Queued:
        """Removes and returns the item of a handle, in O(log n). Raises `HandleVoid` if the handle is void or of another queue."""

    def void(self, handle: Any) -> None:
        """Removes the item of a handle if it is still in the queue. Does nothing otherwise."""

    def scan(self) -> Iterable[Queued]:
        """Returns all items, in any order. Called only if the queue has Capability.SCAN."""


class FlowQueue(Plugin):
    """Makes queues of one type. A band without a type uses the first configured type with all capabilities that its policies need."""

    capabilities: ClassVar[Capability]

    def make(self, key: Callable[[Queued], Any]) -> Queue:
        """Returns a new, empty queue for one flow. `key`: the ordering policy's key. Called when a worker creates a flow."""
        raise NotImplementedError


class OrderingPolicy(Plugin):
    """Orders the items within one flow. One instance may serve several bands."""

    queue_needs: ClassVar[Capability] = Capability.HEAD | Capability.PRIORITY_ORDER

    def key(self, item: Queued) -> Any:
        """Returns the item's sort key; the smallest leaves first.

        Called once per item, when it arrives. Keys of one policy are comparable.
        """
        raise NotImplementedError


class FairShare(Protocol):
    """Decides which flow of one band of one worker has the next turn. A `FairnessPolicy` makes it. Times are monotonic seconds."""

    def changed(self, flow: FlowView) -> None:
        """Called after each change of a flow: its head changed, it became empty, or it is no longer empty."""

    def pick(self, now: float) -> FlowView | None:
        """Returns the flow that has the next turn.

        Returns None if no request waits, or all flows are held back. A turn ends with `dispatched`, not with `pick`.
        """

    def dispatched(self, flow: FlowView, item: Queued, now: float) -> None:
        """Called when `item`, the head of `flow`, was dispatched. A call of `changed` follows."""

    def forget(self, key: FlowKey) -> None:
        """Called when the flow was idle for long. The share may then drop the flow's state."""


class Ledger(Protocol):
    """Shares the positions of the flows of one band among all workers. A position is the service that a flow got; it only grows.

    A flow hash identifies a flow. The methods that read return the highest value that any *other* worker shows. With very many flows, a
    flow's entry may be lost. The flow's position is then -inf, as for a flow that no other worker knows.
    """

    def served(self) -> int:
        """Returns a number that changes when another worker dispatches a request. While the number stays the same, no value needs to be
        read again.
        """

    def flow_hash(self, flow: FlowKey) -> int:
        """Returns the hash of a flow, the same in all workers."""

    def position(self, flow_hash: int) -> float:
        """Returns the highest position of this flow that another worker shows; -inf if no other worker shows this flow."""

    def time(self) -> float:
        """Returns the highest virtual time of the band that another worker shows: the position of the last request that it dispatched."""

    def end(self) -> float:
        """Returns the highest position of any flow that another worker shows."""

    def backlogged(self) -> int:
        """Returns the number of waiting flows in the other worker that has the most of them."""

    def alone(self) -> bool:
        """Returns whether no other worker has a waiting request in this band."""

    def move(self, flow_hash: int, position: float) -> None:
        """Shows this worker's position of a flow to the other workers."""

    def show(self, time: float, end: float, backlogged: int) -> None:
        """Shows this worker's values of `time`, `end` and `backlogged` to the other workers."""


class RankedShare(FairShare, Protocol):
    """A `FairShare` whose turns can be compared between workers. A `FairnessPolicy` with `ranks` makes it."""

    def meet(self, ledger: Ledger) -> None:
        """Gets the band's ledger. Called once, before a request waits."""

    def claim(self, flow: FlowView) -> float:
        """Returns the claim of the picked flow, a measure of how early its turn is. Over all workers the smallest claim goes first."""


class FairnessPolicy(Plugin):
    """Chooses the flow of a band that has the next turn. A policy may also be a ResponseComplete plugin, to learn what requests cost.

    `isolates`: whether the policy keeps one flow from starving another.
    `ranks`: whether the policy's shares are `RankedShare`. If not, workers compare how long flows have waited for their turn (with
    `isolates`), or when the first request of each flow arrived.
    `holds`: whether the policy's shares may hold requests back. `FairShare.pick` may then return None although requests wait; lower bands
    get their turns, and `pick` is called again soon. No request skips the queue, even if no other request waits.
    `tolerance`: two claims of different workers are equal if they differ by no more than this, in the unit of `claim`.
    """

    queue_needs: ClassVar[Capability] = Capability.HEAD
    isolates: bool = True
    ranks: bool = False
    holds: bool = False
    tolerance: float = 0.020

    def share(self, key: Callable[[Queued], Any]) -> FairShare:
        """Returns the state of one band. `key`: the key of the band's ordering policy. Called when a worker creates a band.

        A policy with `ranks` returns a `RankedShare`.
        """
        raise NotImplementedError


class DisplacementPolicy(Plugin):
    """Chooses which waiting item of a band to displace when a more important request arrives and the limits are reached."""

    queue_needs: ClassVar[Capability] = Capability.TAIL

    def victim(self, band: BandView) -> Queued | None:
        """Returns the next item of the band to displace, or None if the band is empty. Called once per item that must leave."""
        raise NotImplementedError


class EvictionFilter(Plugin):
    """Decides which requests in service may be evicted for more important requests that wait."""

    def evictable(self, flow: FlowKey) -> bool:
        """Returns whether a request of this flow may be evicted. Called once per request, when it is sent to an endpoint."""
        raise NotImplementedError


class EvictionOrder(Plugin):
    """Decides which evictable request is evicted first."""

    def key(self, flow: FlowKey, dispatched_at: float) -> Any:
        """Returns the request's sort key; the smallest is evicted first. Called once per request, when it is sent to an endpoint.

        `dispatched_at` is in monotonic seconds. Keys are numbers or tuples of numbers, comparable over all workers.
        """
        raise NotImplementedError
