"""A model of a server with a fixed number of slots: each request in a slot prefills and decodes at a constant speed.

    queue ──▶ slot: wait for shared blocks ─▶ overhead_s + prefill_s_per_token * uncached tokens ─▶ decode_s per further token ──▶ end

Requests do not slow each other down. A request keeps its slot to its end. Without a free slot, or without enough free KV blocks, the
head of the queue waits and no request overtakes it. Blocks that another request is computing are hits, too: the prefill then begins when
these blocks are ready. The first token comes at the end of the prefill.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.sim.engine import Job, JobState
from loadtest.sim.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class SlotSettings:
    """Size and speed of one server."""

    slots: int = 8
    kv_blocks: int = 20_000
    block_size: int = 16
    overhead_s: float = 0.020
    prefill_s_per_token: float = 100e-6
    decode_s: float = 0.005


class SlotServer:
    """The `ServerModel` with slots."""

    def __init__(self, settings: SlotSettings) -> None:
        self.settings = settings
        self.pool = KvPool(settings.kv_blocks)
        self._waiting: dict[Job, None] = {}
        self._running: dict[Job, float] = {}  # request -> time of its end
        self._news: list[tuple[float, int, Job]] = []  # heap of first tokens and ends
        self._order = 0
        self._ready: dict[int, float] = {}  # block that is being computed -> when it is ready

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, job: Job, now: float) -> None:
        job.arrived_at = now
        tokens = job.prompt_tokens + job.max_tokens
        job.blocks_needed = max(-(-tokens // self.settings.block_size), len(job.hashes))
        assert job.blocks_needed <= self.settings.kv_blocks, "the request needs more blocks than the server has"
        self._waiting[job] = None
        self._start(now)

    def cancel(self, job: Job, now: float) -> None:
        if job.state is JobState.WAITING:
            del self._waiting[job]
        elif job.state is JobState.RUNNING:
            self._leave(job)
        else:
            return
        job.state = JobState.CANCELLED
        job.ended_at = now
        self._news = [entry for entry in self._news if entry[2] is not job]
        heapq.heapify(self._news)
        self._start(now)

    def next_due(self) -> float | None:
        return self._news[0][0] if self._news else None

    def advance(self, now: float) -> list[Job]:
        news = []
        while self._news and self._news[0][0] <= now:
            at, _, job = heapq.heappop(self._news)
            if not job.generated:
                job.first_token_at = at
                job.generated = 1
                for block in job.hashes:
                    if self._ready.get(block) == at:
                        del self._ready[block]
            else:
                job.generated = job.max_tokens
            news.append(job)
            if job.generated >= job.max_tokens:
                self._leave(job)
                job.state = JobState.FINISHED
                job.ended_at = at
                self._start(at)
        return news

    def mute(self, job: Job) -> None:
        """Does nothing: a request has no news between its first token and its end."""

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        settings = self.settings
        free = sorted(self._running.values()) + [now] * (settings.slots - len(self._running))
        heapq.heapify(free)
        coming: dict[int, float] = {}
        first = now
        for job in [*self._waiting, *sent]:
            first = self._first_token(job, max(now, heapq.heappop(free)), coming)
            heapq.heappush(free, first + (job.max_tokens - 1) * settings.decode_s)
        return first - now

    def _first_token(self, job: Job, start: float, coming: dict[int, float]) -> float:
        """Returns when the request has its first token if it gets a slot at `start`.

        `coming`: block -> when it is ready, for blocks that requests before this one compute; this request's blocks are added.
        """
        settings = self.settings
        hits = min(self.pool.hits(job.hashes, coming), (job.prompt_tokens - 1) // settings.block_size)
        if hits:
            last = job.hashes[hits - 1]
            start = max(start, coming.get(last, self._ready.get(last, start)))
        uncached = job.prompt_tokens - hits * settings.block_size
        first = start + settings.overhead_s + uncached * settings.prefill_s_per_token
        coming.update(dict.fromkeys(job.hashes[hits:], first))
        return first

    def _start(self, at: float) -> None:
        """Gives free slots to the first requests of the queue, at the time `at`."""
        while self._waiting and len(self._running) < self.settings.slots:
            job = next(iter(self._waiting))
            computed: dict[int, float] = {}
            first = self._first_token(job, at, computed)
            hits_max = (job.prompt_tokens - 1) // self.settings.block_size
            hits = self.pool.allocate(job.hashes, job.blocks_needed, hits_max)
            if hits is None:
                return
            del self._waiting[job]
            self._ready.update(computed)
            job.cached_tokens = hits * self.settings.block_size
            job.state = JobState.RUNNING
            job.admitted_at = at
            end = first + (job.max_tokens - 1) * self.settings.decode_s
            self._running[job] = end
            self._tell(first, job)
            if job.max_tokens > 1:
                self._tell(end, job)

    def _tell(self, at: float, job: Job) -> None:
        self._order += 1
        heapq.heappush(self._news, (at, self._order, job))

    def _leave(self, job: Job) -> None:
        del self._running[job]
        self.pool.release(job.hashes, job.blocks_needed)
