"""Who chooses servers in the routing benchmark: the real pipeline as several workers run it, and what it is compared with.

`Picked` compiles a configuration text and calls `epp.decide`. As in the picker, a worker sees the values of each server's last scrape,
what all workers have in flight at this moment, and the shared prefix index as its writer has left it: what a worker learns is there
`LEARN_S` later. What it does not have is shared memory, a clock and the parser: the prompt is given.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

from epp.candidates import Candidates, Endpoint, Floats, Roster, Snapshot
from epp.config import load
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.decide import decide
from epp.decision import Decision, Response
from epp.errors import ProducerFailed
from epp.metrics import Metric
from epp.pipeline import Pipeline
from epp.plugin import DataProducer, Hashes, Plugin, Profile
from epp.request import Prompt, Request, Subset
from loadtest.engine import Engine
from shm.prefix_index import IndexReader, IndexSchema, IndexWriter
from shm.segment import Region
from tests.bench.routing_fleet import SERVERS, WORKERS, Call, Fleet
from tests.fakes import FakeServices, endpoints

LEARN_S = 0.003
INDEX_ENTRIES = 1 << 19
AGE_S = 1.0


class SharedIndex:
    """The index of all workers: the real one, told `LEARN_S` late."""

    def __init__(self) -> None:
        schema = IndexSchema(INDEX_ENTRIES)
        region = Region(memoryview(bytearray(schema.bytes)))
        self._writer, reader = IndexWriter(schema, region), IndexReader(schema, region)
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.owners = [self._writer.new_owner() for _ in range(SERVERS)]
        self._told: deque[tuple[float, Hashes, int]] = deque()
        self._now = 0.0

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._told.append((self._now + LEARN_S, hashes, owner))

    def forget(self, hashes: Hashes, owner: int) -> None:
        raise AssertionError("all answers are complete")

    def passed(self, now: float) -> None:
        self._now = now
        while self._told and self._told[0][0] <= now:
            _, hashes, owner = self._told.popleft()
            self._writer.insert(hashes, owner, int(now / AGE_S))


class ExactIndex:
    """Knows at once and for ever whatever it was told."""

    def __init__(self) -> None:
        self.owners = list(range(1, SERVERS + 1))
        self._held: dict[int, set[int]] = {}

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        found: dict[int, int] = {}
        for block, value in enumerate(hashes.tolist()):
            held = self._held.get(value)
            if held is None:
                break
            found.update(dict.fromkeys(held, block + 1))
        return found

    def learn(self, hashes: Hashes, owner: int) -> None:
        for value in hashes.tolist():
            self._held.setdefault(value, set()).add(owner)

    def forget(self, hashes: Hashes, owner: int) -> None:
        raise AssertionError("all answers are complete")

    def passed(self, now: float) -> None:
        return None


class Services(FakeServices):
    """What a worker hands to its plugins."""

    def __init__(self, index: SharedIndex | ExactIndex, tokens: Floats, seed: int) -> None:
        super().__init__(seed)
        self.prefix_index = index  # type: ignore[assignment]
        self._tokens = tokens

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens

    def measure(self, plugin: Plugin, metric: Metric) -> "Services":  # type: ignore[override]
        return self

    def observe(self, value: float) -> None:
        """Nobody reads it."""


class Picked:
    """The pipeline of a configuration in `workers` workers. Implements `Policy`, and `epp.decide.Pool` for itself."""

    def __init__(
        self, text: str, seed: int, *, workers: int = WORKERS, exact: bool = False, scraped_only: bool = False
    ) -> None:
        """`scraped_only`: what is in flight is not counted, so load is what the last scrapes say."""
        self._scraped_only = scraped_only
        self._index = ExactIndex() if exact else SharedIndex()
        self._inflight, self._tokens = np.zeros(SERVERS), np.zeros(SERVERS)
        self._pipelines: list[Pipeline] = []
        for worker in range(workers):
            pipeline = load(text, "benchmark").pipeline
            pipeline.start(Services(self._index, self._tokens, seed * WORKERS + worker))
            self._pipelines.append(pipeline)
        servers = endpoints(SERVERS)
        for server, owner in zip(servers, self._index.owners, strict=True):
            server.owner = owner
        self._roster = Roster(servers)
        self._values = {column.name: np.zeros(SERVERS) for column in (WAITING, RUNNING, KV_USAGE)}
        self._at_scrape = np.zeros(SERVERS)
        self._all, self._none = np.ones(SERVERS, dtype=bool), np.zeros(SERVERS, dtype=bool)
        self._snapshot: Snapshot | None = None
        self.passed = self._index.passed

    def scraped(self, server: int, engine: Engine, now: float) -> None:
        values = self._values
        values[WAITING.name][server] = engine.waiting
        values[RUNNING.name][server] = engine.running
        values[KV_USAGE.name][server] = engine.pool.usage
        self._at_scrape[server] = self._inflight[server]
        self._snapshot = None

    def choose(self, call: Call, now: float) -> int:
        pipeline = self._pipelines[call.worker % len(self._pipelines)]
        prompt = call.turn.prompt
        request = Request(id=str(call.id), path="/v1/completions", headers={}, now=now, model="m", streaming=True)
        request.prompt = Prompt(lambda: prompt)
        request.max_tokens = call.turn.output
        try:
            decide(pipeline, request, self).send(None)
        except StopIteration as done:
            decision: Decision = done.value
        else:
            raise AssertionError("a producer waits: this benchmark has nothing that it could wait for")
        slot = decision.targets[0].slot
        self._inflight[slot] += 1
        call.done = (pipeline, request, decision)
        return slot

    def first_token(self, call: Call, now: float) -> None:
        pipeline, request, decision = call.done  # type: ignore[misc]
        for streaming in pipeline.response_streaming:
            streaming(request, decision)

    def ended(self, call: Call, now: float) -> None:
        pipeline, request, decision = call.done  # type: ignore[misc]
        call.done = None
        self._inflight[call.server] -= 1
        for complete in pipeline.response_complete:
            complete(request, decision, Response(200))

    def candidates(self, subset: Subset | None) -> Candidates:
        snapshot = self._snapshot
        if snapshot is None:
            snapshot = self._snapshot = Snapshot(
                self._roster,
                {name: column.copy() for name, column in self._values.items()},
                fresh=self._all,
                known=self._all,
                down=self._none,
                inflight_at_scrape=self._at_scrape.copy(),
            )
        inflight = snapshot.inflight_at_scrape if self._scraped_only else self._inflight
        return Candidates(snapshot, inflight.copy(), self._tokens.copy())

    def reloaded(self, candidates: Candidates) -> Candidates:
        return candidates

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        raise failure

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise problem


class Blind:
    """Needs to be told nothing."""

    def first_token(self, call: Call, now: float) -> None:
        """Nothing to learn."""

    def ended(self, call: Call, now: float) -> None:
        """Nothing to learn."""

    def scraped(self, server: int, engine: Engine, now: float) -> None:
        """Nothing to learn."""

    def passed(self, now: float) -> None:
        """Nothing to learn."""


class RoundRobin(Blind):
    """One after the other, over all workers."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, call: Call, now: float) -> int:
        self._turn = (self._turn + 1) % SERVERS
        return self._turn


class Random(Blind):
    """Any."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/random")

    def choose(self, call: Call, now: float) -> int:
        return self._rng.randrange(SERVERS)


class Oracle(Blind):
    """Knows queues and caches as they are, and takes the server that has the first token soonest; of equal ones the least busy."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, call: Call, now: float) -> int:
        return min(range(SERVERS), key=lambda server: (self._wait(server, call, now), self._load(server)))

    def _load(self, server: int) -> int:
        engine = self._fleet.engines[server]
        return engine.running + engine.waiting + len(self._fleet.underway[server])

    def _wait(self, server: int, call: Call, now: float) -> float:
        """The rest of the step, the prompts ahead and this one: an engine computes what waits in one step, or as much as fits."""
        engine = self._fleet.engines[server]
        pool = engine.pool
        cached: set[int] = set()
        tokens = 0
        ahead = [*engine._waiting, *(other.job for other in self._fleet.underway[server]), call.job]
        for job in ahead:
            hits = 0
            for block in job.hashes:
                if not (block in pool._users or block in pool._idle or block in cached):
                    break
                hits += 1
            tokens += job.prompt_tokens - hits * engine.settings.block_size
            cached.update(job.hashes[hits:])
        ends = engine._step_ends_at
        rest = 0.0 if ends is None else max(0.0, ends - now)
        return rest + tokens * engine.settings.prefill_s_per_token + engine._decode_step()
