"""How many cores and how much memory a picker needs for a load, from what was measured.

Every constant stands in `COSTS` with the commands that measure it. A process that handles r things a second is busy for

    r * each + most * r / (r + half)

of its time: what each costs however many come at once, and what turning to them costs: wake-ups, reads, writes, passing on what was
learned. Few things are turned to one by one; the more there are, the more of them are found together, so that this part grows
towards `most`. Fitted to open loops of 25 to 3,000 requests/s and 100 to 14,000 chunks/s.

What this does not do: measure anything, or know this machine. Another CPU has other constants; their ratios differ less.
"""

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

MACHINE: Final = "2 shared cores of an AMD EPYC, Python 3.11.7, 2026-11-21, noisy"
REMEASURE: Final = "make bench"
_RUN: Final = "python -m tests.bench.throughput --targets native"


class Cost(NamedTuple):
    """A measured constant and what measures it: microseconds (`each`), cores at most and the rate at half of them, MiB."""

    what: str
    source: str
    each: float = 0.0
    most: float = 0.0
    half: float = 1.0
    mib: float = 0.0

    def cores(self, rate: float) -> float:
        """Of one process that handles so many a second."""
        return rate * self.each / 1e6 + self.most * rate / (rate + self.half)


COSTS: Final = {
    "request": Cost("a request of 1 KB", f"{_RUN} --cases short [--rate 25 ... 3200]", each=110, most=0.14, half=150),
    "prompt kb": Cost("each further KB of it", f"{_RUN} --cases long [--rate 30]", each=2.6),
    "chunk": Cost(
        "a chunk of an answer", f"{_RUN} --cases sse,sse-paced [--rate 1 ... 10]", each=3, most=0.032, half=250
    ),
    "learn": Cost(
        "supervisor: a request of 1 KB", f"{_RUN} --cases short [--rate 25 ...]", each=2, most=0.043, half=50
    ),
    "learn kb": Cost("supervisor: each further KB of it", f"{_RUN} --cases long [--rate 30]", each=1.0),
    "scrape": Cost("supervisor: a scrape of a 32 KB page", f"{_RUN} --cases idle100 [--endpoints 8]", each=46),
    "processes": Cost("parent and supervisor", f"{_RUN} --cases short --workers 1,2,4,8", mib=60),
    "worker": Cost("a worker", f"{_RUN} --cases short --workers 1,2,4,8", mib=9),
    "endpoint": Cost("an endpoint", f"{_RUN} --cases idle100 [--endpoints 8]", mib=0.05),
    "stream": Cost("an open stream", f"{_RUN} --cases short,sse-paced", mib=0.006),
    "body mb": Cost("each MB of bodies under way", f"{_RUN} --cases short,long", mib=3),
}
SUPERVISOR_IDLE_CORES: Final = 0.02  # without endpoints: beats, timers, the metrics page

WORKER_SHARE: Final = 0.6  # of a worker's time that is to be used: the rest is for bursts and a worker that restarts
SUPERVISOR_SHARE: Final = 0.5
SCRAPE_S_MIN: Final = 0.05
SCRAPE_STEP_S: Final = 0.05
WORKERS_MIN: Final = 2  # one that restarts is no outage
WORKERS_MAX: Final = 256
CHUNKS_PER_STREAM_S: Final = 25.0  # a token every 40 ms
UNARY_S: Final = 2.0  # how long a request without streaming is open
IN_PICKER_S: Final = 0.05  # how long a body is held, flow control aside

BLOCK_BYTES: Final = 256
TOKENS_PER_BLOCK: Final = 64
DENSE_BLOCKS: Final = 64  # of a prompt; behind them the index knows every fourth
SPARSE: Final = 4
INDEX_LOAD: Final = 0.57
INDEX_ENTRIES_MIN: Final = 1 << 19
INDEX_STEP: Final = 1 << 16
ENTRY_BYTES: Final = 12
ENDPOINTS_MIN: Final = 1024
STATE_BYTES: Final = 4_216  # of shared memory, a place in the endpoint table
LANE_MIB: Final = 3.6  # of shared memory, a worker or a free place for one: there are as many of these
OBJECTS_MIB: Final = 2.1  # of shared memory, objectives and model rewrites
STREAMS_PER_CONNECTION: Final = 8
DESCRIPTORS: Final = 128
BODY_LIMIT: Final = 32 << 20
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Load:
    """What a picker is to carry."""

    requests: float  # a second
    prompt_kb: float = 1.0
    endpoints: int = 8
    chunks: float = 0.0  # of all streams, a second
    streams: int = 0  # open at once; 0: as many as rate and chunks imply
    workers: int = 0  # 0: as many as it takes
    cache_tokens: int = 500_000  # that an endpoint keeps of prompts

    @property
    def further_kb(self) -> float:
        """Of a prompt, beyond what is counted with the request."""
        return max(0.0, self.prompt_kb - 1)

    @property
    def open_streams(self) -> int:
        return self.streams or math.ceil(max(self.requests * UNARY_S, self.chunks / CHUNKS_PER_STREAM_S))


@dataclass(frozen=True)
class Size:
    """What it takes. Cores are of CPU time; memory is the proportional set size of all processes, shared memory included."""

    workers: int
    worker_share: float  # busy, of each worker
    worker_cores: float
    supervisor_cores: float
    scrape_interval_s: float
    memory_mib: float
    shared_mib: float
    index_entries: int
    max_endpoints: int
    body_limit: int
    open_files: int
    warnings: tuple[str, ...]

    @property
    def cores(self) -> float:
        return self.worker_cores + self.supervisor_cores

    @property
    def cpu_request(self) -> float:
        """Of a container: so that neither is busier than it should be; more than the limit cannot be requested."""
        wanted = math.ceil(10 * (self.worker_cores / WORKER_SHARE + self.supervisor_cores / SUPERVISOR_SHARE)) / 10
        return min(wanted, float(self.cpu_limit))

    @property
    def cpu_limit(self) -> int:
        """All processes at once."""
        return self.workers + 1

    def flags(self) -> list[str]:
        """Of `epp serve`, where its defaults are not enough."""
        found = [f"--workers={self.workers}"]
        if self.scrape_interval_s > SCRAPE_S_MIN:
            found.append(f"--refresh-metrics-interval={round(1e3 * self.scrape_interval_s)}ms")
        if self.max_endpoints > ENDPOINTS_MIN:
            found.append(f"--max-endpoints={self.max_endpoints}")
        if self.index_entries > INDEX_ENTRIES_MIN:
            found.append(f"--index-entries={self.index_entries}")
        if self.body_limit > BODY_LIMIT:
            found.append(f"--body-limit={self.body_limit // MIB}MiB")
        return found


def size(load: Load) -> Size:
    """What `load` takes."""
    interval, supervisor = scraping(load)
    workers = load.workers or enough_workers(load)
    share = busy_share(load, workers)
    entries = index_entries(load)
    places = max(ENDPOINTS_MIN, power_of_two(2 * load.endpoints) if load.endpoints > ENDPOINTS_MIN // 2 else 0)
    shared = (entries * ENTRY_BYTES + places * STATE_BYTES) / MIB + LANE_MIB * 2 * workers + OBJECTS_MIB
    return Size(
        workers=workers,
        worker_share=share,
        worker_cores=workers * min(1.0, share),
        supervisor_cores=supervisor,
        scrape_interval_s=interval,
        memory_mib=memory(load, workers, entries),
        shared_mib=shared,
        index_entries=entries,
        max_endpoints=places,
        body_limit=max(BODY_LIMIT, power_of_two(math.ceil(2000 * load.prompt_kb))),
        open_files=DESCRIPTORS + load.endpoints + 2 * math.ceil(load.open_streams / STREAMS_PER_CONNECTION),
        warnings=tuple(warnings(load, workers, share, interval, supervisor)),
    )


def busy_share(load: Load, workers: int) -> float:
    """Of each of so many workers' time; above 1 they cannot do it."""
    requests, chunks = load.requests / workers, load.chunks / workers
    further = requests * load.further_kb
    return COSTS["request"].cores(requests) + COSTS["prompt kb"].cores(further) + COSTS["chunk"].cores(chunks)


def enough_workers(load: Load) -> int:
    """The fewest that are not busier than they should be."""
    return next((n for n in range(WORKERS_MIN, WORKERS_MAX) if busy_share(load, n) <= WORKER_SHARE), WORKERS_MAX)


def scraping(load: Load) -> tuple[float, float]:
    """The scrape interval that leaves the supervisor time, and its cores."""
    further = load.requests * load.further_kb
    learning = SUPERVISOR_IDLE_CORES + COSTS["learn"].cores(load.requests) + COSTS["learn kb"].cores(further)
    left = max(SUPERVISOR_SHARE - learning, SUPERVISOR_SHARE / 5)
    shortest = COSTS["scrape"].cores(load.endpoints) / left
    interval = max(SCRAPE_S_MIN, math.ceil(shortest / SCRAPE_STEP_S) * SCRAPE_STEP_S)
    return interval, learning + COSTS["scrape"].cores(load.endpoints / interval)


def memory(load: Load, workers: int, entries: int) -> float:
    """MiB of all processes, what they share counted once."""
    index = max(0, entries - INDEX_ENTRIES_MIN) * ENTRY_BYTES / MIB  # the smallest is in what was measured
    under_way = min(load.requests * IN_PICKER_S, load.open_streams) * load.prompt_kb / 1e3
    return (
        COSTS["processes"].mib
        + workers * COSTS["worker"].mib
        + load.endpoints * COSTS["endpoint"].mib
        + load.open_streams * COSTS["stream"].mib
        + under_way * COSTS["body mb"].mib
        + index
    )


def index_entries(load: Load) -> int:
    """As many as the prefixes that all endpoints keep, with room to spare."""
    blocks = max(1.0, 1e3 * load.prompt_kb / BLOCK_BYTES)
    known = min(blocks, DENSE_BLOCKS) + max(0.0, blocks - DENSE_BLOCKS) / SPARSE
    entries = load.endpoints * load.cache_tokens / TOKENS_PER_BLOCK * known / blocks
    return max(INDEX_ENTRIES_MIN, INDEX_STEP * math.ceil(entries / INDEX_LOAD / INDEX_STEP))


def warnings(load: Load, workers: int, share: float, interval: float, supervisor: float) -> list[str]:
    found = []
    enough = enough_workers(load)
    if busy_share(load, enough) > WORKER_SHARE:
        found.append(f"{enough} workers are the most there are, and too few: split the pool over several pickers")
    elif share >= 1:
        found.append(f"{workers} worker{'s' * (workers > 1)} cannot carry this load: give it {enough}")
    elif share > WORKER_SHARE:
        found.append(f"each worker is busy for {share:.0%} of its time: bursts will wait; {enough} would do")
    if interval > SCRAPE_S_MIN:
        found.append(
            f"one supervisor scrapes {load.endpoints} endpoints every {1e3 * interval:.0f} ms at most; between scrapes only "
            "what is in flight is known"
        )
    if supervisor > 2 * SUPERVISOR_SHARE:
        found.append("the supervisor cannot learn so many prompts: split the pool over several pickers")
    return found


def power_of_two(count: int) -> int:
    """The next one that is not below."""
    return 1 << max(0, count - 1).bit_length()
