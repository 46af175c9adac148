"""When turns are taken: by the clock of a loop that the test moves."""

import asyncio

import pytest

from tests.waiting import turns
from workers.replicas.pace import EARLY_S, TICK_S, TurnPace


def test_turns_follow_each_other_until_one_returns_false() -> None:
    left = [True, True, False]
    asyncio.run(TurnPace().run(lambda: left.pop(0)))
    assert not left


def test_a_turn_that_raises_ends_the_run_with_the_same_exception() -> None:
    def turn() -> bool:
        raise ConnectionError("away")

    with pytest.raises(ConnectionError, match="away"):
        asyncio.run(TurnPace().run(turn))


def test_a_wake_up_takes_a_turn_unless_the_replica_has_just_published() -> None:
    async def test() -> None:
        loop, pace, taken = asyncio.get_running_loop(), TurnPace(), []
        clock = [0.0]
        loop.time = lambda: clock[0]  # type: ignore[method-assign]

        def turn() -> bool:
            taken.append(clock[0])
            if clock[0] > 0:
                pace.published()
            return True

        running = asyncio.ensure_future(pace.run(turn))
        while not taken:
            await turns()
        for part in (0.1, 0.2, 1.0, 1.1, 1.9, 2.1):
            clock[0] = part * EARLY_S
            pace.woken()
        assert taken == [0.0, 0.1 * EARLY_S, 1.1 * EARLY_S, 2.1 * EARLY_S]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        clock[0] = 1.0
        pace.woken()
        assert len(taken) == 4, "nothing runs any more"

    asyncio.run(test())


def test_under_load_the_bus_is_read_as_often_as_the_timer_fires() -> None:
    pace = TurnPace()
    assert pace.rhythm()[:2] == (pace.woken, TICK_S)
