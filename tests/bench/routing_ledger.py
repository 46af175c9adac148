"""What a published formula may know of each server, as numbers: its caches, its scraped values, and what was sent there.

Every formula gets the same knowledge, and more than its own picker has in most cases: it knows the caches exactly, as KV events tell
them without delay, together with what is on its way there; and one process sends all requests.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from tests.bench.routing_blocks import Blocks
from tests.bench.routing_fleet import Call, Fleet
from tests.bench.routing_traffic import BLOCK_TOKENS

RATES_MAX = 64
FIRST_RATE = 10_000.0  # tokens per second, until an answer has come
BIAS_SHARE = 0.1  # how much of the last error the learned bias takes over


@dataclass(slots=True)
class Server:
    """What is known of one server for one request. Tokens are prompt tokens; times are in seconds.

    `hit`: tokens of this prompt that it has cached. `pending`: uncached tokens of the requests sent there that have no first token yet.
    `queued`: `pending` at the last scrape; `since`: the part of `pending` that was sent after it. `inflight`: requests sent there that
    have not ended; `held`: the tokens of their prompts and this one, shared blocks once. `kv`: the scraped usage, from 0 to 1. `rate`:
    tokens per second, learned. `bias_s`: how much later its first tokens come than at FIRST_RATE, learned.
    """

    id: int = 0
    hit: int = 0
    pending: int = 0
    queued: int = 0
    since: int = 0
    inflight: int = 0
    held: int = 0
    kv: float = 0.0
    rate: float = FIRST_RATE
    bias_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Prompt:
    """The request that a formula decides on: the tokens of its prompt, and the hash of its beginning."""

    tokens: int
    key: int = 0


class Formula(Protocol):
    """Returns the cost of each server for a prompt; the lowest wins, and equal ones are drawn from."""

    def __call__(self, prompt: Prompt, servers: Sequence[Server]) -> Sequence[float]: ...


@dataclass(slots=True)
class Sent:
    """A request in flight: its uncached tokens, when it was sent, at which scrape, and how many tokens were pending there before it."""

    own: int
    at: float
    scrape: int
    before: int
    pending: bool = True


@dataclass(slots=True)
class _Rates:
    """Learns tokens per second: the 90th percentile of the last RATES_MAX values of work / time to the first token."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=RATES_MAX))

    def add(self, rate: float) -> float:
        self.last.append(rate)
        return sorted(self.last)[int(0.9 * (len(self.last) - 1))]


class Ledger:
    """Implements `Policy` with a formula."""

    def __init__(self, fleet: Fleet, formula: Formula, seed: int) -> None:
        self._fleet = fleet
        self._formula = formula
        self._rng = random.Random(f"{seed}/ledger")
        servers = len(fleet.servers)
        self._servers = [Server(server) for server in range(servers)]
        self._scrapes = [0] * servers
        self._rates = [_Rates() for _ in range(servers)]
        self._sent: dict[Call, Sent] = {}
        self._active = [Blocks() for _ in range(servers)]  # of the requests in flight
        self._listed: Sequence[int] = range(servers)
        self._refusals = [0] * servers

    def choose(self, call: Call, now: float) -> int:
        turn = call.turn
        usable = [server for server in self._listed if self._refusals[server] < 2] or self._listed
        for server in usable:
            self._servers[server].hit = self._fleet.hits(server, turn.hashes) * BLOCK_TOKENS
            self._servers[server].held = self._active[server].count_with(turn.hashes) * BLOCK_TOKENS
        seen = [self._servers[server] for server in usable]
        prompt = Prompt(turn.tokens, turn.hashes[0] if turn.hashes else call.id)
        costs = self._formula(prompt, seen)
        least = min(costs)
        at = self._rng.choice([at for at, cost in enumerate(costs) if cost == least])
        server = seen[at]
        own = max(1, turn.tokens - server.hit)
        self._sent[call] = Sent(own, now, self._scrapes[server.id], server.pending)
        server.pending += own
        server.since += own
        server.inflight += 1
        self._active[server.id].add(turn.hashes)
        return server.id

    def first_token(self, call: Call, now: float) -> None:
        sent, server = self._sent[call], self._servers[call.server]
        self._computed(sent, server)
        took, work = now - sent.at, sent.before + sent.own
        server.bias_s += BIAS_SHARE * (took - work / FIRST_RATE - server.bias_s)
        server.rate = self._rates[call.server].add(work / took)

    def ended(self, call: Call, now: float) -> None:
        sent, server = self._sent.pop(call), self._servers[call.server]
        self._computed(sent, server)
        server.inflight -= 1
        self._active[server.id].remove(call.turn.hashes)

    def failed(self, call: Call, now: float) -> None:
        self.ended(call, now)

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        known = self._servers[server]
        known.kv, known.queued, known.since = model.pool.usage, known.pending, 0
        self._scrapes[server] += 1
        self._refusals[server] = 0

    def refused(self, server: int, now: float) -> None:
        self._refusals[server] += 1

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        """Does nothing: the formulas know the pools themselves."""

    def members(self, servers: Sequence[int]) -> None:
        self._listed = servers

    def passed(self, now: float) -> None:
        """Does nothing: there are no delayed messages."""

    def _computed(self, sent: Sent, server: Server) -> None:
        if sent.pending:
            sent.pending = False
            server.pending -= sent.own
            if sent.scrape == self._scrapes[server.id]:
                server.since -= sent.own


def by_formula(formula: Formula) -> Callable[[Fleet, int], Ledger]:
    """Returns a function that makes the policy with this formula."""
    return lambda fleet, seed: Ledger(fleet, formula, seed)
