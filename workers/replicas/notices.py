"""Logs for the exchange: each problem at most once per SAID_AGAIN_S, and at most NEWS_MAX lines in this time about replicas that come and
go.
"""

from collections.abc import Callable

import structlog

SAID_AGAIN_S = 60.0
NEWS_MAX = 20

Report = Callable[..., None]

log = structlog.get_logger()


class Notices:
    """Logs what an operator should know, in a bounded number of lines. `left_out`: the number of suppressed lines about replicas."""

    def __init__(self, now: Callable[[], float], report: Report) -> None:
        self._now = now
        self._report = report
        self._said: dict[str, float] = {}  # problem -> when it was logged last
        self._news_since = float("-inf")
        self._news = 0
        self.left_out = 0

    def problem(self, text: str, why: str) -> bool:
        """Logs a problem, unless it was logged within SAID_AGAIN_S. Returns whether it was logged. `text`: one of a few constants."""
        now = self._now()
        if now - self._said.get(text, float("-inf")) < SAID_AGAIN_S:
            return False
        self._said[text] = now
        self._report(text, why=why)
        return True

    def appeared(self, name: str, replicas: int) -> None:
        """Logs that another replica is heard from now on."""
        if self._may_tell():
            log.info("replica appeared", replica=name, replicas=replicas)

    def gone(self, name: str, replicas: int) -> None:
        """Logs that another replica is not heard any more."""
        if self._may_tell():
            log.warning("replica is gone", replica=name, replicas=replicas)

    def _may_tell(self) -> bool:
        now = self._now()
        if now - self._news_since >= SAID_AGAIN_S:
            self._news_since, self._news = now, 0
        self._news += 1
        if self._news <= NEWS_MAX:
            return True
        self.left_out += 1
        self.problem("replicas come and go too often: the log leaves most of them out", f"{NEWS_MAX} lines a minute")
        return False
