"""Runs recorded arrivals in virtual time: the decision code of workers chooses, and server models answer.

A prompt is not in the recording. A text with the same block hashes in the same order stands for it, so prompts share the same prefixes.
Values of servers are scraped every SCRAPE_S. Flow control, model rewrites and failures of servers are left out.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from epp.candidates import Candidates, Endpoint, Roster, Snapshot
from epp.config.load import EffectiveConfig
from epp.data import CACHE_BLOCK_SIZE, CACHE_NUM_BLOCKS, KV_USAGE, RUNNING, WAITING
from epp.decide import choose
from epp.decision import Decision, Response, Usage
from epp.errors import ProducerFailed, Refused
from epp.plugin import Hashes, Plugin, Profile
from epp.recording.records import Member
from epp.recording.trace import Traced
from epp.request import BYTES_PER_TOKEN, EMPTY_PROMPT, Prompt, Request, Subset
from shm.prefix_index import IndexSchema
from shm.prefix_reader import IndexReader
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from workers.cli.offline import OfflineError, worker_services
from workers.cli.replay.servers import UNBOUNDED, Job, Server, Speed, Started
from workers.worker.services import WorkerServices

SCRAPE_S = 0.05
INDEX_ENTRIES = 1 << 19
INDEX_BLOCK_TOKENS = 64
SERVER_BLOCK_TOKENS = 16
OUTPUT_TOKENS = 100  # of a request whose answer was not recorded


class Result(NamedTuple):
    """The result of one request. `target`: index of its endpoint, -1: it was refused. Seconds; tokens."""

    target: int
    first_s: float
    prompt: int
    cached: int


class ReplayServices(WorkerServices):
    """The services of a worker, with timers in virtual time."""

    def __init__(self, *of_worker: Any, **named: Any) -> None:
        super().__init__(*of_worker, **named)
        self.timers: list[tuple[float, int, float, Callable[[], object]]] = []

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self.timers, (seconds, len(self.timers), seconds, act))

    def passed(self, now: float) -> None:
        """Calls what is due."""
        while self.timers and self.timers[0][0] <= now:
            due, order, seconds, act = self.timers[0]
            heapq.heapreplace(self.timers, (due + seconds, order, seconds, act))
            act()


class Fleet:
    """The servers, and what workers know of them. Implements `epp.decide.EndpointPool`, the prefix index, and the counts of load."""

    def __init__(self, members: Sequence[Member], speeds: Sequence[Speed]) -> None:
        self.servers = [Server(speed) for speed in speeds]
        schema = IndexSchema(INDEX_ENTRIES)
        region = Region(memoryview(bytearray(schema.bytes)))
        self._writer = IndexWriter(schema, region)
        self.match: Callable[[Hashes], Mapping[int, int]] = IndexReader(schema, region).match
        endpoints = []
        for slot, (member, speed) in enumerate(zip(members, speeds, strict=True)):
            owner = self._writer.new_owner()
            if speed.cache_tokens < UNBOUNDED:
                self._writer.limit(owner, speed.cache_tokens // INDEX_BLOCK_TOKENS)
            host, _, port = member.address.rpartition(":")
            endpoints.append(
                Endpoint(
                    name=member.name,
                    namespace=member.namespace,
                    host=host.strip("[]"),
                    port=int(port),
                    labels=member.labels,
                    slot=slot,
                    owner=owner,
                )
            )
        self._roster = Roster(endpoints)
        self.inflight, self._tokens = np.zeros(len(endpoints)), np.zeros(len(endpoints))
        self._now = 0.0
        self._scraped_at = 0.0
        self._snapshot = self._scrape()

    def passed(self, now: float) -> None:
        """Takes the values of a scrape that is due before `now`, the time of the next event."""
        if now - self._scraped_at >= SCRAPE_S:
            self._scraped_at = now - now % SCRAPE_S
            self._snapshot = self._scrape()
        self._now = now

    def _scrape(self) -> Snapshot:
        servers, every = self.servers, np.ones(len(self.servers), dtype=bool)
        values = {
            WAITING.name: np.array([float(server.waiting) for server in servers]),
            RUNNING.name: np.array([float(server.running) for server in servers]),
            KV_USAGE.name: np.array([server.usage for server in servers]),
        }
        if all(server.speed.cache_tokens < UNBOUNDED for server in servers):
            values[CACHE_BLOCK_SIZE.name] = np.full(len(servers), float(SERVER_BLOCK_TOKENS))
            values[CACHE_NUM_BLOCKS.name] = np.array([s.speed.cache_tokens / SERVER_BLOCK_TOKENS for s in servers])
        counts = self.inflight.copy()
        return Snapshot(self._roster, values, fresh=every, known=every, down=~every, inflight_at_scrape=counts)

    def candidates(self, subset: Subset | None) -> Candidates:
        return Candidates(self._snapshot, self.inflight.copy(), self._tokens.copy())

    def reloaded(self, candidates: Candidates) -> Candidates:
        return Candidates(candidates.snapshot, self.inflight.copy(), self._tokens.copy(), candidates.rows)

    def now(self) -> float:
        return self._now

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._writer.insert(hashes, owner, int(self._now))

    def forget(self, hashes: Hashes, owner: int) -> None:
        self._writer.forget(hashes, owner)

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        raise OfflineError(f"a data producer failed: {failure}")

    def scorer_failed(self, problem: Exception) -> None:
        raise problem

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        raise OfflineError(f"shadow profile '{profile.name}' failed: {problem!r}") from problem


class Replay:
    """One run of a configuration over `requests`, which are in the order of their arrival. `rate`: how much faster they arrive."""

    def __init__(
        self, config: EffectiveConfig, requests: Sequence[Traced], members: Sequence[Member], speeds: Sequence[Speed], rate: float
    ) -> None:  # fmt: skip
        self._pipeline = config.pipeline
        self._requests = requests
        self._fleet = Fleet(members, speeds)
        self._services = worker_services(config, self._fleet, ReplayServices)
        self._services.load = self._fleet
        self._pipeline.start(self._services)
        self._sent: dict[int, tuple[Request, Decision, Response]] = {}
        self._results = [Result(-1, 0.0, 0, 0)] * len(requests)
        self._arrivals = [(request.decided.at - requests[0].decided.at) / rate for request in requests]
        self._events: list[tuple[float, int, Callable[[float, Started], None], Started]] = []
        self._order = 0

    def run(self) -> list[Result]:
        """Runs until every answer is complete. Returns one result per request. Raises OfflineError."""
        for number, arrival in enumerate(self._arrivals):
            self._work_until(arrival)
            self._arrive(number, arrival)
        self._work_until(float("inf"))
        return self._results

    def _work_until(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            now, _, act, started = heapq.heappop(self._events)
            self._pass(now)
            act(now, started)

    def _pass(self, now: float) -> None:
        self._fleet.passed(now)
        self._services.passed(now)

    def _arrive(self, number: int, now: float) -> None:
        self._pass(now)
        traced = self._requests[number]
        text = prompt_text(traced, number)
        decided = traced.decided
        request = Request(
            id=str(number),
            path="/v1/completions",
            headers={},
            now=now,
            model=decided.model,
            streaming=decided.streaming,
        )
        request.prompt = Prompt(lambda: text)
        request.priority = decided.priority
        try:
            choose(self._pipeline, request, self._fleet).send(None)
        except StopIteration as done:
            decision = done.value
        except Refused:
            return
        else:
            raise OfflineError("a data producer waits for an answer from outside, which a replay cannot give")
        request.prompt = EMPTY_PROMPT
        request.sent_at = now
        slot = decision.targets[0].slot
        self._fleet.inflight[slot] += 1
        self._sent[number] = request, decision, Response(200, {"content-type": "text/event-stream"}, streaming=True)
        self._results[number] = Result(slot, 0.0, 0, 0)
        self._plan(self._fleet.servers[slot].submit(job_of(traced, number), now))

    def _plan(self, started: Any) -> None:
        for each in started:
            heapq.heappush(self._events, (each.first_at, self._order, self._first, each))
            heapq.heappush(self._events, (each.ended_at, self._order + 1, self._end, each))
            self._order += 2

    def _first(self, now: float, started: Started) -> None:
        job = started.job
        request, decision, response = self._sent[job.number]
        slot = self._results[job.number].target
        first_s = now - self._arrivals[job.number]
        self._results[job.number] = Result(slot, first_s, job.prompt_tokens, started.cached_tokens)
        request.now = now
        for received in self._pipeline.response_received:
            received(request, decision, response)
        for streaming in self._pipeline.response_streaming:
            streaming(request, decision)

    def _end(self, now: float, started: Started) -> None:
        job = started.job
        request, decision, response = self._sent.pop(job.number)
        slot = self._results[job.number].target
        self._fleet.inflight[slot] -= 1
        response.usage = Usage(job.prompt_tokens, job.output_tokens)
        response.whole = True
        request.now = now
        for complete in self._pipeline.response_complete:
            complete(request, decision, response)
        self._plan(self._fleet.servers[slot].ended(now))


def prompt_text(traced: Traced, number: int) -> bytes:
    """Returns a text whose blocks are equal to those of another request exactly where the recorded hashes are equal."""
    decided = traced.decided
    block = decided.block_tokens * BYTES_PER_TOKEN
    hashes = decided.hashes
    blocks = b"".join(hashes[at : at + 8] * (block // 8) for at in range(0, len(hashes), 8))
    size = max(decided.prompt_tokens * BYTES_PER_TOKEN, 1)
    rest = (b"%016d" % number) * (max(size - len(blocks), 0) // 16 + 1)
    return (blocks + rest)[: max(size, len(blocks))]


def job_of(traced: Traced, number: int) -> Job:
    """Returns what a server has to compute for a request."""
    decided, ended = traced.decided, traced.ended
    output = ended.completion if ended is not None else None
    prompt = ended.prompt if ended is not None else None
    blocks = np.frombuffer(decided.hashes, dtype="<u8").tolist()
    tokens = decided.prompt_tokens if prompt is None else prompt
    return Job(
        number, blocks, decided.block_tokens, tokens, output if output is not None else decided.max_tokens or OUTPUT_TOKENS
    )  # fmt: skip
