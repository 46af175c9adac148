"""Decides when the supervisor next asks for the metrics page of a server. This is pure code: every result depends only on the calls and
their `now`.

    cost    the shortest time so far from a request to the last byte of its page; the cost may rise by 1 % per page
    gap     cost / budget, at least the scrape interval, and at most LONGEST_S
    rest    a server without requests is asked once in LONGEST_S
    doubt   if the requests at a server differ from the account, others send there, too: it does not rest for the next DOUBT_S
    spare   if another replica of the picker has read the page, the next one is due later here than there, and at each replica at another
            time: so the same replica reads the next page, and another one does if that page does not come

The account: from page to page, the number of requests at a server changes by the requests that the picker has sent or has seen end.

A page that is asked for before its gap is over (`hasten`) delays the following pages, so the mean stays within the budget. After a page of
another replica, the gap begins anew. Without a budget, a page is due at every turn, and only its cost is learned.
"""

from typing import Final, NamedTuple

LONGEST_S: Final = 2.0
DEARER: Final = 1.01
DOUBT_S: Final = 30.0
# Pages may differ from the account by this much, because requests are on their way, or the picker has not seen their end yet.
ON_THE_WAY: Final = 0.5
ON_THE_WAY_SHARE: Final = 0.1  # the same as a share of the requests in flight
SPARE_INTERVALS: Final = 2  # replicas take their turns at different times, and a page takes time to reach all of them
SPARE_SHARE: Final = 0.125  # share of the gap, for slow pages; a random time of at most the same length is added


class Pacing(NamedTuple):
    """How often the pages of a data source may be read: once per interval, and at most as often as the budget allows.

    `budget`: the share of a server's time that its pages may take, above 0; None if a page is due at every turn.
    """

    interval_s: float
    budget: float | None = None


class Pace:
    """The pace of one server's pages. `cost_s`: the cost of a page for the server, or 0 if not known. `rests`: whether the server has no
    requests, so that its budget is saved. Without a budget, no server rests.

    `spare_s`: how much later a page is due because another replica has read the last page; 0 if this replica has read the last page.
    """

    __slots__ = (
        "_asked_at", "_budget", "_doubted_until", "_due", "_interval_s", "_longest_s", "_others", "_paid_until", "cost_s", "rests",
        "spare_s",
    )  # fmt: skip

    def __init__(self, pacing: Pacing) -> None:
        self._interval_s, self._budget = pacing
        self._longest_s = max(LONGEST_S, pacing.interval_s)
        self._asked_at = self._due = self._paid_until = self._doubted_until = 0.0
        # The smallest and the largest number of requests of other clients that the last page can have shown.
        self._others: tuple[float, float] | None = None
        self.cost_s = self.spare_s = 0.0
        self.rests = False

    @property
    def gap_s(self) -> float:
        """The time between two pages of a server with requests."""
        if self._budget is None:
            return self._interval_s
        return min(max(self.cost_s / self._budget, self._interval_s), self._longest_s)

    def due(self, now: float) -> bool:
        """Returns whether a page is due at this turn. Turns come once per interval, so a page is due at the turn nearest to its time."""
        return self._budget is None or now >= self._due - self._interval_s / 2

    def waits(self, now: float) -> bool:
        """Returns whether no page was missed, because the next page is due later than the last turn."""
        return self._budget is not None and now <= self._due + 2 * self._interval_s

    def asked(self, now: float) -> None:
        """Notes that a page is asked for."""
        self._asked_at = now
        self._due = now + self.gap_s
        self.rests, self.spare_s = False, 0.0

    def read(self, took_s: float) -> None:
        """Notes that the page was read, and how long this took."""
        self.cost_s = min(took_s, self.cost_s * DEARER) if self.cost_s else took_s
        self._paid_until = max(self._paid_until, self._asked_at) + self.gap_s
        self._due = min(self._paid_until, self._asked_at + self._longest_s)

    def told(self, at: float, chance: float) -> None:
        """Notes that another replica has read the page at `at`. `chance`: a random number from 0 to 1."""
        self._asked_at = max(self._asked_at, at)
        self.rests = False
        self.spare_s = SPARE_INTERVALS * self._interval_s + SPARE_SHARE * (1 + chance) * self.gap_s
        self._paid_until = max(self._paid_until, self._asked_at + self.gap_s)
        self._due = min(self._paid_until, self._asked_at + self._longest_s) + self.spare_s

    def shows(self, requests: float, asked: int, read: int) -> None:
        """Notes the number of requests that the last page shows, how many were in flight when it was asked for, and when it was read."""
        most, before = max(asked, read), self._others
        slack = ON_THE_WAY + ON_THE_WAY_SHARE * most
        self._others = least, largest = requests - most - slack, requests - min(asked, read) + slack
        if before is not None and (least > before[1] or largest < before[0]):
            self._doubted_until = self._asked_at + DOUBT_S
        if self._budget is not None and not requests and not asked and self._asked_at >= self._doubted_until:
            self.rests = True
            self._due = self._asked_at + self._longest_s + self.spare_s

    def hasten(self, at: float) -> None:
        """Makes a page due at `at`, or as soon as the budget has made up for pages that came early."""
        self.rests = False
        self._due = min(self._due, max(at, self._paid_until - self.gap_s))

    def retry(self) -> None:
        """Makes a page due at the next turn, because the last one failed."""
        self.rests = False
        self._due = 0.0
