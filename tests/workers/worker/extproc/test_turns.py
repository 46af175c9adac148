"""Work takes turns: no turn of the loop runs more than a slice of it, nothing is lost or run twice, and pools wait in order."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.worker.extproc.turns import BODIES_S, GAP_S, ONE_S, Turns


class World:
    """A loop with a clock that only work moves."""

    def __init__(self, slice_s: float = BODIES_S) -> None:
        self.now = 100.0
        self.scheduled: list[Callable[[], None]] = []
        self.turns = Turns(self.scheduled.append, lambda: self.now, slice_s)
        self.ran: list[str] = []

    def work(self, name: str, seconds: float) -> None:
        self.ran.append(name)
        self.now += seconds

    def turn(self) -> float:
        """Runs one turn of the loop. Returns the seconds that it took."""
        before = self.now
        assert len(self.scheduled) <= 1, "one call per turn serves all parts"
        calls, self.scheduled[:] = list(self.scheduled), []
        for call in calls:
            call()
        return self.now - before


def test_bodies_that_are_complete_at_once_run_one_per_turn_if_each_takes_long() -> None:
    world = World()
    for name in "abc":
        world.turns.soon(world.work, name, 1.0)
    assert [world.turn(), world.turn(), world.turn(), world.turn()] == [1.0, 1.0, 1.0, 0.0]
    assert world.ran == ["a", "b", "c"]


def test_a_continuation_runs_behind_the_others_in_a_later_turn() -> None:
    world = World()
    world.turns.soon(lambda: world.turns.soon(world.work, "a again", 0.0))
    world.turns.soon(world.work, "b", 0.0)
    world.turn()
    assert world.ran == ["b"]
    world.turn()
    assert world.ran == ["b", "a again"]


def test_a_part_that_raises_does_not_keep_the_others_from_their_turn() -> None:
    world = World()

    def broken() -> None:
        raise ValueError("a bug")

    world.turns.soon(broken)
    world.turns.soon(world.work, "b", 0.0)
    with pytest.raises(ValueError, match="a bug"):
        world.turn()
    world.turn()
    assert world.ran == ["b"]


@given(st.lists(st.floats(0.0, 2 * BODIES_S), max_size=50))
def test_a_turn_is_at_most_one_part_longer_than_the_slice_and_keeps_the_order(parts: list[float]) -> None:
    world = World()
    for number, seconds in enumerate(parts):
        world.turns.soon(world.work, str(number), seconds)
    while world.scheduled:
        assert world.turn() <= BODIES_S + max(parts) + 1e-9
    assert world.ran == [str(number) for number in range(len(parts))]


class Pool(World):
    """The decisions of one pool."""

    def __init__(self) -> None:
        super().__init__(ONE_S)
        self.begun: list[int] = []

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            if self.turns.takes(self.now):
                self.begun.append(number)
            else:
                self.turns.soon(self.begun.append, number)

    def later(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.turn()


def test_a_pool_that_is_not_busy_waits_for_nothing() -> None:
    w = Pool()
    for number in range(5):
        w.ask(number)
        w.later(GAP_S * 1.01)
    assert (w.begun, w.scheduled) == ([0, 1, 2, 3, 4], [])


def test_of_many_decisions_at_once_one_begins_in_each_turn_in_order() -> None:
    w = Pool()
    w.ask(0, 1, 2)
    assert w.begun == [0]
    w.later(GAP_S * 1.01)
    w.ask(3)
    assert w.begun == [0, 1], "what comes later does not overtake what waits"
    w.later()
    w.later()
    assert w.begun == [0, 1, 2, 3]
    w.later()
    assert w.scheduled == [], "an idle pool schedules nothing"


def test_a_decision_that_fails_does_not_hold_up_the_others() -> None:
    w = Pool()
    w.ask(0)

    def fails() -> None:
        raise ValueError

    w.turns.soon(fails)
    w.ask(1)
    try:
        w.later()
    except ValueError:
        w.later()
    assert w.begun == [0, 1]
