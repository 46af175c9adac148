"""A model of a vLLM-like engine, without I/O: requests and times go in, tokens come out.

The engine works in steps. A step admits waiting requests, computes their uncached prompt tokens,
and gives every running request one token. A step lasts

    decode_s * (1 + decode_growth * (running - 1))
    + prefill_s_per_token * uncached tokens + lora_load_s * adapters loaded

so a long prompt delays every request, and the time to first token grows under load. A prompt is
computed whole in one step. A step admits more prompts until it has `step_tokens` prompt tokens.

Admission is first come, first served: the head of the queue waits until enough KV blocks are free,
and no request overtakes it. One exception: if a request needs a LoRA adapter and no slot is free for
the adapter, later requests overtake it. From its admission to its end, a request holds the blocks of
its prompt and of all tokens that it may generate, so the engine never preempts.

The owner calls `advance(now)` at `next_due()`, and right before each `submit` and `cancel`, so that
`submit` and `cancel` see the engine's state at `now`. `advance` computes steps lazily: while no
request streams and no request can be admitted, it passes many steps in one go. The engine reads no
clock, draws no random numbers and does not know HTTP. Equal calls give equal results.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from loadtest.sim.kv_pool import Change, KvPool
from loadtest.sim.observations import Observations


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Size and speed of one server. Times are in seconds of engine time, which runs `time_scale` times as fast as the clock."""

    max_running: int = 256
    kv_blocks: int = 20_000
    block_size: int = 16
    overhead_s: float = 0.020  # overhead of a prompt if the engine has slots (`loadtest.sim.slots`)
    prefill_s_per_token: float = 50e-6
    transfer_s_per_token: float = 1e-6  # the time to load KV blocks that another server has computed
    decode_s: float = 0.020
    decode_growth: float = 0.005
    step_tokens: int = 8_192
    max_loras: int = 0
    lora_load_s: float = 0.050
    waiting_max: int = 10_000
    cpu_blocks: int = 0  # size of the CPU tier, which keeps evicted blocks; 0: there is none


class JobState(Enum):
    """The state of a request. The last two states are final."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"


class Refusal(Exception):
    """The engine refuses a request. The message names the limit."""


class TooLong(Refusal):
    """The request needs more blocks than the KV cache has."""


class QueueFull(Refusal):
    """The waiting queue is at its limit."""


class NoLoraSlots(Refusal):
    """The request names an adapter, but the engine has no adapter slots."""


class Job:
    """One request inside an engine. The engine changes it, and the owner of the engine reads it."""

    __slots__ = (
        "admitted_at", "arrived_at", "blocks_needed", "cached_tokens", "ended_at",
        "first_token_at", "generated", "hashes", "lora", "max_tokens", "prompt", "prompt_tokens",
        "remaining", "salt", "state", "streams", "transferred",
    )  # fmt: skip

    def __init__(
        self,
        hashes: Sequence[int],
        prompt_tokens: int,
        max_tokens: int,
        *,
        streams: bool = False,
        lora: str | None = None,
        prompt: bytes = b"",
        salt: str = "",
    ) -> None:
        """`hashes`: one per whole block of the prompt. `prompt`, `salt`: the content of the hashes, for engines that publish KV events."""
        self.hashes = hashes
        self.prompt = prompt
        self.salt = salt
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.streams = streams
        self.lora = lora
        self.transferred = False  # the owner sets it before `submit` if another server has computed the prompt
        self.state = JobState.WAITING
        self.remaining = max(1, max_tokens)  # steps until the end; an embedding takes one and generates no token
        self.generated = 0
        self.cached_tokens = 0
        self.blocks_needed = 0
        self.arrived_at = self.admitted_at = self.first_token_at = self.ended_at = 0.0


class LoraSlots:
    """Holds adapters in GPU memory.

    A slot can take another adapter only while no running request uses the slot. Among such slots, the one whose adapter was requested
    longest ago is taken.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._loaded: OrderedDict[str, int] = OrderedDict()

    @property
    def loaded(self) -> tuple[str, ...]:
        """Returns the adapters in memory. The adapter whose last request started longest ago comes first."""
        return tuple(self._loaded)

    @property
    def running(self) -> tuple[str, ...]:
        """Returns the adapters that running requests use."""
        return tuple(name for name, users in self._loaded.items() if users)

    def fits(self, name: str) -> bool:
        """Returns whether `acquire` would find a slot."""
        loaded = self._loaded
        return name in loaded or len(loaded) < self.slots or 0 in loaded.values()

    def acquire(self, name: str) -> bool:
        """Takes a slot for the adapter `name`, which must fit. Returns True if the adapter had to be loaded."""
        loaded = self._loaded
        missing = name not in loaded
        if missing:
            if len(loaded) >= self.slots:
                del loaded[next(other for other, users in loaded.items() if not users)]
            loaded[name] = 0
        loaded[name] += 1
        loaded.move_to_end(name)
        return missing

    def release(self, name: str) -> None:
        """Ends one running request's use of the adapter `name`."""
        self._loaded[name] -= 1


class Engine:
    """Simulates the queue, the batch and the KV blocks of one server."""

    def __init__(self, settings: EngineSettings, changed: Callable[[Job, Sequence[Change]], None] | None = None) -> None:
        """`changed`: called with a request that changes which blocks the KV cache holds, and with these changes; None for no call."""
        self.settings = settings
        self.pool = KvPool(settings.kv_blocks, settings.cpu_blocks, logs=changed is not None)
        self._changed = changed
        self.loras = LoraSlots(settings.max_loras)
        self.seen = Observations()
        self._waiting: dict[Job, None] = {}
        self._running: dict[Job, None] = {}
        self._streaming = 0
        self._admitted: list[Job] = []
        self._step_ends_at: float | None = None
        self._step_lasts = 0.0
        # True if no waiting request can be admitted before a request ends or arrives.
        self._blocked = False

    @property
    def running(self) -> int:
        """Returns the number of requests in the batch."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Returns the number of requests in the queue."""
        return len(self._waiting)

    def waiting_loras(self) -> tuple[str, ...]:
        """Returns the adapters that waiting requests ask for, in the order of the queue."""
        return tuple(dict.fromkeys(job.lora for job in self._waiting if job.lora is not None))

    def submit(self, job: Job, now: float) -> None:
        """Queues a new request, or raises Refusal and keeps nothing of the request."""
        assert self._is_at(now), "call advance(now) first"
        settings = self.settings
        needed = self._blocks_of(job)
        if needed > settings.kv_blocks:
            room = settings.kv_blocks * settings.block_size
            raise TooLong(
                f"This model's maximum context length is {room} tokens, the request asks for "
                f"{job.prompt_tokens} in the prompt and {job.max_tokens} in the completion. "
                "Please reduce the length of the prompt or max_tokens."
            )
        if job.lora is not None and not settings.max_loras:
            raise NoLoraSlots(f"adapter {job.lora!r} needs a slot but max_loras is 0")
        if len(self._waiting) >= settings.waiting_max:
            raise QueueFull(f"{settings.waiting_max} requests are waiting, the limit")
        job.blocks_needed = needed
        job.arrived_at = now
        self._waiting[job] = None
        self._blocked = False
        if self._step_ends_at is None:
            self._begin_step(now)

    def cancel(self, job: Job, now: float) -> None:
        """Ends a request early and frees its blocks at once. Does nothing if the request has ended."""
        assert self._is_at(now), "call advance(now) first"
        if job.state is JobState.WAITING:
            del self._waiting[job]
        elif job.state is JobState.RUNNING:
            self._leave(job)
        else:
            return
        job.state = JobState.CANCELLED
        job.ended_at = now
        self.seen.aborted += 1
        if not self._running and not self._waiting:
            self._step_ends_at = None

    def next_due(self) -> float | None:
        """Returns the time at which `advance` will have results; None while the engine is idle."""
        if self._step_ends_at is None:
            return None
        return self._step_ends_at + (self._quiet_steps() - 1) * self._decode_step()

    def advance(self, now: float) -> list[Job]:
        """Runs all steps that end by `now`. Returns the requests that have a new token or have ended, in order.

        A streaming request appears once per token. Any other request appears once, when it ends.
        """
        news: list[Job] = []
        while self._step_ends_at is not None and self._step_ends_at <= now:
            at = self._step_ends_at
            self._end_step(at, news)
            self._begin_step(at)
            if not self._admitted and self._step_ends_at is not None:
                self._skip(at, now)
        return news

    def mute(self, job: Job) -> None:
        """Makes `advance` return a streaming request only once more, when it ends."""
        if job.streams:
            job.streams = False
            self._streaming -= job.state is JobState.RUNNING

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        """Predicts the first token of the last request of `sent`, if these requests, and no others, arrive now in this order.

        Returns the seconds from `now`. Assumes as many steps as `step_tokens` requires; ignores the limits of batch and adapters.
        """
        settings = self.settings
        tokens = in_step = uncached = 0
        steps = 1
        prompts = [(job.hashes, job.prompt_tokens) for job in (*self._waiting, *sent)]
        ends = self._step_ends_at
        for uncached in self.pool.uncached(prompts, settings.block_size):
            if in_step >= settings.step_tokens or (in_step and in_step == tokens and ends is None):
                steps, in_step = steps + 1, 0  # an idle engine begins at once, with the first request alone
            tokens += uncached
            in_step += uncached
        rest = 0.0 if ends is None else self._step_rest(now)
        decode_s = self._decode_step()
        room = self._room_in(sent, ((rest + (job.remaining - 1) * decode_s, job) for job in self._running))
        token_s = settings.prefill_s_per_token
        return max(rest + tokens * token_s + steps * decode_s, room + uncached * token_s + decode_s)

    def beyond_half_s(self, now: float) -> float:
        """Returns how many seconds more than half are left of the step, if it computes no prompt (see `ServerModel`)."""
        return 0.0 if self._step_ends_at is None or self._admitted else self._step_rest(now) - 0.5 * self._step_lasts

    def _step_rest(self, now: float) -> float:
        """Returns the seconds from `now` to the end of the step that is under way at `now`."""
        assert self._step_ends_at is not None
        rest = self._step_ends_at - now
        return rest if rest >= 0.0 else rest % self._step_lasts

    def _room_in(self, sent: Sequence[Job], ends: Iterable[tuple[float, Job]]) -> float:
        """Returns in how many seconds the queue and `sent` have room in the KV cache, if running requests end so."""
        wanted = [(job.hashes, self._blocks_of(job)) for job in (*self._waiting, *sent)]
        return self.pool.room_in(wanted, ((seconds, (job.hashes, job.blocks_needed)) for seconds, job in ends))

    def _blocks_of(self, job: Job) -> int:
        """Returns how many blocks a request needs."""
        return max(-(-(job.prompt_tokens + job.max_tokens) // self.settings.block_size), len(job.hashes))

    def _is_at(self, now: float) -> bool:
        return self._step_ends_at is None or self._step_ends_at > now

    def _decode_step(self) -> float:
        settings = self.settings
        return settings.decode_s * (1 + settings.decode_growth * max(0, len(self._running) - 1))

    def _quiet_steps(self) -> int:
        """Returns the number of steps, including the current one, up to the next step that has results for the owner."""
        if self._streaming or not self._running or (self._waiting and not self._blocked):
            return 1
        return min(job.remaining for job in self._running)

    def _begin_step(self, at: float) -> None:
        """Begins a step at time `at`: admits requests that fit, and sets the end of the step. Without requests, the engine becomes idle."""
        self._admitted = []
        extra = self._admit(at) if self._waiting and not self._blocked else 0.0
        if not self._running:
            assert not self._waiting, "an empty engine has room for every queued request"
            self._step_ends_at = None
            return
        self._step_lasts = self._decode_step() + extra
        self._step_ends_at = at + self._step_lasts

    def _admit(self, at: float) -> float:
        """Moves waiting requests into the batch. Returns how many seconds longer the step lasts because of these requests."""
        settings = self.settings
        computed = moved = loads = 0
        for job in self._waiting:
            if len(self._running) >= settings.max_running:
                self._blocked = True
                break
            if computed >= settings.step_tokens:
                self._blocked = False
                break
            if job.lora is not None and not self.loras.fits(job.lora):
                self._blocked = True
                continue
            hits_max = (job.prompt_tokens - 1) // settings.block_size
            hits = self.pool.allocate(job.hashes, job.blocks_needed, hits_max)
            if hits is None:
                self._blocked = True
                break
            if job.lora is not None:
                loads += self.loras.acquire(job.lora)
            job.cached_tokens = hits * settings.block_size
            if job.transferred:
                moved += job.prompt_tokens - job.cached_tokens
            else:
                computed += job.prompt_tokens - job.cached_tokens
                moved += self.pool.loaded * settings.block_size
            if self._changed is not None and self.pool.log:
                self._changed(job, self.pool.log)
                self.pool.log.clear()
            self._enter(job, at)
        for job in self._admitted:
            del self._waiting[job]
        if self._admitted:
            self.seen.step_tokens.observe(computed + len(self._running) - len(self._admitted))
        compute = computed * settings.prefill_s_per_token + moved * settings.transfer_s_per_token
        return compute + loads * settings.lora_load_s

    def _enter(self, job: Job, at: float) -> None:
        job.state = JobState.RUNNING
        job.admitted_at = at
        self._admitted.append(job)
        self._running[job] = None
        self._streaming += job.streams
        self.seen.prefix_queries += job.prompt_tokens
        self.seen.prefix_hits += job.cached_tokens
        if job.transferred:
            self.seen.transferred += job.prompt_tokens - job.cached_tokens
        self.seen.queued.observe(at - job.arrived_at)

    def _leave(self, job: Job) -> None:
        del self._running[job]
        self._streaming -= job.streams
        self.pool.release(job.hashes, job.blocks_needed)
        if job.lora is not None:
            self.loras.release(job.lora)
        self._blocked = False

    def _end_step(self, at: float, news: list[Job]) -> None:
        """Gives every running request its token, and removes finished requests. Adds requests with results to `news`."""
        for job in self._admitted:
            if job.state is JobState.RUNNING:
                job.first_token_at = at
                self.seen.prompt_tokens += job.prompt_tokens
                self.seen.ttft.observe(at - job.arrived_at)
        self._count_tokens(1, len(self._running))
        ended = []
        for job in self._running:
            job.remaining -= 1
            job.generated += job.max_tokens > 0
            if not job.remaining:
                ended.append(job)
            if job.streams or not job.remaining:
                news.append(job)
        for job in ended:
            self._leave(job)
            self._finish(job, at)

    def _count_tokens(self, steps: int, running: int) -> None:
        started = sum(job.state is JobState.RUNNING for job in self._admitted)
        if running > started:
            self.seen.inter_token.observe(self._step_lasts, steps * (running - started))
        if not self._admitted and running:
            self.seen.step_tokens.observe(running, steps)

    def _skip(self, at: float, now: float) -> None:
        """Passes in one go the steps that end by `now` and have no results for the owner. `at`: the time at which the first one began."""
        lasts = self._step_lasts
        steps = self._quiet_steps() - 1
        if lasts > 0:
            steps = min(steps, int((now - at) / lasts))
        if steps <= 0:
            return
        self._count_tokens(steps, len(self._running))
        for job in self._running:
            job.remaining -= steps
            job.generated += steps
        self._step_ends_at = at + (steps + 1) * lasts

    def _finish(self, job: Job, at: float) -> None:
        job.state = JobState.FINISHED
        job.ended_at = at
        seen = self.seen
        seen.served += 1
        seen.generation_tokens += job.generated
        seen.end_to_end.observe(at - job.arrived_at)
        seen.prefill.observe(job.first_token_at - job.admitted_at)
        seen.decode.observe(at - job.first_token_at)
        seen.request_prompt_tokens.observe(job.prompt_tokens)
        seen.request_generation_tokens.observe(job.generated)
        if job.generated > 1:
            per_token = (at - job.first_token_at) / (job.generated - 1)
            seen.per_output_token.observe(per_token)
