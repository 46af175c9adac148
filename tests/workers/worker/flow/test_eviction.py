"""Eviction over real areas in plain memory: workers see only what the others publish."""

from typing import Any

import pytest

from epp.flow.eviction import CONFIRM_S, NOTHING, RevocationObserver, Victim
from epp.metrics.flow_control import REVOKED
from epp.plugin import EvictionFilter, EvictionOrder, NoParams
from epp.request import Request
from epp.request.flows import FlowKey, sheddable
from shm.areas import Areas, AreaSchema
from shm.flow_areas import FlowAreas, FlowSchema, VictimCell
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process.layout import series_schema_of
from workers.worker.flow.eviction import Evictions, RevocationMetrics, reclaiming

GRACE_S = 0.5


class Sheddable(EvictionFilter):
    def evictable(self, flow: FlowKey) -> bool:
        return sheddable(flow.priority)


class LowestThenNewest(EvictionOrder):
    def key(self, flow: FlowKey, dispatched_at: float) -> Any:
        return flow.priority, -dispatched_at


class Picker:
    """Workers over the same areas. `look` is what a worker does when dispatching has stopped."""

    def __init__(self, workers: int = 3) -> None:
        schema, flow = AreaSchema(1, (), (), (), areas=workers + 1), FlowSchema(2, workers)
        self.areas = Areas(schema, Region(memoryview(bytearray(schema.bytes))))
        for ordinal in range(1, workers + 1):
            self.areas.set_serving(ordinal, True)
        self.flow = FlowAreas(flow, Region(memoryview(bytearray(flow.bytes))), self.areas)
        self.now = 100.0
        self.load = 1.0
        self.revoked: list[tuple[int, str]] = []
        self.woken: list[int] = []
        self.victims: dict[str, tuple[int, Victim]] = {}
        self.evictions = [
            Evictions(
                Sheddable("f", NoParams()),
                LowestThenNewest("o", NoParams()),
                GRACE_S,
                pool=self,
                areas=self.flow,
                worker=worker,
                now=lambda: self.now,
                wake=self.woken.append,
                observer=RevocationObserver(),
            )
            for worker in range(workers)
        ]

    def saturation(self) -> float:
        return self.load

    def bands(self) -> list[tuple[int, float, bool]]:
        return [(5, 1.0, True), (-1, 1.0, False)]

    def in_flight(self) -> int:
        return 10

    def send(self, worker: int, name: str, priority: int, *, stays: bool = False) -> None:
        """Sends a request to a model server."""

        def revoke() -> bool:
            self.revoked.append((worker, name))
            if not stays:
                self.end(name)
            return True

        request = Request(id=name, path="/", headers={}, now=self.now, priority=priority)
        victim = self.evictions[worker].track(request, self.now, revoke)
        if victim is not None:
            self.victims[name] = (worker, victim)

    def end(self, name: str) -> None:
        worker, victim = self.victims[name]
        self.evictions[worker].ended(victim)

    def look(self, worker: int, now: float) -> list[tuple[int, str]]:
        """The requests that were revoked, by this worker or by workers that it woke."""
        self.now, before = now, len(self.revoked)
        self.evictions[worker].blocked()
        for other in self.woken:
            self.evictions[other].blocked()
        self.woken.clear()
        return self.revoked[before:]


def test_a_blocked_worker_causes_the_eviction_of_the_best_victim_of_all_workers() -> None:
    picker = Picker()
    picker.send(0, "important", 0)
    picker.send(1, "low", -1)
    picker.now += 1
    picker.send(2, "lower", -2)
    picker.send(1, "low and new", -1)
    assert picker.look(0, 102.0) == [(2, "lower")]
    assert picker.look(0, 103.0) == [(1, "low and new")]
    assert picker.look(0, 104.0) == [(1, "low")]
    assert picker.look(0, 105.0) == []


def test_areas_show_a_workers_victims_and_its_running_revocations() -> None:
    picker = Picker()
    picker.send(1, "a", -3, stays=True)
    assert picker.flow.victim(1) == VictimCell(1, -3, 100.0, 0.0)
    picker.load = 1.05
    picker.look(1, 102.0)
    assert picker.flow.victim(1) == VictimCell(0, 0, 0.0, 102.0 + CONFIRM_S)
    assert reclaiming(picker.flow, 102.0) == pytest.approx((0.105, 0.05))
    picker.now = 103.0
    picker.end("a")
    assert picker.flow.victim(1).busy_until == 103.0 + GRACE_S
    assert reclaiming(picker.flow, 104.0) == pytest.approx((0.0, 0.05))


def test_workers_wait_for_the_effect_of_a_revocation_by_any_of_them() -> None:
    picker = Picker()
    picker.send(0, "mine", -1)
    picker.send(2, "theirs", -2, stays=True)
    assert picker.look(2, 101.0) == [(2, "theirs")]
    assert picker.look(0, 102.0) == []
    picker.now = 103.0
    picker.end("theirs")
    assert picker.look(0, 103.0) == []
    assert picker.look(0, 103.0 + GRACE_S) == [(0, "mine")]


def test_a_dead_worker_has_no_victims_and_blocks_no_other() -> None:
    picker = Picker()
    picker.send(0, "mine", -1)
    picker.send(1, "theirs", -5, stays=True)
    picker.look(1, 101.0)
    picker.send(1, "more", -5)
    picker.areas.set_serving(2, False)
    assert picker.look(0, 102.0) == [(0, "mine")]


def test_a_successor_starts_without_victims() -> None:
    picker = Picker()
    picker.send(1, "theirs", -5)
    picker.flow.area(1).take_over()
    assert picker.flow.victim(1) == VictimCell(0, 0, 0.0, 0.0)
    assert picker.evictions[0].blocked() is NOTHING


def test_requests_that_the_filter_rejects_are_not_published() -> None:
    picker = Picker()
    picker.send(1, "important", 0)
    assert not picker.victims
    assert picker.flow.victim(1) == VictimCell(0, 0, 0.0, 0.0)


def test_revocations_are_counted_by_the_waiting_priority_and_by_their_outcome() -> None:
    schemas = [series_schema_of(group, areas=1) for group in REVOKED]
    regions = [Region(memoryview(bytearray(schema.bytes))) for schema in schemas]
    writers = [SeriesWriter(s, s.area(r, 0)) for s, r in zip(schemas, regions, strict=True)]
    metrics = RevocationMetrics("pool", *writers)
    metrics.issued(5, 2)
    metrics.confirmed(0.02)
    metrics.timed_out()
    issued, ended, seconds = (SeriesReader(s, r, serving=lambda _: True).rows() for s, r in zip(schemas, regions, strict=True))
    assert {labels: row.counters for labels, row in issued.items()} == {("5", "pool"): (2,)}
    assert {labels: row.counters for labels, row in ended.items()} == {("confirmed", "pool"): (1,), ("timed_out", "pool"): (1,)}
    assert list(seconds) == [("pool",)]
