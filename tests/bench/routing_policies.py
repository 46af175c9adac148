"""The policy of a configuration in the routing benchmark: the real pipeline in several workers.

`Picked` compiles a configuration and calls `epp.decision.decide`. As in the picker, a worker sees the values of each server's last scrape,
the requests in flight of all workers at this moment, and the shared prefix index: an update of a worker appears in it after `LEARN_S`. The
response points get the same calls as in the picker: headers and first chunk when the first token comes, the end, and failures, each with
`request.now` in virtual seconds; `request.sent_at` is the time of the decision. Nobody tells it how many tokens a request will generate, or
how many were cached. Timers of plugins (`Services.every`) run in virtual time. The benchmark leaves out shared memory, the clock, flow
control and the parser: the prompt is given.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Floats, Snapshot
from epp.config.load import load
from epp.data import CACHE_BLOCK_SIZE, CACHE_TOKENS, KV_USAGE, RUNNING, WAITING
from epp.decision.decide import choose
from epp.decision.decision import Decision, Response, Usage
from epp.decision.pipeline import Pipeline
from epp.endpoints.failing import with_failed
from epp.errors import ProducerFailed
from epp.metrics import Metric
from epp.plugin import DataProducer, Hashes, Plugin, Profile
from epp.plugins.producers.approx_prefix import BLOCK_TOKENS_MIN
from epp.request import EMPTY_PROMPT, Parts, Prompt, Request, Subset
from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from shm.prefills import Prefills, PrefillsSchema
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.bench.routing_ejection import SharedEjection
from tests.bench.routing_fleet import WORKERS, Call
from tests.bench.routing_held import SharedHeld
from tests.bench.routing_learning import SharedLearning
from tests.bench.routing_traffic import BLOCK_TOKENS, SERVERS
from tests.fakes import FakeServices, endpoints
from workers.shared.bus import AGE_TICKS
from workers.worker.extproc.account import STEP_S, Account, Load
from workers.worker.extproc.pool import REBUILD_MAX_S

LEARN_S = 0.003
INDEX_ENTRIES = 1 << 16  # of a server
OK = 200
SECRET = 99  # of the fake services
SCRAPED = tuple(column.name for column in (WAITING, RUNNING, KV_USAGE, CACHE_BLOCK_SIZE, CACHE_TOKENS))


class SharedIndex:
    """The index of all workers: the real one, with updates delayed by `LEARN_S`."""

    def __init__(self, blocks_max: int = 0, servers: int = SERVERS) -> None:
        """`blocks_max`: how many blocks of a server the index holds; 0 is no limit."""
        schema = IndexSchema(INDEX_ENTRIES * servers)
        region = Region(memoryview(bytearray(schema.bytes)))
        self._writer, reader = IndexWriter(schema, region), IndexReader(schema, region)
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.owners = [self._writer.new_owner() for _ in range(servers)]
        for owner in self.owners:
            self._writer.limit(owner, blocks_max)
        self._pending: deque[tuple[float, Hashes, int, bool]] = deque()
        self._now = 0.0

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._pending.append((self._now + LEARN_S, hashes, owner, True))

    def forget(self, hashes: Hashes, owner: int) -> None:
        self._pending.append((self._now + LEARN_S, hashes, owner, False))

    def passed(self, now: float) -> None:
        self._now = now
        while self._pending and self._pending[0][0] <= now:
            _, hashes, owner, learned = self._pending.popleft()
            if learned:
                self._writer.insert(hashes, owner, int(now * AGE_TICKS))
            else:
                self._writer.forget(hashes, owner)


class ExactIndex:
    """An index that applies updates at once and never forgets."""

    def __init__(self, servers: int = SERVERS) -> None:
        self.owners = list(range(1, servers + 1))
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
        for value in hashes.tolist():
            self._held.get(value, set()).discard(owner)

    def passed(self, now: float) -> None:
        return None


class Pause:
    """A wait in virtual time. Implements `epp.plugin.Waiting`. Awaiting it yields it to the caller, who resumes the coroutine."""

    def __init__(self, seconds: float, call_later: Callable[[float, Callable[[], object]], object]) -> None:
        self.seconds = seconds
        self._call_later = call_later

    def __await__(self) -> Generator["Pause", None, None]:
        yield self

    def add_done_callback(self, call: Callable[..., object], /) -> None:
        self._call_later(self.seconds, lambda: call(self))


class Services(FakeServices):
    """The services that a worker gives to its plugins. `every` runs in virtual time."""

    def __init__(self, index: SharedIndex | ExactIndex, tokens: Floats, seed: int, learning: SharedLearning) -> None:
        super().__init__(seed)
        self.learning = learning  # type: ignore[assignment]
        self.prefix_index = index  # type: ignore[assignment]
        self._tokens = tokens
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._now = 0.0

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        def turn() -> None:
            self.call_later(seconds, turn)
            act()

        self.call_later(seconds, turn)

    def after(self, seconds: float) -> Pause:  # type: ignore[override]
        return Pause(seconds, self.call_later)

    def call_later(self, seconds: float, act: Callable[[], object]) -> None:
        self._order += 1
        heapq.heappush(self._timers, (self._now + seconds, self._order, act))

    def passed(self, now: float) -> None:
        """Calls what is due."""
        timers = self._timers
        while timers and timers[0][0] <= now:
            self._now, _, act = heapq.heappop(timers)
            act()
        self._now = now

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens

    def measure(self, plugin: Plugin, metric: Metric) -> "Services":  # type: ignore[override]
        return self

    def observe(self, value: float) -> None:
        """Does nothing: no one reads the metric."""


class Picked:
    """The pipeline of a configuration in `workers` workers. Implements `Policy` and `epp.decision.decide.EndpointPool`."""

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
        streamed: float = 1.0,
        learning: SharedLearning | None = None,
        servers: int = SERVERS,
    ) -> None:
        """`exact`: whether the prefix index is exact and unbounded. `scraped_only`: whether the load is that of the last scrape, without
        requests in flight. `held`: whether servers publish KV events. `cache_blocks`: the size of each server's cache, if it limits the
        index, as it does in a picker that scrapes it; 0 is no limit. `streamed`: the share of answers that are streamed; of the others,
        the picker sees nothing before their end. `learning`: the latency model of all workers; None: a new one.
        """
        self._streamed = streamed
        self._streams = random.Random(f"{seed}/streams")
        self._scraped_only = scraped_only
        self._now = 0.0
        self._index = ExactIndex(servers) if exact else SharedIndex(cache_blocks * BLOCK_TOKENS // BLOCK_TOKENS_MIN, servers)
        self._held = SharedHeld(self._index.owners, SECRET) if held else None
        self._inflight, self._tokens = np.zeros(servers), np.zeros(servers)
        self._learning = learning or SharedLearning()
        self._pipelines: list[Pipeline] = []
        self._services: list[Services] = []
        prefills = PrefillsSchema(workers)
        shown = Region(memoryview(bytearray(prefills.bytes)))
        for worker in range(workers):
            pipeline = load(text, "benchmark").pipeline
            services = Services(self._index, self._tokens, seed * WORKERS + worker, self._learning)
            services.prefills = Prefills(prefills, shown, worker)
            if self._held is not None:
                services.held_blocks = self._held  # type: ignore[assignment]
            pipeline.start(services)
            self._pipelines.append(pipeline)
            self._services.append(services)
        self._endpoints = endpoints(servers)
        for server, owner in zip(self._endpoints, self._index.owners, strict=True):
            server.owner = owner
        self._columns = {name: np.zeros(servers) for name in SCRAPED}
        self._columns[CACHE_BLOCK_SIZE.name][:] = BLOCK_TOKENS
        self._at_scrape = np.zeros(servers)
        self._known = np.zeros(servers, dtype=bool)
        self._scraped_at = np.zeros(servers)
        self._generations = np.ones(servers, dtype=np.uint64)
        self._accounts = [Account(servers) for _ in range(workers)]
        self._made_at = [0.0] * workers
        self._ejection = SharedEjection(self._inflight, workers)
        self._worker = 0  # the worker that decides now
        self._snapshots: dict[int, Snapshot] = {}  # by worker, until something changes
        self._version = 0  # of the ejection, when these were made
        self.members(range(servers))

    def passed(self, now: float) -> None:
        self._now = now
        self._index.passed(now)
        self._learning.passed(now)
        self._ejection.passed(now)
        for services in self._services:
            services.passed(now)
        if self._held is not None:
            self._held.passed(now)

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        if self._held is not None:
            self._held.changed(server, now)(job, changes)

    def members(self, servers: Sequence[int]) -> None:
        self._members = np.array(servers)
        self._snapshots.clear()
        self._endpoint_list = EndpointList([self._endpoints[server] for server in servers])
        self._learning.listed(servers)
        self._ejection.listed(servers)

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        columns = self._columns
        columns[WAITING.name][server] = model.waiting
        columns[RUNNING.name][server] = model.running
        columns[KV_USAGE.name][server] = model.pool.usage
        columns[CACHE_TOKENS.name][server] = model.pool.total * BLOCK_TOKENS
        self._at_scrape[server] = self._inflight[server]
        self._scraped_at[server] = now
        self._learning.scraped(server, model.running, model.waiting, model.pool.usage)
        self._known[server] = True
        self._ejection.scrapes[server].refusals = 0
        self._snapshots.clear()

    def refused(self, server: int, now: float) -> None:
        self._ejection.scrapes[server].refusals += 1
        self._snapshots.clear()

    def choose(self, call: Call, now: float) -> int:
        request = self.asked(call, now)
        self._worker = call.worker % len(self._pipelines)
        try:
            choose(self.pipeline(call), request, self).send(None)
        except StopIteration as done:
            return self.sent(call, request, done.value, now)
        raise AssertionError("a producer waits, but in this benchmark no producer can be resumed")

    def pipeline(self, call: Call) -> Pipeline:
        """Returns the pipeline of the call's worker."""
        return self._pipelines[call.worker % len(self._pipelines)]

    def asked(self, call: Call, now: float) -> Request:
        """Returns the request as the parser leaves it."""
        prompt = call.turn.prompt
        request = Request(id=str(call.id), path="/v1/completions", headers={}, now=now, model="m")
        request.streaming = self._streams.random() < self._streamed
        request.prompt = Prompt(lambda: prompt)
        if self._held is not None:
            ids = np.frombuffer(prompt[: len(prompt) // 4 * 4], dtype="<u4").tolist()
            request.prompt.read = lambda _: Parts(token_ids=(ids,))
        return request

    def sent(self, call: Call, request: Request, decision: Decision, now: float) -> int:
        """Counts the request in flight. Returns its server."""
        request.prompt = EMPTY_PROMPT
        request.sent_at = now
        slot = decision.targets[0].slot
        self._inflight[slot] += 1
        self._ejection.sent(call.worker % len(self._pipelines), request, slot)
        call.done = (self.pipeline(call), request, decision, Response())
        return slot

    def first_token(self, call: Call, now: float) -> None:
        if call.done[1].streaming:  # type: ignore[index]
            self._answered(call, now)

    def _answered(self, call: Call, now: float) -> None:
        """Takes the headers and the first chunk of an answer."""
        pipeline, request, decision, _ = call.done  # type: ignore[misc]
        self._ejection.answered(call.worker % len(self._pipelines), request, call.server, OK)
        kind = "text/event-stream" if request.streaming else "application/json"
        response = Response(200, {"content-type": kind}, streaming=request.streaming)
        call.done = (pipeline, request, decision, response)
        request.now = now
        for received in pipeline.response_received:
            received(request, decision, response)
        for streaming in pipeline.response_streaming:
            streaming(request, decision)

    def ended(self, call: Call, now: float) -> None:
        if not call.done[1].streaming:  # type: ignore[index]
            self._answered(call, now)
        response = call.done[3]  # type: ignore[index]
        response.usage = Usage(call.turn.tokens, call.turn.output)
        response.whole = True
        self._complete(call, now)

    def failed(self, call: Call, now: float) -> None:
        """Ends a request that its server did not serve."""
        pipeline, request, decision, response = call.done  # type: ignore[misc]
        begun = response.status > 0
        if call.status:
            response = Response(call.status, {}, streaming=request.streaming and call.status == OK)
            response.whole, response.empty = True, call.status == OK
            request.now = now
            for received in pipeline.response_received:
                received(request, decision, response)
        elif not begun:
            response = Response(503)
        if not begun:
            worker, empty = call.worker % len(self._pipelines), call.status == OK
            self._ejection.answered(worker, request, call.server, call.status, empty=empty)
        call.done = (pipeline, request, decision, response)
        self._complete(call, now)

    def _complete(self, call: Call, now: float) -> None:
        pipeline, request, decision, response = call.done  # type: ignore[misc]
        call.done = None
        request.now = now
        self._inflight[call.server] -= 1
        for complete in pipeline.response_complete:
            complete(request, decision, response)

    def candidates(self, subset: Subset | None) -> Candidates:
        if self._version != self._ejection.version:
            self._version = self._ejection.version
            self._snapshots.clear()
        snapshot, members = self._snapshots.get(self._worker), self._members
        if snapshot is None or self._now - self._made_at[self._worker] > REBUILD_MAX_S:
            self._made_at[self._worker] = self._now
            known, failing = self._known[members], self._ejection.failing()
            values = {name: column[members] for name, column in self._columns.items()}
            counted = self._at_scrape[members]
            ages = self._now - self._scraped_at[members]
            if not self._scraped_only and ages.max(initial=0.0) > STEP_S:
                page = Load(values[RUNNING.name], values[WAITING.name], values[KV_USAGE.name], counted)
                load = self._accounts[self._worker].carry(
                    members, self._generations[members], self._scraped_at[members], page, self._inflight[members], self._now
                )
                values |= {RUNNING.name: load.running, WAITING.name: load.waiting, KV_USAGE.name: load.kv}
                counted = load.counted
            snapshot = self._snapshots[self._worker] = Snapshot(
                self._endpoint_list,
                values,
                fresh=known,
                known=known,
                down=self._ejection.down(self._worker)[members],
                inflight_at_scrape=counted,
                failing=None if failing is None else failing[members],
            )
        inflight = snapshot.inflight_at_scrape.copy() if self._scraped_only else self._inflight[members]
        tokens = self._tokens[members]
        if snapshot.failing is not None:
            inflight, tokens = with_failed(inflight, tokens, snapshot.failing)
        return Candidates(snapshot, inflight, tokens)

    def reloaded(self, candidates: Candidates) -> Candidates:
        return candidates

    def now(self) -> float:
        return self._now

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        raise failure

    def scorer_failed(self, problem: Exception) -> None:
        raise problem

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise problem
