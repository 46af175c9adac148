"""Deterministic simulation of flow control: `python -m tests.epp.flow.simulation [--seeds N] [--first S] [--jobs J] [--trace]`.

One seed is one world: a plan, several shards with the real controllers, gates and policies, a pool of servers, and a virtual
clock. A seeded scheduler decides who acts next: arrivals with wishes, clients that leave, decisions that take their time,
responses that end, servers that come and go, wakes that are late, shards that stand still, die and get successors, bands that come
and go, a policy that raises. Shards also act *in the middle* of another's call, wherever that one reads or writes
shared words: that is where processes race. After each step the invariants are checked:

    each request ends exactly once, and nothing is let through after its end
    counters equal contents: bands, totals, lanes, per-flow gauges; no request is left in a queue that nobody waits for
    limits: queued requests and bytes within the limits, but for one request per other shard and what is asked for and not yet gone
    the gate: no more in flight than there is room for, but for one request per other shard
    bands in order: in a shard always; among shards nothing less important than what has waited elsewhere for 100 ms
    turns in order: among shards nothing of the same band whose turn is later than one that has been shown elsewhere for 100 ms
    work conserving: while there is room, what waits does not wait for long
    nobody gives way to what is not more important, and then within 10 ms; nobody waits beyond its time by 100 ms

The same seed gives the same trace, whose checksum is part of the result.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

from epp.client_headers import TTFT_SLO_MS
from epp.decision import Decision, Response, Usage
from epp.flow.bands import Flow
from epp.flow.controller import FlowController
from epp.flow.gate import KEPT_FAR_S, PoolGate
from epp.flow.outcomes import Outcome
from epp.flow.plan import BandPlan, FlowPlan
from epp.flow.ports import Held, Load, Reading, Wanted
from epp.flows import FlowKey, Queued
from epp.plugin import FairnessPolicy, FairShare, NoParams, Plugin, SaturationDetector
from epp.plugins.displacement.largest import Largest
from epp.plugins.displacement.newest import Newest
from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.program_aware import ProgramAware
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.fairness.token_weighted import TokenWeighted
from epp.plugins.ordering.edf import EarliestDeadline
from epp.plugins.ordering.fcfs import FirstCome
from epp.plugins.ordering.slo_deadline import SloDeadline
from epp.plugins.queues.fifo import Fifo
from epp.plugins.queues.priority import Priority
from epp.plugins.saturation.concurrency import Concurrency
from epp.plugins.saturation.utilization import Utilization
from epp.plugins.usage_limits.priority_holdback import PriorityHoldback
from epp.plugins.usage_limits.static import Static
from tests.epp.flow.shards import Board, BoardLedger, BoardPeers, Call, Clock, FakeFuture, FakePool, Thing
from tests.fakes import candidates

TICK_S = 0.005
SWEEP_S = 0.100  # how late a sweep may be
OUTRANKED_S = 0.100  # how long something may wait elsewhere while less important things are served here
IDLE_ROOM_S = 0.060  # how long room may stay unused while something waits
ANSWER_S = 0.010
PRIORITIES = (5, 1, 0, -1, -7)


class Violation(AssertionError):
    """An invariant does not hold."""


class Result(NamedTuple):
    """What one seed came to."""

    seed: int
    steps: int
    trace: int  # checksum of all that happened
    problem: str = ""
    outcomes: tuple[tuple[str, int], ...] = ()


def made(kind: type[Plugin], **parameters: Any) -> Any:
    return kind(kind.type_name or kind.__name__, kind.Params(**parameters))


class Raising(FairnessPolicy):
    """A policy with a bug: now and then any of its calls raises."""

    def __init__(self, inner: FairnessPolicy, rng: random.Random) -> None:
        super().__init__("raising", NoParams())
        self.inner = inner
        self.rng = rng
        self.isolates = inner.isolates  # type: ignore[misc]
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
    """The same pool, as a real detector reads it: requests spread over the servers somehow, some servers' values stale."""

    def __init__(self, board: Board, pods: int, each: int, detector: SaturationDetector, rng: random.Random) -> None:
        super().__init__(board, pods, each)
        self.detector = detector
        self.rng = rng

    def load(self) -> Load:
        if not self.pods:
            return Load(1.0, empty=True)
        inflight = [self.total() // self.pods] * self.pods
        inflight[self.rng.randrange(self.pods)] += self.total() % self.pods
        seen = candidates(
            {"waiting_requests": [0.0] * self.pods, "kv_cache_usage": [0.0] * self.pods},
            inflight=inflight,
            fresh=[self.rng.random() < 0.5 for _ in range(self.pods)],
        )
        return Load(self.detector.saturation(seen), step=self.detector.step(seen))


class SharedLedger(BoardLedger):
    """Where a shard looks how far a flow has got, or says so, another may act first."""

    def __init__(self, peers: "Peers", priority: int) -> None:
        super().__init__(peers, priority)
        self.world = peers.world

    def position(self, mark: int) -> float:
        self.world.intrude()
        return super().position(mark)

    def move(self, mark: int, position: float) -> None:
        self.world.intrude()
        super().move(mark, position)


class Controller(FlowController):
    """Says how early the turn was of what it serves."""

    turn: float = 0.0

    def _serve(self, flow: Flow, now: float) -> None:
        self.turn = flow.band.claim(flow)
        super()._serve(flow, now)


class Peers(BoardPeers):
    """Where a shard touches shared words another may act first; wakes arrive late."""

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

    def ledger(self, priority: int) -> SharedLedger:
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
    """What the ordering by objectives looks at; `band` is where it belongs."""

    headers: Mapping[str, str] = field(default_factory=dict)
    band: int = 0


class Answered:
    """A request as policies see it that learn from its answer; nothing was noted of it before."""

    def __init__(self, item: Thing, now: float) -> None:
        self.fairness_id, self.body_bytes, self.now = item.fairness_id, item.bytes, now

    def __getitem__(self, datum: object) -> None:
        return None


class Request:
    """One request of the world, and where it stands."""

    __slots__ = ("call", "client_left", "item", "number", "shard", "state")

    def __init__(self, number: int, item: Thing, shard: "SimShard") -> None:
        self.number = number
        self.item = item
        self.shard = shard
        self.state = "new"  # waits, dispatched, serving, over, lost
        self.client_left = False
        self.call: Call | None = None


class SimShard:
    """A worker: its controller, and an observer that checks what it says."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.alive = True
        self.touched = True  # since it was checked
        self.busy = False  # one of its calls is on the stack
        self.paused_until = 0.0
        self.last_pause = -inf
        self.tick_set = self.wake_set = False
        self.sweep_at = inf
        self.arrived = self.ended_count = 0
        self.waiting: dict[int, Request] = {}  # requests that wait in it, by number
        self.flows: dict[FlowKey, tuple[int, int]] = {}
        self.shown: FlowKey | None = None
        self.over_since: float | None = None
        self.asked_since: float | None = None
        self.gate = gate = PoolGate(
            world.pool, world.plan.usage_limits, "detector", now=world.clock, report=self.policy_failed
        )
        self.front: tuple[int, float] | None = None
        self.front_since = world.clock.now
        self.controller = Controller(
            world.plan, gate, Peers(world, number), self, now=world.clock, make_future=FakeFuture
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
        shown, self.shown = self.shown, None  # the flow that was shown right before is the one that it leaves
        if outcome is Outcome.DISPATCHED:
            world.check_dispatch(
                self, key, shown.priority if shown else self.controller._registry.band(key.priority).priority
            )
        elif outcome is Outcome.EVICTED_DISPLACED:
            world.check_displaced(self, key, shown.priority if shown else key.priority)

    def queued(self, key: FlowKey, requests: int, bytes: int) -> None:
        self.shown = key
        self.world.queue_moved = True
        self.flows[key] = (requests, bytes)

    def policy_failed(self, plugin: str, problem: Exception) -> None:
        if plugin != "raising":
            raise Violation(f"policy '{plugin}' failed: {problem!r}") from problem

    def blocked(self, reading: Reading, priority: int) -> None:
        room = reading.saturation < reading.ceilings[priority] and not reading.empty
        if room and not self.world.intrusions and not self.gate.one_by_one:
            raise Violation(f"band {priority} is blocked at saturation {reading.saturation}")


class World:
    """Everything of one seed."""

    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        rng = self.rng = random.Random(seed)
        self.seed = seed
        self.trace = trace
        self.checksum = 0
        self.steps = 0
        self.clock = Clock(100.0)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = 0
        self.depth = 0
        self.counts: dict[str, int] = {}
        self.broken = False
        self.queue_moved = False
        self.stop_at = 100.0 + rng.choice((0.05, 0.1, 0.25))
        self.intrusions = rng.choice((0.0, 0.01, 0.05))
        self.room_since: float | None = None
        self.last_pods = self.last_dispatch = self.came_at = -inf
        self.accepted: list[tuple[float, int]] = []  # arrivals that may have displaced somebody: when, band
        self.provisioned = frozenset(rng.sample(PRIORITIES, rng.randrange(3)))
        self.plan = self._plan()
        self.band_plans = {priority: self.plan.band(priority) for priority in PRIORITIES}
        self.calm = rng.random() < 0.5  # no shard stands still or dies
        self.board = Board(rng.choice((1, 2, 2, 3, 4)))
        self.pool = self._pool()
        self.largest = 0
        self.shards = [SimShard(self, i) for i in range(len(self.board.lanes))]
        self.requests: list[Request] = []
        self.tenants = rng.choice((1, 2, 5))
        self.mean_service = rng.choice((0.002, 0.01, 0.03))
        self.at(0.0, self.arrivals)
        self.at(rng.random() * 0.1, self.disturb)

    def _plan(self) -> FlowPlan:
        rng = self.rng
        fcfs, edf, slo = made(FirstCome), made(EarliestDeadline), made(SloDeadline)
        strict, turns, tokens, least = made(GlobalStrict), made(RoundRobin), made(TokenWeighted), made(ProgramAware)
        self.learning = (tokens, least)
        self.faulty = rng.random() < 0.1

        def band(priority: int) -> BandPlan:
            ordering = rng.choice((fcfs, edf, slo))
            fairness: FairnessPolicy = rng.choice((strict, turns, tokens, least))
            if self.faulty:
                fairness = Raising(fairness, rng)
            return BandPlan(
                priority=priority,
                max_requests=rng.choice((3, 10, 1000)),
                max_bytes=rng.choice((60, 10_000)),
                request_ttl_s=rng.choice((None, None, 0.05, inf)),
                queue=made(Priority) if ordering is not fcfs else rng.choice((made(Fifo), made(Priority))),
                ordering=ordering,
                fairness=fairness,
                displacement=rng.choice((made(Newest), made(Largest))),
            )

        limits = rng.choice((made(Static, threshold=1.0), made(PriorityHoldback, min_ceiling=0.5)))
        return FlowPlan(
            bands=tuple(band(p) for p in rng.sample(PRIORITIES, rng.randrange(4))),
            template=band(0),
            negative_template=rng.choice((None, band(0))),
            max_requests=rng.choice((0, 2, 5, 12)),
            max_bytes=rng.choice((0, 0, 80)),
            request_ttl_s=rng.choice((0.05, 0.3, inf)),
            no_endpoint_ttl_s=rng.choice((0.05, 0.3, inf)),
            detector=made(SaturationDetector),
            usage_limits=limits,
            eviction=False,
        )

    def _pool(self) -> FakePool:
        rng = self.rng
        pods, each = rng.randrange(1, 4), rng.choice((1, 2, 4))
        kind = rng.choice(("counted", "counted", "counted", "unknown step", "concurrency", "utilization"))
        if kind == "concurrency":
            return DetectedPool(self.board, pods, each, made(Concurrency, max_concurrency=each), rng)
        if kind == "utilization":
            return DetectedPool(self.board, pods, each, made(Utilization, queue_depth_threshold=each), rng)
        return FakePool(self.board, pods, each, step=kind == "counted")

    # The scheduler.

    def at(self, delay: float, act: Callable[..., None], *arguments: Any) -> None:
        self.sequence += 1
        heappush(self.events, (self.clock.now + delay, self.sequence, act, arguments))

    def run(self) -> Result:
        problem = ""
        try:
            while self.events and self.clock.now < self.stop_at + 5.0:
                self.step()
            self.finish()
        except Violation as violation:
            problem = f"at {self.clock.now - 100.0:.6f} s, step {self.steps}: {violation}"
        except Exception as raised:
            problem = f"at {self.clock.now - 100.0:.6f} s, step {self.steps}: {type(raised).__name__}: {raised}"
        self.broken, self.intrusions = (
            True,
            0.0,
        )  # what is left is not judged: callers of dead shards, when they are collected
        return Result(self.seed, self.steps, self.checksum, problem, tuple(sorted(self.counts.items())))

    def step(self) -> None:
        when, _, act, arguments = heappop(self.events)
        shard = arguments[0] if arguments and isinstance(arguments[0], SimShard) else None
        if shard is not None and (not shard.alive or shard.paused_until > when):
            if shard.alive:  # it will do so when it runs again
                self.sequence += 1
                heappush(self.events, (shard.paused_until, self.sequence, act, arguments))
            return
        self.clock.now = max(self.clock.now, when)
        self.steps += 1
        if shard is None:
            act(*arguments)
        else:
            shard.busy = shard.touched = True
            act(*arguments)
            shard.busy = False
        self.check()

    def intrude(self) -> None:
        """Another shard acts in the middle of a call."""
        if self.intrusions and self.depth < 2 and self.rng.random() < self.intrusions:
            free = [s for s in self.shards if s.alive and not s.busy and s.paused_until <= self.clock.now]
            if free and self.clock.now < self.stop_at:
                shard = self.rng.choice(free)
                self.depth += 1
                shard.busy = shard.touched = True
                self.note("intrusion", shard.number)
                self.rng.choice((self.arrive, self.arrive, self.woken))(shard)
                shard.busy = False
                self.depth -= 1

    def note(self, what: str, shard: int, more: object = "") -> None:
        line = f"{self.clock.now - 100.0:.6f} {what} {shard} {more}"
        self.checksum = crc32(line.encode(), self.checksum)
        if self.trace is not None:
            self.trace.append(line)

    def count(self, outcome: Outcome) -> None:
        self.counts[outcome.value] = self.counts.get(outcome.value, 0) + 1

    # What happens.

    def arrivals(self) -> None:
        """A burst now and then, else one after another."""
        rng = self.rng
        living = [s for s in self.shards if s.alive]
        for _ in range(rng.choice((1, 1, 1, 3, 8))):
            if living:
                self.at(rng.random() * 0.002, self.arrive, rng.choice(living))
        if self.clock.now < self.stop_at:
            self.at(rng.expovariate(1 / 0.008), self.arrivals)

    def arrive(self, shard: SimShard) -> None:
        rng = self.rng
        item = Headed(
            f"t{int(self.tenants * rng.random() ** 2)}",
            rng.choice(PRIORITIES),
            rng.choice((0, 10, 10, 10, 35)),
            rng.choice((None, None, None, 0.0, 0.02, 9.0)),
            headers=rng.choice(({}, {TTFT_SLO_MS[0]: "20"}, {TTFT_SLO_MS[0]: "500"})),
        )
        item.band = item.priority if item.priority in shard.bands else 0
        request = Request(len(self.requests), item, shard)
        self.requests.append(request)
        self.largest = max(self.largest, item.bytes)
        shard.arrived += 1
        self.note("arrival", shard.number, f"{request.number} {item.fairness_id} {item.priority} {item.bytes}")
        shard.waiting[request.number] = request
        self.accepted.append((self.clock.now, item.priority))
        request.state = "waits"
        shard.shown = None
        displaced = self.counts.get("EvictedDisplaced", 0)
        asked = any(any(self.board.outstanding(shard.number, priority)) for priority in PRIORITIES)
        request.call = Call(shard.controller, item)
        self.moved(request)
        in_vain = (
            request.call.ended is Outcome.REJECTED_CAPACITY and self.counts.get("EvictedDisplaced", 0) != displaced
        )
        if in_vain and not asked and not self.intrusions:
            raise Violation("somebody gave way to a request that was rejected all the same")
        if request.state == "waits":
            self.accepted.append((self.clock.now, item.priority))
            if rng.random() < 0.2:
                self.at(rng.random() * 0.2, self.leave, shard, request)
        self.after_call(shard)

    def moved(self, request: Request) -> None:
        """Looks how the call stands, and lets it go on if it can."""
        call = request.call
        assert call is not None
        if request.state == "waits" and call.ended is not None:
            request.shard.waiting.pop(request.number, None)
            if call.ended is Outcome.DISPATCHED:
                request.state = "dispatched"
                self.at(self.rng.choice((0.0, 0.0, 0.003)), self.decide, request.shard, request)
            else:
                request.state = "over"

    def resume(self, shard: SimShard, request: Request) -> None:
        """A future that was set runs its callback."""
        if request.state == "waits" and request.call is not None:
            request.call.step()
            self.moved(request)
            self.after_call(shard)

    def leave(self, shard: SimShard, request: Request) -> None:
        """The client is gone: the stream closes the coroutine, or ends what it has begun."""
        if request.state == "waits" and request.call is not None:
            self.note("leaves", shard.number, request.number)
            request.state = "over"
            shard.waiting.pop(request.number, None)
            request.call.leave()
            self.after_call(shard)

    def decide(self, shard: SimShard, request: Request) -> None:
        """An endpoint is chosen, or not."""
        placed = self.rng.random() < 0.95
        self.note("decides", shard.number, f"{request.number} {placed}")
        request.state = "serving" if placed else "over"
        if placed:
            self.pool.inflight[shard.number] += 1
            self.at(self.rng.expovariate(1 / self.mean_service), self.respond, shard, request)
        shard.controller.settled(placed=placed)
        self.after_call(shard)

    def respond(self, shard: SimShard, request: Request) -> None:
        self.note("responds", shard.number, request.number)
        request.state = "over"
        self.pool.inflight[shard.number] -= 1
        response = Response(200)
        response.usage = Usage(request.item.bytes, self.rng.choice((1, 10, 100)), 0)
        for policy in self.learning:
            policy.response_complete(Answered(request.item, self.clock.now), Decision((), {}, primary=""), response)
        shard.controller.released()
        self.after_call(shard)

    def wake(self, number: int) -> None:
        shard = self.shards[number]
        if shard.alive and not shard.wake_set:
            shard.wake_set = True
            self.at(self.rng.random() * 0.003, self.woken, shard)

    def woken(self, shard: SimShard) -> None:
        shard.wake_set = False
        shard.controller.woken()
        self.after_call(shard)

    def tick(self, shard: SimShard) -> None:
        shard.tick_set = False
        shard.controller.woken()
        self.after_call(shard)

    def sweep(self, shard: SimShard) -> None:
        shard.sweep_at = min(inf, shard.controller.sweep(self.clock.now))
        if shard.sweep_at < inf:
            shard.sweep_at = max(shard.sweep_at, self.clock.now) + 0.001
            if not shard.controller.waiting and self.clock.now > self.stop_at:
                shard.sweep_at = inf
                return
            self.at(shard.sweep_at - self.clock.now, self.sweep, shard)
        self.after_call(shard)

    def disturb(self) -> None:
        """What goes wrong."""
        rng = self.rng
        act = rng.choice((self.churn, self.churn, self.reconfigure, self.stand_still, self.kill))
        if not self.calm or act in (self.churn, self.reconfigure):
            act()
        if self.clock.now < self.stop_at:
            self.at(rng.expovariate(1 / 0.08), self.disturb)

    def churn(self) -> None:
        self.pool.pods = self.rng.choice((0, 1, 2, 3))
        self.last_pods = self.clock.now
        self.note("pods", self.pool.pods)

    def reconfigure(self) -> None:
        self.provisioned = frozenset(self.rng.sample(PRIORITIES, self.rng.randrange(4)))
        self.note("bands", 0, sorted(self.provisioned))
        for shard in self.shards:
            if shard.alive:
                self.at(self.rng.random() * 0.01, self.provide, shard)

    def provide(self, shard: SimShard) -> None:
        shard.bands = frozenset(self.plan.priorities(self.provisioned))
        shard.controller.provision(self.provisioned)
        self.after_call(shard)

    def stand_still(self) -> None:
        shard = self.rng.choice(self.shards)
        until = self.clock.now + self.rng.choice((0.005, 0.05, 0.3))
        shard.paused_until = shard.last_pause = max(shard.paused_until, until)
        lane = self.board.lanes[shard.number]
        lane.fresh = self.rng.random() < 0.8
        self.note("stands still", shard.number, f"{shard.paused_until:.6f} {lane.fresh}")
        self.at(shard.paused_until - self.clock.now, self.goes_on, shard)

    def goes_on(self, shard: SimShard) -> None:
        self.board.lanes[shard.number].fresh = True

    def kill(self) -> None:
        shard = self.rng.choice(self.shards)
        if not shard.alive:
            return
        self.note("dies", shard.number)
        shard.alive = False
        self.board.die(shard.number)
        self.pool.inflight[shard.number] = 0
        for request in self.requests:
            if request.shard is shard and request.state != "over":
                request.state = "lost"
        shard.waiting.clear()
        self.last_pods = self.clock.now
        self.at(self.rng.random() * 0.05, self.succeed, shard.number)

    def succeed(self, number: int) -> None:
        self.note("successor", number)
        self.came_at = self.clock.now
        self.board.successor(number)
        self.shards[number] = SimShard(self, number)
        self.shards[number].last_pause = self.clock.now

    def after_call(self, shard: SimShard) -> None:
        """What a worker's loop does after each of its events: timers, and callbacks of futures that were set."""
        for request in shard.waiting.values():
            if request.call is not None and request.call.future is not None and request.call.future.done():
                self.at(self.rng.choice((0.0, 0.001)), self.resume, shard, request)
        if shard.controller.waiting:
            if not shard.tick_set:
                shard.tick_set = True
                self.at(TICK_S, self.tick, shard)
            if shard.sweep_at > self.clock.now + SWEEP_S / 2:
                shard.sweep_at = self.clock.now + self.rng.random() * SWEEP_S / 2
                self.at(shard.sweep_at - self.clock.now, self.sweep, shard)

    # What must hold.

    def check(self) -> None:
        """What was touched, and now and then everything: time alone can break a promise too."""
        everything = self.steps % 16 == 0
        for shard in self.shards:
            if shard.alive and (shard.touched or everything):
                shard.touched = False
                self.check_contents(shard)
        if self.queue_moved or everything:
            self.queue_moved = False
            self.check_limits()
        for shard in self.shards:
            front = self.board.lanes[shard.number].front
            if front != shard.front:
                shard.front, shard.front_since = front, self.clock.now
        self.check_answers()
        self.check_room()

    def check_contents(self, shard: SimShard) -> None:
        controller, lane = shard.controller, self.board.lanes[shard.number]
        requests = size = 0
        now = self.clock.now
        found = 0
        late = SWEEP_S + 0.002 if shard.last_pause < now - SWEEP_S else inf
        for band in controller._registry.order:
            in_band = bytes_in_band = 0
            for flow in band.active.values():
                items = list(flow.scan())
                total = sum(item.bytes for item in items)
                if not items or len(flow) != len(items) or flow.bytes != total or flow.leases != len(items):
                    raise Violation(
                        f"flow {flow.key}: {len(flow)} items, {flow.leases} leases, {flow.bytes} bytes; it holds {items}"
                    )
                if shard.flows.get(flow.key) != (len(items), total):
                    raise Violation(
                        f"flow {flow.key} is shown as {shard.flows.get(flow.key)}, and holds {len(items)}, {total}"
                    )
                in_band += len(items)
                bytes_in_band += total
                for item in items:
                    if item.outcome is not None or not item.waits:  # type: ignore[attr-defined]
                        raise Violation(f"a request that has ended is in a queue: {flow.key}")
                    if item.request.band != band.priority:
                        raise Violation(f"a request of priority {item.flow.priority} waits in band {band.priority}")
                    if late < inf and now > controller._deadlines.end(item) + late:  # type: ignore[arg-type]
                        raise Violation(f"a request of {flow.key} waits since {item.arrival - 100}, beyond its time")
            held = lane.bands.get(band.priority, Held())
            if not (band.requests == in_band == held.requests and band.bytes == bytes_in_band == held.bytes):
                raise Violation(
                    f"band {band.priority} of shard {shard.number}: {band.requests} counted, {in_band} held, {held} shown"
                )
            if band.leaving and not in_band:
                raise Violation(f"band {band.priority} is empty and leaving, and still there")
            if held.oldest != min((e.arrival for e in band.entries()), default=0.0):
                raise Violation(f"band {band.priority} shows the wrong age")
            requests += in_band
            size += bytes_in_band
        if (controller.waiting, controller.waiting_bytes) != (requests, size):
            raise Violation(f"shard {shard.number} counts {controller.waiting} waiting, and holds {requests}")
        if sum(n for n, _ in shard.flows.values()) != requests:
            raise Violation(f"the flows of shard {shard.number} show {shard.flows}, and {requests} wait")
        found = sum(1 for r in shard.waiting.values() if r.call is not None and not r.call.ready)
        if found != requests:
            raise Violation(f"{found} callers wait in shard {shard.number}, and {requests} items")
        if shard.arrived != shard.ended_count + requests:
            raise Violation(
                f"{shard.arrived} arrived in shard {shard.number}, {shard.ended_count} ended, {requests} wait"
            )
        pending = (
            sum(1 for r in self.requests if r.shard is shard and r.state == "dispatched")
            if self.steps % 16 == 0
            else None
        )
        undelivered = sum(1 for r in shard.waiting.values() if r.call is not None and r.call.ready)
        if pending is not None and not 0 <= lane.pending - pending <= undelivered:
            raise Violation(
                f"shard {shard.number} shows {lane.pending} pending, {pending} are and {undelivered} may be"
            )
        settled = (
            max(self.came_at, shard.last_pause) < now - 2 * TICK_S and controller._peers.shards()
        )  # alone it shows none
        if settled and (lane.front is None) != (not requests):
            raise Violation(f"shard {shard.number} shows the front {lane.front}, and {requests} wait")

    def asked(self) -> tuple[int, int]:
        lanes = self.board.lanes
        asked = [self.board.outstanding(i, p) for i, p in self.board.asked if lanes[i].serving]
        return sum(a[0] for a in asked), sum(a[1] for a in asked)

    def check_limits(self) -> None:
        serving = [lane for lane in self.board.lanes if lane.serving]
        asked, asked_bytes = self.asked()
        slack = len(serving) - 1 if self.intrusions else 0
        for what, limit, total, more in (
            ("requests", self.plan.max_requests, sum(h.requests for x in serving for h in x.bands.values()), asked + slack),
            ("bytes", self.plan.max_bytes, sum(h.bytes for x in serving for h in x.bands.values()), asked_bytes + slack * 35),
        ):  # fmt: skip
            if limit and total > limit + more:
                raise Violation(
                    f"{total} {what} wait, of {limit}; {asked} requests and {asked_bytes} bytes are asked for"
                )
        for priority in PRIORITIES:
            plan = self.band_plans[priority]
            held = [lane.bands.get(priority, Held()) for lane in serving]
            if sum(h.requests for h in held) > plan.max_requests + slack:
                raise Violation(f"{held} wait in band {priority}, of {plan.max_requests}")
            if sum(h.bytes for h in held) > plan.max_bytes + slack * 35:
                raise Violation(f"{held} wait in band {priority}, of {plan.max_bytes} bytes")

    def check_answers(self) -> None:
        for shard in self.shards if self.board.asked else ():
            outstanding = shard.alive and any(
                any(self.board.outstanding(i, p)) for i, p in self.board.asked if i == shard.number
            )
            if not outstanding:
                shard.asked_since = None
            elif shard.asked_since is None:
                shard.asked_since = self.clock.now
            elif self.clock.now - max(shard.asked_since, shard.last_pause) > ANSWER_S:
                raise Violation(
                    f"shard {shard.number} has not answered what it was asked {self.clock.now - shard.asked_since} s ago"
                )

    def room_for(self, priority: int, shard: SimShard) -> bool:
        """Whether a request of this band could go, by the exact load and the bands that the shard knows: ceilings follow from both."""
        load = self.pool.load()
        capacity = self.pool.pods * self.pool.each
        if load.empty or (self.pool.pending() and not load.step):
            return False
        used = round(load.saturation + self.pool.pending() / capacity, 9)
        return used < self.ceiling(priority, shard, load.saturation)

    def ceiling(self, priority: int, shard: SimShard, saturation: float) -> float:
        """Of a band, by the bands that the shard knows."""
        priorities = sorted((b.priority for b in shard.controller._registry.order), reverse=True)
        ceilings = dict(zip(priorities, self.plan.usage_limits.ceilings(saturation, priorities), strict=True))
        return round(ceilings.get(priority, 0.0), 9)

    def check_room(self) -> None:
        """Work conserving: room that somebody waits for does not stay unused."""
        now = self.clock.now
        tops = []
        for shard in self.shards:
            if shard.alive and shard.controller.waiting and shard.last_pause < now - IDLE_ROOM_S:
                tops.append((next(b.priority for b in shard.controller._registry.order if b.requests), shard))
        if not tops or not self.room_for(*max(tops, key=itemgetter(0))):
            self.room_since = None
        elif self.room_since is None or self.last_dispatch > self.room_since:
            self.room_since = now
        elif now - self.room_since > IDLE_ROOM_S:
            raise Violation(f"there has been room since {self.room_since - 100.0:.6f}, and {[p for p, _ in tops]} wait")

    def check_dispatch(self, shard: SimShard, key: FlowKey, own: int) -> None:
        """At the moment in which a request is let through."""
        now = self.clock.now
        self.last_dispatch = now
        for band in shard.controller._registry.order:
            if band.priority > own and band.requests:
                raise Violation(f"{key} goes while {band.requests} of band {band.priority} wait in the same shard")
        for other in self.shards:
            lane = self.board.lanes[other.number]
            if other is shard or not (lane.serving and lane.fresh) or other.last_pause > now - OUTRANKED_S - 0.01:
                continue
            for priority, held in lane.bands.items():
                if priority > own and held.requests and now - held.oldest > OUTRANKED_S and not other.busy:
                    raise Violation(
                        f"{key} goes, and band {priority} waits in shard {other.number} since {held.oldest - 100.0:.6f}"
                    )
            self.check_turn(shard, key, own, other)
        capacity = self.pool.pods * self.pool.each
        load = self.pool.total() + self.pool.pending()  # with this one
        slack = len(self.shards) - 1 if self.intrusions else 0
        if self.last_pods < now - KEPT_FAR_S - 0.0001 and load > capacity + slack:
            raise Violation(f"{load} are in flight or on their way there, of {capacity}")

    def check_turn(self, shard: SimShard, key: FlowKey, own: int, other: SimShard) -> None:
        """Whoever has waited elsewhere for an earlier turn of the same band has not waited for long."""
        lane, now = self.board.lanes[other.number], self.clock.now
        if self.faulty or other.busy or lane.front is None or lane.front != other.front or lane.front[0] != own:
            return
        saturation = self.pool.load().saturation
        if self.ceiling(own, other, saturation) < self.ceiling(own, shard, saturation):
            return  # other bands are known there: it may see no room where this one does
        turn, theirs = shard.controller.turn, lane.front[1]
        tolerance = self.band_plans[own].fairness.tolerance
        if theirs < turn - tolerance and now - other.front_since > OUTRANKED_S:
            raise Violation(f"{key} goes at {turn}, and {theirs} waits in shard {other.number} of the same band")

    def check_displaced(self, shard: SimShard, key: FlowKey, own: int) -> None:
        horizon = self.clock.now - 0.05
        if shard.last_pause > horizon - 0.2:
            horizon = -inf
        if not any(when >= horizon and self.as_band(priority) > own for when, priority in self.accepted):
            raise Violation(f"{key} gave way, and nothing more important has come")

    def as_band(self, priority: int) -> int:
        return max(priority, 0)  # where it has no band it counts as 0, which is more for a negative one

    def finish(self) -> None:
        """All shards leave: nobody is left unanswered."""
        for shard in self.shards:
            if not shard.alive:
                continue
            shard.paused_until = 0.0
            shard.busy = True
            shard.controller.shut_down()
            late = Call(shard.controller, Thing())
            shard.arrived += 1
            if late.outcome != "RejectedOther":
                raise Violation(f"a late arrival is {late.outcome or 'left waiting'}")
            for request in list(shard.waiting.values()):
                if request.call is not None:
                    request.call.step()
                    self.moved(request)
            shard.busy = False
            if shard.controller.waiting or shard.waiting:
                raise Violation(f"{len(shard.waiting)} are left unanswered in shard {shard.number}")
            self.check_contents(shard)
        for request in self.requests:
            if request.state in ("new", "waits"):
                raise Violation(f"request {request.number} never ended")


def simulate(seed: int, trace: list[str] | None = None) -> Result:
    """One seed."""
    return World(seed, trace).run()


def simulate_block(first: int, count: int) -> list[Result]:
    """Those of some seeds that went wrong, and a last one that sums up."""
    steps = checksum = 0
    bad, outcomes = [], dict[str, int]()
    for seed in range(first, first + count):
        result = simulate(seed)
        steps += result.steps
        checksum ^= result.trace
        for name, n in result.outcomes:
            outcomes[name] = outcomes.get(name, 0) + n
        if result.problem:
            bad.append(result)
    return [*bad, Result(first, steps, checksum, "", tuple(sorted(outcomes.items())))]


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation of flow control.")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many worlds (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--trace", action="store_true", help="print all that happens; for one seed")
    options = parser.parse_args()
    if options.trace:
        lines: list[str] = []
        result = simulate(options.first, lines)
        print("\n".join(lines))
        print(
            result.problem or f"seed {result.seed}: {result.steps} steps, trace {result.trace:08x}, all invariants hold"
        )
        return bool(result.problem)
    return report(options)


def report(options: argparse.Namespace) -> int:
    """Runs blocks of seeds, and says how far they are."""
    begin, size = time.monotonic(), 250
    firsts = range(options.first, options.first + options.seeds, size)
    counts = [min(size, options.first + options.seeds - first) for first in firsts]
    done = steps = failures = 0
    totals: dict[str, int] = {}
    with ProcessPoolExecutor(options.jobs) as pool:
        for count, results in zip(counts, pool.map(simulate_block, firsts, counts), strict=True):
            *bad, summed = results
            done += count
            steps += summed.steps
            failures += len(bad)
            for name, n in summed.outcomes:
                totals[name] = totals.get(name, 0) + n
            for each in bad:
                print(f"\nseed {each.seed}: {each.problem}")
                print(f"  replay: python -m tests.epp.flow.simulation --first {each.seed} --trace", flush=True)
            print(
                f"\r{done} of {options.seeds} seeds, {steps} steps, {failures} failures, {time.monotonic() - begin:.0f} s",
                end="",
            )
            sys.stdout.flush()
    print(f"\n{totals}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
