"""Applies changes in batches, and pauses between two of them, because each is also work for the workers."""

import asyncio
from collections.abc import Callable
from typing import Final

BATCH_S: Final = 0.005  # changes within this time are applied together
# The pause after an `apply`, as a multiple of its duration. So `apply` takes about 1/10 of the time.
APPLY_SHARE: Final = 10.0
APPLY_S_MAX: Final = 2.0  # the longest that a change waits, with tens of thousands of pods; with a thousand it is 0.1 s


class Batches:
    """Calls `apply`, which applies all changes so far."""

    def __init__(self, apply: Callable[[], None]) -> None:
        self._apply = apply
        self._due: asyncio.TimerHandle | None = None
        self._free_at = 0.0

    def soon(self) -> None:
        """Applies after a short delay, together with changes that come during the delay."""
        if self._due is None:
            loop = asyncio.get_running_loop()
            wait = min(max(BATCH_S, self._free_at - loop.time()), APPLY_S_MAX)
            self._due = loop.call_later(wait, self.now)

    def now(self) -> None:
        """Applies at once."""
        self.cancel()
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._apply()
        self._free_at = loop.time() + APPLY_SHARE * (loop.time() - began)

    def cancel(self) -> None:
        """Forgets that something is due."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
