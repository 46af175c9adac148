"""The interfaces that flow control needs: `workers/worker/flow` implements these protocols, and the simulation has fakes of them.

    Probe     how full the pool is, by the configured detector; read by `epp/flow/gate.py`
    Gate      whether there is room for one more request
    Peers     the other shards, through the areas: what they show, and how to send them demands
    Future    what a waiting request awaits
    Observer  counts what flow control does

One writer per word: a shard publishes only its own words. To demand something of another shard, it increments a counter that only it
writes. No call blocks or raises. Each worker has one shard. A *serving* shard has its `serving` word set; the words of the others are
ignored.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from epp.flow.outcomes import Outcome
from epp.plugin import Ledger
from epp.request.flows import FlowKey


class PoolLoad(NamedTuple):
    """Says how full the pool is at one moment, by scraped metrics and by what is in flight."""

    saturation: float  # the saturation of the fullest stage; 1.0 for a pool without endpoints
    empty: bool = False  # the pool has no endpoint
    step: float = 0.0  # roughly the most that one more request adds; 0 if unknown, so that requests pass one at a time
    stages: Mapping[str, float] = {}  # stage -> saturation, for metrics


class Probe(Protocol):
    """Reads the load of the pool as flow control sees it: all endpoints, without subsets."""

    def load(self) -> PoolLoad:
        """Computes the load at each call (about 10 us), including what is in flight now in all serving shards."""

    def dispatched(self) -> int:
        """Returns how many requests all serving shards have let through so far: the sum of their dispatch counters. Cheap.

        The number may jump up or down when a shard starts or stops serving. So callers should use only differences over a few milliseconds.
        """

    def pending(self) -> int:
        """Returns how many requests serving shards have let through that have no endpoint yet. They are not yet counted as in flight."""


class Reading(NamedTuple):
    """Holds the state of the gate at one moment. A band waits while saturation >= its ceiling, and so do all bands below it."""

    saturation: float
    ceilings: Mapping[int, float]  # priority -> ceiling, for every band
    empty: bool
    stages: Mapping[str, float] = {}


class Gate(Protocol):
    """Says whether there is room. `epp.flow.gate.PoolGate` is the real implementation; tests substitute their own."""

    @property
    def one_by_one(self) -> bool:
        """Returns whether the next request has to wait until the previous one has an endpoint."""

    def room(self, priority: int) -> bool:
        """Returns whether one request of this band may go now. Cheap. A band with this `priority` must exist."""

    def read(self) -> Reading:
        """Returns the present reading. Reads the pool again if the reading is older than 1 ms or may be wrong."""

    def freed(self) -> None:
        """Call this when a request in flight has ended, because the last reading is then too high."""

    def bands(self, priorities: Sequence[int]) -> None:
        """Sets the bands that exist from now on, the most important first."""


class Held(NamedTuple):
    """Says what waits in one band of one shard."""

    requests: int = 0
    bytes: int = 0
    oldest: float = 0.0  # arrival time of the oldest request; 0 if no request waits


class Head(NamedTuple):
    """Names the priority of a shard's most important waiting band, and the band's claim (`Band.claim`)."""

    shard: int
    priority: int
    claim: float  # within a band the smaller claim goes first


class Elsewhere(NamedTuple):
    """Says what waits in other replicas of the picker."""

    priority: int  # the priority of the most important band in which something waits
    progress: int  # changes when a replica with a request of this band lets a request through


class Wanted(NamedTuple):
    """Demands that a shard displaces a number of requests and bytes in one band."""

    priority: int
    requests: int
    bytes: int


class Peers(Protocol):
    """Reads what the other serving shards show, and sends them demands. Bands are named by priority; areas have numbered cells for them.

    Displacement works by counters that continue over a restart. Each shard counts how much it has *ever* demanded of each other shard in
    each band. Each shard also counts, per band, how much it has *ever* answered of what was demanded of it. All shards can see these
    counters; the outstanding demand on a shard is the sum of the demands minus what the shard has answered. When a process takes over a
    shard, all demands on its predecessor are treated as answered.
    """

    # What the other shards show.

    def waiting(self) -> int:
        """Returns how many requests wait in other serving shards; at least 1 if a request waits in another replica.

        Called for each request, so it must be cheap.
        """

    def totals(self) -> tuple[int, int]:
        """Returns how many requests and bytes wait in other serving shards."""

    def band(self, priority: int) -> tuple[int, int]:
        """Returns how many requests and bytes wait in this band of other serving shards."""

    def shards(self) -> Sequence[int]:
        """Returns the numbers of the other serving shards."""

    def held(self, shard: int, priority: int) -> Held: ...
    def heads(self) -> Sequence[Head]:
        """Returns the head of each other serving shard that has waiting requests and a fresh heartbeat."""

    def elsewhere(self) -> Elsewhere | None:
        """Returns what waits in other replicas of the picker; None if this replica knows of no waiting request."""

    def progress(self, shard: int) -> int:
        """Returns how many requests the given shard has let through. A change shows that it reacts to wakes."""

    def yields(self, shard: int) -> int:
        """Returns how often the given shard has left room to others."""

    def asked(self, shard: int, priority: int) -> tuple[int, int]:
        """Returns the requests and bytes of all outstanding demands on the given shard in one band."""

    def ledger(self, priority: int, policy: str) -> Ledger:
        """Returns the positions of the flows of one band, over all shards. `policy`: the type of the band's fairness policy, because each
        policy measures positions in its own unit.
        """

    def demands(self) -> Sequence[Wanted]:
        """Returns what this shard has to displace now, over all bands. Usually this is nothing, and then the call must be cheap."""

    # What this shard shows and sends.

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        """Publishes what waits here in one band. Also updates the totals over all bands."""

    def head(self, priority: int | None, claim: float) -> None:
        """Publishes this shard's `Head`. `priority` is None if no request waits."""

    def let_through(self, pending: int) -> None:
        """Counts one more request that was let through here. `pending`: requests without an endpoint, including this one."""

    def pending(self, count: int) -> None:
        """Publishes the number of pending requests after it fell. (`let_through` publishes it after it rose.)"""

    def yielded(self) -> None:
        """Counts that this shard has left room to another one."""

    def demand(self, shard: int, wanted: Wanted) -> None:
        """Adds a demand on another shard.

        Call it after `publish`, so that the other shard sees why the demand is needed, and call `wake` afterwards.
        """

    def answered(self, wanted: Wanted) -> None:
        """Counts this element of `demands` as answered: the requests were displaced, or there is no request left to displace."""

    def wake(self, shard: int) -> None:
        """Makes the given shard call `FlowController.woken` soon."""


class Future(Protocol):
    """The object that a waiting request awaits; `asyncio.Future` is one. It is set only once. Setting it resumes the request later, not at
    once.
    """

    def __await__(self) -> Generator[Any, None, Any]: ...
    def set_result(self, result: Any, /) -> None: ...
    def done(self) -> bool: ...


class Observer(Protocol):
    """Counts what flow control does. All calls are cheap and never raise."""

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        """Reports that a request has ended: the flow that it named, its outcome, and its wait (0 if it did not wait).

        Called once per request, except for those that `FlowController.passes` lets through.
        """

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        """Reports what waits here in one flow now. A flow reports 0 before it is removed or merged into another."""

    def cycled(self, seconds: float, /) -> None:
        """Reports how long a cycle took in which requests waited."""

    def policy_failed(self, plugin: str, problem: Exception) -> None:
        """Reports that a policy raised, and that the plain rule replaced it for this call. `plugin`: the name of the instance."""

    def blocked(self, reading: Reading, priority: int) -> None:
        """Reports that a cycle ended at this waiting band, for which there is no room. This call triggers in-flight eviction."""
