"""Lets long work on bodies take turns: parts of it run one after the other, for `SLICE_S` in each turn of the event loop.

Without this, all waiting parts would run in the next turn. Many large bodies can be complete at the same time, so that turn could take
seconds. Other streams would wait, and the parent would take the worker for a hung one. A part may add its continuation, which runs after
the other parts.

A stream has one waiting part at most, so the limit of streams bounds the parts. Their bodies count as held
(`workers.worker.extproc.request_phase`).
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

SLICE_S: Final = 0.004  # about the time that the work for 1 MiB takes


class BodyTurns:
    """Runs the waiting parts of one worker. `next_turn` schedules a call for the loop's next turn. `now` returns monotonic seconds."""

    def __init__(self, next_turn: Callable[[Callable[[], None]], object], now: Callable[[], float]) -> None:
        self._next_turn = next_turn
        self._now = now
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False

    def soon(self, act: Callable[..., object], *arguments: Any) -> None:
        """Adds a part. It runs in the next turn of the loop at the earliest."""
        self._waiting.append(partial(act, *arguments))
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._next_turn(self._run)

    def _run(self) -> None:
        self._scheduled = False
        until = self._now() + SLICE_S
        try:
            for _ in range(len(self._waiting)):  # parts that these parts add wait for the next turn
                self._waiting.popleft()()
                if self._now() >= until:
                    break
        finally:
            if self._waiting:
                self._schedule()
