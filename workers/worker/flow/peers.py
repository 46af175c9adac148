"""Joins one shard of flow control with the other shards, through the areas: implements `epp.flow.ports.Peers` over `shm.flow_areas`.

Flow control identifies a band by its priority, the areas by its place. A priority keeps its place until another priority gets the place. So
a band that was removed is still served until it is empty. The supervisor gives a place to another priority only when no request waits at
that place in any worker.

With a replica store, the sums of bands include what waits in other replicas, so limits hold over all of them. A replica leaves room for
another replica in which a more important band waits.
"""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import xxhash

from compiled.calls import increase
from epp.flow.ports import Elsewhere, Head, Held, Wanted
from epp.request.flows import FlowKey
from shm.areas import Areas
from shm.flow_areas import BACKLOGGED, DISPATCHED, END, FLOW_HASH_MAX, PENDING, REQUESTS, TIME, WAITING, WAITING_BYTES, YIELDED, FlowAreas
from shm.remote_area import HEAD as REMOTE_HEAD
from shm.remote_area import RemoteArea

FRESH_S: Final = 0.5  # seconds; no shard waits for a worker whose heartbeat is older
NOTHING: Final[Sequence[Wanted]] = ()


class AreaPeers:
    """Reads the areas of the other shards, and writes the area of one worker. `worker`: the worker's number, from 0."""

    def __init__(
        self,
        flow: FlowAreas,
        areas: Areas,
        worker: int,
        places: Mapping[int, int],
        *,
        wakeups: Sequence[int],
        now: Callable[[], float],
        remote: RemoteArea | None = None,
        pool: str = "",
    ) -> None:
        """`remote`: has the requests of this pool that wait in other replicas, while the remote area of `areas` is in use; None if it is
        that area itself. `pool`: the name of the pool, because another pool may have had the areas before.
        """
        self._flow = flow
        self._areas = areas
        self._remote = remote
        self._worker = worker
        self._area = flow.area(worker)
        self._base = flow.base(worker)
        self._words = flow.words
        self._bases: tuple[int, ...] = ()
        self._other_bases: tuple[int, ...] = ()
        self._shards: tuple[int, ...] = ()
        self._wakeups = wakeups
        self._now = now
        self._pool = pool
        self._answered_up_to = flow.asked_ever(worker)
        self._places: dict[int, int] = {}
        self._priorities: dict[int, int] = {}
        self.know(places)

    def know(self, places: Mapping[int, int]) -> None:
        """Sets the places of bands (priority -> place). A band that is not in `places` keeps its place, unless another band takes it."""
        for priority, place in places.items():
            before = self._priorities.get(place)
            if before is not None and before != priority:
                del self._places[before]
            moved_from = self._places.get(priority)
            if moved_from is not None and moved_from != place:
                del self._priorities[moved_from]
            self._places[priority] = place
            self._priorities[place] = priority

    # What the other shards show.

    def _look(self) -> tuple[int, ...]:
        """Returns the offsets, in words, at which the areas of the other shards begin."""
        bases = self._flow.serving_bases()
        if bases is not self._bases:
            self._bases = bases
            self._other_bases = tuple(base for base in bases if base != self._base)
            self._shards = tuple(worker for worker in self._flow.serving() if worker != self._worker)
        return self._other_bases

    def _elsewhere(self) -> RemoteArea | None:
        """Returns the area with the requests of this pool that wait in other replicas, or None while this area is not in use."""
        added = self._areas.added
        return added if added is None or self._remote is None else self._remote

    def waiting(self) -> int:
        total = self._flow.total(WAITING, self._worker)
        if (remote := self._elsewhere()) is not None and remote.words[REMOTE_HEAD]:
            total += 1
        return total

    def totals(self) -> tuple[int, int]:
        words, bases = self._words, self._look()
        requests, size = (sum(words[base + WAITING] for base in bases), sum(words[base + WAITING_BYTES] for base in bases))
        if (remote := self._elsewhere()) is not None:
            more, more_bytes = remote.waiting()
            return requests + more, size + more_bytes
        return requests, size

    def band(self, priority: int) -> tuple[int, int]:
        requests = size = 0
        for shard in self.shards():
            held = self.held(shard, priority)
            requests += held.requests
            size += held.bytes
        if (remote := self._elsewhere()) is not None and (place := self._places.get(priority)) is not None:
            more, more_bytes = remote.band(place)
            return requests + more, size + more_bytes
        return requests, size

    def shards(self) -> Sequence[int]:
        self._look()
        return self._shards

    def held(self, shard: int, priority: int) -> Held:
        place = self._places.get(priority)
        return Held() if place is None else Held(*self._flow.cell(shard, place))

    def heads(self) -> Sequence[Head]:
        shown = [(shard, cell) for shard in self.shards() if (cell := self._flow.head(shard)) is not None]
        if not shown:
            return ()
        ages = self._areas.ages(self._now())
        return [Head(shard, cell.priority, cell.claim) for shard, cell in shown if ages[shard + 1] < FRESH_S]

    def elsewhere(self) -> Elsewhere | None:
        if (remote := self._elsewhere()) is None or (head := remote.head()) is None:
            return None
        priority = self._priorities.get(head[0])
        return None if priority is None else Elsewhere(priority, head[1])

    def ledger(self, priority: int, policy: str) -> "BandLedger":
        return BandLedger(self._look, self._flow, self._worker, self._places, priority, f"{self._pool}/{priority}/{policy}")

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

    # What this shard shows and sends.

    def publish(self, priority: int, requests: int, bytes: int, oldest: float) -> None:
        place = self._places.get(priority)
        if place is not None:
            self._area.publish(place, requests, bytes, oldest)

    def head(self, priority: int | None, claim: float) -> None:
        if priority is None:
            self._area.no_head()
        else:
            self._area.head(priority, claim)

    def let_through(self, pending: int) -> None:
        words, base = self._words, self._base
        words[base + PENDING] = pending
        increase(words, base + DISPATCHED)

    def pending(self, count: int) -> None:
        self._words[self._base + PENDING] = count

    def yielded(self) -> None:
        self._words[self._base + YIELDED] += 1

    def demand(self, shard: int, wanted: Wanted) -> None:
        place = self._places.get(wanted.priority)
        if place is not None:
            self._area.ask(shard, place, wanted.requests, wanted.bytes)

    def answered(self, wanted: Wanted) -> None:
        place = self._places.get(wanted.priority)
        if place is not None:
            self._area.answer(place, wanted.requests, wanted.bytes)

    def retire(self) -> None:
        """Clears this shard's area. No request waits in this shard any more."""
        self._area.take_over()

    def wake(self, shard: int) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakeups[shard], 1)


class BandLedger:
    """Implements `epp.plugin.Ledger` for one band, over the areas. A band without a place shows nothing, and reads 0 from other shards."""

    def __init__(
        self,
        other_bases: Callable[[], tuple[int, ...]],
        flow: FlowAreas,
        worker: int,
        places: Mapping[int, int],
        priority: int,
        comparable: str,
    ) -> None:
        """`comparable`: a name that is the same for all flows with comparable positions."""
        self._other_bases = other_bases  # returns the offsets, in words, at which the areas of the other shards begin
        self._flow = flow
        self._worker = worker
        self._area = flow.area(worker)
        self._band_at = flow.schema.band_at
        self._words = flow.words
        self._floats = flow.floats
        self._places = places
        self._priority = priority
        self._comparable = comparable

    def served(self) -> int:
        return self._flow.total(DISPATCHED, self._worker)

    def flow_hash(self, flow: FlowKey) -> int:
        """Returns the hash of the flow, its pool, its band and the band's fairness policy.

        The last three are part of the hash, because the area keeps positions when a reload replaces the policy, and when another band or
        another pool gets the place.
        """
        name = f"{self._comparable}/{flow.fairness_id}".encode(errors="replace")
        return (xxhash.xxh3_64_intdigest(name) & FLOW_HASH_MAX) or 1

    def position(self, flow_hash: int) -> float:
        return self._flow.position(flow_hash, self._other_bases())

    def time(self) -> float:
        return self._furthest(TIME)

    def end(self) -> float:
        return self._furthest(END)

    def _furthest(self, word: int) -> float:
        place = self._places.get(self._priority)
        if place is None:
            return 0.0
        floats, furthest, at = self._floats, 0.0, self._band_at(place) + word
        for base in self._other_bases():
            position = floats[base + at]
            if position > furthest:
                furthest = position
        return furthest

    def backlogged(self) -> int:
        return self._most(BACKLOGGED)

    def alone(self) -> bool:
        return not self._flow.total(WAITING, self._worker) or not self._most(REQUESTS)

    def _most(self, word: int) -> int:
        place = self._places.get(self._priority)
        if place is None:
            return 0
        words, most, at = self._words, 0, self._band_at(place) + word
        for base in self._other_bases():
            count = words[base + at]
            if count > most:
                most = count
        return most

    def move(self, flow_hash: int, position: float) -> None:
        self._area.move(flow_hash, position)

    def show(self, time: float, end: float, backlogged: int) -> None:
        place = self._places.get(self._priority)
        if place is not None:
            self._area.show_time(place, time, end, backlogged)
