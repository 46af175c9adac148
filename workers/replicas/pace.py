"""Decides when the exchange takes a turn: after the supervisor has read the bus of the prefix index, or else by a timer.

A wake-up of a process costs more than a turn. So under load the supervisor reads the bus each TICK_S, until BUS_PATIENCE reads have found
no frame. A turn follows each read, or the timer, which is set to TICK_S after each turn. Without load, a turn follows each message at once,
unless this replica has published within EARLY_S.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from workers.shared.bus import Rhythm

TICK_S: Final = 0.009
BUS_PATIENCE: Final = 2
EARLY_S: Final = 0.0065


class TurnPace:
    """Calls `turn` again and again between `begin` and `end`. A turn that raises is the last turn, and `begin` raises the same
    exception.
    """

    def __init__(self) -> None:
        self._turn: Callable[[], bool] | None = None
        self._ended: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle
        self._last = float("-inf")
        self._published = float("-inf")

    def rhythm(self) -> Rhythm:
        """Returns how the supervisor must read the bus."""
        return Rhythm(self.woken, TICK_S, BUS_PATIENCE)

    async def run(self, turn: Callable[[], bool]) -> None:
        """Takes turns until one returns false. Raises the exceptions of turns."""
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
        """Takes a turn if this replica has published nothing for EARLY_S."""
        if self._turn is not None and self._loop.time() - self._published >= EARLY_S:
            self._timer.cancel()
            self._take()

    def published(self) -> None:
        """Notes that this turn publishes a message."""
        self._published = self._last

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
