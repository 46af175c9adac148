"""Pools take turns: which decisions begin at once, and which wait."""

from collections.abc import Callable

from workers.worker.extproc.pool_turns import GAP_S, PoolTurns


class Worker:
    def __init__(self) -> None:
        self.now = 100.0
        self.soon: list[Callable[[], None]] = []
        self.turns = PoolTurns(lambda call: self.soon.append(call))
        self.begun: list[int] = []

    def ask(self, *numbers: int) -> None:
        for number in numbers:
            if self.turns.takes(self.now):
                self.begun.append(number)
            else:
                self.turns.later(self.begun.append, number)

    def turn(self, seconds: float = 0.0) -> None:
        self.now += seconds
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def test_a_pool_that_is_not_busy_waits_for_nothing() -> None:
    w = Worker()
    for number in range(5):
        w.ask(number)
        w.turn(GAP_S * 1.01)
    assert (w.begun, w.soon) == ([0, 1, 2, 3, 4], [])


def test_of_many_decisions_at_once_one_begins_in_each_turn_in_order() -> None:
    w = Worker()
    w.ask(0, 1, 2)
    assert w.begun == [0]
    w.turn(GAP_S * 1.01)
    w.ask(3)
    assert w.begun == [0, 1], "what comes later does not overtake what waits"
    w.turn()
    w.turn()
    assert w.begun == [0, 1, 2, 3]
    w.turn()
    assert w.soon == [], "an idle pool schedules nothing"


def test_a_decision_that_fails_does_not_hold_up_the_others() -> None:
    w = Worker()
    w.ask(0)

    def fails() -> None:
        raise ValueError

    w.turns.later(fails)
    w.ask(1)
    try:
        w.turn()
    except ValueError:
        w.turn()
    assert w.begun == [0, 1]
