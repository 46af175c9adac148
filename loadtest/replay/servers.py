"""Models of one model server with fitted values (`Speed`), in three forms. A recording decides which form fits best.

    steps    as vLLM: a step gives each running request a token and computes up to `step_tokens` tokens of waiting prompts, for all of which
             every request of the server waits. A step lasts decode_s * (1 + growth * (running - 1)) + prefill_s * prompt tokens
    serial   prompts are computed one after the other and delay no answers, as on servers that separate both
    slots    each request computes its own prompt and answer, independently of the others

Requests wait in order for a slot and for room in the cache. Each request reaches the server `overhead_s` after its arrival: the time of
gateway and network. The cache keeps the blocks that were used last. Models read no clock: the owner calls `advance(now)` at `due`, and
right before `submit` and `clear`.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, Literal, Protocol

import msgspec

from loadtest.replay.runs import Run

UNBOUNDED: Final = 1 << 40
SPREAD: Final = 2_654_435_761  # spreads numbers evenly over 32 bits (Knuth's multiplicative hash)
BLOCKS_MAX: Final = 1 << 18  # blocks in the cache of a server whose size is not known
NOTHING: Final = 0, 0.0  # what a cache holds of an unknown run: no blocks, and 0 tokens in each

Form = Literal["steps", "serial", "slots"]
FORMS: Final[tuple[Form, ...]] = ("steps", "serial", "slots")


class Speed(msgspec.Struct, frozen=True):
    """The fitted values of a server. Times are in seconds: `prefill_s` per token of a prompt, `decode_s` per token of an answer that runs
    alone.

    `growth`: by how much each further running request lengthens a step, as a share. `slots`: how many requests run at once. `cache_tokens`:
    the size of the cache. `samples`: the number of requests from which the speed was fitted; 0 if it is the speed of the other servers.
    `error`: the share by which the model misses a measured time to the first token; the median over these requests. `rest_s`: the part of
    these times that the model does not explain, as evenly spaced quantiles; a replay adds one of them to each time, always the same one for
    a request.
    """

    form: Form
    overhead_s: float
    prefill_s: float
    decode_s: float
    growth: float
    step_tokens: int
    slots: int
    cache_tokens: int
    samples: int
    error: float
    rest_s: tuple[float, ...] = (0.0,)

    def rest_of(self, number: int) -> float:
        """Returns the time that is added to the time to the first token of a request."""
        return self.rest_s[number * SPREAD % (1 << 32) * len(self.rest_s) >> 32]


class Job:
    """One request inside a server. `runs`: the blocks of its prompt. `cached`: tokens that need no computing; below 0 if the server's cache
    decides at the start. `known`, `beyond`: if the server holds exactly `known` blocks, it has `beyond` further tokens cached.
    """

    __slots__ = (
        "beyond", "block_tokens", "cached", "known", "left", "needs", "number", "output", "prompt", "ready_at", "runs"
    )  # fmt: skip

    def __init__(self, number: int, runs: Sequence[Run], block_tokens: float, prompt: int, output: int, cached: int = -1) -> None:
        """`block_tokens`: the tokens per block of the server."""
        self.number = number
        self.runs = runs
        self.block_tokens = block_tokens
        self.prompt = prompt
        self.output = max(output, 1)
        self.cached = cached
        self.known = self.beyond = 0
        self.ready_at = 0.0
        self.left = 0  # tokens of the prompt that are not computed yet
        # tokens of the cache; once it runs, only those that no other request can share
        self.needs = prompt + self.output

    def again(self) -> "Job":
        """Returns the same request for another server."""
        return Job(self.number, self.runs, self.block_tokens, self.prompt, self.output, self.cached)


News = tuple[float, Job, bool]  # when, which request, and whether it has got its first token; otherwise it has ended


class Server(Protocol):
    """One server. `due`: when `advance` will have news; inf if it will have none. `active_tokens`: the tokens of the cache that running
    requests hold; a block that several requests use is counted once.
    """

    due: float
    running: int
    active_tokens: float
    waiting: deque[Job]

    def submit(self, job: Job, now: float) -> None: ...
    def advance(self, now: float) -> list[News]: ...
    def queued(self, now: float) -> int:
        """Returns how many of the waiting requests have reached the server."""

    def clear(self) -> None:
        """Forgets all requests and the cache, as when a server dies."""

    def warm(self, runs: Sequence[Run], block_tokens: float) -> None:
        """Puts blocks into the cache, as an earlier request would have done."""


class Cache:
    """The prefix cache of a server: the blocks that were used last. The cache may have lost blocks at the end of a run."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        # Blocks of each run, and tokens of each block; the longest unused run first.
        self._held: OrderedDict[Run, tuple[int, float]] = OrderedDict()
        self._held_blocks, self._held_tokens = 0, 0.0

    def take(self, job: Job, output_tokens: int) -> int:
        """Returns how many tokens of a prompt the cache holds. From now on, it holds the whole prompt. `output_tokens`: the tokens of the
        answers that run.
        """
        hits = 0
        for run in job.runs:
            count = self._held.get(run, NOTHING)[0]
            hits += count
            if count < run.blocks:
                break
        self.hold(job.runs, job.block_tokens, output_tokens)
        cached = int(hits * job.block_tokens) + (job.beyond if hits == job.known else 0)
        return min(cached, max(job.prompt - 1, 0))

    def hold(self, runs: Sequence[Run], size: float, output_tokens: int = 0) -> None:
        """Holds these runs, with `size` tokens per block, and forgets others if the cache is full."""
        held = self._held
        for run in reversed(runs):  # in reverse, so that a prompt loses its end first
            count, tokens = held.pop(run, NOTHING)
            if count < run.blocks:
                self._held_blocks += run.blocks - count
                self._held_tokens += run.blocks * size - count * tokens
                count, tokens = run.blocks, size
            held[run] = count, tokens
        tokens_over = self._held_tokens - max(self._tokens - output_tokens, 0)
        blocks_over = self._held_blocks - BLOCKS_MAX
        while held and (tokens_over > 0 or blocks_over > 0):
            run, (count, tokens) = held.popitem(last=False)
            lost = count
            if count * tokens > tokens_over and count > blocks_over:
                lost = max(math.ceil(tokens_over / tokens) if tokens_over > 0 else 0, blocks_over)
            tokens_over -= lost * tokens
            blocks_over -= lost
            self._held_blocks -= lost
            self._held_tokens -= lost * tokens
            if lost < count:
                held[run] = count - lost, tokens
                held.move_to_end(run, last=False)


class _Queue:
    """What all forms of the model share: the queue, the slots, the cache."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self.due = math.inf
        self.clear()

    def clear(self) -> None:
        self._cache = Cache(self._speed.cache_tokens)
        self.waiting: deque[Job] = deque()
        self.running = self._output_tokens = 0
        self.active_tokens = 0.0
        self._users: dict[Run, int] = {}  # run -> running requests that use it
        self._ends: list[tuple[float, int, Job]] = []
        self._order = 0
        self.due = math.inf

    def queued(self, now: float) -> int:
        return sum(job.ready_at <= now for job in self.waiting)

    def warm(self, runs: Sequence[Run], block_tokens: float) -> None:
        self._cache.hold(runs, block_tokens)

    def _admits(self, at: float) -> bool:
        """Returns whether the first waiting request may start at this time. There must be a waiting request."""
        speed, first = self._speed, self.waiting[0]
        if first.ready_at > at or self.running >= speed.slots:
            return False
        return not self.running or self.active_tokens + first.needs <= speed.cache_tokens

    def _admit(self) -> Job:
        job = self.waiting.popleft()
        self._output_tokens += job.output
        cached = self._cache.take(job, self._output_tokens) if job.runs else 0
        if job.cached < 0:
            job.cached = cached
        job.left = max(job.prompt - job.cached, 1)
        self.running += 1
        self._hold(job)
        return job

    def _hold(self, job: Job) -> None:
        runs, users = job.runs, self._users
        blocks = new = 0
        for run in runs:
            blocks += run.blocks
            count = users.get(run, 0)
            if not count:
                new += run.blocks
            users[run] = count + 1
        job.needs -= int(blocks * job.block_tokens) if runs else job.cached
        self.active_tokens += job.needs + new * job.block_tokens

    def _leave(self, job: Job) -> None:
        users = self._users
        unused = 0
        for run in job.runs:
            count = users[run]
            if count > 1:
                users[run] = count - 1
            else:
                del users[run]
                unused += run.blocks
        self.running -= 1
        self.active_tokens -= job.needs + unused * job.block_tokens
        self._output_tokens -= job.output

    def _push(self, at: float, job: Job) -> None:
        self._order += 1
        heapq.heappush(self._ends, (at, self._order, job))


class Stepping(_Queue):
    """The form `steps`. Steps that only produce tokens are passed in one leap, up to the next end or arrival."""

    def clear(self) -> None:
        super().clear()
        self._computing: deque[Job] = deque()  # requests whose prompts are not computed yet
        self._computed: list[Job] = []  # requests whose prompts the present step completes
        self._steps = 0  # steps that have ended so far; a request in `_ends` ends with the step of this number
        self._leap = 0  # how many steps end at `due`
        self._begun = self._lasts = 0.0

    def submit(self, job: Job, now: float) -> None:
        job.ready_at = now + self._speed.overhead_s
        self.waiting.append(job)
        if self.due == math.inf:
            self._begin(job.ready_at)
        elif self._leap > 1 and len(self.waiting) == 1:
            self._cut(job.ready_at)

    def advance(self, now: float) -> list[News]:
        news: list[News] = []
        while self.due <= now:
            at = self.due
            self._steps += self._leap
            for job in self._computed:
                news.append((at, job, True))
                self._push(self._steps - 1 + job.output, job)
            ends = self._ends
            while ends and ends[0][0] <= self._steps:
                job = heapq.heappop(ends)[2]
                self._leave(job)
                news.append((at, job, False))
            self._begin(at)
        return news

    def _cut(self, ready_at: float) -> None:
        """Ends the leap with the step in which a new request becomes ready, if the request may start then."""
        if not self._admits(ready_at):
            return
        steps = int((ready_at - self._begun) / self._lasts) + 1 if self._lasts else 1
        if steps < self._leap:
            self._leap = steps
            self.due = self._begun + steps * self._lasts

    def _begin(self, at: float) -> None:
        speed, computing = self._speed, self._computing
        left = max(speed.step_tokens - len(self._ends), 1)
        tokens = 0
        self._computed = []
        while left:
            if not computing:
                if not (self.waiting and self._admits(at)):
                    break
                computing.append(self._admit())
            job = computing[0]
            chunk = min(job.left, left)
            job.left -= chunk
            tokens += chunk
            left -= chunk
            if not job.left:
                self._computed.append(computing.popleft())
        if not self.running:
            self.due = math.inf
            if self.waiting:
                self._begin(self.waiting[0].ready_at)
            return
        self._begun = at
        self._lasts = speed.decode_s * (1 + speed.growth * (self.running - 1)) + tokens * speed.prefill_s
        self._leap = 1 if tokens or not self._ends else max(int(self._ends[0][0]) - self._steps, 1)
        self.due = at + self._leap * self._lasts
        if self._leap > 1 and self.waiting:
            self._cut(self.waiting[0].ready_at)


class Slotted(_Queue):
    """The forms `serial` and `slots`."""

    def clear(self) -> None:
        super().clear()
        self._prefill_free_at = 0.0
        self._firsts: list[tuple[float, int, Job]] = []

    def submit(self, job: Job, now: float) -> None:
        job.ready_at = now
        self.waiting.append(job)
        self._start(now)

    def advance(self, now: float) -> list[News]:
        news: list[News] = []
        firsts, ends = self._firsts, self._ends
        while self.due <= now:
            at = self.due
            if firsts and firsts[0][0] <= at:
                job = heapq.heappop(firsts)[2]
                news.append((at, job, True))
                self._push(at + (job.output - 1) * self._speed.decode_s, job)
            else:
                job = heapq.heappop(ends)[2]
                self._leave(job)
                news.append((at, job, False))
                self._start(at)
            self._set_due()
        return news

    def _start(self, at: float) -> None:
        speed = self._speed
        while self.waiting and self._admits(at):
            job = self._admit()
            begun = max(at, self._prefill_free_at) if speed.form == "serial" else at
            computed = begun + job.left * speed.prefill_s
            if speed.form == "serial":
                self._prefill_free_at = computed
            self._order += 1
            heapq.heappush(self._firsts, (computed + speed.overhead_s, self._order, job))
        self._set_due()

    def _set_due(self) -> None:
        firsts, ends = self._firsts, self._ends
        self.due = min(firsts[0][0] if firsts else math.inf, ends[0][0] if ends else math.inf)


def server(speed: Speed) -> Server:
    """Returns a server of this speed."""
    return Stepping(speed) if speed.form == "steps" else Slotted(speed)
