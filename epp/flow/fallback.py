"""What serves in place of a policy that raises: plain rules that cannot fail, and who decides when they take over for good.

A policy that raises is counted and the plain rule is used for that one call. One that raises `FAILURES_MAX` times within
`WITHIN_S` is not asked again in this worker: it would cost every request an exception. Nothing that waits is lost either way.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from epp.flows import Queued

FAILURES_MAX = 5
WITHIN_S = 60.0

Report = Callable[[str, Exception], None]


class Trust:
    """One policy instance's record in one band."""

    __slots__ = ("_failures", "_name", "_report", "lost")

    def __init__(self, name: str, report: Report) -> None:
        self._name = name
        self._report = report
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)
        self.lost = False  # not asked any more

    def failed(self, problem: Exception, now: float) -> None:
        self._report(self._name, problem)
        self._failures.append(now)
        if len(self._failures) == FAILURES_MAX and now - self._failures[0] <= WITHIN_S:
            self.lost = True


class Unranked:
    """The key of an item whose ordering policy failed: behind all others, in order of arrival among themselves."""

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


class PlainQueue:
    """First come, first served; a `Queue` that takes over the items of one that broke."""

    __slots__ = ("_items", "bytes")

    def __init__(self) -> None:
        self._items: dict[int, Queued] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    def offer(self, item: Queued) -> Any:
        self._items[id(item)] = item
        self.bytes += item.bytes
        return id(item)

    def head(self) -> Queued | None:
        return next(iter(self._items.values()), None)

    def tail(self) -> Queued | None:
        return next(reversed(self._items.values()), None)

    def take(self) -> Queued:
        if not self._items:
            raise IndexError("take from an empty queue")
        return self.remove(next(iter(self._items)))

    def remove(self, handle: Any) -> Queued:
        item = self._items.pop(handle)
        self.bytes -= item.bytes
        return item

    def void(self, handle: Any) -> None:
        if handle in self._items:
            self.remove(handle)

    def scan(self) -> Iterable[Queued]:
        return self._items.values()
