"""Lets pools take turns in a busy worker, so that a flood on one of them leaves time for the others.

In one turn of the event loop, each pool begins at most AT_ONCE decision. The others of the pool wait for the next turn, in the order in
which their bodies were complete. A worker that is not busy seldom has so many in one turn, and a worker of one pool has no such turns.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

AT_ONCE: Final = 1


class PoolTurns:
    """Counts the decisions of one pool. `next_turn` schedules a call for the loop's next turn.

    A stream waits here once at most, so the limit of streams bounds what waits.
    """

    def __init__(self, next_turn: Callable[[Callable[[], None]], object]) -> None:
        self._next_turn = next_turn
        self._begun = 0  # in this turn
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def takes(self) -> bool:
        """Returns whether one more decision may begin in this turn, and counts it."""
        if self._begun >= AT_ONCE or self._waiting:
            return False
        if not self._begun:
            self._next_turn(self._next)
        self._begun += 1
        return True

    def later(self, act: Callable[..., object], *arguments: Any) -> None:
        """Adds a decision that begins in a later turn."""
        self._waiting.append((act, arguments))

    def _next(self) -> None:
        self._begun = min(AT_ONCE, len(self._waiting))
        if self._begun:
            self._next_turn(self._next)
        for _ in range(self._begun):
            act, arguments = self._waiting.popleft()
            act(*arguments)
