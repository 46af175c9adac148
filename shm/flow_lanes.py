"""What waits in each worker, and what workers ask of each other: one lane per worker, its owner writes, everybody reads.

    lane    | waiting | its bytes | pending | dispatched | front: 0/1 | its priority | its claim | yielded |
            | evictable | best victim: priority | sent at | busy until | pending reclaim | reclaim target | 0 ... |
            | band 0: requests | bytes | oldest | answered requests | answered bytes | time | end | backlogged | band 1 ... |
            | positions: mark | position | mark | position | mark | position | mark | position | next line ... |
            | asked of worker 0: total | requests of band 0 | bytes of band 0 | ... | asked of worker 1 ... |
Each line of the drawing and each worker's part of the last starts on its own cache line; every cell is one 8-byte word: int64,
but moments (float64, monotonic seconds, 0 = none), claims, times, ends and positions (float64) and reclaims (float64, parts of the
saturation).

- Which band is which priority is said elsewhere (a document); here bands are numbers.
- Gauges (what waits, pending, front, victim) are cleared by `take_over`, since what they counted died with the predecessor.
  `dispatched`, `yielded` and what was asked or answered are counts that only grow, over successors too.
- What is asked of a worker and not yet answered is the sum over all lanes of what was asked, less what it has answered: nothing
  is ever acknowledged, and no word has two writers. A successor starts with everything answered that was asked before. `total`
  adds up requests and bytes of all bands and moves last, so that one word per lane tells whether there is anything new.
- Positions are how far flows have got in their band, and `time` and `end` where the band itself is and the furthest flow: they only
  grow, over successors too, and the greatest of all lanes counts. A flow is named by a mark, a hash of its name and its band's number,
  and has its line by that; of the four places of a line the next in turn is given to a newcomer. So a flow whose place was taken
  is not known any more until it moves again, but never has another one's position, but for equal marks of 63 bits.
- Lanes whose worker is not serving count nothing (`Lanes` has the words that say so): a killed worker's queue is gone
  for the others as soon as the parent has reaped it.
- Words of a lane are not changed together: a reader may see a band's requests before its bytes.

What this does not do: know priorities, limits or policies.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

from shm.lanes import Lanes
from shm.layout import CACHE_LINE, WORD, aligned, layout_hash
from shm.segment import Region

BANDS_MAX = 64
LANE_ALIGNMENT = 2 * CACHE_LINE  # CPUs fetch cache lines in pairs
LINE = CACHE_LINE // WORD

WAITING, WAITING_BYTES, PENDING, DISPATCHED, FRONT, FRONT_PRIORITY, FRONT_CLAIM, YIELDED = range(LINE)
EVICTABLE, VICTIM_PRIORITY, VICTIM_SENT_AT, VICTIM_BUSY_UNTIL, RECLAIM_PENDING, RECLAIM_TARGET = range(LINE, LINE + 6)
BANDS_AT = 2 * LINE
REQUESTS, BYTES, OLDEST, ANSWERED_REQUESTS, ANSWERED_BYTES, TIME, END, BACKLOGGED = range(LINE)
MARK_LINES = 512  # a power of 2
PLACES = tuple(range(0, LINE, 2))  # of a mark in its line
MARK_MAX = (1 << 63) - 1
GAUGES = (
    WAITING, WAITING_BYTES, PENDING, FRONT, FRONT_PRIORITY, FRONT_CLAIM, EVICTABLE, VICTIM_PRIORITY, VICTIM_SENT_AT, VICTIM_BUSY_UNTIL,
    RECLAIM_PENDING, RECLAIM_TARGET,
)  # fmt: skip


class FlowSchema:
    """How many bands there are, how many workers, and where each word of a lane lies."""

    def __init__(self, bands: int, workers: int) -> None:
        if bands < 1 or workers < 1:
            raise ValueError(f"flow lanes need at least one band and one worker, not {bands}, {workers}")
        self.bands, self.workers = bands, workers
        self.marks_at = BANDS_AT + bands * LINE
        self.asked_at = self.marks_at + MARK_LINES * LINE
        self.asked_words = aligned((1 + 2 * bands) * WORD) // WORD
        self.lane_bytes = aligned((self.asked_at + workers * self.asked_words) * WORD, LANE_ALIGNMENT)
        self.lane_words = self.lane_bytes // WORD
        self.bytes = workers * self.lane_bytes
        self.layout_hash = layout_hash("flow 3", bands, workers)

    def describe(self) -> dict[str, Any]:
        return {"kind": "flow", "bands": self.bands, "workers": self.workers}

    def band_at(self, band: int) -> int:
        """Where a band's words begin in a lane."""
        return BANDS_AT + band * LINE

    def line_of(self, mark: int) -> int:
        """Where in a lane the line of a mark begins."""
        return self.marks_at + (mark & (MARK_LINES - 1)) * LINE

    def asked_of(self, worker: int) -> int:
        """Where in a lane it stands what was asked of a worker."""
        return self.asked_at + worker * self.asked_words


class Cell(NamedTuple):
    """One band in one worker; `oldest` is an arrival, 0 where nothing waits."""

    requests: int
    bytes: int
    oldest: float


class FrontCell(NamedTuple):
    """A worker's most important band in which something waits."""

    priority: int
    claim: float


class VictimCell(NamedTuple):
    """What a worker shows of the requests that it could give up."""

    evictable: int
    priority: int
    sent_at: float
    busy_until: float


class FlowLanes:
    """All lanes. Workers count from 0. What is summed is summed over workers that serve."""

    def __init__(self, schema: FlowSchema, region: Region, lanes: Lanes) -> None:
        self.schema = schema
        self.words: memoryview = region.bytes.cast("q")
        self.floats: memoryview[float] = region.bytes.cast("d")
        self._lanes = lanes
        self._serving_now = lanes.serving_words.tobytes
        self._seen = b""
        self._workers: tuple[int, ...] = ()
        self._bases: tuple[int, ...] = ()

    def base(self, worker: int) -> int:
        """Where a worker's lane begins, in words."""
        return worker * self.schema.lane_words

    def lane(self, worker: int) -> "FlowLane":
        """The owner's side of a worker's lane."""
        return FlowLane(self, worker)

    def serving(self) -> tuple[int, ...]:
        """The workers that count."""
        self._look()
        return self._workers

    def serving_bases(self) -> tuple[int, ...]:
        """Where their lanes begin: the same object until it is others who serve."""
        if self._serving_now() != self._seen:
            self._look()
        return self._bases

    def total(self, word: int) -> int:
        """One word, summed."""
        words, total = self.words, 0
        for base in self.serving_bases():
            total += words[base + word]
        return total

    def cell(self, worker: int, band: int) -> Cell:
        """One band of one worker, serving or not."""
        at = self.base(worker) + self.schema.band_at(band)
        words = self.words
        return Cell(words[at + REQUESTS], words[at + BYTES], self.floats[at + OLDEST])

    def band(self, band: int) -> Cell:
        """One band over all workers."""
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
        """Whether nothing waits in a band, and nothing is asked of it, in any worker that serves."""
        return not self.band(band).requests and all(self.asked(worker, band) == (0, 0) for worker in self.serving())

    def position(self, mark: int, bases: Sequence[int]) -> float:
        """How far the flow of this mark has got in any of these lanes; -inf: nobody knows it."""
        line, words, furthest = self.schema.line_of(mark), self.words, -inf
        for base in bases:
            at = base + line
            for place in PLACES:
                if words[at + place] == mark:
                    position = self.floats[at + place + 1]
                    if position > furthest and words[at + place] == mark:  # it has not become another one's meanwhile
                        furthest = position
                    break
        return furthest

    def front(self, worker: int) -> FrontCell | None:
        """None: nothing waits there."""
        base, words = self.base(worker), self.words
        if not words[base + FRONT]:
            return None
        return FrontCell(words[base + FRONT_PRIORITY], self.floats[base + FRONT_CLAIM])

    def victim(self, worker: int) -> VictimCell:
        """What this worker could give up."""
        base, words, floats = self.base(worker), self.words, self.floats
        return VictimCell(
            words[base + EVICTABLE],
            words[base + VICTIM_PRIORITY],
            floats[base + VICTIM_SENT_AT],
            floats[base + VICTIM_BUSY_UNTIL],
        )

    def reclaim(self, worker: int) -> tuple[float, float]:
        """How much saturation is on its way to be freed by what this worker gave up, and how much its last decision was to free."""
        base, floats = self.base(worker), self.floats
        return floats[base + RECLAIM_PENDING], floats[base + RECLAIM_TARGET]

    def asked(self, worker: int, band: int) -> tuple[int, int]:
        """Requests and bytes that this worker is to displace of a band and has not answered yet, whoever asked."""
        words, at = self.words, self.schema.asked_of(worker) + 1 + 2 * band
        own = self.base(worker) + self.schema.band_at(band)
        requests, size = -words[own + ANSWERED_REQUESTS], -words[own + ANSWERED_BYTES]
        for base in range(0, self.schema.workers * self.schema.lane_words, self.schema.lane_words):
            requests += words[base + at]
            size += words[base + at + 1]
        return max(0, requests), max(0, size)

    def asked_ever(self, worker: int) -> int:
        """Moves with everything that this worker is asked."""
        words, at = self.words, self.schema.asked_of(worker)
        total = 0
        for base in range(0, self.schema.workers * self.schema.lane_words, self.schema.lane_words):
            total += words[base + at]
        return total

    def _look(self) -> None:
        serves = self._serving_now()
        if serves != self._seen:
            self._seen = serves
            count = min(self.schema.workers, self._lanes.schema.lanes - 1)
            self._workers = tuple(worker for worker in range(count) if self._lanes.serving(worker + 1))
            self._bases = tuple(map(self.base, self._workers))


class FlowLane:
    """The owner's side of one lane: plain stores, no other process writes here."""

    def __init__(self, all_: FlowLanes, worker: int) -> None:
        self.worker = worker
        self.schema = schema = all_.schema
        self.base = base = all_.base(worker)
        self._all = all_
        self.words = all_.words[base : base + schema.lane_words]
        self.floats = all_.floats[base : base + schema.lane_words]
        self._place = 0  # in a line, of the next newcomer

    def take_over(self) -> None:
        """Clear the predecessor's gauges; everything that was asked of it counts as answered."""
        words, schema = self.words, self.schema
        for word in GAUGES:
            words[word] = 0
        for band in range(schema.bands):
            at = schema.band_at(band)
            words[at + REQUESTS] = words[at + BYTES] = words[at + OLDEST] = words[at + BACKLOGGED] = 0
            self.answer(band, *self._all.asked(self.worker, band))

    def publish(self, band: int, requests: int, size: int, oldest: float) -> None:
        """What waits here in one band; totals follow."""
        words, at = self.words, self.schema.band_at(band)
        words[WAITING] += requests - words[at + REQUESTS]
        words[WAITING_BYTES] += size - words[at + BYTES]
        words[at + REQUESTS] = requests
        words[at + BYTES] = size
        self.floats[at + OLDEST] = oldest

    def move(self, mark: int, position: float) -> None:
        """How far a flow has got."""
        words, line = self.words, self.schema.line_of(mark)
        for at in range(line, line + LINE, 2):
            if words[at] == mark:
                self.floats[at + 1] = position
                return
        at = line + PLACES[self._place]
        self._place = (self._place + 1) % len(PLACES)
        words[at] = 0  # whoever reads now finds nobody
        self.floats[at + 1] = position
        words[at] = mark

    def show_time(self, band: int, time: float, end: float, backlogged: int) -> None:
        """Where a band is, where its furthest flow, and how many flows wait for their turn."""
        words, floats, at = self.words, self.floats, self.schema.band_at(band)
        floats[at + END] = end
        floats[at + TIME] = time
        words[at + BACKLOGGED] = backlogged

    def front(self, priority: int, claim: float) -> None:
        """The most important band in which something waits."""
        words = self.words
        words[FRONT_PRIORITY] = priority
        self.floats[FRONT_CLAIM] = claim
        words[FRONT] = 1

    def no_front(self) -> None:
        """Nothing waits."""
        self.words[FRONT] = 0

    def ask(self, worker: int, band: int, requests: int, size: int) -> None:
        """Have another worker displace so much more of a band."""
        words, at = self.words, self.schema.asked_of(worker)
        words[at + 1 + 2 * band] += requests
        words[at + 2 + 2 * band] += size
        words[at] += requests + size  # last: whoever looks at it finds what it stands for

    def answer(self, band: int, requests: int, size: int) -> None:
        """So much of what is asked of this worker is done, or cannot be done any more."""
        words, at = self.words, self.schema.band_at(band)
        words[at + ANSWERED_REQUESTS] += requests
        words[at + ANSWERED_BYTES] += size

    def show_victim(self, cell: VictimCell) -> None:
        """What this worker could give up of what is being served."""
        words, floats = self.words, self.floats
        words[VICTIM_PRIORITY] = cell.priority
        floats[VICTIM_SENT_AT] = cell.sent_at
        floats[VICTIM_BUSY_UNTIL] = cell.busy_until
        words[EVICTABLE] = cell.evictable

    def show_reclaim(self, pending: float, target: float) -> None:
        """What is being freed by what this worker gave up, in parts of the saturation."""
        self.floats[RECLAIM_PENDING] = pending
        self.floats[RECLAIM_TARGET] = target
