"""The gate: a reading is kept for a millisecond, and not one request too many passes in that time."""

from collections.abc import Sequence

import pytest

from epp.flow.gate import KEPT_FAR_S, KEPT_S, PoolGate
from epp.flow.ports import PoolLoad
from tests.epp.flow.policies import ToTheCeiling
from tests.epp.flow.shards import Board, Clock, FakePool


class Gated:
    """A gate over a pool, and the failures that it reports."""

    def __init__(self, limits: ToTheCeiling | None = None, *, step: bool = True, each: int = 4) -> None:
        self.board = Board(2)
        self.pool = FakePool(self.board, 1, each, step=step)
        self.clock = Clock()
        self.failures: list[str] = []
        self.gate = PoolGate(
            self.pool, limits or ToTheCeiling(), "detector", now=self.clock, report=lambda name, _: self.failures.append(name)
        )
        self.gate.bands((5, 0, -1))

    def let_through(self, shard: int = 0, *, placed: bool = True) -> None:
        area = self.board.areas[shard]
        area.progress += 1
        if placed:
            self.pool.inflight[shard] += 1
        else:
            area.pending += 1


@pytest.mark.parametrize(("in_flight", "kept_s"), [(60, KEPT_S), (40, KEPT_FAR_S)])
def test_a_reading_is_kept_for_a_millisecond_and_far_below_the_ceilings_for_ten(in_flight: int, kept_s: float) -> None:
    gated = Gated(each=100)
    gated.pool.inflight[0] = in_flight
    for _ in range(50):
        assert gated.gate.room(0)
    gated.clock.now += kept_s * 0.9
    gated.gate.room(0)
    assert gated.pool.reads == 1
    gated.clock.now += kept_s * 0.2
    gated.gate.room(0)
    assert gated.pool.reads == 2


def test_requests_let_through_by_any_shard_count_without_a_new_reading() -> None:
    gated = Gated()
    let = 0
    while gated.gate.room(0):
        gated.let_through(let % 2)
        let += 1
    assert let == 4
    assert gated.pool.reads == 2, "once at first, once at the ceiling"


def test_a_request_without_an_endpoint_counts_as_in_flight() -> None:
    gated = Gated()
    for _ in range(4):
        assert gated.gate.room(0)
        gated.let_through(1, placed=False)
    assert not gated.gate.room(0)
    gated.clock.now += 1.0
    assert not gated.gate.room(0)
    assert gated.gate.read().saturation == 1.0


def test_the_gate_closes_on_exact_readings_only() -> None:
    gated = Gated()
    for _ in range(3):
        assert gated.gate.room(0)
        gated.let_through()
    gated.pool.inflight[0] -= 2  # ended elsewhere, without a call of `freed`
    assert gated.gate.room(0)
    gated.let_through()
    assert gated.gate.room(0)


def test_freed_causes_a_new_reading() -> None:
    gated = Gated(each=1)
    assert gated.gate.room(0)
    gated.let_through()
    assert not gated.gate.room(0)
    gated.pool.inflight[0] = 0
    gated.gate.freed()
    assert gated.gate.room(0)


@pytest.mark.parametrize("each", [3, 6, 7, 49])
def test_a_full_pool_is_full_despite_rounding_of_fractions(each: int) -> None:
    for placed in range(each):
        gated = Gated(each=each)
        for i in range(each):
            assert gated.gate.room(0)
            gated.let_through(placed=i < placed)
        assert not gated.gate.room(0)


def test_an_empty_pool_has_no_room() -> None:
    gated = Gated()
    gated.pool.pods = 0
    assert not gated.gate.room(5)
    assert gated.gate.read().empty


def test_each_band_has_its_own_ceiling() -> None:
    gated = Gated(ToTheCeiling({5: 1.0, 0: 0.75, -1: 0.5}))
    gated.pool.inflight[0] = 2
    assert [gated.gate.room(priority) for priority in (5, 0, -1)] == [True, True, False]
    gated.let_through()
    assert [gated.gate.room(priority) for priority in (5, 0, -1)] == [True, False, False]


def test_requests_pass_one_at_a_time_if_the_detector_knows_no_step() -> None:
    gated = Gated(step=False)
    assert gated.gate.room(0)
    gated.let_through(1, placed=False)
    assert gated.gate.one_by_one
    assert not gated.gate.room(0)
    gated.board.areas[1].pending, gated.pool.inflight[1] = 0, 1
    assert gated.gate.room(0)
    gated.pool.inflight[1] = 4
    assert not gated.gate.room(0)


def test_a_detector_that_raises_is_counted_and_the_gate_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated()

    def broken() -> PoolLoad:
        raise ZeroDivisionError

    monkeypatch.setattr(gated.pool, "load", broken)
    assert gated.gate.room(0)
    assert "detector" in gated.failures


@pytest.mark.parametrize("ceilings", [[0.5], [float("nan")] * 3, None])
def test_invalid_usage_limits_are_counted_and_replaced_by_no_limit(
    ceilings: Sequence[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated()
    monkeypatch.setattr(ToTheCeiling, "ceilings", lambda self, saturation, priorities: ceilings)
    gated.pool.inflight[0] = 3
    assert gated.gate.room(-1)
    assert set(gated.failures) == {"limits"}
    gated.let_through()
    assert not gated.gate.room(5)


def test_a_saturation_that_is_not_a_number_leaves_the_gate_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated()
    monkeypatch.setattr(gated.pool, "load", lambda: PoolLoad(float("nan"), step=0.1))
    assert gated.gate.room(0)
    assert set(gated.failures) == {"detector"}


def test_the_counts_of_a_shard_that_stops_serving_are_ignored() -> None:
    gated = Gated()
    for _ in range(4):
        gated.let_through(1)
    assert not gated.gate.room(0)
    gated.board.die(1)
    assert gated.gate.room(0)
    assert gated.gate.read().saturation == 0.0
