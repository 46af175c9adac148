"""Does one run of the routing benchmark: simulated servers and pickers in virtual time.

    client ── choose ──▶ (SEND_S) ──▶ server 0..n ──▶ first token ──▶ end ──▶ (think) ──▶ next turn

Each server has its scrape timer, as in the supervisor. Events come from one heap, ordered by time; equal seeds give equal runs. A
request goes to a random worker, the same one under every policy. A server may die: its requests fail, and so do those that are still
sent to it; its scrapes are refused; `LEAVES_S` later discovery removes it. A server may join later, with an empty cache. A server may
answer errors, at once, while its metrics stay good, and a server may stand still for a while. A server may stand still while it makes
its metrics page, too.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from loadtest.sim.engine import Job, JobState
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from tests.bench.routing_blocks import Blocks
from tests.bench.routing_servers import Kind
from tests.bench.routing_traffic import BLOCK_TOKENS, Session, Turn, Workload

WORKERS = 4
SCRAPE_S = 0.05
SEND_S = 0.001  # from the decision to the server's queue
FAILS_S = 0.001  # from the server's queue to its error
TOO_MANY = 429
STILL = 1e6  # how many times slower a server is while it stands still
LEAVES_S = 5.0  # from the death of a server to its removal by discovery
DUPLICATE_TOKENS = 1_024


class Call:
    """One request in progress. `failed`: it got an error, with `status`; 0 without an answer. `duplicate`: see `Fleet.is_duplicate`.

    Times are virtual seconds.
    """

    __slots__ = (
        "at", "done", "duplicate", "ended_at", "failed", "first_at", "id", "job", "next", "server", "status", "turn", "worker",
    )  # fmt: skip

    def __init__(self, id: int, turn: Turn, at: float, worker: int, following: Iterator[Turn]) -> None:
        self.id = id
        self.turn = turn
        self.at = at
        self.worker = worker
        self.next = following
        self.server = -1
        self.job = Job(turn.hashes, turn.tokens, turn.output, streams=True, prompt=turn.prompt)
        self.first_at = self.ended_at = 0.0
        self.failed = self.duplicate = False
        self.status = 0
        self.done: object = None  # data of the policy


class Policy(Protocol):
    """Chooses the servers. Knows only what these calls tell, except for the oracles, which get the fleet."""

    def choose(self, call: Call, now: float) -> int:
        """Returns the server. From now on the request counts as in flight there."""

    def first_token(self, call: Call, now: float) -> None:
        """Records that the answer has begun."""

    def ended(self, call: Call, now: float) -> None:
        """Records that the answer is complete."""

    def failed(self, call: Call, now: float) -> None:
        """Records that the request has failed."""

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        """Takes the values of a server's metrics page."""

    def refused(self, server: int, now: float) -> None:
        """Records that a server refused a scrape."""

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        """Takes the changes of a server's pool that a request caused, as KV events tell them."""

    def members(self, servers: Sequence[int]) -> None:
        """Takes the servers that discovery lists now."""

    def passed(self, now: float) -> None:
        """Delivers the delayed messages that arrive up to `now`."""


class Fleet:
    """Runs the sessions of a workload under a policy. `calls` has their requests and results."""

    def __init__(
        self,
        sessions: list[Session],
        policy: Callable[["Fleet"], Policy],
        seed: int,
        *,
        kind: Kind,
        workload: Workload,
        seconds: float,
        scrape_s: float = SCRAPE_S,
        page_s: float = 0.0,
    ) -> None:
        """`scrape_s`: the time between two scrapes of a server. `page_s`: how long a server stands still for its page."""
        self._scrape_s, self._page_s = scrape_s, page_s
        self.kv_blocks = workload.kv_blocks
        servers = range(workload.servers)
        self.servers = kind.make(workload.servers, workload.kv_blocks, self._changed)
        self._factors = [1.0 for _ in servers]
        self.now = 0.0
        self.underway: list[list[Call]] = [[] for _ in servers]  # sent, not yet received by the server
        self.coming = [Blocks() for _ in servers]  # of the requests without a first token
        self.up = [True for _ in servers]
        self._workload = workload
        self._seconds = seconds
        self.calls: list[Call] = []
        self._by_job: dict[Job, Call] = {}
        self._due: list[float | None] = [None for _ in servers]
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._events = 0
        self._open = 0
        self._rng = random.Random(f"{seed}/fleet")
        self._policy = policy(self)
        for session in sessions:
            turns = iter(session.turns)
            self._begin(next(turns), turns, session.at)
        for server in servers:
            self._at(self._rng.random() * scrape_s, lambda now, server=server: self._scrape(server, now))  # type: ignore[misc]
        if workload.pauses is not None:
            paused, share, lasts = workload.pauses
            self._at(share * seconds, lambda now: self._slow(paused, STILL, now))
            self._at((share + lasts) * seconds, lambda now: self._slow(paused, 1.0, now))
        for server, (share, factor) in kind.slowed_of(workload.servers).items():
            self._at(share * seconds, lambda now, server=server, factor=factor: self._slow(server, factor, now))  # type: ignore[misc]
        if workload.dies is not None:
            server, share = workload.dies
            self._at(share * seconds, lambda now: self._die(server, now))
        if workload.joins is not None:
            joins, share = workload.joins
            self.up[joins] = False
            self._listed()
            self._at(share * seconds, lambda now: self._join(joins, now))

    def run(self) -> list[Call]:
        """Runs until every answer is complete."""
        heap, passed = self._heap, self._policy.passed
        while self._open:
            now, _, act = heapq.heappop(heap)
            self.now = now
            passed(now)
            act(now)
        return self.calls

    def error(self, server: int, now: float) -> int:
        """Returns the status with which a server that is up answers a request at once; 0 if it serves the request."""
        fails, sheds = self._workload.fails, self._workload.sheds
        if fails is not None and server == fails.server and now >= fails.share * self._seconds:
            return fails.status
        model = self.servers[server]
        full = sheds is not None and server == sheds[0] and model.running + model.waiting >= sheds[1]
        return TOO_MANY if full else 0

    def hits(self, server: int, hashes: Sequence[int]) -> int:
        """Returns how many leading blocks a server holds, or will have computed for the requests that it has got."""
        return self.servers[server].pool.hits(hashes, self.coming[server])

    def is_duplicate(self, call: Call, server: int) -> bool:
        """Returns whether this server computes at least half of the prompt, and DUPLICATE_TOKENS, that another server holds."""
        most = max(DUPLICATE_TOKENS, call.turn.tokens // 2)
        if call.turn.tokens < most:
            return False
        own, hashes = self.hits(server, call.turn.hashes), call.turn.hashes
        return any((self.hits(other, hashes) - own) * BLOCK_TOKENS >= most for other, up in enumerate(self.up) if up and other != server)

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
        self._send(call, self._policy.choose(call, now), now)

    def _send(self, call: Call, server: int, now: float) -> None:
        call.server = server
        call.duplicate = self.is_duplicate(call, server)
        self.coming[server].add(call.turn.hashes)
        self.underway[server].append(call)
        self._at(now + SEND_S, lambda now: self._submit(call, now))

    def _submit(self, call: Call, now: float) -> None:
        server = call.server
        self.underway[server].remove(call)
        if not self.up[server]:
            self._fail(call, now)
            return
        self._advance(server, now)
        call.status = self.error(server, now)
        if call.status:
            self._at(now + FAILS_S, lambda now: self._fail(call, now))
            return
        self._by_job[call.job] = call
        self.servers[server].submit(call.job, now)
        self._wake(server)

    def _advance(self, server: int, now: float) -> None:
        model = self.servers[server]
        for job in model.advance(now):
            call = self._by_job[job]
            if job.generated and not call.first_at:
                call.first_at = now
                model.mute(job)
                self.coming[server].remove(call.turn.hashes)
                self._policy.first_token(call, now)
            if job.state is JobState.FINISHED:
                self._end(call, now)
                self._policy.ended(call, now)

    def _end(self, call: Call, now: float) -> None:
        self._by_job.pop(call.job, None)
        self._open -= 1
        call.ended_at = now
        turn = next(call.next, None)
        if turn is not None:
            self._begin(turn, call.next, now + turn.think_s)

    def _fail(self, call: Call, now: float) -> None:
        call.failed = True
        if not call.first_at:
            self.coming[call.server].remove(call.turn.hashes)
        self._end(call, now)
        self._policy.failed(call, now)

    def _tick(self, server: int, now: float) -> None:
        if self._due[server] != now:
            return  # the timer was set again
        self._due[server] = None
        self._advance(server, now)
        self._wake(server)

    def _wake(self, server: int) -> None:
        due = self.servers[server].next_due()
        if due is not None and due != self._due[server]:
            self._due[server] = due
            self._at(due, lambda now: self._tick(server, now))

    def _scrape(self, server: int, now: float) -> None:
        if self.up[server]:
            self._policy.scraped(server, self.servers[server], now)
            if self._page_s:
                self._work(server, STILL, now)
                self._at(now + self._page_s, lambda now: self._work(server, self._factors[server], now))
        else:
            self._policy.refused(server, now)
        self._at(now + self._scrape_s, lambda now: self._scrape(server, now))

    def _slow(self, server: int, factor: float, now: float) -> None:
        self._factors[server] = factor
        self._work(server, factor, now)

    def _work(self, server: int, factor: float, now: float) -> None:
        self._advance(server, now)
        self.servers[server].slow(factor, now)
        self._wake(server)

    def _die(self, server: int, now: float) -> None:
        self._advance(server, now)
        self.up[server] = False
        self._due[server] = None
        for call in [call for call in self._by_job.values() if call.server == server]:
            self._fail(call, now)
        self._at(now + LEAVES_S, lambda _: self._listed())

    def _join(self, server: int, now: float) -> None:
        self.up[server] = True
        self._listed()

    def _listed(self) -> None:
        self._policy.members([server for server, up in enumerate(self.up) if up])
