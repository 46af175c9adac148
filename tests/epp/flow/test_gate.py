"""The gate: a reading is kept for a millisecond, and not one request too many goes meanwhile."""

from collections.abc import Sequence

import pytest

from epp.flow.gate import KEPT_FAR_S, KEPT_S, PoolGate
from epp.flow.ports import Load
from tests.epp.flow.shards import Board, Clock, FakePool, ToTheCeiling


class Gated:
    """A gate over a pool, and who is told of failures."""

    def __init__(self, limits: ToTheCeiling | None = None, *, step: bool = True, each: int = 4) -> None:
        self.board = Board(2)
        self.pool = FakePool(self.board, 1, each, step=step)
        self.clock = Clock()
        self.failures: list[str] = []
        self.gate = PoolGate(
            self.pool,
            limits or ToTheCeiling(),
            "detector",
            now=self.clock,
            report=lambda name, _: self.failures.append(name),
        )
        self.gate.bands((5, 0, -1))

    def let_through(self, shard: int = 0, *, placed: bool = True) -> None:
        lane = self.board.lanes[shard]
        lane.progress += 1
        if placed:
            self.pool.inflight[shard] += 1
        else:
            lane.pending += 1


@pytest.mark.parametrize(("in_flight", "kept_s"), [(60, KEPT_S), (40, KEPT_FAR_S)])
def test_a_reading_is_kept_for_a_millisecond_and_far_below_the_ceilings_for_ten(in_flight: int, kept_s: float) -> None:
    made = Gated(each=100)
    made.pool.inflight[0] = in_flight
    for _ in range(50):
        assert made.gate.room(0)
    made.clock.now += kept_s * 0.9
    made.gate.room(0)
    assert made.pool.reads == 1
    made.clock.now += kept_s * 0.2
    made.gate.room(0)
    assert made.pool.reads == 2


def test_what_all_shards_let_through_since_counts_without_reading_again() -> None:
    made = Gated()
    let = 0
    while made.gate.room(0):
        made.let_through(let % 2)
        let += 1
    assert let == 4
    assert made.pool.reads == 2, "once at first, once at the edge"


def test_who_has_no_endpoint_yet_counts_as_in_flight() -> None:
    made = Gated()
    for _ in range(4):
        assert made.gate.room(0)
        made.let_through(1, placed=False)
    assert not made.gate.room(0)
    made.clock.now += 1.0
    assert not made.gate.room(0)
    assert made.gate.read().saturation == 1.0


def test_the_gate_closes_on_exact_readings_only() -> None:
    made = Gated()
    for _ in range(3):
        assert made.gate.room(0)
        made.let_through()
    made.pool.inflight[0] -= 2  # ended elsewhere: nobody said so
    assert made.gate.room(0)
    made.let_through()
    assert made.gate.room(0)


def test_freed_makes_it_read_again() -> None:
    made = Gated(each=1)
    assert made.gate.room(0)
    made.let_through()
    assert not made.gate.room(0)
    made.pool.inflight[0] = 0
    made.gate.freed()
    assert made.gate.room(0)


@pytest.mark.parametrize("each", [3, 6, 7, 49])
def test_a_full_pool_is_full_whatever_fractions_add_up_to(each: int) -> None:
    for placed in range(each):
        made = Gated(each=each)
        for i in range(each):
            assert made.gate.room(0)
            made.let_through(placed=i < placed)
        assert not made.gate.room(0)


def test_an_empty_pool_has_no_room() -> None:
    made = Gated()
    made.pool.pods = 0
    assert not made.gate.room(5)
    assert made.gate.read().empty


def test_each_band_has_its_own_ceiling() -> None:
    made = Gated(ToTheCeiling({5: 1.0, 0: 0.75, -1: 0.5}))
    made.pool.inflight[0] = 2
    assert [made.gate.room(priority) for priority in (5, 0, -1)] == [True, True, False]
    made.let_through()
    assert [made.gate.room(priority) for priority in (5, 0, -1)] == [True, False, False]


def test_where_the_detector_cannot_say_what_one_adds_one_goes_at_a_time() -> None:
    made = Gated(step=False)
    assert made.gate.room(0)
    made.let_through(1, placed=False)
    assert made.gate.one_by_one
    assert not made.gate.room(0)
    made.board.lanes[1].pending, made.pool.inflight[1] = 0, 1
    assert made.gate.room(0)
    made.pool.inflight[1] = 4
    assert not made.gate.room(0)


def test_a_detector_that_raises_is_counted_and_does_not_stop_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gated()

    def broken() -> Load:
        raise ZeroDivisionError

    monkeypatch.setattr(made.pool, "load", broken)
    assert made.gate.room(0)
    assert "detector" in made.failures


@pytest.mark.parametrize("ceilings", [[0.5], [float("nan")] * 3, None])
def test_usage_limits_that_are_wrong_are_counted_and_count_as_none(
    ceilings: Sequence[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Gated()
    monkeypatch.setattr(ToTheCeiling, "ceilings", lambda self, saturation, priorities: ceilings)
    made.pool.inflight[0] = 3
    assert made.gate.room(-1)
    assert set(made.failures) == {"limits"}
    made.let_through()
    assert not made.gate.room(5)


def test_a_saturation_that_is_not_a_number_does_not_stop_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Gated()
    monkeypatch.setattr(made.pool, "load", lambda: Load(float("nan"), step=0.1))
    assert made.gate.room(0)
    assert set(made.failures) == {"detector"}


def test_a_shard_that_leaves_takes_its_counts_with_it() -> None:
    made = Gated()
    for _ in range(4):
        made.let_through(1)
    assert not made.gate.room(0)
    made.board.die(1)
    assert made.gate.room(0)
    assert made.gate.read().saturation == 0.0
