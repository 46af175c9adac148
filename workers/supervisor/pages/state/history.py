"""Keeps a few figures of the last 15 minutes: a row per second for the pool, and a row per step for the endpoints.

    pool       SAMPLES rows of float32, one column for each of FIGURES
    endpoints  rows of float32, one cell per slot and ENDPOINT_FIGURES, and the generation of each slot

Both together take at most BYTES_MAX. If the rows of a large pool would take more, every second row of the endpoints is dropped and the
step between two rows doubles: 100 endpoints have a row each second, 1,000 endpoints one every 8 seconds. A cell that is unknown is NaN.

A sample costs a few array operations, so that it can be taken whether or not someone watches. The history begins with the supervisor.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shm.table import Words

SAMPLES: Final = 900
STEP_S: Final = 1.0
KEPT_S: Final = SAMPLES * STEP_S
BYTES_MAX: Final = 4 << 20
ROW_BYTES: Final = 256  # what Python adds to a row of the endpoints
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
RING_BYTES: Final = SAMPLES * (len(FIGURES) + 2) * 4

Floats = npt.NDArray[np.float32]


class Sample(NamedTuple):
    """The figures of one moment. `at`: monotonic seconds. `pool`: by name; a missing figure is unknown.

    `generations`: of each slot. `endpoints`: shape (slots, ENDPOINT_FIGURES).
    """

    at: float
    pool: Mapping[str, float | None]
    generations: Words
    endpoints: Floats


class Row(NamedTuple):
    """One row of the endpoints."""

    at: float
    generations: Words
    values: Floats

    @property
    def bytes(self) -> int:
        """The bytes that this row takes."""
        return self.generations.nbytes + self.values.nbytes + ROW_BYTES


class History:
    """The figures of the last 15 minutes."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._room = bytes_max - RING_BYTES
        self._times = np.full(SAMPLES, -math.inf)
        self._pool = np.full((SAMPLES, len(FIGURES)), np.nan, np.float32)
        self._next = 0
        self._rows: deque[Row] = deque()
        self._rows_bytes = 0
        self.step_s = STEP_S  # between two rows of the endpoints

    @property
    def bytes(self) -> int:
        """The bytes that the history takes."""
        return RING_BYTES + self._rows_bytes

    def add(self, sample: Sample) -> None:
        """Adds a sample. Call it once per STEP_S."""
        self._times[self._next] = sample.at
        self._pool[self._next] = [math.nan if (v := sample.pool.get(name)) is None else v for name in FIGURES]
        self._next = (self._next + 1) % SAMPLES
        if self._rows and sample.at - self._rows[-1].at < self.step_s - STEP_S / 2:
            return
        row = Row(sample.at, sample.generations.astype(np.uint32), sample.endpoints)
        self._rows.append(row)
        self._rows_bytes += row.bytes
        while self._rows and sample.at - self._rows[0].at > KEPT_S:
            self._rows_bytes -= self._rows.popleft().bytes
        while self._rows_bytes > self._room and len(self._rows) > 1:
            self._thin()
        if self.step_s > STEP_S and 4 * row.bytes * KEPT_S / self.step_s < self._room:
            self.step_s /= 2

    def pool(self, now: float) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
        """Returns the ages of the samples in seconds, oldest first, and the figures of the pool by name."""
        order = np.roll(np.arange(SAMPLES), -self._next)
        order = order[self._times[order] >= now - KEPT_S]
        ages = (now - self._times[order]).round(1).tolist()
        return ages, {name: self._pool[order, at].tolist() for at, name in enumerate(FIGURES)}

    def endpoint(self, slot: int, generation: int, now: float) -> tuple[Sequence[float], Mapping[str, Sequence[float]]]:
        """Returns the ages of the rows of one endpoint, oldest first, and its figures by name."""
        rows = [row for row in self._rows if slot < len(row.generations) and row.generations[slot] == generation and now - row.at <= KEPT_S]
        ages = [round(now - row.at, 1) for row in rows]
        return ages, {name: [float(r.values[slot, at]) for r in rows] for at, name in enumerate(ENDPOINT_FIGURES)}

    def _thin(self) -> None:
        """Drops every second row, and doubles the step. Keeps the newest row."""
        kept = list(itertools.islice(reversed(self._rows), 0, None, 2))
        self._rows = deque(reversed(kept))
        self._rows_bytes = sum(row.bytes for row in kept)
        self.step_s *= 2
