"""When the exchange takes its turn: soon after something else has woken the process up, or by a timer.

To wake a process up costs more than a turn. Under load, updates of the prefix index wake the supervisor up all the time; a turn then
follows each one that comes at least EARLY_S after the last turn, and the timer, which fires TICK_S after it, does not run out.
"""

import asyncio
from collections.abc import Callable
from typing import Final

TICK_S: Final = 0.009
EARLY_S: Final = 0.0065


class Pace:
    """Calls `turn` again and again between `begin` and `end`. A turn that raises is the last one, and `begin` raises the same."""

    def __init__(self) -> None:
        self._turn: Callable[[], bool] | None = None
        self._ended: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle
        self._last = float("-inf")

    async def run(self, turn: Callable[[], bool]) -> None:
        """Takes turns until one returns false. Raises what a turn raises."""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._turn = turn
        self._timer = self._loop.call_soon(self._take)  # type: ignore[assignment] # a handle that can be cancelled
        try:
            await self._ended
        finally:
            self._turn = None
            self._timer.cancel()

    def woken(self) -> None:
        """Takes a turn if it is time for an early one."""
        if self._turn is not None and self._loop.time() - self._last >= EARLY_S:
            self._timer.cancel()
            self._take()

    def _take(self) -> None:
        assert self._turn is not None
        self._last = self._loop.time()
        try:
            more = self._turn()
        except Exception as failure:
            self._stop(failure)
            return
        if more:
            self._timer = self._loop.call_at(self._last + TICK_S, self._take)
        else:
            self._stop(None)

    def _stop(self, failure: Exception | None) -> None:
        self._turn = None
        if self._ended.done():
            return
        if failure is not None:
            self._ended.set_exception(failure)
        else:
            self._ended.set_result(None)
