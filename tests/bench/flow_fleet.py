"""Runs flow control in virtual time: the controllers, gate and policies of a configuration, and the engines of the simulated servers.

    arrival ── shard 0..n ── enqueue_and_wait ──▶ least loaded Engine ──▶ first token ──▶ end ──▶ released
                 └─ wake-up (after WAKE_S), every TICK_S while requests wait, sweep

The figures depend only on the seed. A shard sees the published state of other shards at once. As in the concurrency detector, the load is
the number of requests in flight divided by the places. The model leaves out Envoy, shared memory, scraped values and CPU time.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epp.config.load import load
from epp.decision.decision import Decision, Response, Usage
from epp.flow.controller import FlowController
from epp.flow.gate import PoolGate
from epp.plugin import FairnessPolicy, ResponseComplete
from epp.request import Request
from epp.request.flows import FlowKey
from loadtest.sim.engine import Engine, EngineSettings, Job, JobState
from tests.bench.overload_stack import BATCH, DECODE_GROWTH, DECODE_MS, PREFILL_US, PRIORITIES, SERVERS, WORKERS, config
from tests.bench.overload_traffic import GAVE_UP, Call, Result
from tests.epp.flow.shards import Board, BoardPeers, Clock, FakeFuture, FakePool, Recorder
from tests.epp.flow.shards import Call as Caller

PROMPT_TOKENS = 18
BODY_BYTES = 140
WAKE_S = 0.0002
TICK_S = 0.005
SWEEP_S = 0.05
ENGINE = EngineSettings(
    max_running=BATCH, kv_blocks=2_000, prefill_s_per_token=PREFILL_US / 1e6, decode_s=DECODE_MS / 1e3, decode_growth=DECODE_GROWTH
)


@dataclass(slots=True)
class Waiter:
    """One request: the item for flow control, and its state."""

    call: Call
    shard: int
    flow: FlowKey
    request: Request
    caller: Caller | None = None
    job: Job | None = None
    server: int = -1
    placed: bool = False
    over: bool = False
    bytes: int = BODY_BYTES
    ttl_s: float | None = None
    id: str = ""


class RecordingFuture(FakeFuture):
    """A future that adds itself to a list when it is set."""

    def __init__(self, settled: "list[RecordingFuture]") -> None:
        super().__init__()
        self._settled = settled

    def set_result(self, result: Any) -> None:
        super().set_result(result)
        self._settled.append(self)


class FlowFleet:
    """Runs shards in front of servers. `run` returns the result of every call."""

    def __init__(
        self, flow: dict[str, Any], *, seed: int = 0, shards: int = WORKERS, servers: int = SERVERS, patience_s: float = 6.0
    ) -> None:
        loaded = load(config(Path("endpoints.yaml"), flow), "benchmark", allow_experimental=True)
        assert loaded.flow is not None
        plan = loaded.flow
        self._rng = random.Random(f"{seed}/fleet")
        self._clock = Clock()
        self._set: list[RecordingFuture] = []  # futures that are set, but whose requests have not continued
        self._board = Board(shards)
        self._pool = FakePool(self._board, servers, BATCH)
        self.seen = [Recorder() for _ in range(shards)]
        self.shards = [
            FlowController(
                plan,
                PoolGate(self._pool, plan.usage_limits, "detector", now=self._clock, report=lambda _, problem: _fail(problem)),
                BoardPeers(self._board, n),
                self.seen[n],
                now=self._clock,
                make_future=lambda _item: RecordingFuture(self._set),
            )
            for n in range(shards)
        ]
        for shard in self.shards:
            shard.provision(PRIORITIES.values())
        bands = (*plan.bands, plan.template)
        self._response_plugins = {b.fairness.name: b.fairness for b in bands if isinstance(b.fairness, ResponseComplete)}
        self._fairness: FairnessPolicy = plan.template.fairness
        self._engines = [Engine(ENGINE) for _ in range(servers)]
        self._load = [0] * servers
        self._due: list[float | None] = [None] * servers
        self._by_job: dict[Job, Waiter] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._events = 0
        self._patience_s = patience_s
        self._waiting: dict[RecordingFuture, Waiter] = {}
        self._results: list[Result] = []
        self._start = self._clock.now

    def run(self, calls: Sequence[Call]) -> list[Result]:
        for number, call in enumerate(calls):
            self._at(self._start + call.at, lambda call=call, number=number: self._arrive(call, number))  # type: ignore[misc]
        for number in range(len(self.shards)):
            self._at(self._start + TICK_S * self._rng.random(), lambda number=number: self._tick(number))  # type: ignore[misc]
            self._at(self._start + SWEEP_S * self._rng.random(), lambda number=number: self._sweep(number))  # type: ignore[misc]
        while len(self._results) < len(calls):
            self._clock.now, _, act = heapq.heappop(self._heap)
            act()
            self._after()
        return self._results

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (when, self._events, act))

    def _arrive(self, call: Call, number: int) -> None:
        kind, now = call.kind, self._clock.now
        request = Request(
            id=str(number), path="/", headers={}, now=now, body_bytes=BODY_BYTES,
            fairness_id=kind.tenant or "default", priority=PRIORITIES.get(kind.objective, 0),
        )  # fmt: skip
        request.max_tokens = call.tokens
        shard = self._rng.randrange(len(self.shards))
        waiter = Waiter(call, shard, FlowKey(request.fairness_id, request.priority), request)
        waiter.caller = Caller(self.shards[shard], waiter)
        self._continue(waiter)
        self._at(now + self._patience_s, lambda: self._give_up(waiter))

    def _give_up(self, waiter: Waiter) -> None:
        if waiter.over:
            return
        assert waiter.caller is not None
        self._end(waiter, 0, GAVE_UP)
        if waiter.placed:
            assert waiter.job is not None
            self._advance(waiter.server)
            self._engines[waiter.server].cancel(waiter.job, self._clock.now)
            del self._by_job[waiter.job]
            self._left(waiter)
            self._wake_engine(waiter.server)
        else:
            waiter.caller.leave()

    def _after(self) -> None:
        """Continues the requests whose future is set. Lets each shard that was woken check its queue after WAKE_S."""
        while self._set:
            waiter = self._waiting.pop(self._set.pop(0), None)
            if waiter is not None and not waiter.over:
                self._continue(waiter)
        wakes, self._board.wakes = self._board.wakes, []
        for shard in dict.fromkeys(wakes):
            self._at(self._clock.now + WAKE_S, self.shards[shard].woken)

    def _continue(self, waiter: Waiter) -> None:
        caller = waiter.caller
        assert caller is not None
        caller.step()
        if caller.error is not None:
            self._end(waiter, 429, caller.error.ending.outcome.value)
        elif caller.ended is not None:
            self._place(waiter)
        else:
            assert isinstance(caller.future, RecordingFuture)
            self._waiting[caller.future] = waiter

    def _place(self, waiter: Waiter) -> None:
        server = min(range(len(self._engines)), key=lambda n: (self._load[n], self._rng.random()))
        self._load[server] += 1
        self._pool.inflight[waiter.shard] += 1
        waiter.placed, waiter.server = True, server
        self.shards[waiter.shard].settled(placed=True)
        waiter.job = Job((), PROMPT_TOKENS, waiter.call.tokens, streams=True)
        self._by_job[waiter.job] = waiter
        self._advance(server)
        self._engines[server].submit(waiter.job, self._clock.now)
        self._wake_engine(server)

    def _advance(self, server: int) -> None:
        for job in self._engines[server].advance(self._clock.now):
            if job.state is JobState.FINISHED:
                waiter = self._by_job.pop(job)
                self._end(waiter, 200, "")
                response = Response(200)
                response.usage = Usage(PROMPT_TOKENS, waiter.call.tokens, 0)
                for plugin in self._response_plugins.values():
                    plugin.response_complete(waiter.request, Decision((), {}, primary=""), response)
                self._left(waiter)

    def _left(self, waiter: Waiter) -> None:
        self._load[waiter.server] -= 1
        self._pool.inflight[waiter.shard] -= 1
        self.shards[waiter.shard].released()

    def _wake_engine(self, server: int) -> None:
        due = self._engines[server].next_due()
        if due is not None and due != self._due[server]:
            self._due[server] = due
            self._at(due, lambda: self._engine_due(server, due))

    def _engine_due(self, server: int, due: float) -> None:
        if self._due[server] == due:
            self._due[server] = None
            self._advance(server)
            self._wake_engine(server)

    def _tick(self, number: int) -> None:
        if self.shards[number].waiting:
            self.shards[number].woken()
        self._at(self._clock.now + TICK_S, lambda: self._tick(number))

    def _sweep(self, number: int) -> None:
        self.shards[number].sweep(self._clock.now)
        self._at(self._clock.now + SWEEP_S, lambda: self._sweep(number))

    def _end(self, waiter: Waiter, status: int, reason: str) -> None:
        waiter.over = True
        due, job = self._start + waiter.call.at, waiter.job
        first = job.first_token_at - due if status == 200 and job is not None else None
        self._results.append(Result(waiter.call, status, reason, first, self._clock.now - due, status == 429))


def _fail(problem: Exception) -> None:
    raise problem
