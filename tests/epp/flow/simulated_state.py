"""The state of a simulated world: what a seed chooses, and what happens in it."""

import random
from collections.abc import Callable
from math import inf
from typing import Any
from zlib import crc32

from epp.flow.outcomes import Outcome
from epp.flow.plan import BandPlan, FlowPlan
from epp.plugin import FairnessPolicy, SaturationDetector
from epp.plugins.displacement import Largest, Newest
from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.program_aware import ProgramAware
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.fairness.token_weighted import TokenWeighted
from epp.plugins.ordering import EarliestDeadline, FirstCome, SloDeadline
from epp.plugins.queues import Fifo, Priority
from epp.plugins.saturation.concurrency import Concurrency
from epp.plugins.saturation.utilization import Utilization
from epp.plugins.usage_limits import PriorityHoldback, Static
from tests.epp.flow.shards import Board, Clock, FakePool
from tests.epp.flow.simulated_shards import PRIORITIES, DetectedPool, Raising, Request, SimShard, made


class State:
    """What one seed has made: its plan, its pool, its shards and its requests, and what the world remembers for its checks."""

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
        self.accepted: list[tuple[float, int]] = []  # arrivals that may have displaced a request: time, priority
        self.provisioned = frozenset(rng.sample(PRIORITIES, rng.randrange(3)))
        self.plan = self._plan()
        self.band_plans = {priority: self.plan.band(priority) for priority in PRIORITIES}
        self.calm = rng.random() < 0.5  # no shard stalls or dies
        self.board = Board(rng.choice((1, 2, 2, 3, 4)))
        self.pool = self._pool()
        self.largest = 0
        self.shards = [SimShard(self, i) for i in range(len(self.board.areas))]
        self.requests: list[Request] = []
        self.tenants = rng.choice((1, 2, 5))
        self.mean_service = rng.choice((0.002, 0.01, 0.03))

    def _plan(self) -> FlowPlan:
        rng = self.rng
        fcfs, edf, slo = made(FirstCome), made(EarliestDeadline), made(SloDeadline)
        strict, turns, tokens, least = made(GlobalStrict), made(RoundRobin), made(TokenWeighted), made(ProgramAware)
        deepest = made(ProgramAware, strategy="turn-priority")
        self.learning = (tokens, least, deepest)
        self.faulty = rng.random() < 0.1

        def band(priority: int) -> BandPlan:
            ordering = rng.choice((fcfs, edf, slo))
            fairness: FairnessPolicy = rng.choice((strict, turns, tokens, least, deepest))
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

    def note(self, what: str, shard: int, more: object = "") -> None:
        line = f"{self.clock.now - 100.0:.6f} {what} {shard} {more}"
        self.checksum = crc32(line.encode(), self.checksum)
        if self.trace is not None:
            self.trace.append(line)

    def count(self, outcome: Outcome) -> None:
        self.counts[outcome.value] = self.counts.get(outcome.value, 0) + 1
