"""One endpoint of the endpoint table: what the supervisor knows of it beside its row."""

from collections.abc import Mapping

from epp.plugins.extractors._pages import NONE, REFUSED_PAGE, UNREAD_VALUES, Extracted
from shm.table import Handle
from workers.shared.freshness import Health
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoint_log import Change, Condition, shown
from workers.supervisor.endpoints.scrape_results import EXTRACT
from workers.supervisor.endpoints.target import Target


class Member:
    """An endpoint that has a slot."""

    __slots__ = (
        "cause",
        "condition",
        "failures",
        "handle",
        "health",
        "names",
        "owner",
        "page",
        "problems",
        "since",
        "spec",
        "target",
        "why",
    )

    def __init__(self, spec: EndpointSpec, handle: Handle, owner: int) -> None:
        self.spec = spec
        self.handle = handle
        self.owner = owner
        self.names: Mapping[str, frozenset[str]] = {}
        # The last good page: its values, the requests in flight when it was requested, its time.
        self.page: tuple[Extracted, int, float] | None = None
        self.condition = Condition.UNKNOWN
        self.since: float | None = None  # when `condition` began; None if it began before this supervisor
        self.failures = 0  # failed scrapes since the last good one
        self.problems: Mapping[str, str] = NONE  # what could not be read of the last good page: cause -> text
        self.cause = self.why = ""  # of the last failed scrape: `cause` is one word, `why` the full text
        self.health: Health
        self.target: Target

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
        """Returns whether the first scrape after a good one is under way, or not due yet. Until it ends, the values count as fresh."""
        return not self.failures and self.target.waits(now)

    @property
    def failure(self) -> str:
        """Why the last scrape has failed, or what of its page could not be read; "" if there is nothing to say."""
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
        return self.change(now).explained(self.why if self.failures else "")

    def read(self, problems: Mapping[str, str]) -> Change | None:
        """Takes what could not be read of a good page. Returns the record of it if a cause is new."""
        new = problems.keys() - self.problems.keys()
        self.problems = problems
        return Change(*shown(self.spec), cause=EXTRACT, why="; ".join(problems.values())) if new else None
