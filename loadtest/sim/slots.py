"""A model of a server with a fixed number of slots: each request in a slot prefills and decodes at a constant speed.

    queue ──▶ slot: wait for shared blocks ─▶ overhead_s + prefill_s_per_token * uncached tokens ─▶ decode_s per further token ──▶ end

Requests do not slow each other down. A request keeps its slot to its end. Without a free slot, or without enough free KV blocks, the
head of the queue waits and no request overtakes it. Blocks that another request is computing are hits, too: the prefill then begins when
these blocks are ready. The first token comes at the end of the prefill.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

from loadtest.sim.engine import Engine, EngineSettings, Job
from loadtest.sim.kv_pool import Change

UNBOUNDED = 1 << 40


class SlotServer(Engine):
    """An `Engine` that does not work in steps. It has `max_running` slots, and ignores `decode_growth` and the time to load adapters."""

    def __init__(self, settings: EngineSettings, changed: Callable[[Job, Sequence[Change]], None] | None = None) -> None:
        super().__init__(replace(settings, step_tokens=UNBOUNDED), changed)
        self._first: dict[Job, float] = {}  # running request -> time of its first token
        self._news: list[tuple[float, int, Job]] = []  # heap of the next token of each running request, or of its end
        self._order = 0
        self._ready: dict[int, float] = {}  # block that is being computed -> when it is ready

    def cancel(self, job: Job, now: float) -> None:
        super().cancel(job, now)
        if self._first.pop(job, None) is not None:
            self._unlist(job)
        self._blocked = False
        self._begin_step(now)

    def next_due(self) -> float | None:
        return self._news[0][0] if self._news else None

    def advance(self, now: float) -> list[Job]:
        news = []
        while self._news and self._news[0][0] <= now:
            at, _, job = heapq.heappop(self._news)
            self._take_tokens(job)
            news.append(job)
            if job.remaining:
                self._tell(job)
            else:
                del self._first[job]
                self._leave(job)
                self._finish(job, at)
                self._begin_step(at)
        return news

    def mute(self, job: Job) -> None:
        super().mute(job)
        if job in self._first:
            self._unlist(job)
            self._tell(job)

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        """Predicts the first token of the last request of `sent` (see `ServerModel`). The limit of adapters is ignored."""
        settings = self.settings
        free = sorted(map(self._end_of, self._first)) + [now] * (settings.max_running - len(self._first))
        heapq.heapify(free)
        coming: dict[int, float] = {}
        first = now
        room = self._room_in(sent, ((self._end_of(job) - now, job) for job in self._first))
        for job in [*self._waiting, *sent]:
            hits = min(self.pool.hits(job.hashes, coming), (job.prompt_tokens - 1) // settings.block_size)
            start = now + room if job is sent[-1] else now
            first = self._computed_at(job, hits, max(start, heapq.heappop(free)), coming)
            heapq.heappush(free, first + (max(1, job.max_tokens) - 1) * settings.decode_s)
        return first - now

    def beyond_half_s(self, now: float) -> float:
        """Returns 0, because there are no steps."""
        return 0.0

    def _computed_at(self, job: Job, hits: int, start: float, coming: dict[int, float]) -> float:
        """Returns when the request has its first token with `hits` hits and a slot at `start`.

        `coming`: block -> when it is ready, for blocks that requests before this one compute; this request's blocks are added.
        """
        settings = self.settings
        if hits:
            last = job.hashes[hits - 1]
            start = max(start, coming.get(last, self._ready.get(last, start)))
        each = settings.transfer_s_per_token if job.transferred else settings.prefill_s_per_token
        first = start + settings.overhead_s + (job.prompt_tokens - hits * settings.block_size) * each
        coming.update(dict.fromkeys(job.hashes[hits:], first))
        return first

    def _begin_step(self, at: float) -> None:
        """Gives free slots to the first requests of the queue, at the time `at`."""
        self._admitted = []
        if self._waiting and not self._blocked:
            self._admit(at)

    def _enter(self, job: Job, at: float) -> None:
        super()._enter(job, at)
        loaded = self.pool.loaded * self.settings.block_size * self.settings.transfer_s_per_token
        self._first[job] = self._computed_at(job, job.cached_tokens // self.settings.block_size, at + loaded, self._ready)
        self._tell(job)

    def _take_tokens(self, job: Job) -> None:
        """Gives a request its next token, or all tokens if it does not stream."""
        seen, first = self.seen, self._first[job]
        if not job.generated:
            job.first_token_at = first
            seen.prompt_tokens += job.prompt_tokens
            seen.ttft.observe(first - job.arrived_at)
            for block in [block for block in job.hashes if self._ready.get(block) == first]:
                del self._ready[block]
        tokens = 1 if job.streams else job.remaining
        job.remaining -= tokens
        job.generated += min(tokens, job.max_tokens)
        if not job.remaining and job.generated > 1:
            seen.inter_token.observe(self.settings.decode_s, job.generated - 1)

    def _tell(self, job: Job) -> None:
        """Adds the next news of a running request to the list."""
        at = self._first[job] + job.generated * self.settings.decode_s if job.streams else self._end_of(job)
        self._order += 1
        heapq.heappush(self._news, (at, self._order, job))

    def _unlist(self, job: Job) -> None:
        self._news = [entry for entry in self._news if entry[2] is not job]
        heapq.heapify(self._news)

    def _end_of(self, job: Job) -> float:
        return self._first[job] + (max(1, job.max_tokens) - 1) * self.settings.decode_s
