"""When turns are taken: by the clock of a loop that the test moves."""

import asyncio

import pytest

from workers.endpoints.replicas.pace import EARLY_S, TICK_S, Pace


def test_turns_follow_each_other_until_one_returns_false() -> None:
    left = [True, True, False]
    asyncio.run(Pace().run(lambda: left.pop(0)))
    assert not left


def test_a_turn_that_raises_ends_the_run_with_the_same_exception() -> None:
    def turn() -> bool:
        raise ConnectionError("away")

    with pytest.raises(ConnectionError, match="away"):
        asyncio.run(Pace().run(turn))


def test_a_wake_up_takes_a_turn_if_the_last_one_was_some_time_ago() -> None:
    async def test() -> None:
        loop, pace, taken = asyncio.get_running_loop(), Pace(), []
        clock = [0.0]
        loop.time = lambda: clock[0]  # type: ignore[method-assign]
        running = asyncio.ensure_future(pace.run(lambda: not taken.append(clock[0])))  # type: ignore[func-returns-value]
        while not taken:
            await asyncio.sleep(0)
        for at in (EARLY_S / 2, EARLY_S, EARLY_S + TICK_S / 2, 2 * EARLY_S):
            clock[0] = at
            pace.woken()
        assert taken == [0.0, EARLY_S, 2 * EARLY_S]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        clock[0] = 1.0
        pace.woken()
        assert len(taken) == 3, "nothing runs any more"

    asyncio.run(test())
