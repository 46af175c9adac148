"""A model of a server with chunked prefill: a step computes at most `step_tokens` tokens, decodes first, then chunks of prompts.

Each request that decodes takes one token of this budget. The rest goes to prompts, first come, first served: the oldest prompt takes
all that it needs, and the next ones what is left. A step lasts

    decode_s * (1 + decode_growth * (running - 1)) + prefill_s_per_token * prompt tokens in the step

so a long prompt slows the decodes down but never stops them. A request enters the batch in the first step that has tokens left for its
prompt, if the batch has room and enough KV blocks are free. Its hits are determined at this moment, and include blocks that earlier
requests of the same step compute. The first token comes with the last chunk of the prompt.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.engine import Job, JobState
from loadtest.sim.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class ChunkedSettings:
    """Size and speed of one server."""

    max_running: int = 256
    kv_blocks: int = 20_000
    block_size: int = 16
    step_tokens: int = 2_048
    prefill_s_per_token: float = 100e-6
    decode_s: float = 0.020
    decode_growth: float = 0.005


class ChunkedServer:
    """The `ServerModel` with chunked prefill. Passes steps without prompt tokens in one go, up to the next end of a request."""

    def __init__(self, settings: ChunkedSettings) -> None:
        self.settings = settings
        self.pool = KvPool(settings.kv_blocks)
        self._waiting: dict[Job, None] = {}
        self._prefilling: dict[Job, int] = {}  # request -> prompt tokens left for steps after the current one
        self._ending: list[Job] = []  # requests whose prompt the current step completes
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the number of the step that ends the request
        self._step = 0
        self._order = 0
        self._step_ends_at: float | None = None
        self._lasts = 0.0
        self._computes = False  # whether the current step computes prompt tokens

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._ending) + len(self._decoding)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job, now: float) -> None:
        job.arrived_at = now
        job.blocks_needed = self._blocks_of(job)
        assert job.blocks_needed <= self.settings.kv_blocks, "the request needs more blocks than the server has"
        self._waiting[job] = None
        if self._step_ends_at is None:
            self._begin(now)

    def cancel(self, job: Job, now: float) -> None:
        if job.state is JobState.WAITING:
            del self._waiting[job]
        elif job.state is JobState.RUNNING:
            self._prefilling.pop(job, None)
            self._ending = [other for other in self._ending if other is not job]
            self._decoding = [entry for entry in self._decoding if entry[2] is not job]
            heapq.heapify(self._decoding)
            self.pool.release(job.hashes, job.blocks_needed)
        else:
            return
        job.state = JobState.CANCELLED
        job.ended_at = now
        if not self.running and not self._waiting:
            self._step_ends_at = None

    def next_due(self) -> float | None:
        ends = self._step_ends_at
        return None if ends is None else ends + self._quiet_steps() * self._lasts

    def advance(self, now: float) -> list[Job]:
        news: list[Job] = []
        while (ends := self._step_ends_at) is not None and ends <= now:
            quiet = min(self._quiet_steps(), int((now - ends) / self._lasts))
            at = ends + quiet * self._lasts
            self._step += quiet + 1
            self._end(at, news)
            self._begin(at)
        return news

    def mute(self, job: Job) -> None:
        """Does nothing, because a request has no news between its first token and its end."""

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        settings = self.settings
        tokens = sum(self._prefilling.values())
        prompts = [(job.hashes, job.prompt_tokens) for job in (*self._waiting, *sent)]
        uncached = self.pool.uncached(prompts, settings.block_size)
        tokens += sum(uncached)
        decoding = len(self._decoding) + len(self._ending)
        steps = -(-tokens // max(1, settings.step_tokens - decoding))
        rest = 0.0 if self._step_ends_at is None else self._step_rest(now)
        requests = self.running + len(self._waiting) + len(sent)
        decode_s = self._decode_step(requests)
        own_s = self._alone_s(uncached[-1], decode_s)
        return max(rest + steps * decode_s + tokens * settings.prefill_s_per_token, self._room_in(sent, rest, decode_s) + own_s)

    def beyond_half_s(self, now: float) -> float:
        return 0.0 if self._step_ends_at is None or self._computes else self._step_rest(now) - 0.5 * self._lasts

    def _alone_s(self, tokens: int, decode_s: float) -> float:
        """Returns how long `tokens` prompt tokens take in steps of their own."""
        return -(-tokens // self.settings.step_tokens) * decode_s + tokens * self.settings.prefill_s_per_token

    def _room_in(self, sent: Sequence[Job], rest: float, decode_s: float) -> float:
        """Returns in how many seconds the queue and `sent` have room in the KV cache."""
        wanted = [(job.hashes, self._blocks_of(job)) for job in (*self._waiting, *sent)]
        ends = [(rest + (step - self._step) * decode_s, job) for step, _, job in self._decoding]
        ends += [(rest + (job.max_tokens - 1) * decode_s, job) for job in self._ending]
        computed = self._alone_s(sum(self._prefilling.values()), decode_s)
        ends += [(rest + computed + (job.max_tokens - 1) * decode_s, job) for job in self._prefilling]
        return self.pool.room_in(wanted, ((seconds, (job.hashes, job.blocks_needed)) for seconds, job in ends))

    def _blocks_of(self, job: Job) -> int:
        """Returns how many blocks a request needs."""
        return max(-(-(job.prompt_tokens + job.max_tokens) // self.settings.block_size), len(job.hashes))

    def _step_rest(self, now: float) -> float:
        """Returns the seconds from `now` to the end of the step that is under way at `now`."""
        assert self._step_ends_at is not None
        rest = self._step_ends_at - now
        return rest if rest >= 0.0 else rest % self._lasts

    def _decode_step(self, requests: int) -> float:
        return self.settings.decode_s * (1 + self.settings.decode_growth * max(0, requests - 1))

    def _quiet_steps(self) -> int:
        """Returns how many steps, from the current one on, end without news."""
        if self._computes or self._prefilling or not self._decoding or self._may_enter():
            return 0
        return max(0, self._decoding[0][0] - self._step - 1)

    def _may_enter(self) -> bool:
        return bool(self._waiting) and self.running < self.settings.max_running

    def _begin(self, at: float) -> None:
        """Plans the step that begins at `at`, and sets its end. Without requests, the server becomes idle."""
        settings = self.settings
        budget = settings.step_tokens - len(self._decoding)
        computed = 0
        while budget > computed and (job := self._next(at)) is not None:
            left = self._prefilling[job]
            chunk = min(left, budget - computed)
            computed += chunk
            if chunk < left:
                self._prefilling[job] = left - chunk
            else:
                del self._prefilling[job]
                self._ending.append(job)
        self._computes = computed > 0
        if not self.running:
            assert not self._waiting, "an empty server has room for every queued request"
            self._step_ends_at = None
            return
        self._lasts = self._decode_step(self.running) + computed * settings.prefill_s_per_token
        self._step_ends_at = at + self._lasts

    def _next(self, at: float) -> Job | None:
        """Returns the oldest request with prompt tokens to compute; if there is none, lets the head of the queue in."""
        if self._prefilling:
            return next(iter(self._prefilling))
        if not self._may_enter():
            return None
        job = next(iter(self._waiting))
        size = self.settings.block_size
        hits = self.pool.allocate(job.hashes, job.blocks_needed, (job.prompt_tokens - 1) // size)
        if hits is None:
            return None
        del self._waiting[job]
        job.cached_tokens = hits * size
        job.state = JobState.RUNNING
        job.admitted_at = at
        self._prefilling[job] = job.prompt_tokens - job.cached_tokens
        return job

    def _end(self, at: float, news: list[Job]) -> None:
        """Ends the step with the number `_step`: requests with a completed prompt get their first token, and requests that are done leave.

        Adds both to `news`.
        """
        for job in self._ending:
            job.first_token_at = at
            job.generated = 1
            self._order += 1
            heapq.heappush(self._decoding, (self._step + max(0, job.max_tokens - 1), self._order, job))
            if job.max_tokens > 1:
                news.append(job)
        self._ending.clear()
        while self._decoding and self._decoding[0][0] <= self._step:
            _, _, job = heapq.heappop(self._decoding)
            job.generated = job.max_tokens
            job.state = JobState.FINISHED
            job.ended_at = at
            self.pool.release(job.hashes, job.blocks_needed)
            news.append(job)
