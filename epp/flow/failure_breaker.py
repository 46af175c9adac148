"""Plain rules for a policy that raises, and the breaker that decides when they replace the policy permanently.

When a policy raises, the failure is counted and the plain rule serves that one call. After `FAILURES_MAX` failures within `WITHIN_S`
the breaker trips and this worker does not call the policy again, since each call would cost an exception. In both cases, no waiting
request is lost.
"""

from collections import deque
from collections.abc import Callable

FAILURES_MAX = 5
WITHIN_S = 60.0

Report = Callable[[str, Exception], None]


class FailureBreaker:
    """Counts the failures of one policy instance in one band, and trips when there are too many in a short time."""

    __slots__ = ("_failures", "_name", "_report", "tripped")

    def __init__(self, name: str, report: Report) -> None:
        self._name = name
        self._report = report
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self.tripped = False  # if set, the policy is not called any more

    def failed(self, problem: Exception, now: float) -> None:
        self._report(self._name, problem)
        self._failures.append(now)
        if len(self._failures) == FAILURES_MAX and now - self._failures[0] <= WITHIN_S:
            self.tripped = True


class Unranked:
    """The sort key of an item for which the ordering policy failed. It sorts after all other keys; several such keys sort by arrival."""

    __slots__ = ("_arrival",)

    def __init__(self, arrival: float) -> None:
        self._arrival = arrival

    def __lt__(self, other: object) -> bool:
        return isinstance(other, Unranked) and self._arrival < other._arrival

    def __gt__(self, other: object) -> bool:
        return not isinstance(other, Unranked) or self._arrival > other._arrival

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unranked) and self._arrival == other._arrival

    def __hash__(self) -> int:
        return hash(self._arrival)
