"""The simple policies of the routing benchmark: those without state about requests and servers, and those that know everything."""

import bisect
import random
from collections.abc import Sequence

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from tests.bench.routing_fleet import Call, Fleet
from tests.bench.routing_traffic import SERVERS

DRAWS = 12


class Blind:
    """A policy without state about requests and servers. It knows which servers discovery lists."""

    def __init__(self, servers: int = SERVERS) -> None:
        self._listed: Sequence[int] = range(servers)

    def members(self, servers: Sequence[int]) -> None:
        self._listed = servers

    def first_token(self, call: Call, now: float) -> None:
        """Does nothing."""

    def ended(self, call: Call, now: float) -> None:
        """Does nothing."""

    def failed(self, call: Call, now: float) -> None:
        """Does nothing."""

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        """Does nothing."""

    def refused(self, server: int, now: float) -> None:
        """Does nothing."""

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        """Does nothing."""

    def passed(self, now: float) -> None:
        """Does nothing."""


class RoundRobin(Blind):
    """Chooses one server after the other. All workers share the turn."""

    def __init__(self, servers: int = SERVERS) -> None:
        super().__init__(servers)
        self._turn = -1

    def choose(self, call: Call, now: float) -> int:
        self._turn += 1
        return self._listed[self._turn % len(self._listed)]


class Random(Blind):
    """Chooses a random server."""

    def __init__(self, seed: int, servers: int = SERVERS) -> None:
        super().__init__(servers)
        self._rng = random.Random(f"{seed}/random")

    def choose(self, call: Call, now: float) -> int:
        return self._rng.choice(self._listed)


class Oracle(Blind):
    """Knows the state of all servers and how they work, and takes the earliest first token. Among equals it takes the least busy one.

    It is greedy: it knows nothing of later requests, so another policy may do better.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(len(fleet.servers))
        self._fleet = fleet

    def choose(self, call: Call, now: float) -> int:
        return min(self._usable(now), key=lambda server: (round(self._wait(server, call, now), 6), self._load(server)))

    def _usable(self, now: float) -> list[int]:
        """Returns the servers that would serve a request now; all that are up if none would."""
        up = [server for server, up in enumerate(self._fleet.up) if up]
        return [server for server in up if not self._fleet.error(server, now)] or up

    def _load(self, server: int) -> int:
        model = self._fleet.servers[server]
        return model.running + model.waiting + len(self._fleet.underway[server])

    def _wait(self, server: int, call: Call, now: float) -> float:
        """Returns the seconds until the first token."""
        sent = [*(other.job for other in self._fleet.underway[server]), call.job]
        return self._fleet.servers[server].first_token_in(sent, now)


class Informed(Oracle):
    """Knows all that the oracle knows, but not what the picker cannot see: how long answers become, and when steps without prompts end.

    An answer under way becomes as long as one of the past answers that lasted longer than it has so far: the policy draws up to DRAWS
    times, and takes the earliest mean first token. It takes half of a step that computes no prompt to be left. It knows when full KV
    caches have room.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        super().__init__(fleet)
        self._rng = random.Random(f"{seed}/informed")
        self._open: dict[Call, None] = {}
        self._past: list[tuple[float, int]] = []  # how long answers lasted after their first tokens, and their tokens, in this order

    def choose(self, call: Call, now: float) -> int:
        lengths = {other.job: other.job.max_tokens for other in self._open}
        usable = self._usable(now)
        drawn: list[list[float]] = []
        while len(drawn) < DRAWS and not (len(drawn) > 1 and drawn[0] == drawn[1]):  # if two agree, lengths do not matter
            for other in self._open:
                other.job.max_tokens = self.drawn(other, now)
            drawn.append([self._wait(server, call, now) for server in usable])
        waits = dict(zip(usable, map(sum, zip(*drawn, strict=True)), strict=True))
        for job, tokens in lengths.items():
            job.max_tokens = tokens
        self._open[call] = None
        return min(usable, key=lambda server: (round(waits[server] / len(drawn), 6), self._load(server)))

    def ended(self, call: Call, now: float) -> None:
        del self._open[call]
        bisect.insort(self._past, (now - call.first_at, call.turn.output))

    def failed(self, call: Call, now: float) -> None:
        del self._open[call]

    def _wait(self, server: int, call: Call, now: float) -> float:
        return super()._wait(server, call, now) - self._fleet.servers[server].beyond_half_s(now)

    def drawn(self, call: Call, now: float) -> int:
        """Returns how many tokens an answer may get; what it does get if no past answer lasted so long."""
        past = self._past
        longer = bisect.bisect_right(past, (now - call.first_at if call.first_at else -1.0, 0))
        return past[self._rng.randrange(longer, len(past))][1] if longer < len(past) else call.turn.output


class MostHits(Oracle):
    """Knows caches exactly, and takes the server with the longest prefix, whatever its queue. Among equals it takes the one with most room.

    So it shows about how many hits any placement of single requests can have.
    """

    def choose(self, call: Call, now: float) -> int:
        return min(self._usable(now), key=lambda server: self._cost(server, call))

    def _cost(self, server: int, call: Call) -> tuple[int, int, int]:
        """Hits, unused blocks and blocks in use, of which the last counts against a server. Blocks on their way count as held."""
        fleet = self._fleet
        pool, coming = fleet.servers[server].pool, len(fleet.coming[server])
        unused = pool.total - pool.in_use - pool.idle - coming
        return -fleet.hits(server, call.turn.hashes), -unused, pool.in_use + coming
