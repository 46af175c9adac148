"""Areas: the numbers that each process publishes about itself. One process writes an area, and all processes read all areas and sum their
numbers.

    serving   | area 0 | area 1 | ... | area n-1 |            only the parent writes here
    area      | heartbeat | successions | scalar 0 | ... |         area 0 is the supervisor's,
              | requests in flight, one per slot |            areas 1..n-1 the workers'
              | tokens in flight, one per slot |
              | requests served, one per slot |
              | points of failures, one per slot |
              | counter 0 | ... |
              | sum | bucket 0 | ... | overflow |             per histogram; bucket i counts
                                                              values <= bound i, not cumulative
              | room for more histograms ... |
Each line of the drawing starts on its own cache line. Every cell is one 8-byte word: int64, except heartbeats (monotonic seconds) and sums,
which are float64. An area starts on an even cache line, so areas never share a pair of lines.

- Scalars and in-flight numbers are gauges. `take_over` clears them, because the requests that they counted died with the predecessor.
  All other numbers continue in the successor, so exported counters never decrease. `workers.shared.ejection` explains served requests
  and points of failures.
- In-flight numbers are valid only while the parent marks the area as serving. So the numbers that a dead worker left in its area are not
  taken as load of an endpoint.
- An area may have room for more histograms at its end. A schema that only adds histograms there describes the same areas, so a new
  process can use more histograms while others still use the old schema.
- The words of one area do not change together: a reader may see a histogram's bucket before its sum.

This module does not react to the numbers. For example, the reader of a heartbeat decides whether the heartbeat is too old.
"""

import math
from typing import Final

import numpy as np

from compiled.calls import area_loads, area_sums, increase
from shm.histograms import Histograms
from shm.layout import ROW_ALIGNMENT, WORD, Layout, aligned
from shm.remote_area import RemoteArea
from shm.segment import Floats, Ints, Region

SUPERVISOR_AREA: Final = 0
HEARTBEAT: Final = 0
SUCCESSIONS: Final = 1
FIRST_SCALAR: Final = 2


class AreaSchema(Layout):
    """Lays out the areas: what an area contains, how many areas there are, and the position of each word."""

    def __init__(
        self,
        slots: int,
        scalars: tuple[str, ...],
        counters: tuple[str, ...],
        histograms: tuple[tuple[str, tuple[float, ...]], ...],
        *,
        areas: int,
        end: int = 0,
    ) -> None:
        """`end`: the least size of an area in words. If the area needs fewer words, the others are room for more histograms."""
        if slots < 1 or areas < 1:
            raise ValueError(f"areas need at least one slot and one area, not {slots}, {areas}")
        self.slots, self.areas, self.histograms = slots, areas, histograms
        self.scalar = _indices("scalar", scalars)
        self.counter = _indices("counter", counters)
        self.histogram = _indices("histogram", tuple(name for name, _ in histograms))
        for name, bounds in histograms:
            if list(bounds) != sorted(set(bounds)):
                raise ValueError(f"histogram {name}: bounds must ascend, not {bounds}")
        self.inflight_at = _next_line(FIRST_SCALAR + len(scalars))
        self.tokens_at = _next_line(self.inflight_at + slots)
        self.served_at = _next_line(self.tokens_at + slots)
        self.failed_at = _next_line(self.served_at + slots)
        self.counters_at = _next_line(self.failed_at + slots)
        least, end = end, _next_line(self.counters_at + len(counters))
        self.histograms_at: list[int] = []
        for _, bounds in histograms:
            self.histograms_at.append(end)
            end = _next_line(end + 2 + len(bounds))
        self.used = end
        self.end = max(end, least)
        self.area_bytes = aligned(self.end * WORD, ROW_ALIGNMENT)
        self.areas_at = aligned(areas * WORD, ROW_ALIGNMENT)
        self.bytes = self.areas_at + areas * self.area_bytes
        super().__init__(
            "areas", "areas 3", slots=slots, scalars=scalars, counters=counters, histograms=histograms, areas=areas, end=self.end
        )


def _indices(kind: str, names: tuple[str, ...]) -> dict[str, int]:
    if len(set(names)) != len(names):
        raise ValueError(f"a {kind} is named twice in {names}")
    return {name: index for index, name in enumerate(names)}


def _next_line(word: int) -> int:
    return aligned(word * WORD) // WORD


class Area:
    """Writes one area. Plain stores are enough, because no other process writes this area."""

    def __init__(self, schema: AreaSchema, region: Region) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self.scalars = self.words[FIRST_SCALAR : FIRST_SCALAR + len(schema.scalar)]
        self.inflight = self.words[schema.inflight_at : schema.inflight_at + schema.slots]
        self.tokens = self.words[schema.tokens_at : schema.tokens_at + schema.slots]
        self.served = self.words[schema.served_at : schema.served_at + schema.slots]
        self.failed = self.words[schema.failed_at : schema.failed_at + schema.slots]
        self.counters = self.words[schema.counters_at :][: len(schema.counter)]
        self._histograms = Histograms(region, schema.area_bytes // WORD, schema.histograms_at, [bounds for _, bounds in schema.histograms])

    def add(self, counter_index: int, n: int = 1) -> None:
        """Adds `n` to a counter."""
        increase(self.counters, counter_index, n)

    def observe(self, histogram_index: int, value: float) -> None:
        """Counts a value in its bucket."""
        self._histograms.observe(0, histogram_index, value)

    def observe_all(self, histogram_index: int, values: list[float], weight: int = 1) -> None:
        """Counts each of `values` in its bucket, `weight` times. This takes 3 us for eight values, and 0.05 us per value above about a
        hundred.
        """
        self._histograms.observe_all(0, histogram_index, values, weight)

    def heartbeat(self, now: float) -> None:
        """Records that this process's event loop turned at `now` (monotonic seconds)."""
        self.floats[HEARTBEAT] = now

    def take_over(self) -> None:
        """Clears the predecessor's gauges and heartbeat. Counters and histograms continue."""
        for gauges in (self.scalars, self.inflight, self.tokens):
            gauges[:] = memoryview(bytes(gauges.nbytes)).cast("q")
        self.floats[HEARTBEAT] = 0.0
        self.words[SUCCESSIONS] += 1


class Areas:
    """Reads all areas. Creates the writing side of an area, sums over areas, and holds the parent's serving words."""

    def __init__(self, schema: AreaSchema, region: Region, remote: RemoteArea | None = None) -> None:
        """`remote`: the area of other replicas; None without a replica store."""
        self.schema = schema
        self.remote = remote
        self._added: RemoteArea | None = None  # the remote area, while this process adds it
        self._region = region
        area_words, areas_at = schema.area_bytes // WORD, schema.areas_at
        shape = (schema.areas, area_words)
        self._serving = region.bytes[: schema.areas * WORD].cast("q")
        self._all: Ints = region.array(np.int64, areas_at, shape)
        self._floats: Floats = region.array(np.float64, areas_at, shape)
        self._workers = self._all[1:]
        self._each: Ints = np.ones(len(self._workers), dtype=np.int64)
        self._weights: Ints = region.array(np.int64, 0, schema.areas)[1:]
        self._words = region.bytes.cast("q")
        self._bases = [(areas_at // WORD) + i * area_words for i in range(schema.areas)]

    def area(self, index: int) -> Area:
        """Returns the writing side of area `index`: 0 is the supervisor's area, the others are those of the workers."""
        size = self.schema.area_bytes
        return Area(self.schema, self._region.part(self.schema.areas_at + index * size, size))

    def serving(self, index: int) -> bool:
        """Returns whether the parent marks this area as serving."""
        return self._serving[index] != 0

    @property
    def serving_words(self) -> memoryview:
        """Returns all serving words, read-only.

        A caller that caches a sum compares the words to notice that a worker started or stopped serving.
        """
        return self._serving.toreadonly()

    def set_serving(self, index: int, serving: bool) -> None:
        """Stores whether an area's process serves. The parent calls this when the process is ready and after it was reaped."""
        self._serving[index] = int(serving)

    def add_remote(self, now: float) -> None:
        """Lets `inflight` and `tokens` include other replicas if the remote area is fresh at `now`. Workers call this regularly."""
        remote = self.remote
        self._added = remote if remote is not None and remote.fresh(now) else None

    @property
    def added(self) -> RemoteArea | None:
        """Returns the remote area; None if the last call of `add_remote` did not include it."""
        return self._added

    def inflight(self, slots_used: int, first: int = 0) -> Ints:
        """Returns the requests in flight per slot, over all serving workers, and over other replicas if `add_remote` included them.

        `first`: the slot with which the result begins. `slots_used`: the number of slots in the result.
        """
        return self._sum(self.schema.inflight_at + first, slots_used, None if self._added is None else self._added.requests[first:])

    def tokens(self, slots_used: int) -> Ints:
        """Returns the tokens in flight per slot, summed in the same way as by `inflight`."""
        return self._sum(self.schema.tokens_at, slots_used, None if self._added is None else self._added.tokens)

    def loads(self, slots_used: int, first: int = 0) -> tuple[Ints, Floats]:
        """Returns the results of `inflight` and of `tokens`, the tokens as float64."""
        at, added = self.schema, self._added
        more = (None, None) if added is None else (added.requests[first:], added.tokens[first:])
        return area_loads(self._workers, self._weights, at.inflight_at + first, at.tokens_at + first, slots_used, *more)

    def of_workers(self) -> tuple[Ints, Ints]:
        """Returns the areas of the workers, shape (workers, words), and the serving word of each. A kernel reads both in place."""
        return self._workers, self._weights

    def outcomes(self, slots_used: int) -> tuple[Ints, Ints]:
        """Returns the requests served and points of failures per slot, over all workers, serving or not."""
        schema = self.schema
        served, failed = (area_sums(self._workers, self._each, at, slots_used, None) for at in (schema.served_at, schema.failed_at))
        return served, failed

    def serving_workers(self) -> list[int]:
        """Returns the areas of the workers that serve."""
        return [index for index in range(1, self.schema.areas) if self._serving[index]]

    def slot_inflight(self, slot: int) -> int:
        """Returns the requests in flight on one slot, over all serving workers."""
        at, words, serving, total = self.schema.inflight_at + slot, self._words, self._serving, 0
        for index in range(1, self.schema.areas):
            if serving[index]:
                total += words[self._bases[index] + at]
        return total

    def slot_load(self, slot: int) -> int:
        """Returns the requests in flight on one slot, over all serving workers and other replicas, whether the remote area is fresh or not.

        Only the supervisor may call this, because it writes the remote area itself.
        """
        return self.slot_inflight(slot) + (0 if self.remote is None else self.remote.words[self.remote.requests_at + slot])

    def scalars(self, name: str) -> list[int]:
        """Returns the value of one gauge in every area, serving or not."""
        return self._column(FIRST_SCALAR + self.schema.scalar[name])

    def successions(self) -> list[int]:
        """Returns the number of times that each area was taken over."""
        return self._column(SUCCESSIONS)

    def counters(self) -> dict[str, int]:
        """Returns all counters, summed over all areas."""
        at = self.schema.counters_at
        sums = self._all[:, at : at + len(self.schema.counter)].sum(axis=0).tolist()
        return dict(zip(self.schema.counter, sums, strict=True))

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Returns the counts per bucket (the last is overflow) and the sum of values of each histogram, over all areas."""
        totals = {}
        for at, (name, bounds) in zip(self.schema.histograms_at, self.schema.histograms, strict=True):
            counts = self._all[:, at + 1 : at + 2 + len(bounds)].sum(axis=0).tolist()
            totals[name] = (counts, float(self._floats[:, at].sum()))
        return totals

    def ages(self, now: float) -> list[float]:
        """Returns the seconds from each area's last heartbeat to `now`; infinite before the first heartbeat."""
        return [now - heartbeat if heartbeat else math.inf for heartbeat in self._floats[:, HEARTBEAT].tolist()]

    def _column(self, word: int) -> list[int]:
        column: list[int] = self._all[:, word].tolist()
        return column

    def _sum(self, at: int, slots_used: int, more: Ints | None) -> Ints:
        """Sums words over the areas of the serving workers, and adds `more`."""
        return area_sums(self._workers, self._weights, at, slots_used, more)
