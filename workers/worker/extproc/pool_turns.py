"""Lets pools take turns in a busy worker, so that a flood on one of them leaves time for the others.

A decision begins at once if the pool has begun none for GAP_S. Otherwise it waits, and in each turn of the event loop one decision of the
pool begins, in the order in which the bodies were complete. A worker of one pool has no such turns.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

GAP_S: Final = 0.001


class PoolTurns:
    """Keeps the decisions of one pool that wait. `next_turn` schedules a call for the loop's next turn.

    A stream waits here once at most, so the limit of streams bounds what waits.
    """

    def __init__(self, next_turn: Callable[[Callable[[], None]], object]) -> None:
        self._next_turn = next_turn
        self._begun_at = 0.0
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def takes(self, now: float) -> bool:
        """Returns whether a decision may begin at once, and takes that it does. `now`: monotonic seconds."""
        if self._waiting or now - self._begun_at < GAP_S:
            return False
        self._begun_at = now
        return True

    def later(self, act: Callable[..., object], *arguments: Any) -> None:
        """Adds a decision that begins in a later turn."""
        if not self._waiting:
            self._next_turn(self._next)
        self._waiting.append((act, arguments))

    def _next(self) -> None:
        act, arguments = self._waiting.popleft()
        if self._waiting:
            self._next_turn(self._next)
        act(*arguments)
