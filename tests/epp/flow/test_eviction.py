"""In-flight eviction of one worker: which victims, when, and how many."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.flow.eviction import (
    CONFIRM_S,
    NOTHING,
    REVOCATIONS_MAX,
    BestVictim,
    Reclamation,
    RevocationObserver,
    Step,
    Victim,
    Victims,
    WaitingBand,
    grace_s,
    waiting_band,
)
from epp.request.flows import FlowKey, sheddable
from tests.examples import examples

GRACE_S = 0.5


def by_priority_then_newest(flow: FlowKey, dispatched_at: float) -> tuple[float, float]:
    return (flow.priority, -dispatched_at)


class Counts(RevocationObserver):
    def __init__(self) -> None:
        self.by_priority: list[tuple[int, int]] = []
        self.confirmations: list[float] = []
        self.late = 0

    def issued(self, priority: int, count: int) -> None:
        self.by_priority.append((priority, count))

    def confirmed(self, seconds: float) -> None:
        self.confirmations.append(seconds)

    def timed_out(self) -> None:
        self.late += 1


class Worker:
    """The requests of one worker. `slow` streams end when the test ends them, the others at once."""

    def __init__(self, *, slow: bool = False) -> None:
        self.victims = Victims(lambda flow: sheddable(flow.priority), by_priority_then_newest)
        self.observer = Counts()
        self.reclamation = Reclamation(self.victims, GRACE_S, observer=self.observer)
        self.slow = slow
        self.now = 0.0
        self.revoked: list[str] = []
        self.tracked: dict[str, Victim | None] = {}

    def serve(self, name: str, priority: int, at: float, *, complete: bool = False) -> None:
        def revoke() -> bool:
            if complete:
                return False
            self.revoked.append(name)
            if not self.slow:
                self.end(name)
            return True

        self.tracked[name] = self.victims.track(FlowKey(name, priority), at, revoke)

    def end(self, name: str) -> None:
        victim = self.tracked[name]
        assert victim is not None
        self.reclamation.ended(victim, self.now)

    def look(self, now: float, saturation: float = 1.0, bands: Any = ((5, 1.0, True),), others: Any = (), in_flight: int = 10) -> Step:
        self.now = now
        return self.reclamation.look(now, saturation, list(bands), list(others), in_flight)


def test_only_requests_that_the_filter_accepts_are_tracked() -> None:
    worker = Worker()
    for name, priority in (("a", -1), ("b", 0), ("c", 5)):
        worker.serve(name, priority, 0.0)
    assert [name for name, victim in worker.tracked.items() if victim] == ["a"]
    assert len(worker.victims) == 1


def test_the_least_important_victim_goes_first_and_within_a_band_the_newest() -> None:
    worker = Worker()
    for name, priority, at in (("old", -1, 1.0), ("worse", -5, 0.0), ("new", -1, 2.0)):
        worker.serve(name, priority, at)
    for now in (3.0, 4.0, 5.0):
        worker.look(now)
    assert worker.revoked == ["worse", "new", "old"]


def test_another_filter_and_order_count_for_requests_that_are_already_served() -> None:
    worker = Worker()
    for name, priority, at in (("old", -1, 1.0), ("worst", -9, 0.0), ("new", -2, 2.0)):
        worker.serve(name, priority, at)
    worker.victims.use(lambda flow: flow.priority > -9, lambda flow, dispatched_at: dispatched_at)
    assert len(worker.victims) == 2
    for now in (3.0, 4.0, 5.0):
        worker.look(now)
    assert worker.revoked == ["old", "new"]
    worker.end("worst")
    assert len(worker.victims) == 0


def test_priorities_minus_one_zero_and_five_are_evicted_by_rank() -> None:
    everything = Victims(lambda flow: True, by_priority_then_newest)
    revoked: list[int] = []
    reclamation = Reclamation(everything, 0.0, observer=RevocationObserver())
    for priority in (0, 5, -1):

        def revoke(priority: int = priority) -> bool:
            revoked.append(priority)
            return True

        victim = everything.track(FlowKey("x", priority), 0.0, revoke)
        assert victim is not None
    for now in (1.0, 20.0, 40.0, 60.0):
        reclamation.look(now, 1.0, [(5, 1.0, True), (0, 1.0, True), (-1, 1.0, True)], (), 3)
    assert revoked == [-1, 0]


def test_nothing_is_revoked_for_a_band_of_equal_or_lower_importance() -> None:
    worker = Worker()
    worker.serve("a", -1, 0.0)
    assert worker.look(1.0, bands=((-1, 1.0, True), (-2, 1.0, True))) is NOTHING
    assert worker.revoked == []


@pytest.mark.parametrize(
    ("bands", "band"),
    [
        ([(5, 1.0, True)], WaitingBand(5, 1.0)),
        ([(5, 1.0, False), (0, 0.9, True)], WaitingBand(0, 0.9)),
        ([(5, 0.0, True), (0, 0.9, True)], WaitingBand(0, 0.9)),
        ([(5, 1.5, True), (0, 0.9, True)], WaitingBand(0, 0.9)),
        ([(5, 1.0, False)], None),
        ([(-1, 1.0, True)], None),
        ([(-5, 1.0, True)], None),
        ([], None),
    ],
    ids=["waits", "first is empty", "first has ceiling 0", "first is open", "empty", "same", "below", "none"],
)
def test_the_band_is_the_most_important_one_above_the_victim_that_waits_because_of_the_load(bands: Any, band: WaitingBand | None) -> None:
    assert waiting_band(1.0, bands, -1) == band


def test_the_number_of_victims_is_deficit_over_mean_footprint_and_at_most_two() -> None:
    for saturation, in_flight, expected in ((1.0, 10, 1), (1.05, 10, 1), (1.15, 10, 2), (3.0, 10, REVOCATIONS_MAX)):
        worker = Worker()
        for number in range(5):
            worker.serve(str(number), -1, float(number))
        step = worker.look(9.0, saturation=saturation, in_flight=in_flight)
        assert step.revoked == len(worker.revoked) == expected
        assert worker.reclamation.target == pytest.approx(saturation - 1.0)


def test_a_victim_with_a_complete_answer_is_skipped_and_not_counted() -> None:
    worker = Worker()
    worker.serve("still there", -1, 1.0)
    worker.serve("complete", -1, 2.0, complete=True)
    assert worker.look(3.0).revoked == 1
    assert worker.revoked == ["still there"]
    assert worker.observer.by_priority == [(5, 1)]


def test_the_next_decision_waits_for_the_confirmation_and_then_for_the_grace_period() -> None:
    worker = Worker(slow=True)
    for number in range(4):
        worker.serve(str(number), -1, float(number))
    assert worker.look(10.0).revoked == 1
    assert worker.look(11.0) is NOTHING
    worker.now = 12.0
    worker.end("3")
    assert worker.observer.confirmations == [2.0]
    assert worker.look(12.0 + GRACE_S - 0.01) is NOTHING
    assert worker.reclamation.pending == pytest.approx(0.1)
    assert worker.look(12.0 + GRACE_S).revoked == 1


def test_a_stream_that_does_not_end_counts_as_gone_after_ten_seconds() -> None:
    worker = Worker(slow=True)
    for number in range(4):
        worker.serve(str(number), -1, float(number))
    worker.look(10.0)
    assert worker.look(10.0 + CONFIRM_S - 0.01) is NOTHING
    assert worker.observer.late == 0
    assert worker.look(10.0 + CONFIRM_S) is NOTHING  # counts as gone; now the grace period
    assert worker.observer.late == 1
    assert worker.look(10.0 + CONFIRM_S + GRACE_S).revoked == 1
    worker.end("3")  # late
    assert worker.observer.confirmations == []


def test_a_worker_with_a_better_victim_is_woken_instead() -> None:
    worker = Worker()
    worker.serve("mine", -1, 5.0)
    worse, newer, older = BestVictim(3, -2, 1.0), BestVictim(1, -1, 6.0), BestVictim(1, -1, 4.0)
    assert worker.look(7.0, others=((1, older), (2, newer), (3, worse))) == Step(wake=3)
    assert worker.look(7.0, others=((1, older), (2, newer))) == Step(wake=2)
    assert worker.revoked == []
    assert worker.look(7.0, others=((1, older),)).revoked == 1


def test_a_worker_without_victims_wakes_one_that_has_some() -> None:
    worker = Worker()
    assert worker.look(7.0) is NOTHING
    assert worker.look(7.0, others=((2, BestVictim(1, -1, 6.0)),)) == Step(wake=2)


def test_a_revocation_by_another_worker_blocks_until_it_shows() -> None:
    worker, other = Worker(), Worker(slow=True)
    worker.serve("mine", -1, 5.0)
    other.serve("theirs", -2, 5.0)
    assert other.look(6.0).revoked == 1
    seen = other.reclamation.best_victim()
    assert seen == BestVictim(0, 0, 0.0, 6.0 + CONFIRM_S)
    assert worker.look(7.0, others=((2, seen),)) is NOTHING
    other.now = 8.0
    other.end("theirs")
    assert worker.look(8.0, others=((2, other.reclamation.best_victim()),)) is NOTHING
    assert worker.look(8.0 + GRACE_S, others=((2, other.reclamation.best_victim()),)).revoked == 1


def test_a_request_that_ends_normally_is_no_victim_and_leaves_nothing_behind() -> None:
    worker = Worker()
    for number in range(10_000):
        worker.serve(str(number), -1, float(number))
        worker.end(str(number))
    assert worker.look(20_000.0) is NOTHING
    assert len(worker.victims._heap) < 200
    assert worker.reclamation.best_victim() == BestVictim()


def test_freed_capacity_shows_at_once_if_the_detector_counts_and_else_after_a_scrape() -> None:
    assert grace_s(counted=True, interval_s=0.05, scrape_s=2.0) == 0.010
    assert grace_s(counted=False, interval_s=0.05, scrape_s=2.0) == pytest.approx(2.3)


@pytest.mark.parametrize("saturation", [0.0, math.nan, math.inf, -1.0])
def test_a_meaningless_saturation_revokes_nothing(saturation: float) -> None:
    worker = Worker()
    worker.serve("a", -1, 0.0)
    worker.look(1.0, saturation=saturation)
    assert worker.revoked == []


STEP = st.tuples(
    st.sampled_from([0.0, 0.1, 0.6, 11.0]),
    st.integers(0, 2),
    st.sampled_from(["serve", "serve", "end", "look"]),
    st.integers(-3, 5),
    st.integers(0, 59),
)
STEPS = st.integers(1, 60).flatmap(lambda count: st.lists(STEP, min_size=count, max_size=count))


@examples(200)
@given(st.tuples(st.booleans(), st.booleans(), st.booleans()), STEPS)
def test_revocations_are_few_at_once_less_important_than_what_waits_and_never_repeated(
    slow: tuple[bool, ...], steps: list[tuple[float, int, str, int, int]]
) -> None:
    """Three workers; each one sees the best victims of the others."""
    workers = [Worker(slow=each) for each in slow]
    priorities: dict[str, int] = {}
    now, names, serving = 0.0, 0, {}
    for pause, which, act, priority, place in steps:
        now += pause
        worker = workers[which]
        worker.now = now
        if act == "serve":
            name, names = str(names), names + 1
            priorities[name] = priority
            worker.serve(name, priorities[name], now)
            serving[name] = worker
        elif act == "end":
            own = [name for name, owner in serving.items() if owner is worker and worker.tracked[name]]
            if own:
                name = own[place % len(own)]
                worker.end(name)
                del serving[name]
        else:
            demand = max(-2, priority)
            others = [(n, other.reclamation.best_victim()) for n, other in enumerate(workers) if other is not worker]
            before = [len(other.revoked) for other in workers]
            best = min(
                ((priorities[n], -w.tracked[n].dispatched_at) for n, w in serving.items() if w.tracked[n] and w.tracked[n].here),
                default=None,
            )  # fmt: skip
            step = worker.look(now, 1.3, ((demand, 1.0, True),), others, max(1, len(serving)))
            assert [len(w.revoked) for w in workers if w is not worker] == [
                n for w, n in zip(workers, before, strict=True) if w is not worker
            ]
            revoked = worker.revoked[before[workers.index(worker)] :]
            assert len(revoked) == step.revoked <= REVOCATIONS_MAX
            assert all(priorities[name] < min(0, demand) for name in revoked)
            if revoked:
                assert best is not None
                assert priorities[revoked[0]] == best[0]
    for worker in workers:
        assert len(worker.revoked) == len(set(worker.revoked))
        assert len(worker.victims) == sum(victim is not None and victim.here for victim in worker.tracked.values())
        assert len(worker.reclamation._unconfirmed) <= REVOCATIONS_MAX
