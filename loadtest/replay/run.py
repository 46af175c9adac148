"""Runs recorded arrivals in virtual time: the decision code of workers chooses, and server models answer.

    arrivals ──▶ admission, decision ──▶ server model ──▶ first token ──▶ end ──▶ arrivals that waited for it
                  │ waits: flow control, admitters                  └▶ response points of plugins

A recording has no prompts. In place of a prompt, a replay uses a text with the same block hashes in the same order, so that prompts share
the same prefixes. A header that plugins read gets the hash of its recorded value as its value. One worker decides.
"""

import heapq
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from epp.config.load import EffectiveConfig
from epp.decision.decide import decide
from epp.decision.decision import Decision, Response, Usage
from epp.decision.pipeline import Pipeline
from epp.errors import Refused
from epp.prefix.blocks import block_hashes, landmarks, root
from epp.request import BYTES_PER_TOKEN, DEFAULT_FLOW, EMPTY_PROMPT, Prompt, Request
from loadtest.replay.clients import Arrivals, turns
from loadtest.replay.fit import job_of
from loadtest.replay.fleet import Fleet
from loadtest.replay.prompts import OPEN, Prompts, Warm, compared, warm
from loadtest.replay.reading import Asked, Lifetime
from loadtest.replay.runs import leading
from loadtest.replay.servers import Job, Speed
from loadtest.replay.services import BATCHES_S, ReplayLearning, ReplayServices
from loadtest.replay.waiting import LOOK_S, Pause, Queue, Waited, admission_of
from workers.cli.offline import OfflineError, worker_services
from workers.shared.index_limits import PrefixUse, prefix_use

REFUSED, FAILED = -1, -2  # in `Run.target`: no endpoint was chosen; its server died
BAD_GATEWAY: Final = 503
FIRST_MIN_S: Final = 1e-4
SHOWN_EVERY: Final = 2_000  # requests
EVENT_STREAM: Final = {"content-type": "text/event-stream"}
JSON: Final = {"content-type": "application/json"}
Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


class Run(msgspec.Struct, frozen=True):
    """What became of each request. Arrays of shape (requests,): `target`: the index of the request's endpoint, REFUSED or FAILED.

    `at`: virtual seconds. `waited_s`: the time in queues; `first_s`, `lasted_s`: the times from its arrival to the first token and to the
    end, NaN if there is none. `prompt`, `cached`: tokens; `output`: tokens of the answer. `refused`: cause -> number of requests.
    """

    target: Ints
    at: Floats
    waited_s: Floats
    first_s: Floats
    lasted_s: Floats
    prompt: Ints
    cached: Ints
    output: Ints
    refused: dict[str, int]


def empty(size: int) -> Run:
    """Returns a run in which nothing has happened."""
    prompt, cached, output = np.zeros((3, size), np.int64)
    first_s, lasted_s = np.full((2, size), math.nan)
    return Run(np.full(size, REFUSED), np.zeros(size), np.zeros(size), first_s, lasted_s, prompt, cached, output, {})


class World(msgspec.Struct, frozen=True):
    """What is replayed: the requests in the order of arrival, what their prompts share, the servers, and how clients behave.

    `before`: the request that each one waits for, or OPEN. `warm`: what servers hold at the start.
    """

    requests: Sequence[Asked]
    prompts: Prompts
    before: Sequence[int]
    endpoints: Sequence[Lifetime]
    speeds: Sequence[Speed]
    warm: Sequence[Warm] = ()
    rate: float = 1.0
    clients: int = 0
    seed: int = 0


def world(requests: Sequence[Asked], endpoints: Sequence[Lifetime], speeds: Sequence[Speed], *, open: bool, clients: int) -> World:
    """Returns the world as it was recorded. `open`: if true, no client waits for an answer."""
    held = warm(requests)
    prompts = compared(requests, held)
    before = [OPEN] * len(requests) if open else turns(requests, prompts.before)
    return World(requests, prompts, before, endpoints, speeds, held, clients=clients)


class _Lease:
    """The pipeline of all requests. Implements `epp.decision.decide.Lease`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline

    def renew(self) -> None:
        """Does nothing, because no plugin is disabled in a replay."""


class _Open:
    """One request under way: the result of `epp.decision.decide` for it, and the server at which it is."""

    __slots__ = ("decision", "number", "request", "response", "slot")

    def __init__(self, number: int, request: Request, decision: Decision, slot: int) -> None:
        self.number = number
        self.request = request
        self.decision = decision
        self.slot = slot
        self.response: Response | None = None  # until the first piece of its answer


class Replay:
    """One run of a freshly loaded configuration. From time to time, `progress` is called with the number of requests that have arrived."""

    def __init__(self, config: EffectiveConfig, world: World, progress: Callable[[int], object] = lambda _: None) -> None:
        self._world = world
        self._requests = world.requests
        self._progress = progress
        self._pipeline = config.pipeline
        self._lease = _Lease(self._pipeline)
        use = prefix_use(self._pipeline.plugins.values())
        self._fleet = fleet = Fleet(world.endpoints, world.speeds, use)
        self._services = worker_services(config, fleet, ReplayServices)
        self._services.load = fleet
        self._services.learning = learning = ReplayLearning(fleet.batches)
        self._timers = self._services.timers
        self._timers.after(BATCHES_S, learning.look, BATCHES_S)
        self._services.rng.seed(world.seed)
        self._pipeline.start(self._services)
        priorities = {asked.priority for asked in world.requests}
        self._admission = admission_of(config, fleet, priorities, self._freed)
        self._queue = self._admission if isinstance(self._admission, Queue) else None
        self._arrivals = Arrivals(world.requests, world.before, world.rate, world.clients)
        self._heap: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._order = 0
        self._due = [math.inf] * len(world.endpoints)
        self._open: dict[int, _Open] = {}
        self._waits: dict[Waited, tuple[int, Request, Coroutine[Any, Any, Decision]]] = {}
        self._looking = False
        self._run = empty(len(world.requests))
        self._plan_members()
        self._warm(use)

    def run(self) -> Run:
        """Runs until every answer is complete. Raises OfflineError."""
        heap, arrivals = self._heap, self._arrivals
        arrived = 0
        while True:
            due = arrivals.due
            if heap and heap[0][0] <= due:
                now, _, act, what = heapq.heappop(heap)
                self._pass(now)
                act(now, what)
            elif due < math.inf:
                self._pass(due)
                self._arrive(arrivals.pop(), due)
                arrived += 1
                if not arrived % SHOWN_EVERY:
                    self._progress(arrived)
            else:
                return self._run

    def _at(self, time: float, act: Callable[[float, Any], None], what: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (time, self._order, act, what))

    def _pass(self, now: float) -> None:
        self._fleet.passed(now)
        self._timers.passed(now)

    def _warm(self, use: PrefixUse | None) -> None:
        """Gives the caches and the index the blocks that servers held before the recording. The blocks that are needed first become the
        youngest.
        """
        secret = self._services.prefix_seed
        for number, slot, blocks in reversed(self._world.warm):
            asked = self._requests[number]
            if slot < len(self._fleet.servers):
                block_bytes = (asked if use is None else use).block_tokens * BYTES_PER_TOKEN
                text = prompt_text(asked, number)[: blocks * asked.block_tokens * BYTES_PER_TOKEN]
                start = root(asked.target_model or asked.model, "", secret)
                hashes = landmarks(block_hashes(text, block_bytes, start, secret), 0)
                runs = leading(self._world.prompts.runs[number], blocks)
                self._fleet.warm(slot, runs, asked.server_block_tokens, hashes)

    # Requests.

    def _arrive(self, number: int, now: float) -> None:
        asked = self._requests[number]
        run = self._run
        run.at[number] = now
        request = request_of(asked, number, now)
        self._step(number, request, decide(self._lease, request, self._fleet, self._admission))

    def _step(self, number: int, request: Request, deciding: Coroutine[Any, Any, Decision]) -> None:
        """Continues a decision until it is made or has to wait."""
        now = self._fleet.now()
        try:
            waits = deciding.send(None)
        except StopIteration as done:
            self._send(number, request, done.value, now)
        except Refused as refused:
            self._refuse(number, refused, now)
        else:
            if isinstance(waits, Waited):
                self._waits[waits] = (number, request, deciding)
                if not self._looking:
                    self._looking = True
                    self._at(now + LOOK_S, self._look, None)
            elif isinstance(waits, Pause):
                self._at(now + waits.seconds, self._resume, (number, request, deciding))
            else:
                raise OfflineError("a plugin waits for an answer from outside, which a replay cannot give")

    def _resume(self, now: float, what: tuple[int, Request, Coroutine[Any, Any, Decision]]) -> None:
        self._step(*what)

    def _freed(self, waited: Waited) -> None:
        """Resumes a request that leaves the queue."""
        self._at(self._fleet.now(), self._resume, self._waits.pop(waited))

    def _look(self, now: float, what: None) -> None:
        assert self._queue is not None
        self._queue.look()
        self._looking = self._queue.waiting > 0
        if self._looking:
            self._at(now + LOOK_S, self._look, None)

    def _refuse(self, number: int, refused: Refused, now: float) -> None:
        run = self._run
        run.waited_s[number] = now - run.at[number]
        cause = refused.cause.name.lower()
        run.refused[cause] = run.refused.get(cause, 0) + 1
        self._arrivals.ended(number, now)

    def _send(self, number: int, request: Request, decision: Decision, now: float) -> None:
        run, fleet = self._run, self._fleet
        request.prompt = EMPTY_PROMPT
        request.sent_at = now
        slot = decision.targets[0].slot
        run.waited_s[number] = now - run.at[number]
        fleet.inflight[slot] += 1
        if decision.ticket is not None:
            decision.ticket.placed()
        self._open[number] = _Open(number, request, decision, slot)
        run.target[number] = slot
        if not fleet.up[slot]:
            self._fail(number, now)
            return
        self._advance(slot, now)
        prompts = self._world.prompts
        job = job_of(self._requests[number], number, prompts.runs[number])
        job.known, job.beyond = prompts.known[number], prompts.beyond[number]
        run.prompt[number], run.output[number] = job.prompt, job.output
        fleet.servers[slot].submit(job, now)
        self._wake(slot)

    # Servers.

    def _tick(self, now: float, slot: int) -> None:
        if self._due[slot] == now:  # otherwise the timer was set again
            self._due[slot] = math.inf
            self._advance(slot, now)
            self._wake(slot)

    def _wake(self, slot: int) -> None:
        due = self._fleet.servers[slot].due
        if due != self._due[slot]:
            self._due[slot] = due
            if due < math.inf:
                self._at(due, self._tick, slot)

    def _advance(self, slot: int, now: float) -> None:
        for at, job, is_first in self._fleet.servers[slot].advance(now):
            if is_first:
                self._first(job, at)
            else:
                self._end(job, at)

    def _first(self, job: Job, at: float) -> None:
        self._run.cached[job.number] = job.cached
        if self._requests[job.number].streaming:
            self._answer(job.number, at)

    def _answer(self, number: int, at: float) -> None:
        """Passes on the first piece of an answer."""
        run, opened = self._run, self._open[number]
        run.first_s[number] = max(at - run.at[number] + self._world.speeds[opened.slot].rest_of(number), FIRST_MIN_S)
        streaming = self._requests[number].streaming
        response = opened.response = Response(200, EVENT_STREAM if streaming else JSON, streaming=streaming)
        request, decision = opened.request, opened.decision
        request.now = at
        for received in self._pipeline.response_received:
            received(request, decision, response)
        for begun in self._pipeline.response_streaming:
            begun(request, decision)

    def _end(self, job: Job, at: float) -> None:
        if not self._requests[job.number].streaming:
            self._answer(job.number, at)
        opened = self._open[job.number]
        response = opened.response
        assert response is not None
        response.usage = Usage(job.prompt, job.output)
        response.whole = True
        self._complete(opened, response, at)

    def _fail(self, number: int, now: float) -> None:
        opened = self._open[number]
        self._run.target[number] = FAILED
        self._run.first_s[number] = math.nan
        self._complete(opened, opened.response or Response(BAD_GATEWAY), now)

    def _complete(self, opened: _Open, response: Response, now: float) -> None:
        number, request, decision = opened.number, opened.request, opened.decision
        del self._open[number]
        self._run.lasted_s[number] = now - self._run.at[number]
        self._fleet.inflight[opened.slot] -= 1
        request.now = now
        for complete in self._pipeline.response_complete:
            complete(request, decision, response)
        if decision.ticket is not None:
            decision.ticket.done()
        self._arrivals.ended(number, now)

    # Endpoints that join, leave, go down and come back.

    def _plan_members(self) -> None:
        world = self._world
        start = world.requests[0].at
        for slot, each in enumerate(world.endpoints):
            for time in (each.joined_at, each.left_at):
                if start < time < math.inf:
                    self._at((time - start) / world.rate, self._list, None)
            for since, until in each.down:
                self._at(max(since - start, 0.0) / world.rate, self._die, slot)
                if until < math.inf:
                    self._at(max(until - start, 0.0) / world.rate, self._revive, slot)
        self._list(0.0, None)

    def _list(self, now: float, what: None) -> None:
        world = self._world
        time = world.requests[0].at + now * world.rate
        here = [
            slot
            for slot, each in enumerate(world.endpoints)
            if each.joined_at <= max(time, world.requests[0].at) + 1e-9 and time + 1e-9 < each.left_at
        ]
        self._fleet.list(here)

    def _die(self, now: float, slot: int) -> None:
        self._advance(slot, now)
        self._fleet.die(slot)
        self._due[slot] = math.inf
        for number in [number for number, opened in self._open.items() if opened.slot == slot]:
            self._fail(number, now)

    def _revive(self, now: float, slot: int) -> None:
        self._fleet.revive(slot)


def request_of(asked: Asked, number: int, now: float) -> Request:
    """Returns the request as the parser leaves it."""
    request = Request(
        id=str(number),
        path="/v1/completions",
        headers=headers_of(asked),
        now=now,
        model=asked.model,
        body_bytes=asked.body_bytes,
        fairness_id=f"{asked.flow:016x}" if asked.flow else DEFAULT_FLOW,
        priority=asked.priority,
        ttl_s=asked.ttl_s,
    )
    request.prompt = Prompt(lambda: prompt_text(asked, number))
    request.streaming, request.max_tokens = asked.streaming, asked.max_tokens
    if asked.target_model:
        request.target_model = asked.target_model
    return request


def headers_of(asked: Asked) -> Mapping[str, str]:
    """Returns the headers that plugins of the recorded configuration read, each with the hash of its value."""
    if not any(asked.facts):
        return {}
    return {name: f"{fact:016x}" for name, fact in zip(asked.headers, asked.facts, strict=False) if fact}


def prompt_text(asked: Asked, number: int) -> bytes:
    """Returns a text whose blocks are equal to those of another request exactly where the recorded hashes are equal."""
    block = asked.block_tokens * BYTES_PER_TOKEN
    blocks = np.frombuffer(asked.hashes, "<u8").repeat(block // 8).tobytes()
    size = max(asked.prompt_tokens * BYTES_PER_TOKEN, 1)
    rest = size - len(blocks)
    if rest <= 0:
        return blocks[:size]
    return blocks + ((b"%016d" % number) * (rest // 16 + 1))[:rest]
