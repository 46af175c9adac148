"""Limits the share of the process's time that the events of one watch take.

A server may send events faster than the supervisor can use them: bookmarks without end, or thousands of pods that flap. A watch that has
used up its share is not read for a while, so the server has to wait. A watch is reported when its waits add up to SLOWED_S. The sum
begins anew after QUIET_S without a wait.
"""

import time
from collections.abc import Callable
from typing import Final

from workers.supervisor.pages.turns import Share

SHARE: Final = 1 / 8
BURST_S: Final = 0.1
SLOWED_S: Final = 1.0
QUIET_S: Final = 60.0  # after this time without a wait, earlier waits no longer count
AGAIN_S: Final = 60.0  # between two reports


class Pace:
    """Measures the work for one watch. Call `begin` before each event is used, and `wait_s` after it was used."""

    def __init__(
        self,
        report: Callable[..., None],
        cpu: Callable[[], float] = time.thread_time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`report` is called with an event and a reason.

        `cpu`: CPU seconds of this thread. Time in which the machine stalls does not count.
        """
        self._report = report
        self._cpu = cpu
        self._share = Share(SHARE, BURST_S, clock)
        self._begun = 0.0
        self._slowed_s = self._again_at = self._quiet_at = 0.0

    def begin(self) -> None:
        self._begun = self._cpu()

    def wait_s(self, now: float) -> float:
        """Returns for how many seconds the watch may not be read; mostly 0. `now`: the time of the event loop, in seconds."""
        self._share.spend(self._cpu() - self._begun)
        wait_s = self._share.wait_s()
        if wait_s == 0.0:
            return 0.0
        if now >= self._quiet_at:
            self._slowed_s = 0.0
        self._slowed_s += wait_s
        self._quiet_at = now + wait_s + QUIET_S
        if self._slowed_s >= SLOWED_S and now >= self._again_at:
            self._slowed_s, self._again_at = 0.0, now + AGAIN_S
            reason = (
                f"its events may take {SHARE:.1%} of the supervisor's time; look for objects that change all the time"
            )
            self._report("a watch sends events faster than they are processed: changes arrive late", reason=reason)
        return wait_s
