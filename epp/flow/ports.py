"""What flow control is handed: load, the other shards, futures, a clock. `workers/flow.py` implements these, the simulation fakes them.

    Probe   the pool: how full it is, by the configured detector             read by `epp/flow/gate.py`
    Peers   the other shards, by way of the lanes: what they show, how to speak to them
    Future  what one waiting request awaits

One writer per word: a shard publishes only what is its own and asks others by counters that only it writes. None of the calls
waits or raises. A shard is a worker; *serving* ones are those whose `serving` word is set: words of the others count nothing.
"""

from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from epp.flow.outcomes import Outcome
from epp.flows import FlowKey
from epp.plugin import Ledger


class Load(NamedTuple):
    """How full the pool is at one moment, by what is scraped and what is in flight."""

    saturation: float  # the worst stage's; of a pool without endpoints 1.0
    empty: bool = False  # the pool has no endpoint
    step: float = 0.0  # how much one request more adds at most, about; 0: unknown, so one goes at a time
    stages: Mapping[str, float] = {}  # stage -> saturation, for metrics


class Probe(Protocol):
    """The pool as flow control sees it: all endpoints, no subset."""

    def load(self) -> Load:
        """Computed anew at each call (about 10 us): what is in flight in all serving shards is in it, up to this moment."""

    def dispatched(self) -> int:
        """Requests let through so far by all serving shards, this one's too: a sum of their dispatch counters, cheap.

        A shard that leaves or comes may move it either way; only differences over a few milliseconds are used.
        """

    def pending(self) -> int:
        """Requests let through in serving shards whose endpoint is not yet chosen: they are in flight nowhere else."""


class Reading(NamedTuple):
    """The gate at one moment. A band waits while saturation >= its ceiling, and all bands below it."""

    saturation: float
    ceilings: Mapping[int, float]  # by priority, of every band
    empty: bool
    stages: Mapping[str, float] = {}


class Gate(Protocol):
    """Whether there is room. `epp.flow.gate.PoolGate` is the real one; tests put their own in its place."""

    @property
    def one_by_one(self) -> bool:
        """Whether the next may go only when an endpoint is chosen for the one before."""

    def room(self, priority: int) -> bool:
        """Whether one request of this band may go now; cheap. `priority` is that of a band that exists."""

    def read(self) -> Reading:
        """The present reading, recomputed when it is older than a millisecond or may have become wrong."""

    def freed(self) -> None:
        """Something in flight has ended: what was read is too high now."""

    def bands(self, priorities: Sequence[int]) -> None:
        """The bands that exist from now on, the most important first."""


class Held(NamedTuple):
    """What waits in one band of one shard."""

    requests: int = 0
    bytes: int = 0
    oldest: float = 0.0  # arrival of the oldest; 0: nothing waits


class Front(NamedTuple):
    """A shard's most important band with something waiting, and how early its turn is (`Band.claim`)."""

    shard: int
    priority: int
    claim: float  # the smaller goes first within a band


class Wanted(NamedTuple):
    """What one shard is asked to displace of one band."""

    priority: int
    requests: int
    bytes: int


class Peers(Protocol):
    """The other shards that serve. Bands are named by priority; who implements this maps them to lane cells.

    Displacement: each shard keeps, per other shard and band, how much it has *ever* asked that one to displace (counters that go
    on over a restart), and each shard how much of it it has *ever* answered, per band. What is asked and not yet answered is the
    difference of the sums, seen by all. A successor starts with everything answered that was asked of its predecessor.
    """

    # What others show.

    def waiting(self) -> int:
        """Requests that wait in other serving shards; called for each request, so cheap."""

    def totals(self) -> tuple[int, int]:
        """Requests and bytes that wait in other serving shards."""

    def band(self, priority: int) -> tuple[int, int]:
        """Requests and bytes that wait in this band of other serving shards."""

    def shards(self) -> Sequence[int]:
        """The other serving shards."""

    def held(self, shard: int, priority: int) -> Held: ...
    def fronts(self) -> Sequence[Front]:
        """Of each other serving shard with a fresh heartbeat in which something waits."""

    def progress(self, shard: int) -> int:
        """How many requests this shard has let through: whether it is alive to what it is told."""

    def yields(self, shard: int) -> int:
        """How often it has left room to others."""

    def asked(self, shard: int, priority: int) -> tuple[int, int]:
        """Requests and bytes that all shards together have asked it to displace and that it has not answered yet."""

    def ledger(self, priority: int) -> Ledger:
        """What all shards know together of the flows of one band."""

    def demands(self) -> Sequence[Wanted]:
        """The same for this shard, over all bands: what it is to displace now; usually empty, so cheap then."""

    # What this shard shows and says.

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        """What waits here in one band; totals follow."""

    def front(self, priority: int | None, claim: float) -> None:
        """This shard's `Front`; None: nothing waits."""

    def let_through(self, pending: int) -> None:
        """One request more was let through here; `pending` are those whose endpoint is not yet chosen, this one too."""

    def pending(self, count: int) -> None:
        """`pending` has changed for another reason."""

    def yielded(self) -> None:
        """This shard leaves room to another."""

    def demand(self, shard: int, wanted: Wanted) -> None:
        """Asks a shard to displace so much more. Called after `publish`, so that it sees why; `wake` follows."""

    def answered(self, wanted: Wanted) -> None:
        """So much of `demands` is done, or cannot be done any more."""

    def wake(self, shard: int) -> None:
        """Makes that shard call `FlowController.woken` soon."""


class Future(Protocol):
    """One wait; `asyncio.Future` is one. Done futures are never set again; setting one runs who waits later, never at once."""

    def __await__(self) -> Generator[Any, None, Any]: ...
    def set_result(self, result: Any, /) -> None: ...
    def done(self) -> bool: ...


class Observer(Protocol):
    """Who counts what flow control does; all calls are cheap and never raise."""

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        """Once per request: the flow that it asked for, how it ended, and its wait (0 when it did not wait)."""

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        """What waits here in one flow now. A flow that is no longer told apart has become 0 first."""

    def policy_failed(self, plugin: str, problem: Exception) -> None:
        """A policy raised, and the plain rule was used in its place; `plugin` is the instance's name."""

    def blocked(self, reading: Reading, priority: int) -> None:
        """A cycle ended because this band, in which something waits, may not go: the place of in-flight eviction."""
