"""Flow areas: which requests wait in each worker, and how many requests workers ask each other to displace. There is one area per worker.

A worker writes its own area; all processes read all areas.

    area    | waiting | its bytes | pending | dispatched | head: 0/1 | its priority | its claim | yielded |
            | evictable | best victim: priority | sent at | busy until | pending reclaim | reclaim target | 0 ... |
            | band 0: requests | bytes | oldest | answered requests | answered bytes | time | end | backlogged | band 1 ... |
            | positions: hash | position | hash | position | hash | position | hash | position | next line ... |
            | asked of worker 0: total | requests of band 0 | bytes of band 0 | ... | asked of worker 1 ... |
Each line of the drawing, and each worker's part of the last line, starts on its own cache line. Every cell is one 8-byte word. Moments
(monotonic seconds, 0 = none), claims, times, ends, positions and reclaims (fractions of the saturation) are float64, the others int64.

- `yielded` counts how often the worker left room to another one. `sent at` says when the best victim got its endpoint, and `busy until`
  when the worker's evictions are over at the latest.
- A band is a number here. A document maps bands to priorities.
- `take_over` clears the gauges (waiting requests, pending, head, victim), because the requests that they counted died with the predecessor.
  `dispatched`, `yielded`, and the asked and answered numbers only grow; successors continue them.
- A worker may ask another worker to displace requests of a band. The other worker still has to displace the sum of the asked numbers over
  all areas, minus its answered numbers. So there are no acknowledgements, and no word has two writers. A successor treats all requests that
  its predecessor was asked to displace as answered. `total` is the sum of requests and bytes over all bands. The asking worker stores
  `total` last, so one word per area shows whether more was asked.
- A position is how far a flow has got in its band; `time` is the band's virtual time and `end` the position of its furthest flow. The three
  only grow, even over successors, and the largest value of all areas is valid. A flow hash identifies a flow: it is a hash of the flow's
  name, and of all that makes its positions comparable with others. The flow hash selects the flow's line, which has four places; a new
  flow takes the next place in turn. A flow that lost its place is unknown until it moves again. It never gets the position of another
  flow, unless two 63-bit flow hashes are equal.
- All numbers in the area of a worker that is not serving are ignored (`Areas` has the serving words). So as soon as the parent has reaped a
  killed worker, other workers ignore the queue of that worker.
- The words of an area do not change together: a reader may see a band's requests before its bytes.

This module does not know priorities, limits or policies.
"""

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

import numpy as np

from compiled.calls import area_total
from shm import fence
from shm.areas import Areas
from shm.layout import CACHE_LINE, ROW_ALIGNMENT, WORD, Layout, aligned
from shm.segment import Ints, Region

BANDS_MAX = 64
LINE: Final = CACHE_LINE // WORD

WAITING: Final = 0
WAITING_BYTES: Final = 1
PENDING: Final = 2
DISPATCHED: Final = 3
HEAD, HEAD_PRIORITY, HEAD_CLAIM, YIELDED = range(4, LINE)
EVICTABLE, VICTIM_PRIORITY, VICTIM_SENT_AT, VICTIM_BUSY_UNTIL, RECLAIM_PENDING, RECLAIM_TARGET = range(LINE, LINE + 6)
BANDS_AT: Final = 2 * LINE
REQUESTS, BYTES, OLDEST, ANSWERED_REQUESTS, ANSWERED_BYTES, TIME, END, BACKLOGGED = range(LINE)
HASH_LINES: Final = 512  # a power of 2; pools that share a picker have fewer lines
PLACES: Final = tuple(range(0, LINE, 2))  # possible positions of a flow hash in its line, in words
FLOW_HASH_MAX = (1 << 63) - 1
GAUGES: Final = (
    WAITING, WAITING_BYTES, PENDING, HEAD, HEAD_PRIORITY, HEAD_CLAIM, EVICTABLE, VICTIM_PRIORITY, VICTIM_SENT_AT, VICTIM_BUSY_UNTIL,
    RECLAIM_PENDING, RECLAIM_TARGET,
)  # fmt: skip


class FlowSchema(Layout):
    """Lays out the flow areas for a number of bands and workers: the position of each word."""

    def __init__(self, bands: int, workers: int, lines: int = HASH_LINES) -> None:
        """`lines`: the number of lines for flow hashes, a power of 2."""
        if bands < 1 or workers < 1:
            raise ValueError(f"flow areas need at least one band and one worker, not {bands}, {workers}")
        self.bands, self.workers, self.lines = bands, workers, lines
        self.hashes_at = BANDS_AT + bands * LINE
        self.asked_at = self.hashes_at + lines * LINE
        self.asked_words = aligned((1 + 2 * bands) * WORD) // WORD
        self.area_bytes = aligned((self.asked_at + workers * self.asked_words) * WORD, ROW_ALIGNMENT)
        self.area_words = self.area_bytes // WORD
        self.bytes = workers * self.area_bytes
        super().__init__("flow", "flow 4", bands=bands, workers=workers, lines=lines)

    def band_at(self, band: int) -> int:
        """Returns where a band's words begin, in words from the start of an area."""
        return BANDS_AT + band * LINE

    def line_of(self, flow_hash: int) -> int:
        """Returns where the line of a flow begins, in words from the start of an area."""
        return self.hashes_at + (flow_hash & (self.lines - 1)) * LINE

    def asked_of(self, worker: int) -> int:
        """Returns where an area holds what its writer asked of `worker`, in words from the start of the area."""
        return self.asked_at + worker * self.asked_words


class Cell(NamedTuple):
    """Says how many requests of one band wait, and their bytes. `oldest`: the earliest arrival in monotonic seconds, or 0."""

    requests: int
    bytes: int
    oldest: float


class HeadCell(NamedTuple):
    """Describes a worker's most important waiting request (its head) by priority and claim."""

    priority: int
    claim: float


class VictimCell(NamedTuple):
    """Says how many requests in flight a worker could evict, and which request it would evict first (its best victim).

    `priority` and `sent_at` describe the best victim; `sent_at` says when the victim got its endpoint. `busy_until`: when the worker's
    evictions are over at the latest. Times are in monotonic seconds.
    """

    evictable: int
    priority: int
    sent_at: float
    busy_until: float


class FlowAreas:
    """Reads all areas. Workers are numbered from 0. Sums run over the serving workers."""

    def __init__(self, schema: FlowSchema, region: Region, areas: Areas) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self._areas = areas
        workers = min(schema.workers, areas.schema.areas - 1)
        self._all: Ints = region.array(np.int64, 0, (schema.workers, schema.area_words))[:workers]
        self._serving: Ints = areas.of_workers()[1][:workers]
        self._serving_now = areas.serving_words.tobytes
        self._seen = b""
        self._workers: tuple[int, ...] = ()
        self._bases: tuple[int, ...] = ()

    def base(self, worker: int) -> int:
        """Returns where a worker's area begins, in words from the start of the region."""
        return worker * self.schema.area_words

    def area(self, worker: int) -> "FlowArea":
        """Returns the writing side of a worker's area."""
        return FlowArea(self, worker)

    def serving(self) -> tuple[int, ...]:
        """Returns the workers that serve."""
        self._look()
        return self._workers

    def serving_bases(self) -> tuple[int, ...]:
        """Returns where the areas of the serving workers begin, in words.

        Returns the same object until the set of serving workers changes.
        """
        if self._serving_now() != self._seen:
            self._look()
        return self._bases

    def total(self, word: int, skipped: int = -1) -> int:
        """Sums one word over the areas of the serving workers, except the area of `skipped`. `word`: the position of the word in an
        area.
        """
        return area_total(self._all, self._serving, word, skipped)

    def cell(self, worker: int, band: int) -> Cell:
        """Returns the waiting requests in one band of one worker, whether the worker serves or not."""
        at = self.base(worker) + self.schema.band_at(band)
        words = self.words
        return Cell(words[at + REQUESTS], words[at + BYTES], self.floats[at + OLDEST])

    def band(self, band: int) -> Cell:
        """Returns the waiting requests in one band, over all serving workers."""
        at, words, floats = self.schema.band_at(band), self.words, self.floats
        requests = size = 0
        oldest = 0.0
        for base in self.serving_bases():
            here = base + at
            requests += words[here + REQUESTS]
            size += words[here + BYTES]
            arrival = floats[here + OLDEST]
            if arrival and (not oldest or arrival < oldest):
                oldest = arrival
        return Cell(requests, size, oldest)

    def empty(self, band: int) -> bool:
        """Returns whether no request of the band waits in a serving worker, and no worker still has to displace a request of the band."""
        return not self.band(band).requests and all(self.asked(worker, band) == (0, 0) for worker in self.serving())

    def position(self, flow_hash: int, bases: Sequence[int]) -> float:
        """Returns the largest position that the areas at `bases` have for the flow with this flow hash; -inf if no area knows the flow."""
        line, words, furthest = self.schema.line_of(flow_hash), self.words, -inf
        for base in bases:
            at = base + line
            for place in PLACES:
                if words[at + place] == flow_hash:
                    position = self.floats[at + place + 1]
                    if position > furthest and words[at + place] == flow_hash:  # no other flow has taken the place since
                        furthest = position
                    break
        return furthest

    def head(self, worker: int) -> HeadCell | None:
        """Returns the head of one worker, or None if no request waits in this worker."""
        base, words = self.base(worker), self.words
        if not words[base + HEAD]:
            return None
        return HeadCell(words[base + HEAD_PRIORITY], self.floats[base + HEAD_CLAIM])

    def victim(self, worker: int) -> VictimCell:
        """Returns what one worker publishes about its possible victims."""
        base, words, floats = self.base(worker), self.words, self.floats
        return VictimCell(
            words[base + EVICTABLE], words[base + VICTIM_PRIORITY], floats[base + VICTIM_SENT_AT], floats[base + VICTIM_BUSY_UNTIL]
        )

    def reclaim(self, worker: int) -> tuple[float, float]:
        """Returns how much this worker's evictions have yet to free, and how much its last decision meant to free.

        Both are fractions of the saturation.
        """
        base, floats = self.base(worker), self.floats
        return floats[base + RECLAIM_PENDING], floats[base + RECLAIM_TARGET]

    def asked(self, worker: int, band: int) -> tuple[int, int]:
        """Returns how many requests and bytes of a band other workers asked this worker to displace, minus the answered ones."""
        words, at = self.words, self.schema.asked_of(worker) + 1 + 2 * band
        own = self.base(worker) + self.schema.band_at(band)
        requests, size = -words[own + ANSWERED_REQUESTS], -words[own + ANSWERED_BYTES]
        for base in range(0, self.schema.workers * self.schema.area_words, self.schema.area_words):
            requests += words[base + at]
            size += words[base + at + 1]
        return max(0, requests), max(0, size)

    def asked_ever(self, worker: int) -> int:
        """Returns a counter that grows whenever another worker asks this worker to displace requests."""
        words, at = self.words, self.schema.asked_of(worker)
        total = 0
        for base in range(0, self.schema.workers * self.schema.area_words, self.schema.area_words):
            total += words[base + at]
        fence.order()
        return total

    def _look(self) -> None:
        serves = self._serving_now()
        if serves != self._seen:
            self._seen = serves
            self._workers = tuple(worker for worker in range(len(self._all)) if self._areas.serving(worker + 1))
            self._bases = tuple(map(self.base, self._workers))


class FlowArea:
    """Writes one area. Plain stores are enough, because no other process writes this area."""

    def __init__(self, all_: FlowAreas, worker: int) -> None:
        self.worker = worker
        self.schema = schema = all_.schema
        self.base = base = all_.base(worker)
        self._all = all_
        self.words = all_.words[base : base + schema.area_words]
        self.floats = all_.floats[base : base + schema.area_words]
        self._place = 0  # which of the four places of its line the next new flow takes

    def take_over(self) -> None:
        """Clears the predecessor's gauges, and treats all requests that other workers asked the predecessor to displace as answered."""
        words, schema = self.words, self.schema
        for word in GAUGES:
            words[word] = 0
        for band in range(schema.bands):
            at = schema.band_at(band)
            words[at + REQUESTS] = words[at + BYTES] = words[at + OLDEST] = words[at + BACKLOGGED] = 0
            self.answer(band, *self._all.asked(self.worker, band))

    def publish(self, band: int, requests: int, size: int, oldest: float) -> None:
        """Publishes the waiting requests of one band, and updates the totals over all bands."""
        words, at = self.words, self.schema.band_at(band)
        words[WAITING] += requests - words[at + REQUESTS]
        words[WAITING_BYTES] += size - words[at + BYTES]
        words[at + REQUESTS] = requests
        words[at + BYTES] = size
        self.floats[at + OLDEST] = oldest

    def move(self, flow_hash: int, position: float) -> None:
        """Publishes the position of a flow."""
        words, line = self.words, self.schema.line_of(flow_hash)
        for at in range(line, line + LINE, 2):
            if words[at] == flow_hash:
                self.floats[at + 1] = position
                return
        at = line + PLACES[self._place]
        self._place = (self._place + 1) % len(PLACES)
        words[at] = 0  # a reader must not combine the old flow hash with the new position
        self.floats[at + 1] = position
        words[at] = flow_hash

    def show_time(self, band: int, time: float, end: float, backlogged: int) -> None:
        """Publishes a band's virtual time, the position of its furthest flow, and its number of backlogged flows."""
        words, floats, at = self.words, self.floats, self.schema.band_at(band)
        floats[at + END] = end
        floats[at + TIME] = time
        words[at + BACKLOGGED] = backlogged

    def head(self, priority: int, claim: float) -> None:
        """Publishes the head: the priority and claim of the most important waiting request."""
        words = self.words
        words[HEAD_PRIORITY] = priority
        self.floats[HEAD_CLAIM] = claim
        words[HEAD] = 1

    def no_head(self) -> None:
        """Publishes that no request waits."""
        self.words[HEAD] = 0

    def ask(self, worker: int, band: int, requests: int, size: int) -> None:
        """Asks another worker to displace more requests and bytes of a band."""
        words, at = self.words, self.schema.asked_of(worker)
        words[at + 1 + 2 * band] += requests
        words[at + 2 + 2 * band] += size
        fence.order()
        words[at] += requests + size  # stored last: a reader that sees the new total also sees the new numbers of the band

    def answer(self, band: int, requests: int, size: int) -> None:
        """Records that requests and bytes were displaced as other workers asked, or can no longer be displaced."""
        words, at = self.words, self.schema.band_at(band)
        words[at + ANSWERED_REQUESTS] += requests
        words[at + ANSWERED_BYTES] += size

    def show_victim(self, cell: VictimCell) -> None:
        """Publishes which requests in flight this worker could evict."""
        words, floats = self.words, self.floats
        words[VICTIM_PRIORITY] = cell.priority
        floats[VICTIM_SENT_AT] = cell.sent_at
        floats[VICTIM_BUSY_UNTIL] = cell.busy_until
        words[EVICTABLE] = cell.evictable

    def show_reclaim(self, pending: float, target: float) -> None:
        """Publishes how much this worker's evictions still have to free, and how much they are to free, as fractions of the saturation."""
        self.floats[RECLAIM_PENDING] = pending
        self.floats[RECLAIM_TARGET] = target
