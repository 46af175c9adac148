"""Lanes: what each process says about itself; its owner writes, everybody reads and sums.

    serving   | lane 0 | lane 1 | ... | lane n-1 |            written by the parent only
    lane      | beat | successions | scalar 0 | ... |         lane 0 is the supervisor's,
              | requests in flight, one per slot |            lanes 1..n-1 the workers'
              | tokens in flight, one per slot |
              | counter 0 | ... |
              | sum | bucket 0 | ... | overflow |             per histogram; bucket i counts
                                                              values <= bound i, not cumulated
Each line of the drawing starts on its own cache line; every cell is one 8-byte word: int64, except
beats and sums (float64). A lane starts on an even cache line, so lanes never share one.

- Scalars and in-flight numbers are gauges: `take_over` clears them, since what they counted died
  with the predecessor. Counters and histograms go on, so exported counters never fall.
- In-flight numbers count only while the parent says that the lane is serving: what a dead worker
  left in its lane must not weigh on an endpoint until a successor comes.
- Words of one lane are not changed together: a reader may see a histogram's bucket before its sum.

What this does not do: react. Who is too old, or has too much, is the reader's business.
"""

import math
from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

SUPERVISOR_LANE = 0
BEAT, SUCCESSIONS, FIRST_SCALAR = range(3)
LANE_ALIGNMENT = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs

Ints = npt.NDArray[np.int64]


class LaneSchema:
    """What a lane holds, how many lanes there are, and where each word lies."""

    def __init__(
        self,
        slots: int,
        scalars: tuple[str, ...],
        counters: tuple[str, ...],
        histograms: tuple[tuple[str, tuple[float, ...]], ...],
        *,
        lanes: int,
    ) -> None:
        if slots < 1 or lanes < 1:
            raise ValueError(f"lanes need at least one slot and one lane, not {slots}, {lanes}")
        self.slots, self.lanes, self.histograms = slots, lanes, histograms
        self.scalar = _indices("scalar", scalars)
        self.counter = _indices("counter", counters)
        self.histogram = _indices("histogram", tuple(name for name, _ in histograms))
        for name, bounds in histograms:
            if list(bounds) != sorted(set(bounds)):
                raise ValueError(f"histogram {name}: bounds must ascend, not {bounds}")
        self.inflight_at = _next_line(FIRST_SCALAR + len(scalars))
        self.tokens_at = _next_line(self.inflight_at + slots)
        self.counters_at = _next_line(self.tokens_at + slots)
        end = _next_line(self.counters_at + len(counters))
        self.histograms_at: list[int] = []
        for _, bounds in histograms:
            self.histograms_at.append(end)
            end = _next_line(end + 2 + len(bounds))
        self.lane_bytes = aligned(end * WORD, LANE_ALIGNMENT)
        self.lanes_at = aligned(lanes * WORD, LANE_ALIGNMENT)
        self.bytes = self.lanes_at + lanes * self.lane_bytes
        self.layout_hash = layout_hash("lanes 1", slots, scalars, counters, histograms, lanes)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "lanes",
            "slots": self.slots,
            "scalars": tuple(self.scalar),
            "counters": tuple(self.counter),
            "histograms": self.histograms,
            "lanes": self.lanes,
        }


def _indices(kind: str, names: tuple[str, ...]) -> dict[str, int]:
    if len(set(names)) != len(names):
        raise ValueError(f"a {kind} is named twice in {names}")
    return {name: index for index, name in enumerate(names)}


def _next_line(word: int) -> int:
    return aligned(word * WORD) // WORD


class Lane:
    """The owner's side of one lane: plain stores, no other process writes here."""

    def __init__(self, schema: LaneSchema, region: Region) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self.scalars = self.words[FIRST_SCALAR : FIRST_SCALAR + len(schema.scalar)]
        self.inflight = self.words[schema.inflight_at : schema.inflight_at + schema.slots]
        self.tokens = self.words[schema.tokens_at : schema.tokens_at + schema.slots]
        self.counters = self.words[schema.counters_at :][: len(schema.counter)]
        self._histograms = [
            (at, at + 1, bounds) for at, (_, bounds) in zip(schema.histograms_at, schema.histograms, strict=True)
        ]
        self._cells: Ints = region.array(np.int64, 0, schema.lane_bytes // WORD)
        self._bounds = [np.array(bounds, np.float64) for _, bounds in schema.histograms]

    def add(self, counter_index: int, n: int = 1) -> None:
        """Move a counter on."""
        self.counters[counter_index] += n

    def observe(self, histogram_index: int, value: float) -> None:
        """Count a value in its bucket."""
        sum_at, counts_at, bounds = self._histograms[histogram_index]
        self.words[counts_at + bisect_left(bounds, value)] += 1
        self.floats[sum_at] += value

    def observe_all(self, histogram_index: int, values: list[float], weight: int = 1) -> None:
        """Count many values at once, each `weight` times: 3 us for eight, and 0.05 us each from about a hundred on."""
        sum_at, counts_at, _ = self._histograms[histogram_index]
        counts = np.bincount(self._bounds[histogram_index].searchsorted(values))
        self._cells[counts_at : counts_at + len(counts)] += weight * counts
        self.floats[sum_at] += weight * sum(values)

    def beat(self, now: float) -> None:
        """Say that this process's loop turns."""
        self.floats[BEAT] = now

    def take_over(self) -> None:
        """Clear the predecessor's gauges and its beat; go on with its counters."""
        for gauges in (self.scalars, self.inflight, self.tokens):
            gauges[:] = memoryview(bytes(gauges.nbytes)).cast("q")
        self.floats[BEAT] = 0.0
        self.words[SUCCESSIONS] += 1


class Lanes:
    """All lanes: makes an owner's lane, sums for readers, holds the parent's serving words."""

    def __init__(self, schema: LaneSchema, region: Region) -> None:
        self.schema = schema
        self._region = region
        lane_words, lanes_at = schema.lane_bytes // WORD, schema.lanes_at
        shape = (schema.lanes, lane_words)
        self._serving = region.bytes[: schema.lanes * WORD].cast("q")
        self._all: Ints = region.array(np.int64, lanes_at, shape)
        self._floats: npt.NDArray[np.float64] = region.array(np.float64, lanes_at, shape)
        self._weights: Ints = region.array(np.int64, 0, schema.lanes)[1:]
        self._words = region.bytes.cast("q")
        self._bases = [(lanes_at // WORD) + i * lane_words for i in range(schema.lanes)]
        self._parts: dict[tuple[int, int], Ints] = {}
        self._seen = b""
        self._only = -1  # the one worker's lane that serves, less one

    def lane(self, index: int) -> Lane:
        """The owner's side of lane `index`: 0 is the supervisor, workers follow."""
        size = self.schema.lane_bytes
        return Lane(self.schema, self._region.part(self.schema.lanes_at + index * size, size))

    def serving(self, index: int) -> bool:
        """Whether the parent lets this lane count."""
        return self._serving[index] != 0

    @property
    def serving_words(self) -> memoryview:
        """All of them, to read: whoever keeps what follows from them compares."""
        return self._serving.toreadonly()

    def set_serving(self, index: int, serving: bool) -> None:
        """The parent's word: set when the process is ready, cleared when it was reaped."""
        self._serving[index] = int(serving)

    def inflight(self, slots_used: int) -> Ints:
        """Requests in flight per slot, over all serving workers."""
        return self._sum(self.schema.inflight_at, slots_used)

    def tokens(self, slots_used: int) -> Ints:
        """Tokens in flight per slot, over all serving workers."""
        return self._sum(self.schema.tokens_at, slots_used)

    def slot_inflight(self, slot: int) -> int:
        """Requests in flight on one slot, over all serving workers."""
        at, words, serving, total = self.schema.inflight_at + slot, self._words, self._serving, 0
        for index in range(1, self.schema.lanes):
            if serving[index]:
                total += words[self._bases[index] + at]
        return total

    def scalars(self, name: str) -> list[int]:
        """One gauge of every lane, serving or not."""
        return self._column(FIRST_SCALAR + self.schema.scalar[name])

    def successions(self) -> list[int]:
        """How often each lane was taken over."""
        return self._column(SUCCESSIONS)

    def counters(self) -> dict[str, int]:
        """All counters, summed over all lanes."""
        at = self.schema.counters_at
        sums = self._all[:, at : at + len(self.schema.counter)].sum(axis=0).tolist()
        return dict(zip(self.schema.counter, sums, strict=True))

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Counts per bucket (the last is overflow) and the sum of values, over all lanes."""
        found = {}
        for at, (name, bounds) in zip(self.schema.histograms_at, self.schema.histograms, strict=True):
            counts = self._all[:, at + 1 : at + 2 + len(bounds)].sum(axis=0).tolist()
            found[name] = (counts, float(self._floats[:, at].sum()))
        return found

    def ages(self, now: float) -> list[float]:
        """Seconds since each lane's last beat; infinite before the first."""
        return [now - beat if beat else math.inf for beat in self._floats[:, BEAT].tolist()]

    def _column(self, word: int) -> list[int]:
        column: list[int] = self._all[:, word].tolist()
        return column

    def _sum(self, at: int, slots_used: int) -> Ints:
        part = self._parts.get((at, slots_used))
        if part is None:
            if len(self._parts) > 2 * self.schema.slots:
                self._parts.clear()
            part = self._parts[(at, slots_used)] = self._all[1:, at : at + slots_used]
        weights = bytes(self._serving)
        if weights != self._seen:  # rarely: who serves has changed
            self._seen = weights
            serving = np.flatnonzero(self._weights).tolist()
            self._only = serving[0] if len(serving) == 1 else -1
        if self._only >= 0:  # one worker: nothing to sum, 0.7 us instead of 1.6
            only: Ints = part[self._only].copy()
            return only
        return self._weights @ part
