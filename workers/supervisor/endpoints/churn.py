"""Reports an endpoints file that changes all the time.

Each change is read and published. So a program that rewrites the file without end costs the supervisor time, and endpoints of the file may
come and go. Routing goes on meanwhile. Changes that come together are read once.
"""

from collections.abc import Callable
from typing import Final

WINDOW_S: Final = 10.0
MANY: Final = 10  # changes within WINDOW_S
REPORT_EVERY_S: Final = 60.0
WHY: Final = "each change is read and published: write the file once for several changes"


class Churn:
    """Counts the changes of one file. `now` is in monotonic seconds."""

    def __init__(
        self, path: str, report: Callable[..., None], count: Callable[[], None], now: Callable[[], float]
    ) -> None:
        """`count` is called for each change. `report(event, **fields)` is called at most every REPORT_EVERY_S."""
        self._path = path
        self._report = report
        self._count = count
        self._now = now
        self._since = 0.0
        self._changes = 0
        self._report_at = 0.0  # the earliest time of the next report

    def changed(self) -> None:
        """Counts one change of the file. Reports the file if it had MANY changes within WINDOW_S."""
        self._count()
        now = self._now()
        if now - self._since > WINDOW_S:
            self._since, self._changes = now, 0
        self._changes += 1
        if self._changes >= MANY and now >= self._report_at:
            self._report_at = now + REPORT_EVERY_S
            seconds = round(now - self._since, 1)
            self._report(
                "the endpoints file changes often", file=self._path, reads=self._changes, seconds=seconds, why=WHY
            )
