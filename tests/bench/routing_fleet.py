"""Does one run of the routing benchmark: simulated servers and pickers in virtual time.

    client ── choose ──▶ (SEND_S) ──▶ Engine 0..7 ──▶ first token ──▶ end ──▶ (think) ──▶ next turn

The engines are those of `loadtest.sim`. Each engine has its scrape timer, as in the supervisor. Events come from one heap, ordered by
time; equal seeds give equal runs. A request goes to a random worker, the same one under every policy.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from loadtest.engine import Engine, EngineSettings, Job, JobState
from loadtest.kv_pool import Change
from tests.bench.routing_traffic import BLOCK_TOKENS, KV_BLOCKS, Session, Turn

SERVERS = 8
WORKERS = 4
SCRAPE_S = 0.05
SEND_S = 0.001  # from the decision to the server's queue
ENGINE = EngineSettings(kv_blocks=KV_BLOCKS, block_size=BLOCK_TOKENS, prefill_s_per_token=100e-6, decode_s=0.025)


class Call:
    """One request in progress."""

    __slots__ = ("at", "done", "id", "job", "next", "server", "turn", "worker")

    def __init__(self, id: int, turn: Turn, at: float, worker: int, following: Iterator[Turn]) -> None:
        self.id = id
        self.turn = turn
        self.at = at
        self.worker = worker
        self.next = following
        self.server = -1
        self.job = Job(turn.hashes, turn.tokens, turn.output, streams=True, prompt=turn.prompt)
        self.done: object = None  # data of the policy


class Policy(Protocol):
    """Chooses the servers."""

    def choose(self, call: Call, now: float) -> int:
        """Returns the server. From now on the request counts as in flight there."""

    def first_token(self, call: Call, now: float) -> None:
        """Records that the answer has begun."""

    def ended(self, call: Call, now: float) -> None:
        """Records that the answer is complete."""

    def scraped(self, server: int, engine: Engine, now: float) -> None:
        """Takes the values of a server's metrics page."""

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        """Takes the changes of a server's pool that a request caused, as KV events tell them."""

    def passed(self, now: float) -> None:
        """Delivers the delayed messages that arrive up to `now`."""


class Fleet:
    """Runs the sessions under a policy. `calls` has their requests and results."""

    def __init__(
        self, sessions: list[Session], policy: Callable[["Fleet"], Policy], seed: int, kv_blocks: int = KV_BLOCKS
    ) -> None:
        settings = replace(ENGINE, kv_blocks=kv_blocks)
        self.kv_blocks = kv_blocks
        self.engines = [
            Engine(settings, lambda job, changes, server=server: self._changed(server, job, changes))  # type: ignore[misc]
            for server in range(SERVERS)
        ]
        self.now = 0.0
        self.underway: list[list[Call]] = [[] for _ in range(SERVERS)]  # sent, not yet received by the server
        self.calls: list[Call] = []
        self._by_job: dict[Job, Call] = {}
        self._due: list[float | None] = [None] * SERVERS
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0
        self._open = 0
        self._rng = random.Random(f"{seed}/fleet")
        self._policy = policy(self)
        for session in sessions:
            turns = iter(session.turns)
            self._begin(next(turns), turns, session.at)
        for server in range(SERVERS):
            self._at(self._rng.random() * SCRAPE_S, lambda now, server=server: self._scrape(server, now))  # type: ignore[misc]

    def run(self) -> list[Call]:
        """Runs until every answer is complete."""
        heap, passed = self._heap, self._policy.passed
        while self._open:
            now, _, act = heapq.heappop(heap)
            self.now = now
            passed(now)
            act(now)
        return self.calls

    def _changed(self, server: int, job: Job, changes: Sequence[Change]) -> None:
        self._policy.changed(server, job, changes, self.now)

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (time, self._events, act))

    def _begin(self, turn: Turn, following: Iterator[Turn], at: float) -> None:
        self._open += 1
        self._at(at, lambda now: self._decide(turn, following, now))

    def _decide(self, turn: Turn, following: Iterator[Turn], now: float) -> None:
        call = Call(len(self.calls), turn, now, self._rng.randrange(WORKERS), following)
        self.calls.append(call)
        call.server = self._policy.choose(call, now)
        self.underway[call.server].append(call)
        self._at(now + SEND_S, lambda now: self._submit(call, now))

    def _submit(self, call: Call, now: float) -> None:
        server = call.server
        engine = self.engines[server]
        self._advance(server, now)
        self.underway[server].remove(call)
        self._by_job[call.job] = call
        engine.submit(call.job, now)
        self._wake(server)

    def _advance(self, server: int, now: float) -> None:
        for job in self.engines[server].advance(now):
            call = self._by_job[job]
            if job.generated == 1:
                self._policy.first_token(call, now)
            if job.state is JobState.FINISHED:
                self._end(call, now)

    def _end(self, call: Call, now: float) -> None:
        del self._by_job[call.job]
        self._open -= 1
        self._policy.ended(call, now)
        turn = next(call.next, None)
        if turn is not None:
            self._begin(turn, call.next, now + turn.think_s)

    def _tick(self, server: int, now: float) -> None:
        if self._due[server] != now:
            return  # the timer was set again
        self._due[server] = None
        self._advance(server, now)
        self._wake(server)

    def _wake(self, server: int) -> None:
        due = self.engines[server].next_due()
        if due is not None and due != self._due[server]:
            self._due[server] = due
            self._at(due, lambda now: self._tick(server, now))

    def _scrape(self, server: int, now: float) -> None:
        self._policy.scraped(server, self.engines[server], now)
        self._at(now + SCRAPE_S, lambda now: self._scrape(server, now))
