"""Decides which endpoints are fresh, stale, unknown or down. This is pure code: every result depends only on the calls and their `now`."""

from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from shm.table import State

FRESH_INTERVALS = 4
FRESH_S_MIN = 2.0  # longer than a loaded server needs for a page, because otherwise values would be stale before the next page
SCRAPE_S_MAX = 1.0
REFUSALS_TO_DOWN = 2

Member = TypeVar("Member", bound=Hashable)


def fresh_for(interval_s: float, threshold_s: float = 0.0) -> float:
    """Returns for how many seconds the values of a good scrape are fresh. `threshold_s`: --metrics-staleness-threshold."""
    return max(FRESH_INTERVALS * interval_s, FRESH_S_MIN, threshold_s)


def believed_for(interval_s: float, fresh_s: float) -> float:
    """Returns for how many seconds readers of the table trust the mark FRESH without a renewal.

    The supervisor removes the mark after `fresh_s`. If a scrape is under way at this time or begins at the next turn, the supervisor
    removes the mark when the scrape ends. So readers need this limit only while there is no supervisor.
    """
    return fresh_s + 2 * interval_s + SCRAPE_S_MAX


class Fresh(NamedTuple):
    """For how many seconds readers of the table trust the mark FRESH. `paced`: whether each endpoint's pages have their own pace. If so,
    values are up to date until a page is missing.
    """

    for_s: float
    paced: bool = False


class Health:
    """The state of one endpoint as its scrapes show it. `seen_at`: the time of the last good scrape."""

    __slots__ = ("down", "refusals", "seen_at", "state")

    def __init__(self, state: State = State.UNKNOWN, seen_at: float = 0.0) -> None:
        self.state = state
        self.seen_at = seen_at
        self.down = False
        self.refusals = 0


class Freshness(Generic[Member]):
    """Keeps the states of all endpoints. Values older than `limit_s` are stale, unless no scrape that may renew them has failed yet."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._members: dict[Member, Health] = {}
        self._fresh: dict[Member, None] = {}  # ordered by the time of the last good scrape, oldest first

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Member) -> Health:
        """Adds an endpoint that was never scraped."""
        health = self._members[member] = Health()
        return health

    def adopt(self, member: Member, *, scraped: bool, down: bool, now: float) -> Health:
        """Adds an endpoint from a predecessor. If `scraped`, the endpoint's values are fresh until `limit_s` from now."""
        health = self._members[member] = Health(State.FRESH if scraped else State.UNKNOWN, now)
        health.down = down
        if scraped:
            self._fresh[member] = None
        return health

    def forget(self, member: Member) -> None:
        """Removes an endpoint."""
        self._members.pop(member, None)
        self._fresh.pop(member, None)

    def good(self, member: Member, now: float) -> Health:
        """Records a good scrape."""
        health = self._members[member]
        health.state, health.seen_at = State.FRESH, now
        health.down, health.refusals = False, 0
        self._fresh.pop(member, None)
        self._fresh[member] = None
        return health

    def failed(self, member: Member, *, refused: bool, serves: bool = False) -> bool:
        """Records a failed scrape. Returns whether the endpoint is down from now on, or is not down any more.

        `refused`, `serves`: whether the endpoint's own address refuses connections, or accepts them.
        """
        health = self._members[member]
        health.refusals = health.refusals + 1 if refused else 0
        was_down = health.down
        health.down = not serves and (was_down or health.refusals >= REFUSALS_TO_DOWN)
        return health.down != was_down

    def newly_stale(self, now: float, renewing: Callable[[Member], bool]) -> list[Member]:
        """Returns the endpoints that have become stale since the last call. `renewing(member)`: whether the first scrape after the last
        good scrape is under way or not due yet.
        """
        stale: list[Member] = []
        for member in self._fresh:
            health = self._members[member]
            if now - health.seen_at < self.limit_s:
                break
            if not renewing(member):
                health.state = State.STALE
                stale.append(member)
        for member in stale:
            del self._fresh[member]
        return stale
