"""Computes the cores and the memory that a picker needs for a load, from measured costs.

`COSTS` has every constant with the command that measures it. A process that handles r items per second is busy for

    r * each + most * r / (r + half)

of its time. The first term is the cost of the items. The second term is the cost of wake-ups: reads, writes, messages to other
processes. At low rates, every item causes a wake-up. At high rates, one wake-up handles several items, so this term approaches `most`.
The constants were fitted to open loops of 25 to 3,000 requests/s and 100 to 14,000 chunks/s.

This module measures nothing and does not know this machine. Another CPU has other constants, but their ratios differ less.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from epp.plugins.producers._precise_params import ENTRY_BYTES as HELD_BLOCK_BYTES
from epp.prefix.blocks import DENSE_BLOCKS, STRIDE
from workers.host.options import SCRAPE_INTERVAL_MIN_S, Options
from workers.process.unit_bytes import unit_bytes

MACHINE: Final = "2 shared cores of an AMD EPYC, Python 3.11.7, 2026-11-21, noisy"
REMEASURE: Final = "make bench"
_RUN: Final = "python -m tests.bench.throughput --targets native"


class Cost(NamedTuple):
    """One constant of `COSTS`, and the command that measures it (`source`). Its value is either CPU time or `mib`.

    `each`: µs per item. `most`: cores for wake-ups at high rates. `half`: the rate per second at which wake-ups take half of `most`.
    """

    what: str
    source: str
    each: float = 0.0
    most: float = 0.0
    half: float = 1.0
    mib: float = 0.0

    def cores(self, rate: float) -> float:
        """Returns the cores of one process that handles `rate` items per second."""
        return rate * self.each / 1e6 + self.most * rate / (rate + self.half)


COSTS: Final = {
    "request": Cost("a request of 1 KB", f"{_RUN} --cases short [--rate 25 ... 3200]", each=110, most=0.14, half=150),
    "prompt kb": Cost("each further KB of a request", f"{_RUN} --cases long [--rate 30]", each=2.6),
    "chunk": Cost("a chunk of an answer", f"{_RUN} --cases sse,sse-paced [--rate 1 ... 10]", each=3, most=0.032, half=250),
    "learn": Cost("supervisor: a request of 1 KB", f"{_RUN} --cases short [--rate 25 ...]", each=2, most=0.043, half=50),
    "learn kb": Cost("supervisor: each further KB", f"{_RUN} --cases long [--rate 30]", each=1.0),
    "scrape": Cost("supervisor: a scrape of a 32 KB page", f"{_RUN} --cases idle100 [--endpoints 8]", each=46),
    "processes": Cost("parent and supervisor", f"{_RUN} --cases short --workers 1,2,4,8", mib=60),
    "worker": Cost("a worker", f"{_RUN} --cases short --workers 1,2,4,8", mib=9),
    "endpoint": Cost("an endpoint", f"{_RUN} --cases idle100 [--endpoints 8]", mib=0.05),
    "stream": Cost("an open stream", f"{_RUN} --cases short,sse-paced", mib=0.006),
    "body mb": Cost("each MB of bodies in the picker", f"{_RUN} --cases short,long", mib=3),
}
SUPERVISOR_IDLE_CORES: Final = 0.02  # without endpoints: heartbeats, timers, the metrics page

# The share of its time that a worker may be busy. The rest is for bursts, and for the load of a worker that restarts.
WORKER_SHARE: Final = 0.6
SUPERVISOR_SHARE: Final = 0.5
SCRAPE_S_MIN: Final = SCRAPE_INTERVAL_MIN_S
SCRAPE_STEP_S: Final = 0.05
WORKERS_MIN: Final = 2  # two, so that the restart of a worker is no outage
WORKERS_MAX: Final = 256
CHUNKS_PER_STREAM_S: Final = 25.0  # one token every 40 ms
UNARY_S: Final = 2.0  # how long the stream of a request with an unstreamed answer is open
IN_PICKER_S: Final = 0.05  # how long the picker holds a body without flow control

BLOCK_BYTES: Final = 256
TOKENS_PER_BLOCK: Final = 64
INDEX_LOAD: Final = 0.57
INDEX_STEP: Final = 1 << 16
ENGINE_BLOCK_TOKENS: Final = 16  # tokens in each block that model servers publish
STREAMS_PER_CONNECTION: Final = 8
DESCRIPTORS: Final = 128
MIB: Final = 1 << 20

_DEFAULT: Final = Options()  # the options of `epp serve` without flags
INDEX_ENTRIES_MIN: Final = _DEFAULT.index_entries
ENDPOINTS_MIN: Final = _DEFAULT.max_endpoints
HELD_BLOCKS_MIN: Final = _DEFAULT.kv_index_blocks
BODY_LIMIT: Final = _DEFAULT.body_bytes_max


def _tenths(size: int) -> float:
    """Converts bytes to MiB, rounded up to tenths."""
    return math.ceil(10 * size / MIB) / 10


_UNIT: Final = unit_bytes()
ENTRY_BYTES: Final = _UNIT.entry
STATE_BYTES: Final = _UNIT.endpoint  # shared memory per row of the endpoint table
AREA_MIB: Final = _tenths(_UNIT.worker)  # shared memory per ordinal; there are twice as many ordinals as workers
OBJECTS_MIB: Final = _tenths(_UNIT.fixed)  # shared memory for objectives, model rewrites and the owners of the index

# Constants of a pod's resources. `python -m tests.deploy.generate` writes them into the chart, and its templates compute the same sizes.
CHART: Final[Mapping[str, int]] = {
    "entryBytes": _UNIT.entry,
    "heldBlockBytes": HELD_BLOCK_BYTES,
    "endpointKib": math.ceil(_UNIT.endpoint / 1024),
    "workerKib": math.ceil(_UNIT.worker / 1024),
    "fixedKib": 3072,  # more than `_UNIT.fixed`, because a configuration can add to it
    "stepKib": 16 << 10,
    "processesMib": 192,  # memory of a picker's processes without workers
    "workerMib": 16,
    "maxEndpoints": _DEFAULT.max_endpoints,
    "indexEntries": _DEFAULT.index_entries,
    "kvIndexBlocks": _DEFAULT.kv_index_blocks,
    "endSeconds": 10,  # what the grace period has beyond preStop and drain: time to cut streams, end the supervisor and remove names
}
REQUEST_MIB: Final = 1024  # the chart's memory request
LIMIT_MIB: Final = 2048  # the chart's limit: twice the bytes that flow control holds in the built-in configuration


@dataclass(frozen=True)
class Load:
    """The load for which a picker is sized."""

    requests: float  # per second
    prompt_kb: float = 1.0
    endpoints: int = 8
    chunks: float = 0.0  # chunks of answers per second, over all streams
    streams: int = 0  # streams that are open at once; 0: computed from requests and chunks
    workers: int = 0  # 0: as many as needed
    cache_tokens: int = 500_000  # prompt tokens that an endpoint caches
    kv_events: bool = False  # whether a precise prefix producer follows the endpoints

    @property
    def further_kb(self) -> float:
        """Returns the KB of a prompt beyond the first KB. The cost of a request includes the first KB."""
        return max(0.0, self.prompt_kb - 1)

    @property
    def open_streams(self) -> int:
        return self.streams or math.ceil(max(self.requests * UNARY_S, self.chunks / CHUNKS_PER_STREAM_S))


@dataclass(frozen=True)
class Size:
    """What a picker needs for a load. Cores are CPU seconds per second. Memory is the proportional set size of all processes."""

    workers: int
    worker_share: float  # the share of its time that each worker is busy
    worker_cores: float
    supervisor_cores: float
    scrape_interval_s: float
    memory_mib: float
    shared_mib: float
    index_entries: int
    kv_index_blocks: int  # 0: no precise prefix producer
    max_endpoints: int
    body_limit: int
    open_files: int
    warnings: tuple[str, ...]

    @property
    def cores(self) -> float:
        return self.worker_cores + self.supervisor_cores

    @property
    def cpu_request(self) -> float:
        """Returns the container's CPU request. It includes spare time for workers and supervisor, and is never above the limit."""
        request = math.ceil(10 * (self.worker_cores / WORKER_SHARE + self.supervisor_cores / SUPERVISOR_SHARE)) / 10
        return min(request, float(self.cpu_limit))

    @property
    def cpu_limit(self) -> int:
        """Returns the container's CPU limit: every worker and the supervisor may use a core."""
        return self.workers + 1

    def flags(self) -> list[str]:
        """Returns the flags of `epp serve` that need other values than their defaults, and --workers."""
        flags = [f"--workers={self.workers}"]
        if self.scrape_interval_s > SCRAPE_S_MIN:
            flags.append(f"--refresh-metrics-interval={round(1e3 * self.scrape_interval_s)}ms")
        if self.max_endpoints > ENDPOINTS_MIN:
            flags.append(f"--max-endpoints={self.max_endpoints}")
        if self.index_entries > INDEX_ENTRIES_MIN:
            flags.append(f"--index-entries={self.index_entries}")
        if self.kv_index_blocks:
            flags.append(f"--kv-index-blocks={self.kv_index_blocks}")
        if self.body_limit > BODY_LIMIT:
            flags.append(f"--body-limit={self.body_limit // MIB}MiB")
        return flags


def size(load: Load) -> Size:
    """Computes the needs of a picker for a load."""
    interval, supervisor = scraping(load)
    workers = load.workers or enough_workers(load)
    share = busy_share(load, workers)
    entries = index_entries(load)
    held = held_blocks(load)
    places = max(ENDPOINTS_MIN, power_of_two(2 * load.endpoints) if load.endpoints > ENDPOINTS_MIN // 2 else 0)
    shared = (entries * ENTRY_BYTES + places * STATE_BYTES) / MIB + AREA_MIB * 2 * workers + OBJECTS_MIB
    shared += held * HELD_BLOCK_BYTES / MIB
    return Size(
        workers=workers,
        worker_share=share,
        worker_cores=workers * min(1.0, share),
        supervisor_cores=supervisor,
        scrape_interval_s=interval,
        memory_mib=memory(load, workers, entries) + held * HELD_BLOCK_BYTES / MIB,
        shared_mib=shared,
        index_entries=entries,
        kv_index_blocks=held,
        max_endpoints=places,
        body_limit=max(BODY_LIMIT, power_of_two(math.ceil(2000 * load.prompt_kb))),
        open_files=DESCRIPTORS + load.endpoints + 2 * math.ceil(load.open_streams / STREAMS_PER_CONNECTION),
        warnings=tuple(warnings(load, workers, share, interval, supervisor)),
    )


def busy_share(load: Load, workers: int) -> float:
    """Returns the share of its time that each worker is busy. Above 1, the workers cannot carry the load."""
    requests, chunks = load.requests / workers, load.chunks / workers
    further = requests * load.further_kb
    return COSTS["request"].cores(requests) + COSTS["prompt kb"].cores(further) + COSTS["chunk"].cores(chunks)


def enough_workers(load: Load) -> int:
    """Returns the lowest number of workers that are busy for at most WORKER_SHARE of their time."""
    return next((n for n in range(WORKERS_MIN, WORKERS_MAX) if busy_share(load, n) <= WORKER_SHARE), WORKERS_MAX)


def scraping(load: Load) -> tuple[float, float]:
    """Returns the shortest scrape interval in seconds that leaves the supervisor spare time, and the supervisor's cores."""
    further = load.requests * load.further_kb
    learning = SUPERVISOR_IDLE_CORES + COSTS["learn"].cores(load.requests) + COSTS["learn kb"].cores(further)
    left = max(SUPERVISOR_SHARE - learning, SUPERVISOR_SHARE / 5)
    shortest = COSTS["scrape"].cores(load.endpoints) / left
    interval = max(SCRAPE_S_MIN, math.ceil(shortest / SCRAPE_STEP_S) * SCRAPE_STEP_S)
    return interval, learning + COSTS["scrape"].cores(load.endpoints / interval)


def memory(load: Load, workers: int, entries: int) -> float:
    """Returns the memory of all processes in MiB, with shared memory counted once."""
    index = max(0, entries - INDEX_ENTRIES_MIN) * ENTRY_BYTES / MIB  # the measured processes include the smallest index
    body_mb = min(load.requests * IN_PICKER_S, load.open_streams) * load.prompt_kb / 1e3
    return (
        COSTS["processes"].mib
        + workers * COSTS["worker"].mib
        + load.endpoints * COSTS["endpoint"].mib
        + load.open_streams * COSTS["stream"].mib
        + body_mb * COSTS["body mb"].mib
        + index
    )


def index_entries(load: Load) -> int:
    """Returns the entries that the prefix index needs for all prefixes in the endpoints' caches, with spare room."""
    blocks = max(1.0, 1e3 * load.prompt_kb / BLOCK_BYTES)
    known = min(blocks, DENSE_BLOCKS) + max(0.0, blocks - DENSE_BLOCKS) / STRIDE
    entries = load.endpoints * load.cache_tokens / TOKENS_PER_BLOCK * known / blocks
    return max(INDEX_ENTRIES_MIN, INDEX_STEP * math.ceil(entries / INDEX_LOAD / INDEX_STEP))


def held_blocks(load: Load) -> int:
    """Returns the blocks that the endpoints hold when their caches are full, with spare room. Returns 0 without KV events."""
    if not load.kv_events:
        return 0
    blocks = load.endpoints * load.cache_tokens / ENGINE_BLOCK_TOKENS
    return max(HELD_BLOCKS_MIN, INDEX_STEP * math.ceil(blocks / INDEX_STEP))


def warnings(load: Load, workers: int, share: float, interval: float, supervisor: float) -> list[str]:
    """Returns warnings about settings that cannot carry the load, or that leave too little spare time."""
    texts = []
    enough = enough_workers(load)
    if busy_share(load, enough) > WORKER_SHARE:
        texts.append(f"{enough} workers, the maximum, are too few: split the pool over several pickers")
    elif share >= 1:
        texts.append(f"{workers} worker{'s' * (workers > 1)} cannot carry this load: use {enough}")
    elif share > WORKER_SHARE:
        texts.append(f"each worker is busy for {share:.0%} of its time, so bursts will wait: use {enough}")
    if interval > SCRAPE_S_MIN:
        texts.append(
            f"one supervisor cannot scrape {load.endpoints} endpoints more often than every {1e3 * interval:.0f} ms; between "
            "scrapes, only the load in flight is known"
        )
    if supervisor > 2 * SUPERVISOR_SHARE:
        texts.append("the supervisor cannot learn so many prompts: split the pool over several pickers")
    return texts


def shared_memory_mib(workers: int, flags: Mapping[str, Any], *, kv_events: bool = False) -> int:
    """Returns the MiB that /dev/shm of a pod should hold: a quarter more than indexes, endpoint table and workers need.

    `flags`: flags of `epp serve` by name. `kv_events`: whether the chart's values have ports of KV events. With such ports, or with the
    flag kv-index-blocks, the index of held blocks is included.
    """
    most = int(flags.get("workers-max", 2 * workers))
    places, entries = (int(flags.get(*each)) for each in (("max-endpoints", ENDPOINTS_MIN), ("index-entries", INDEX_ENTRIES_MIN)))
    kib = entries * CHART["entryBytes"] // 1024 + places * CHART["endpointKib"] + most * CHART["workerKib"]
    held = int(flags.get("kv-index-blocks", CHART["kvIndexBlocks"] if kv_events else 0))
    kib += held * CHART["heldBlockBytes"] // 1024
    step = CHART["stepKib"]
    return -(-(kib * 5 // 4 + CHART["fixedKib"]) // step) * (step >> 10)


def memory_least_mib(workers: int, flags: Mapping[str, Any]) -> int:
    """Returns the lowest memory limit that a pod may have, in MiB. It includes /dev/shm, which is a part of the pod's memory."""
    return shared_memory_mib(workers, flags) + CHART["processesMib"] + CHART["workerMib"] * workers


def memory_request_mib(needs: Size) -> int:
    """Returns the memory request of a pod in MiB. It is never below the chart's default."""
    return max(rounded(needs.memory_mib), REQUEST_MIB)


def memory_limit_mib(needs: Size) -> int:
    """Returns the memory limit of a pod in MiB, with room for bursts and for bodies that wait.

    The chart accepts this limit. It is never below the chart's default.
    """
    flags = dict(flag.removeprefix("--").split("=") for flag in needs.flags())
    return max(rounded(2 * needs.memory_mib), memory_least_mib(needs.workers, flags), LIMIT_MIB)


def rounded(mib: float) -> int:
    """Rounds up to a multiple of 16 MiB."""
    return 16 * -(-int(mib + 1) // 16)


def power_of_two(count: int) -> int:
    """Returns the lowest power of two that is at least `count`."""
    return 1 << max(0, count - 1).bit_length()
