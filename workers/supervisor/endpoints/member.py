"""Holds what the supervisor knows of one endpoint of the endpoint table, besides the endpoint's row."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from epp.plugins.extractors._pages import NONE, REFUSED_PAGE, UNREAD_VALUES, Extracted
from shm.table import Handle
from workers.shared.freshness import Health
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoint_log import Change, Condition, shown
from workers.supervisor.endpoints.scrape import EXTRACT
from workers.supervisor.endpoints.wheel import Target


@dataclass(slots=True, eq=False)
class Member:
    """An endpoint that has a slot."""

    spec: EndpointSpec
    handle: Handle
    owner: int
    names: Mapping[str, frozenset[str]] = field(default_factory=dict)
    # The last good page: its values, the requests in flight when it was requested, its time.
    page: tuple[Extracted, int, float] | None = None
    condition: Condition = Condition.UNKNOWN
    since: float | None = None  # when `condition` began; None if it began before this supervisor
    failures: int = 0  # failed scrapes since the last good scrape
    problems: Mapping[str, str] = field(default_factory=lambda: NONE)  # unreadable values of the last good page: cause -> text
    cause: str = ""  # the cause of the last failed scrape, in one word
    why: str = ""  # the full text of this cause
    health: Health = field(init=False)
    target: Target = field(init=False)

    @property
    def refuses(self) -> bool:
        return self.health.refusals > 0

    @property
    def is_down(self) -> bool:
        return self.health.down

    @property
    def pool(self) -> int:
        return self.spec.pool

    @property
    def id(self) -> str:
        return f"{self.spec.namespace}/{self.spec.name} {shown(self.spec)[1]}"

    def renewing(self, now: float) -> bool:
        """Returns whether the first scrape after a good one is under way, or not due yet. Until that scrape ends, the values are fresh."""
        return not self.failures and self.target.waits(now)

    @property
    def failure(self) -> str:
        """Why the last scrape has failed, or which values of its page could not be read; "" if neither."""
        if self.failures:
            return REFUSED_PAGE + self.why if self.cause == EXTRACT else self.why
        return UNREAD_VALUES + "; ".join(self.problems.values()) if self.problems else ""

    def change(self, now: float, *, in_flight: int = 0) -> Change:
        """Returns the record of a change that ends the present condition."""
        lasted_s = None if self.since is None else max(now - self.since, 0.0)
        cause = self.cause if self.failures else ""
        return Change(*shown(self.spec), self.condition, lasted_s, cause, in_flight)

    def trouble(self, now: float) -> Change:
        """Returns the same record as `change`, with the full text of the cause."""
        if self.failures and self.why:
            return self.change(now)._replace(why=self.why)
        return self.change(now)._replace(cause="pending", why="the scrape under way has had no answer yet")

    def read(self, problems: Mapping[str, str]) -> Change | None:
        """Notes the unreadable values of a good page. Returns a record of them if a cause is new."""
        new = problems.keys() - self.problems.keys()
        self.problems = problems
        return Change(*shown(self.spec), cause=EXTRACT, why="; ".join(problems.values())) if new else None
