"""Decides when a turn of the event loop has taken so long that it should read no more.

Many connections can bring much work at the same time. Timers must run in between, because the parent takes a worker without heartbeats
for a hung one.

    a read that comes GAP_SECONDS or more after the last one   may be the first of a turn: its time is noted until the next turn
    a read that comes TURN_SECONDS or more after a noted one   is put off until the next turn

Times are noted only after such a gap, so that a turn of short reads costs nothing.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

GAP_SECONDS: Final = 0.005  # the time between the begins of two reads
TURN_SECONDS: Final = 0.25
NEVER: Final = float("inf")


class Loop(Protocol):
    """The part of an event loop that this module uses."""

    def call_soon(self, callback: Callable[[], None]) -> Any: ...


class Turn:
    """Watches how long the present turn of the loop takes. All connections of a server share it."""

    __slots__ = ("_loop", "_read_at", "_until")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._read_at = 0.0  # when the last read began
        self._until = NEVER

    def over(self, now: float) -> bool:
        """Whether bytes that were read at `now` must be put off to the next turn. If not, counts this read. `now`: monotonic seconds."""
        if now - self._read_at > GAP_SECONDS or now > self._until:
            if self._until == NEVER:
                self._until = now + TURN_SECONDS
                self._loop.call_soon(self._next)
            elif now > self._until:
                return True
        self._read_at = now
        return False

    def _next(self) -> None:
        self._until = NEVER
