"""Models one model server with fitted speeds: prompts are computed one after the other, and answers are generated side by side.

    queue ──▶ slot: wait for the prompts before ─▶ prefill_s * uncached tokens ─▶ overhead_s ─▶ decode_s per further token ──▶ end

The overhead does not delay other prompts. Without a free slot, requests wait in order. The cache keeps the blocks that were used last.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

UNBOUNDED: Final = 1 << 40


class Speed(msgspec.Struct, frozen=True):
    """The fitted values of a server. Times in seconds, `prefill_s` and `decode_s` per token; `slots`: requests that run at once.

    `cache_tokens`: the size of the cache. `samples`: the requests from which the prefill speed was fitted.
    """

    overhead_s: float
    prefill_s: float
    decode_s: float
    slots: int
    cache_tokens: int
    samples: int


class Job(NamedTuple):
    """What a server computes. `blocks`: the chain of block hashes of the prompt."""

    number: int
    blocks: list[int]
    block_tokens: int
    prompt_tokens: int
    output_tokens: int


class Started(NamedTuple):
    """A request that has got a slot: when its first token comes, when it ends, and how many tokens of its prompt were cached."""

    job: Job
    first_at: float
    ended_at: float
    cached_tokens: int


class Server:
    """One server. The caller calls `submit` and `ended` in the order of time, and learns which requests start thereby."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.running = 0
        self._queue: deque[Job] = deque()
        self._prefill_free_at = 0.0
        self._held: OrderedDict[int, int] = OrderedDict()  # block -> tokens, the longest unused first
        self._held_tokens = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def usage(self) -> float:
        """The share of the cache that is filled."""
        return min(self._held_tokens / self.speed.cache_tokens, 1.0)

    def submit(self, job: Job, now: float) -> Iterator[Started]:
        """Takes a request. Yields the requests that start now."""
        self._queue.append(job)
        yield from self._start(now)

    def ended(self, now: float) -> Iterator[Started]:
        """Frees the slot of a request that has ended. Yields the requests that start now."""
        self.running -= 1
        yield from self._start(now)

    def _start(self, now: float) -> Iterator[Started]:
        speed = self.speed
        while self._queue and self.running < speed.slots:
            job = self._queue.popleft()
            cached = min(self._hits(job) * job.block_tokens, max(job.prompt_tokens - 1, 0))
            begun = max(now, self._prefill_free_at)
            self._prefill_free_at = begun + (job.prompt_tokens - cached) * speed.prefill_s
            first = self._prefill_free_at + speed.overhead_s
            self._keep(job)
            self.running += 1
            yield Started(job, first, first + max(job.output_tokens - 1, 0) * speed.decode_s, cached)

    def _hits(self, job: Job) -> int:
        for index, block in enumerate(job.blocks):
            if block not in self._held:
                return index
        return len(job.blocks)

    def _keep(self, job: Job) -> None:
        held = self._held
        for block in reversed(job.blocks):  # so that a prompt loses its end first
            if block not in held:
                self._held_tokens += job.block_tokens
            held[block] = job.block_tokens
            held.move_to_end(block)
        while self._held_tokens > self.speed.cache_tokens:
            self._held_tokens -= held.popitem(last=False)[1]
