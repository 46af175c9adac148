"""Runs parts of work one after the other, for a slice of each turn of the event loop. Other work runs in between.

    bodies    parts of the work for long bodies. Many of them can be complete at the same time. In one turn, the work for all could take
              seconds: other streams would wait, and the parent would take the worker for a hung one
    a pool    decisions of one of several pools, one in each turn, so that a flood on one pool leaves time for the others

A part may add its continuation, which runs behind the other parts. A stream has one waiting part at most, so the limit of streams bounds
the parts. Their bodies are counted as held (`workers.worker.extproc.request_phase`).
"""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

BODIES_S: Final = 0.004  # about the time that the work for 1 MiB takes
ONE_S: Final = 0.0  # one part in each turn
GAP_S: Final = 0.001


class Turns:
    """Runs the waiting parts of one kind. `next_turn` schedules a call for the loop's next turn. `now` returns monotonic seconds.

    `slice_s`: after this time in one turn, no further part begins.
    """

    def __init__(self, next_turn: Callable[[Callable[[], None]], object], now: Callable[[], float], slice_s: float) -> None:
        self._next_turn = next_turn
        self._now = now
        self._slice_s = slice_s
        self._begun_at = 0.0
        self._waiting: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._scheduled = False

    def takes(self, now: float) -> bool:
        """Returns whether work may begin at once, and notes that it begins. Work may begin at once if no part waits, and if no work has
        begun at once for GAP_S.
        """
        if self._waiting or now - self._begun_at < GAP_S:
            return False
        self._begun_at = now
        return True

    def soon(self, act: Callable[..., object], *arguments: Any) -> None:
        """Adds a part. It runs in the next turn of the loop at the earliest."""
        self._waiting.append((act, arguments))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._next_turn(self._run)

    def _run(self) -> None:
        self._scheduled = False
        until = self._now() + self._slice_s
        try:
            for _ in range(len(self._waiting)):  # parts that these parts add wait for the next turn
                act, arguments = self._waiting.popleft()
                act(*arguments)
                if self._now() >= until:
                    break
        finally:
            if self._waiting:
                self._schedule()
