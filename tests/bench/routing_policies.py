"""Defines the policies of the routing benchmark: the real pipeline in several workers, and simpler policies to compare it with.

`Picked` compiles a configuration and calls `epp.decide`. Like in the picker, a worker sees the values of each server's last scrape, the
requests in flight of all workers at this moment, and the shared prefix index: an update of a worker appears in it after `LEARN_S`. The
model leaves out shared memory, the clock and the parser: the prompt is given.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from epp.candidates import Candidates, Endpoint, Floats, Roster, Snapshot
from epp.config.load import load
from epp.data import KV_USAGE, RUNNING, WAITING
from epp.decide import choose
from epp.decision import Decision, Response
from epp.errors import ProducerFailed
from epp.metrics import Metric
from epp.pipeline import Pipeline
from epp.plugin import DataProducer, Hashes, Plugin, Profile
from epp.plugins.producers.approx_prefix import BLOCK_TOKENS_MIN
from epp.request import Parts, Prompt, Request, Subset
from loadtest.engine import Engine, Job
from loadtest.kv_pool import Change
from shm.prefix_index import IndexSchema
from shm.prefix_reader import IndexReader
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.bench.routing_fleet import SERVERS, WORKERS, Call, Fleet
from tests.bench.routing_held import SharedHeld
from tests.bench.routing_traffic import BLOCK_TOKENS
from tests.fakes import FakeServices, endpoints

LEARN_S = 0.003
INDEX_ENTRIES = 1 << 19
AGE_S = 1.0
SECRET = 99  # of the fake services


class SharedIndex:
    """The index of all workers: the real one, with updates delayed by `LEARN_S`."""

    def __init__(self, blocks_max: int = 0) -> None:
        """`blocks_max`: how many blocks of a server the index holds; 0 is no limit."""
        schema = IndexSchema(INDEX_ENTRIES)
        region = Region(memoryview(bytearray(schema.bytes)))
        self._writer, reader = IndexWriter(schema, region), IndexReader(schema, region)
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.owners = [self._writer.new_owner() for _ in range(SERVERS)]
        for owner in self.owners:
            self._writer.limit(owner, blocks_max)
        self._pending: deque[tuple[float, Hashes, int]] = deque()
        self._now = 0.0

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._pending.append((self._now + LEARN_S, hashes, owner))

    def forget(self, hashes: Hashes, owner: int) -> None:
        raise AssertionError("all answers are complete")

    def passed(self, now: float) -> None:
        self._now = now
        while self._pending and self._pending[0][0] <= now:
            _, hashes, owner = self._pending.popleft()
            self._writer.insert(hashes, owner, int(now / AGE_S))


class ExactIndex:
    """An index that applies updates at once and never forgets."""

    def __init__(self) -> None:
        self.owners = list(range(1, SERVERS + 1))
        self._held: dict[int, set[int]] = {}

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        blocks: dict[int, int] = {}
        for block, value in enumerate(hashes.tolist()):
            held = self._held.get(value)
            if held is None:
                break
            blocks.update(dict.fromkeys(held, block + 1))
        return blocks

    def learn(self, hashes: Hashes, owner: int) -> None:
        for value in hashes.tolist():
            self._held.setdefault(value, set()).add(owner)

    def forget(self, hashes: Hashes, owner: int) -> None:
        raise AssertionError("all answers are complete")

    def passed(self, now: float) -> None:
        return None


class Services(FakeServices):
    """The services that a worker gives to its plugins."""

    def __init__(self, index: SharedIndex | ExactIndex, tokens: Floats, seed: int) -> None:
        super().__init__(seed)
        self.prefix_index = index  # type: ignore[assignment]
        self._tokens = tokens

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens

    def measure(self, plugin: Plugin, metric: Metric) -> "Services":  # type: ignore[override]
        return self

    def observe(self, value: float) -> None:
        """Does nothing: no one reads the metric."""


class Picked:
    """The pipeline of a configuration in `workers` workers. Implements `Policy` and `epp.decide.EndpointPool`."""

    def __init__(
        self,
        text: str,
        seed: int,
        *,
        workers: int = WORKERS,
        exact: bool = False,
        scraped_only: bool = False,
        held: bool = False,
        cache_blocks: int = 0,
    ) -> None:
        """`exact`: whether the prefix index is exact and unbounded. `scraped_only`: whether the load is that of the last scrape, without

        requests in flight. `held`: whether servers publish KV events. `cache_blocks`: the size of each server's cache, if it limits the
        index, as it does in a picker that scrapes it; 0 is no limit.
        """
        self._scraped_only = scraped_only
        self._index = ExactIndex() if exact else SharedIndex(cache_blocks * BLOCK_TOKENS // BLOCK_TOKENS_MIN)
        self._held = SharedHeld(self._index.owners, SECRET) if held else None
        self._inflight, self._tokens = np.zeros(SERVERS), np.zeros(SERVERS)
        self._pipelines: list[Pipeline] = []
        for worker in range(workers):
            pipeline = load(text, "benchmark").pipeline
            services = Services(self._index, self._tokens, seed * WORKERS + worker)
            if self._held is not None:
                services.held_blocks = self._held  # type: ignore[assignment]
            pipeline.start(services)
            self._pipelines.append(pipeline)
        servers = endpoints(SERVERS)
        for server, owner in zip(servers, self._index.owners, strict=True):
            server.owner = owner
        self._roster = Roster(servers)
        self._values = {column.name: np.zeros(SERVERS) for column in (WAITING, RUNNING, KV_USAGE)}
        self._at_scrape = np.zeros(SERVERS)
        self._all, self._none = np.ones(SERVERS, dtype=bool), np.zeros(SERVERS, dtype=bool)
        self._snapshot: Snapshot | None = None

    def passed(self, now: float) -> None:
        self._index.passed(now)
        if self._held is not None:
            self._held.passed(now)

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        if self._held is not None:
            self._held.changed(server, now)(job, changes)

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
        if self._held is not None:
            ids = np.frombuffer(prompt[: len(prompt) // 4 * 4], dtype="<u4").tolist()
            request.prompt.read = lambda _: Parts(token_ids=(ids,))
        try:
            choose(pipeline, request, self).send(None)
        except StopIteration as done:
            decision: Decision = done.value
        else:
            raise AssertionError("a producer waits, but in this benchmark no producer can be resumed")
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

    def scorer_failed(self, problem: Exception) -> None:
        raise problem

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise problem


class Blind:
    """A policy without state about requests and servers."""

    def first_token(self, call: Call, now: float) -> None:
        """Does nothing."""

    def ended(self, call: Call, now: float) -> None:
        """Does nothing."""

    def scraped(self, server: int, engine: Engine, now: float) -> None:
        """Does nothing."""

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        """Does nothing."""

    def passed(self, now: float) -> None:
        """Does nothing."""


class RoundRobin(Blind):
    """Chooses one server after the other. All workers share the turn."""

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, call: Call, now: float) -> int:
        self._turn = (self._turn + 1) % SERVERS
        return self._turn


class Random(Blind):
    """Chooses a random server."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"{seed}/random")

    def choose(self, call: Call, now: float) -> int:
        return self._rng.randrange(SERVERS)


class Oracle(Blind):
    """Knows queues and caches exactly, and takes the server with the earliest first token. Among equals it takes the least busy one."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def choose(self, call: Call, now: float) -> int:
        return min(range(SERVERS), key=lambda server: (self._wait(server, call, now), self._load(server)))

    def _load(self, server: int) -> int:
        engine = self._fleet.engines[server]
        return engine.running + engine.waiting + len(self._fleet.underway[server])

    def _wait(self, server: int, call: Call, now: float) -> float:
        """Returns the seconds until the first token: the rest of the current step, and the step for the prompts ahead and this one.

        An engine computes all waiting prompts that fit in one step.
        """
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


class MostHits(Oracle):
    """Knows caches exactly, and takes the server with the longest prefix, whatever its queue. Among equals it takes the one with most room.

    So it shows about how many hits any placement of single requests can have.
    """

    def choose(self, call: Call, now: float) -> int:
        return min(range(SERVERS), key=lambda server: self._cost(server, call))

    def _cost(self, server: int, call: Call) -> tuple[int, int, int]:
        """Hits, unused blocks and blocks in use, of which the last counts against a server. Blocks on their way count as held."""
        engine = self._fleet.engines[server]
        pool = engine.pool
        coming: set[int] = set()
        for job in [*engine._waiting, *(other.job for other in self._fleet.underway[server])]:
            coming.update(job.hashes)
        hits = 0
        for block in call.job.hashes:
            if not (block in pool._users or block in pool._idle or block in coming):
                break
            hits += 1
        unused = pool.total - pool.in_use - pool.idle - len(coming)
        return -hits, -unused, pool.in_use + len(coming)
