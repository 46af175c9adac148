"""Ejection: which failures eject an endpoint, for how long, and how it returns."""

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm.table import AREA_MASK, EJECTED, TRIAL_AREA_AT, TRIAL_NUMBER_AT
from tests.workers.shared.outlier_world import no_answers
from workers.shared.ejection import BACK_OFF_S, BACK_OFF_S_MAX, CALM_S, CONNECTION_POINTS, SHARE_MAX, TRIAL_S, Ejections, Step

TICK_S = 0.005


class Server:
    def __init__(self, pool: int = 0) -> None:
        self.refuses = self.is_down = False
        self.pool = pool


class World:
    """A pool of endpoints, and what workers count for them."""

    def __init__(self, size: int = 8) -> None:
        self.now = 100.0
        self.served, self.failed = np.zeros(size + 2, dtype=np.int64), np.zeros(size + 2, dtype=np.int64)
        self.used = size + 2
        self.pool: dict[int, Any] = {slot: Server() for slot in range(size)}
        self.workers = [1, 2]
        self.inflight = dict.fromkeys(range(size), 0)
        self.ejections = self.made(None)

    def made(self, earlier: Ejections | None) -> Ejections:
        return Ejections(
            lambda: (self.served[: self.used].copy(), self.failed[: self.used].copy()),
            lambda: self.workers,
            self.inflight.__getitem__,
            no_answers(self.used),
            earlier,
        )

    def sweep(self, seconds: float = TICK_S) -> list[tuple[int, Step]]:
        self.now += seconds
        return list(self.ejections.sweep(self.now, self.pool))

    def fail(self, slot: int = 0, points: int = CONNECTION_POINTS) -> list[tuple[int, Step]]:
        self.failed[slot] += points
        return self.sweep()

    def serve(self, slot: int = 0) -> list[tuple[int, Step]]:
        self.served[slot] += 1
        return self.sweep()

    def out(self) -> list[int]:
        return [slot for slot in self.pool if self.ejections.flags(slot) & EJECTED]

    def trial(self, slot: int = 0) -> tuple[int, int]:
        """The area and the number of the trial."""
        flags = self.ejections.flags(slot)
        assert flags & EJECTED
        return flags >> TRIAL_AREA_AT & AREA_MASK, flags >> TRIAL_NUMBER_AT


def test_two_failed_connections_in_a_row_eject() -> None:
    w = World()
    assert w.fail() == [] and w.fail() == [(0, Step.EJECTED)]
    assert (w.out(), w.ejections.count(), w.ejections.total) == ([0], 1, 1)


def test_five_server_errors_in_a_row_eject_and_a_success_between_them_starts_again() -> None:
    w = World()
    for _ in range(4):
        assert w.fail(points=1) == []
    assert w.serve() == []
    for _ in range(4):
        assert w.fail(points=1) == []
    assert w.fail(points=1) == [(0, Step.EJECTED)]


def test_one_failure_ejects_a_server_that_refused_its_last_scrape() -> None:
    w = World()
    w.pool[0].refuses = True
    assert w.fail(points=1) == [(0, Step.EJECTED)]


def test_failures_and_a_success_within_one_sweep_do_not_eject() -> None:
    w = World()
    w.served[0] += 1
    assert w.fail(points=99) == []


def test_random_errors_of_1_percent_eject_none() -> None:
    w, rng = World(), random.Random(7)
    for _ in range(20_000):
        slot = rng.randrange(8)
        if rng.random() < 0.01:
            w.fail(slot, 1)
        else:
            w.serve(slot)
    assert w.ejections.total == 0


def test_one_dead_server_of_8_costs_at_most_2_errors() -> None:
    w, rng, errors = World(), random.Random(7), 0
    for _ in range(2000):
        slot = rng.choice([slot for slot in w.pool if slot not in w.out()])
        if slot == 3:
            errors += 1
            w.fail(slot)
        else:
            w.serve(slot)
        if w.ejections.flags(3) not in (0, EJECTED):
            break  # on trial, which costs one error more, after the back-off
    assert errors == 2


def test_after_the_back_off_one_worker_gets_a_trial_and_a_success_returns_the_endpoint() -> None:
    w = World()
    w.fail(), w.fail()
    assert w.sweep(BACK_OFF_S - 2 * TICK_S) == []
    assert w.sweep() == [] and w.sweep(2 * TICK_S) == [(0, Step.TRIAL)]
    assert w.trial()[0] in w.workers
    assert w.out() == [0], "for the other workers"
    assert w.serve() == [(0, Step.RETURNED)]
    assert w.ejections.flags(0) == 0 and w.out() == []


def test_an_unused_trial_goes_to_the_next_worker_and_one_in_flight_stays() -> None:
    w = World()
    w.fail(), w.fail()
    w.sweep(BACK_OFF_S)
    area, number = w.trial()
    w.inflight[0] = 1
    assert w.sweep(10 * TRIAL_S) == []
    w.inflight[0] = 0
    assert w.sweep(TRIAL_S) == [(0, Step.TRIAL)]
    assert w.trial() == (3 - area, number + 1)
    w.workers = []
    assert w.sweep(TRIAL_S) == []


def test_older_requests_that_take_long_delay_no_trial() -> None:
    w = World()
    w.inflight[0] = 3
    w.fail(), w.fail()
    assert w.sweep(BACK_OFF_S) == [(0, Step.TRIAL)]
    w.inflight[0] = 4
    assert w.sweep(10 * TRIAL_S) == [], "it is used"
    assert w.serve() == [(0, Step.RETURNED)]


def test_each_failed_trial_doubles_the_back_off_up_to_a_limit_and_calm_resets_it() -> None:
    w = World()
    w.fail(), w.fail()
    back_offs = []
    for _ in range(8):
        seconds = 0.0
        while not w.sweep(0.25):
            seconds += 0.25
        back_offs.append(seconds)
        assert w.fail(points=1) == [(0, Step.EJECTED)]
    assert back_offs[:4] == pytest.approx([1, 2, 4, 8], abs=0.3)
    assert back_offs[-1] == pytest.approx(BACK_OFF_S_MAX, abs=0.3)
    w.sweep(BACK_OFF_S_MAX)
    assert w.serve() == [(0, Step.RETURNED)]
    w.sweep(CALM_S + 1)
    w.fail(), w.fail()
    assert w.sweep(BACK_OFF_S) == [(0, Step.TRIAL)]


def test_a_server_that_is_down_gets_no_trial() -> None:
    w = World()
    w.fail(), w.fail()
    w.pool[0].is_down = True
    assert w.sweep(BACK_OFF_S) == []
    w.pool[0].is_down = False
    assert w.sweep() == [(0, Step.TRIAL)]


def test_a_slot_that_another_endpoint_takes_is_not_ejected() -> None:
    w = World()
    w.fail(), w.fail()
    w.ejections.forget(0)
    assert w.ejections.flags(0) == 0 and w.sweep(BACK_OFF_S) == []
    assert w.fail() == [], "earlier failures do not count"
    w.failed[9] += 99
    assert w.sweep() == [], "a slot without an endpoint"


def test_a_successor_continues_with_the_ejections_of_the_slots_that_it_adopts() -> None:
    w = World()
    for slot in (0, 1, 2):
        w.fail(slot), w.fail(slot)
    w.ejections = w.made(w.ejections)
    assert (w.out(), w.ejections.total) == ([], 0)
    w.ejections = w.made(w.ejections)
    w.ejections.adopt(0)
    w.ejections.forget(1)
    w.ejections.adopt(1)
    assert w.out() == [0], "slot 1 has another endpoint, and slot 2 none"
    assert w.sweep(BACK_OFF_S) == [(0, Step.TRIAL)]
    assert w.serve() == [(0, Step.RETURNED)]


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["fail", "serve", "wait"])), max_size=120))
def test_never_more_than_half_of_the_pool_is_ejected(steps: list[tuple[int, str]]) -> None:
    w = World(7)
    for slot, step in steps:
        if step == "fail":
            w.fail(slot, 5)
        elif step == "serve":
            w.serve(slot)
        else:
            w.sweep(0.7)
        assert len(w.out()) == w.ejections.count() <= SHARE_MAX * len(w.pool)


def test_slots_that_come_into_use_bring_no_old_failures_and_the_others_are_judged_as_before() -> None:
    world = World()
    world.used = 4
    world.failed[6], world.served[6] = 100, 50  # of an endpoint that was there before
    assert world.fail(0, 3) == []
    world.used = 8
    assert world.fail(0, 2) == [(0, Step.EJECTED)]
    assert world.fail(6, 4) == []
    world.used = 7
    assert world.fail(6, 1) == [(6, Step.EJECTED)]
    world.used = 2
    assert world.fail(1, 5) == [(1, Step.EJECTED)]


def test_half_of_each_pool_may_be_ejected_whatever_happens_in_the_others() -> None:
    w = World()
    for slot in range(4, 8):
        w.pool[slot].pool = 1
    for slot in (4, 5, 6, 7):
        w.fail(slot)
        w.fail(slot)
    assert w.out() == [4, 5]
    w.fail(0)
    w.fail(0)
    assert w.out() == [0, 4, 5]
