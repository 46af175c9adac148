"""Keeps a few figures of the last 15 minutes: rows for all pools together, for the endpoints, and for the pools.

    together   a row each second, one cell for each of FIGURES
    endpoints  one cell per slot and ENDPOINT_FIGURES; keys are the generations of the slots
    pools      one cell per pool and POOL_FIGURES; keys come from the names. None if the picker has one pool

The first two together take at most BYTES_MAX. If the rows of a large pool would take more, every second row of the endpoints is dropped and
the step between two rows doubles: 100 endpoints have a row each second, 1,000 endpoints one every 8 seconds. The same holds for the rows of
pools and POOLS_BYTES: 100 pools have a row every 5 seconds. An unknown cell is NaN.

A sample costs only a few array operations, so it is taken with and without viewers. The history begins with the supervisor.
"""

import itertools
import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.table import Words

SAMPLES: Final = 900
STEP_S: Final = 1.0
POOL_STEP_S: Final = 5.0
KEPT_S: Final = SAMPLES * STEP_S
BYTES_MAX: Final = 4 << 20
POOLS_BYTES: Final = 1 << 20  # further room for the rows of pools
ROW_BYTES: Final = 256  # the overhead of Python for a row of endpoints or pools
FIGURES: Final = (
    "requests_per_s",
    "errors_per_s",
    "first_token_p50_s",
    "first_token_p95_s",
    "processing_p99_s",
    "predicted_share",
    "reported_share",
    "in_flight",
    "running",
    "waiting",
    "queued",
    "kv_cache_usage",
    "workers_serving",
    "endpoints_ready",
)
ENDPOINT_FIGURES: Final = ("running", "waiting", "kv_cache_usage", "in_flight")
NOT_OF_POOLS: Final = ("processing_p99_s", "workers_serving", "endpoints_ready")
POOL_FIGURES: Final = tuple(name for name in FIGURES if name not in NOT_OF_POOLS)
TOGETHER_BYTES: Final = 2 * SAMPLES * ((len(FIGURES) + 1) * 4 + ROW_BYTES)  # room for samples that are half a step apart
RECENT_STEP_S: Final = 30.0
RECENT_S: Final = 300.0

ALONE: Final = np.zeros(1, np.uint64)  # the key of a row with a place that never changes its owner

Floats = npt.NDArray[np.float32]
Shown = tuple[Sequence[float], Mapping[str, Sequence[float]]]  # the ages of samples in seconds, oldest first, and figures by name


def key_of(name: str) -> int:
    """Returns a number that distinguishes a pool from a later pool in its place, or 0 for an empty place."""
    return zlib.crc32(name.encode()) if name else 0


class PoolSample(NamedTuple):
    """The figures of several pools. `keys`: the key of each pool (`key_of`). `values`: shape (pools, POOL_FIGURES)."""

    keys: Words
    values: Floats


class Sample(NamedTuple):
    """The figures of one moment. `at`: monotonic seconds. `counters`: the present counters. `pool`: the figures of all pools together, by
    name; a missing figure is unknown. `generations`: the generation of each slot. `endpoints`: shape (slots, ENDPOINT_FIGURES). `pools`:
    None if no figures of pools are due.
    """

    at: float
    counters: Mapping[str, int]
    pool: Mapping[str, float | None]
    generations: Words
    endpoints: Floats
    pools: PoolSample | None = None


class Row(NamedTuple):
    """One row of endpoints or pools. `keys`: the numbers that distinguish each endpoint or pool from a later one in its place."""

    at: float
    keys: Words
    values: Floats

    @property
    def bytes(self) -> int:
        """The bytes that this row takes."""
        return self.keys.nbytes + self.values.nbytes + ROW_BYTES


class Rows:
    """Rows within limited room: the larger the rows, the fewer are kept. `step_s`: the time between two rows. `bytes`: the size of all
    rows.
    """

    def __init__(self, figures: Sequence[str], room: int, least_s: float) -> None:
        """`least_s`: the shortest step."""
        self._figures = figures
        self._room = room
        self._least_s = least_s
        self._rows: deque[Row] = deque()
        self.bytes = 0
        self.step_s = least_s

    def add(self, at: float, keys: Words, values: Floats) -> None:
        """Adds a row, unless the last one is younger than a step."""
        if self._rows and at - self._rows[-1].at < self.step_s - STEP_S / 2:
            return
        row = Row(at, keys.astype(np.uint32), values)
        self._rows.append(row)
        self.bytes += row.bytes
        while self._rows and at - self._rows[0].at > KEPT_S:
            self.bytes -= self._rows.popleft().bytes
        while self.bytes > self._room and len(self._rows) > 1:
            self._thin()
        if self.step_s > self._least_s and 4 * row.bytes * KEPT_S / self.step_s < self._room:
            self.step_s /= 2

    def of(self, place: int, key: int, now: float) -> Shown:
        """Returns the rows' figures of one endpoint or pool."""
        rows = [row for row in self._rows if place < len(row.keys) and row.keys[place] == key and now - row.at <= KEPT_S]
        values = np.array([row.values[place] for row in rows]).reshape(len(rows), len(self._figures))
        return [round(now - row.at, 1) for row in rows], dict(zip(self._figures, values.T.tolist(), strict=True))

    def _thin(self) -> None:
        """Drops every second row, and doubles the step. Keeps the newest row."""
        kept = list(itertools.islice(reversed(self._rows), 0, None, 2))
        self._rows = deque(reversed(kept))
        self.bytes = sum(row.bytes for row in kept)
        self.step_s *= 2


class Recent:
    """Remembers the counters once per RECENT_STEP_S, for RECENT_S, so that findings can distinguish present problems from past problems."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Mapping[str, int]]] = deque(maxlen=int(RECENT_S / RECENT_STEP_S) + 1)

    def add(self, at: float, counters: Mapping[str, int]) -> None:
        """Remembers the counters at time `at`, unless the last counters are younger than RECENT_STEP_S."""
        if not self._kept or at - self._kept[-1][0] >= RECENT_STEP_S:
            self._kept.append((at, counters))

    def increases(self, counters: Mapping[str, int]) -> dict[str, int]:
        """Returns by how much each counter has grown since the oldest remembered counters. Skips counters that have not grown."""
        if not self._kept:
            return {}
        then = self._kept[0][1]
        return {name: grown for name, count in counters.items() if (grown := count - then.get(name, 0)) > 0}


class History:
    """The figures of the last 15 minutes."""

    def __init__(self) -> None:
        self.recent = Recent()
        self.together = Rows(FIGURES, TOGETHER_BYTES, STEP_S)
        self.endpoints = Rows(ENDPOINT_FIGURES, BYTES_MAX - TOGETHER_BYTES, STEP_S)
        self.pools = Rows(POOL_FIGURES, POOLS_BYTES, POOL_STEP_S)

    @property
    def bytes(self) -> int:
        """The bytes that all rows take."""
        return self.together.bytes + self.endpoints.bytes + self.pools.bytes

    def add(self, sample: Sample) -> None:
        """Adds a sample. Call it once per STEP_S."""
        self.recent.add(sample.at, sample.counters)
        cells = [math.nan if (value := sample.pool.get(name)) is None else value for name in FIGURES]
        self.together.add(sample.at, ALONE, np.array([cells], np.float32))
        self.endpoints.add(sample.at, sample.generations, sample.endpoints)
        if sample.pools is not None:
            self.pools.add(sample.at, *sample.pools)
