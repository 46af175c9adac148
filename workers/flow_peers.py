"""The other shards, by way of the lanes: `epp.flow.ports.Peers` over `shm.flow_lanes`.

Bands are priorities to flow control and places in the lanes here. A priority keeps its place until another one has it: a band
that is wanted no more is still served until it is empty, and the place is given away only when nobody shows anything there.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

import xxhash

from epp.flow.ports import Front, Held, Wanted
from epp.flows import FlowKey
from shm.flow_lanes import (
    BACKLOGGED,
    DISPATCHED,
    END,
    MARK_MAX,
    PENDING,
    REQUESTS,
    TIME,
    WAITING,
    WAITING_BYTES,
    YIELDED,
    FlowLanes,
)
from shm.lanes import Lanes

FRESH_S = 0.5  # whose last beat is older is not waited for
NOTHING: Sequence[Wanted] = ()


class LanePeers:
    """One worker's view of the others, and what it says to them. `worker` counts from 0."""

    def __init__(
        self,
        flow: FlowLanes,
        lanes: Lanes,
        worker: int,
        places: Mapping[int, int],
        *,
        wakeups: Sequence[int],
        now: Callable[[], float],
    ) -> None:
        self._flow = flow
        self._lanes = lanes
        self._worker = worker
        self._lane = flow.lane(worker)
        self._own = flow.base(worker)
        self._words = flow.words
        self._bases: tuple[int, ...] = ()
        self._others: tuple[int, ...] = ()
        self._shards: tuple[int, ...] = ()
        self._wakeups = wakeups
        self._now = now
        self._answered_up_to = flow.asked_ever(worker)
        self._places: dict[int, int] = {}
        self._priorities: dict[int, int] = {}
        self.know(places)

    def know(self, places: Mapping[int, int]) -> None:
        """Which place each band has from now on; bands that are not named keep theirs unless it is taken."""
        for priority, place in places.items():
            before = self._priorities.get(place)
            if before is not None and before != priority:
                del self._places[before]
            moved_from = self._places.get(priority)
            if moved_from is not None and moved_from != place:
                del self._priorities[moved_from]
            self._places[priority] = place
            self._priorities[place] = priority

    # What others show.

    def _look(self) -> tuple[int, ...]:
        """Where the others' lanes begin."""
        bases = self._flow.serving_bases()
        if bases is not self._bases:
            self._bases = bases
            self._others = tuple(base for base in bases if base != self._own)
            self._shards = tuple(worker for worker in self._flow.serving() if worker != self._worker)
        return self._others

    def waiting(self) -> int:
        total, words = 0, self._words
        for base in self._look():
            total += words[base + WAITING]
        return total

    def totals(self) -> tuple[int, int]:
        words, bases = self._words, self._look()
        return sum(words[base + WAITING] for base in bases), sum(words[base + WAITING_BYTES] for base in bases)

    def band(self, priority: int) -> tuple[int, int]:
        requests = size = 0
        for shard in self.shards():
            held = self.held(shard, priority)
            requests += held.requests
            size += held.bytes
        return requests, size

    def shards(self) -> Sequence[int]:
        self._look()
        return self._shards

    def held(self, shard: int, priority: int) -> Held:
        place = self._places.get(priority)
        return Held() if place is None else Held(*self._flow.cell(shard, place))

    def fronts(self) -> Sequence[Front]:
        shown = [(shard, cell) for shard in self.shards() if (cell := self._flow.front(shard)) is not None]
        if not shown:
            return ()
        ages = self._lanes.ages(self._now())
        return [Front(shard, cell.priority, cell.claim) for shard, cell in shown if ages[shard + 1] < FRESH_S]

    def ledger(self, priority: int) -> "BandLedger":
        return BandLedger(self._look, self._flow, self._worker, self._places, priority)

    def progress(self, shard: int) -> int:
        count: int = self._words[self._flow.base(shard) + DISPATCHED]
        return count

    def yields(self, shard: int) -> int:
        count: int = self._words[self._flow.base(shard) + YIELDED]
        return count

    def asked(self, shard: int, priority: int) -> tuple[int, int]:
        place = self._places.get(priority)
        return (0, 0) if place is None else self._flow.asked(shard, place)

    def demands(self) -> Sequence[Wanted]:
        ever = self._flow.asked_ever(self._worker)
        if ever == self._answered_up_to:
            return NOTHING
        wanted = [Wanted(p, *self._flow.asked(self._worker, place)) for p, place in self._places.items()]
        wanted = [each for each in wanted if each.requests or each.bytes]
        if not wanted:
            self._answered_up_to = ever
        return wanted

    # What this shard shows and says.

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        place = self._places.get(priority)
        if place is not None:
            self._lane.publish(place, requests, bytes, oldest)

    def front(self, priority: int | None, claim: float) -> None:
        if priority is None:
            self._lane.no_front()
        else:
            self._lane.front(priority, claim)

    def let_through(self, pending: int) -> None:
        words, own = self._words, self._own
        words[own + PENDING] = pending
        words[own + DISPATCHED] += 1

    def pending(self, count: int) -> None:
        self._words[self._own + PENDING] = count

    def yielded(self) -> None:
        self._words[self._own + YIELDED] += 1

    def demand(self, shard: int, wanted: Wanted) -> None:
        place = self._places.get(wanted.priority)
        if place is not None:
            self._lane.ask(shard, place, wanted.requests, wanted.bytes)

    def answered(self, wanted: Wanted) -> None:
        place = self._places.get(wanted.priority)
        if place is not None:
            self._lane.answer(place, wanted.requests, wanted.bytes)

    def wake(self, shard: int) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeups[shard], 1)


class BandLedger:
    """`epp.plugin.Ledger` of one band: what other workers show. A band without a place shows nothing and sees nothing."""

    def __init__(
        self,
        others: Callable[[], tuple[int, ...]],
        flow: FlowLanes,
        worker: int,
        places: Mapping[int, int],
        priority: int,
    ) -> None:
        self._others = others  # where their lanes begin
        self._flow = flow
        self._lane = flow.lane(worker)
        self._band_at = flow.schema.band_at
        self._words = flow.words
        self._floats = flow.floats
        self._places = places
        self._priority = priority

    def served(self) -> int:
        words, total = self._words, 0
        for base in self._others():
            total += words[base + DISPATCHED]
        return total

    def mark(self, flow: FlowKey) -> int:
        """Positions compare at one place alone, so it is part of the name."""
        name = f"{self._places.get(self._priority, -1)}/{flow.fairness_id}".encode(errors="replace")
        return (xxhash.xxh3_64_intdigest(name) & MARK_MAX) or 1

    def position(self, mark: int) -> float:
        return self._flow.position(mark, self._others())

    def time(self) -> float:
        return self._furthest(TIME)

    def end(self) -> float:
        return self._furthest(END)

    def _furthest(self, word: int) -> float:
        place = self._places.get(self._priority)
        if place is None:
            return 0.0
        floats, furthest, at = self._floats, 0.0, self._band_at(place) + word
        for base in self._others():
            position = floats[base + at]
            if position > furthest:
                furthest = position
        return furthest

    def backlogged(self) -> int:
        return self._most(BACKLOGGED)

    def alone(self) -> bool:
        words, waiting = self._words, 0
        for base in self._others():
            waiting += words[base + WAITING]
        return not waiting or not self._most(REQUESTS)

    def _most(self, word: int) -> int:
        place = self._places.get(self._priority)
        if place is None:
            return 0
        words, most, at = self._words, 0, self._band_at(place) + word
        for base in self._others():
            count = words[base + at]
            if count > most:
                most = count
        return most

    def move(self, mark: int, position: float) -> None:
        self._lane.move(mark, position)

    def show(self, time: float, end: float, backlogged: int) -> None:
        place = self._places.get(self._priority)
        if place is not None:
            self._lane.show_time(place, time, end, backlogged)
