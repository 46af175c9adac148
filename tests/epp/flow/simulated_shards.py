"""The shards of the simulation: real controllers, gates and policies, whose calls another shard may interrupt."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

from epp.flow.bands import Band, Entry, Flow
from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.flow.outcomes import Outcome
from epp.flow.ports import Held, PoolLoad, Reading, Wanted
from epp.plugin import FairnessPolicy, FairShare, NoParams, Plugin, SaturationDetector
from epp.request import Request as ParsedRequest
from epp.request.flows import FlowKey, Queued
from tests.epp.flow.shards import Board, BoardLedger, BoardPeers, Call, FakeFuture, FakePool, Thing
from tests.fakes import candidates

if TYPE_CHECKING:
    from tests.epp.flow.simulated_world import World

PRIORITIES = (5, 1, 0, -1, -7)


class Violation(AssertionError):
    """An invariant does not hold."""


def made(kind: type[Plugin], **parameters: Any) -> Any:
    return kind(kind.type_name or kind.__name__, kind.Params(**parameters))


class Raising(FairnessPolicy):
    """A policy with a bug: any of its calls raises with a probability of 5%."""

    def __init__(self, inner: FairnessPolicy, rng: random.Random) -> None:
        super().__init__("raising", NoParams())
        self.inner = inner
        self.rng = rng
        self.isolates = inner.isolates
        self.ranks = inner.ranks
        self.tolerance = inner.tolerance

    def share(self, key: Callable[[Queued], Any]) -> FairShare:
        return RaisingShare(self.inner.share(key), self.rng)


class RaisingShare:
    def __init__(self, inner: FairShare, rng: random.Random) -> None:
        self.inner = inner
        self.rng = rng

    def __getattr__(self, name: str) -> Any:
        if self.rng.random() < 0.05:
            raise RuntimeError("a bug in a policy")
        return getattr(self.inner, name)


class DetectedPool(FakePool):
    """The same pool as a real detector reads it. Requests are spread over the servers, and some servers have stale values."""

    def __init__(self, board: Board, pods: int, each: int, detector: SaturationDetector, rng: random.Random) -> None:
        super().__init__(board, pods, each)
        self.detector = detector
        self.rng = rng

    def load(self) -> PoolLoad:
        if not self.pods:
            return PoolLoad(1.0, empty=True)
        inflight = [self.total() // self.pods] * self.pods
        inflight[self.rng.randrange(self.pods)] += self.total() % self.pods
        seen = candidates(
            {"waiting_requests": [0.0] * self.pods, "kv_cache_usage": [0.0] * self.pods},
            inflight=inflight,
            fresh=[self.rng.random() < 0.5 for _ in range(self.pods)],
        )
        return PoolLoad(self.detector.saturation(seen), step=self.detector.step(seen))


class SharedLedger(BoardLedger):
    """Lets another shard act before a shard reads or writes the position of a flow."""

    def __init__(self, peers: "Peers", priority: int) -> None:
        super().__init__(peers, priority)
        self.world = peers.world

    def position(self, flow_hash: int) -> float:
        self.world.intrude()
        return super().position(flow_hash)

    def move(self, flow_hash: int, position: float) -> None:
        self.world.intrude()
        super().move(flow_hash, position)


class ClaimedBand(Band):
    """Keeps the claim of the last flow that it served, as it was compared with other shards. It may have moved since."""

    served_claim = 0.0
    compared: float | None = None

    def claim(self, flow: Flow) -> float:
        self.compared = super().claim(flow)
        return self.compared

    def take(self, flow: Flow, now: float) -> Entry:
        self.served_claim = self.claim(flow) if self.compared is None else self.compared
        self.compared = None
        return super().take(flow, now)


class Peers(BoardPeers):
    """Before a shard touches shared words, another shard may act. Wake-ups arrive late."""

    def __init__(self, world: "World", shard: int) -> None:
        super().__init__(world.board, shard)
        self.world = world

    def waiting(self) -> int:
        self.world.intrude()
        return super().waiting()

    def totals(self) -> tuple[int, int]:
        self.world.intrude()
        return super().totals()

    def band(self, priority: int) -> tuple[int, int]:
        self.world.intrude()
        return super().band(priority)

    def held(self, shard: int, priority: int) -> Held:
        self.world.intrude()
        return super().held(shard, priority)

    def ledger(self, priority: int, policy: str = "") -> SharedLedger:
        return SharedLedger(self, priority)

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        self.world.intrude()
        super().publish(priority, requests, bytes, oldest)

    def demand(self, shard: int, wanted: Wanted) -> None:
        self.world.intrude()
        super().demand(shard, wanted)

    def wake(self, shard: int) -> None:
        self.world.wake(shard)


@dataclass
class Headed(Thing):
    """An item with the headers that the ordering by SLO reads. `band`: the band that must hold it."""

    headers: Mapping[str, str] = field(default_factory=dict)
    band: int = 0


def answered(item: Thing, now: float) -> ParsedRequest:
    """The request as policies see it that learn from its answer. It has no data from before."""
    fields = {"fairness_id": item.fairness_id, "priority": item.flow.priority}
    return ParsedRequest(id="", path="", headers={}, now=now, body_bytes=item.bytes, **fields)


class Request:
    """One request of the world, and its state."""

    __slots__ = ("call", "client_left", "item", "number", "shard", "state")

    def __init__(self, number: int, item: Thing, shard: "SimShard") -> None:
        self.number = number
        self.item = item
        self.shard = shard
        self.state = "new"  # then: waits, dispatched, serving, over, lost
        self.client_left = False
        self.call: Call | None = None


class SimShard:
    """A worker: its controller, and an observer that checks the reports of the controller."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.touched = True  # has acted since its last check
        self.busy = False  # one of its calls is on the stack
        self.paused_until = 0.0
        self.last_pause = -inf
        self.tick_set = self.wake_set = False
        self.sweep_at = inf
        self.arrived = self.ended_count = 0
        self.waiting: dict[int, Request] = {}  # number -> request that waits in it
        self.flows: dict[FlowKey, tuple[int, int]] = {}
        self.shown: FlowKey | None = None
        self.over_since: float | None = None
        self.demanded_since: float | None = None
        self.gate = gate = PoolGate(world.pool, world.plan.usage_limits, "detector", now=world.clock, report=self.policy_failed)
        self.head: tuple[int, float] | None = None
        self.head_since = world.clock.now
        self.controller = FlowController(
            world.plan, gate, Peers(world, number), self, now=world.clock, make_future=lambda _item: FakeFuture()
        )
        self.bands = frozenset(world.plan.priorities(world.provisioned))
        self.controller.provision(world.provisioned)

    # Observer.

    def ended(self, key: FlowKey, outcome: Outcome, waited_s: float, bytes: int) -> None:
        self.ended_count += 1
        world = self.world
        world.count(outcome)
        world.note("ended", self.number, f"{key} {outcome.value} {waited_s:.6f}")
        if world.broken:
            return
        shown, self.shown = self.shown, None  # the flow that was shown right before is the one that the request leaves
        if outcome is Outcome.DISPATCHED:
            world.check_dispatch(self, key, shown.priority if shown else self.controller._registry.band(key.priority).priority)
        elif outcome is Outcome.EVICTED_DISPLACED:
            world.check_displaced(self, key, shown.priority if shown else key.priority)

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        self.shown = key
        self.world.queue_moved = True
        self.flows[key] = (requests, bytes)

    def cycled(self, seconds: float, /) -> None: ...

    def policy_failed(self, plugin: str, problem: Exception) -> None:
        if plugin != "raising":
            raise Violation(f"policy '{plugin}' failed: {problem!r}") from problem

    def blocked(self, reading: Reading, priority: int) -> None:
        room = reading.saturation < reading.ceilings[priority] and not reading.empty
        if room and not self.world.intrusions and not self.gate.one_by_one:
            raise Violation(f"band {priority} is blocked at saturation {reading.saturation}")
