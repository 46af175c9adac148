"""Pools take turns: which decisions begin in a turn of the loop, and which wait."""

from collections.abc import Callable

from workers.worker.extproc.pool_turns import AT_ONCE, PoolTurns


class Loop:
    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def test_a_pool_begins_a_few_decisions_in_a_turn_and_the_rest_in_order_later() -> None:
    loop = Loop()
    turns = PoolTurns(lambda call: loop.soon.append(call))
    begun: list[int] = []
    for number in range(2 * AT_ONCE + 1):
        if turns.takes():
            begun.append(number)
        else:
            turns.later(begun.append, number)
    assert begun == list(range(AT_ONCE))
    for waves in (2 * AT_ONCE, 2 * AT_ONCE + 1):
        loop.turn()
        assert begun == list(range(waves))
    loop.turn()
    loop.turn()
    assert loop.soon == [], "an idle pool schedules nothing"


def test_what_comes_later_does_not_overtake_what_waits() -> None:
    loop = Loop()
    turns = PoolTurns(lambda call: loop.soon.append(call))
    assert all(turns.takes() for _ in range(AT_ONCE))
    begun: list[str] = []
    turns.later(begun.append, "first")
    assert not turns.takes()
    loop.turn()
    assert begun == ["first"]
    loop.turn()
    assert turns.takes()
