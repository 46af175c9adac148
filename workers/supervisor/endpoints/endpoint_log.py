"""Logs for the supervisor which endpoints appeared, left or changed. At level debug, also logs all endpoints with their values.

    EndpointTable ─ add ─▶ changes, collected by kind ─ flush, once per tick ─▶ few lines
    shared memory ─ Snapshots, every 5 s, at debug only ─▶ one record, in parts that each fit into a line

- An endpoint has one condition: unknown, fresh, stale or down. The line about a change gives the previous condition, how long it lasted,
  and the cause of the last failed scrape. An endpoint that stays unknown gets one line.
- Each kind of change has a budget of `LINES_MAX` lines, which refills by one line per second. If the budget suffices, each changed endpoint
  gets a line. Otherwise all changed endpoints share one line, which has their number and the names of the first few. If the budget is used
  up, changes are counted and wait.
- So only details can be lost: every change has its own line or is part of a count (`changes`, `suppressed`).
- A snapshot is split into lines between endpoints, never inside one. Its lines are written one by one over time, because a pipe cannot take
  hundreds of lines at once.

This module does not decide the condition of an endpoint (`endpoints` does), and does not write lines (`log` does).
"""

import asyncio
import enum
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from epp.candidates import Endpoint
from shm.table import DOWN, State, TableReader
from workers.host.log import LINE_BYTES_MAX
from workers.shared.documents import EndpointRecord, EndpointsView, NamesView
from workers.supervisor.endpoints.discovery import EndpointSpec

LINES_MAX = 5  # per kind of change: the lines that may be written at once
LINES_PER_S = 1.0
NAMED_MAX = 8  # the number of names in a line about many endpoints
# How many endpoints have their own count between two lines. The changes of all others are added to one common count.
COUNTED_MAX = 4096
TEXT_MAX = 400
NAME_MAX = 400

DRAINED_EVERY_S = 0.25
SNAPSHOT_EVERY_S = 5.0
PART_EVERY_S = 0.025
ENVELOPE_BYTES = 512  # reserved in a line for everything but the endpoints
PART_BYTES_MAX = LINE_BYTES_MAX - ENVELOPE_BYTES

GONE = "discovery knows none: requests are refused, or wait"
UNUSABLE = "all are stale or down, and get requests all the same: see their lines for the causes"

STATES = {State.FRESH: "fresh", State.STALE: "stale", State.UNKNOWN: "unknown"}


class Condition(enum.Enum):
    """The present condition of an endpoint."""

    UNKNOWN = "unknown"
    FRESH = "fresh"
    STALE = "stale"
    DOWN = "down"


class Kind(enum.Enum):
    """The kind of a change. The kinds that are conditions have the same values as in `Condition`."""

    APPEARED = "appeared"
    TAKEN_OVER = "taken over"
    LEFT = "left"
    DRAINED = "drained"
    FRESH = "fresh"
    STALE = "stale"
    DOWN = "down"
    UP = "up"
    EJECTED = "ejected"  # its requests failed
    RETURNED = "returned"  # the endpoint's trial request succeeded, or its failures have moved on to other endpoints
    FAILING = "failing"  # the endpoint fails more of its requests than the others do
    UNREADABLE = "not readable"  # many scrapes, and none of them was good
    UNREAD = "partly readable"  # the endpoint's metrics page has unreadable values; the other values are used

    def event(self, *, of_many: bool) -> str:
        """Returns the log event: in the singular, or with `of_many` in the plural."""
        return f"endpoints {self.value}" if of_many else f"endpoint {self.value}"


WARNED = frozenset((Kind.STALE, Kind.DOWN, Kind.EJECTED, Kind.FAILING, Kind.UNREADABLE, Kind.UNREAD))


def shown(endpoint: EndpointSpec | EndpointRecord | Endpoint) -> tuple[str, str]:
    """Returns name and address of an endpoint in the form in which log lines show them."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.namespace}/{endpoint.name}"[:NAME_MAX], f"{host}:{endpoint.port}"


class Conditioned(Protocol):
    """An endpoint with its present condition."""

    condition: Condition


class Change(NamedTuple):
    """A change of one endpoint. Fields that are None, empty or 0 do not appear in the line."""

    endpoint: str
    address: str
    previous: Condition | None = None
    lasted_s: float | None = None
    cause: str = ""
    in_flight: int = 0
    why: str = ""  # the full text of the cause

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a log line about this one endpoint."""
        found = {
            "previous": None if self.previous is None else self.previous.value,
            "lasted_s": None if self.lasted_s is None else round(self.lasted_s, 3),
            "cause": self.cause or None,
            "why": self.why[:TEXT_MAX] or None,
            "in_flight": self.in_flight or None,
        }
        return {"endpoint": self.endpoint, "address": self.address, **{name: value for name, value in found.items() if value is not None}}


class Collected:
    """Collects the changes of one kind since its last line, and keeps the budget of lines for that kind."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}  # the last change of each of the first NAMED_MAX endpoints
        self.times: Counter[str] = Counter()
        self.uncounted = 0
        self.previous: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self._lines = float(LINES_MAX)
        self._at = 0.0

    def add(self, change: Change) -> None:
        """Adds a change to the next line."""
        name = change.endpoint
        if name in self.changes or len(self.changes) < NAMED_MAX:
            self.changes[name] = change
        if name in self.times or len(self.times) < COUNTED_MAX:
            self.times[name] += 1
        else:
            self.uncounted += 1
        if change.previous is not None:
            self.previous[change.previous.value] += 1
        if change.cause:
            self.causes[change.cause] += 1

    def lines(self, now: float) -> list[tuple[bool, dict[str, Any]]]:
        """Returns and removes the lines that the budget allows now. For each line: whether it is about many endpoints, and its fields."""
        self._lines = min(self._lines + (now - self._at) * LINES_PER_S, LINES_MAX)
        self._at = now
        if self._lines < 1.0:
            return []
        if not self.uncounted and len(self.times) <= self._lines:
            lines = [(False, self._single(change)) for change in self.changes.values()]
            self._lines -= len(lines)
        else:
            lines = [(True, self._summary())]
            self._lines = 0.0  # spends the whole budget, so that further changes wait for a second
        for collected in (self.changes, self.times, self.previous, self.causes):
            collected.clear()
        self.uncounted = 0
        return lines

    def _single(self, change: Change) -> dict[str, Any]:
        fields = change.fields()
        if (times := self.times[change.endpoint]) > 1:
            fields["suppressed"] = times - 1
        return fields

    def _summary(self) -> dict[str, Any]:
        changes = self.times.total() + self.uncounted
        found = {
            "changes": changes if changes > len(self.times) else None,
            "previous": dict(self.previous),
            "causes": dict(self.causes),
            "why": next((change.why[:TEXT_MAX] for change in self.changes.values() if change.why), None),  # the reason of one change
        }
        return {"endpoints": len(self.times), "first": list(self.changes), **{name: value for name, value in found.items() if value}}


class EndpointLog:
    """Logs changes of endpoints in a limited number of lines. With `debug`, also logs each failed scrape."""

    def __init__(self, *, debug: bool = False, log: Any = None) -> None:
        self.debug = debug
        self._log = structlog.get_logger() if log is None else log
        self._collected = {kind: Collected() for kind in Kind}
        self._waiting: dict[Kind, None] = {}
        self._any = False  # whether there has ever been an endpoint
        self._none = ""

    def add(self, kind: Kind, change: Change) -> None:
        """Adds a change. It is logged at the next flush, or later if the budget of its kind is used up."""
        self._collected[kind].add(change)
        self._waiting[kind] = None

    def left(self, endpoints: int, usable: int) -> None:
        """Logs when no endpoint is left or none is usable, and when one is usable again.

        `endpoints`: the number of all endpoints. `usable`: the number of endpoints that are neither stale nor down.
        """
        none = "" if usable else GONE if not endpoints else UNUSABLE
        self._any |= endpoints > 0
        if not self._any or none == self._none:
            return
        self._none = none
        if none:
            self._log.error("no endpoint is healthy" if endpoints else "no endpoint is left", why=none, endpoints=endpoints)
        else:
            self._log.info("there are endpoints again", endpoints=endpoints, usable=usable)

    def flush(self, now: float, members: Collection[Conditioned] = ()) -> None:
        """Writes the lines that the budget allows. If a change has left no endpoint usable, logs that, too. `members`: all endpoints."""
        if not self._waiting:
            return
        for kind in list(self._waiting):
            write = self._log.warning if kind in WARNED else self._log.info
            lines = self._collected[kind].lines(now)
            for of_many, fields in lines:
                write(kind.event(of_many=of_many), **fields)
            if lines:
                del self._waiting[kind]
        self.left(len(members), sum(m.condition in (Condition.FRESH, Condition.UNKNOWN) for m in members))

    def scrape_failed(self, endpoint: str, address: str, cause: str, text: str, *, failures: int, next_try_s: float) -> None:
        """Logs a failed scrape at level debug. Callers check `debug` first, so that they do not compute the arguments in vain."""
        self._log.debug(
            "scrape failed",
            endpoint=endpoint,
            address=address,
            cause=cause,
            text=text[:TEXT_MAX],
            failures=failures,
            next_try_s=round(next_try_s, 3),
        )


class Snapshots:
    """Logs all endpoints every SNAPSHOT_EVERY_S, with the values that workers see in shared memory."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        table: TableReader,
        endpoints: EndpointsView,
        names: NamesView,
        *,
        now: Callable[[], float],
        log: Any = None,
    ) -> None:
        self._loop = loop
        self._table = table
        self._endpoints = endpoints
        self._names = names
        self._now = now
        self._log = structlog.get_logger() if log is None else log
        self._parts: deque[dict[str, Any]] = deque()
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts the timer. The first snapshot comes after SNAPSHOT_EVERY_S, so that endpoints can be scraped before."""
        self._timer = self._loop.call_later(SNAPSHOT_EVERY_S, self._turn)

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        if not self._parts:
            now = self._now()
            self._next_at = now + SNAPSHOT_EVERY_S
            self._parts.extend(parts(self._rows(now)))
        self._log.debug("endpoints", **self._parts.popleft())
        wait = PART_EVERY_S if self._parts else max(self._next_at - self._now(), PART_EVERY_S)
        self._timer = self._loop.call_later(wait, self._turn)

    def _rows(self, now: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yields the state, the name and the values of each endpoint, ordered by state."""
        copy = self._table.copy()
        known = [e for e in self._endpoints.current() if e.slot < len(copy.rows)]
        slots = [endpoint.slot for endpoint in known]
        words = (copy.generation, copy.state, copy.flags, copy.updated_at, copy.present)
        columns = [copy.column(index)[slots].tolist() for index in range(len(self._table.schema.columns))]
        found = list(zip(range(len(known)), known, *(word[slots].tolist() for word in words), strict=True))
        names = self._names.current()
        for state, group in STATES.items():
            for place, endpoint, generation, row_state, flags, updated_at, present in found:
                if row_state != state or generation != endpoint.generation:
                    continue
                name, address = shown(endpoint)
                row = _status(address, flags, now - updated_at if updated_at else None)
                row |= _values(self._table.schema.columns, [column[place] for column in columns], present)
                row |= {column: len(of) for column, of in names.get((endpoint.slot, generation), {}).items()}
                yield group, name, row


def parts(rows: Iterable[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Divides the rows into records, grouped by state. Each record fits into one log line. There is at least one record."""
    found: list[dict[str, Any]] = [{}]
    room = PART_BYTES_MAX
    for state, name, row in rows:
        size = len(json.dumps(name)) + len(json.dumps(row)) + len(": , ")
        if size > room and found[-1]:
            found.append({})
            room = PART_BYTES_MAX
        found[-1].setdefault(state, {})[name] = row
        room -= size
    return [{"part": number, "of": len(found), **record} for number, record in enumerate(found, 1)]


def _status(address: str, flags: int, age_s: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"address": address}
    if age_s is not None:
        row["age_s"] = round(age_s, 3)
    if flags & DOWN:
        row["down"] = True
    return row


def _values(columns: Sequence[str], values: Sequence[float], present: int) -> dict[str, float]:
    """Returns the values that the server has reported, by column. Rounds them, and turns whole numbers into int."""
    return {
        column: int(value) if value.is_integer() else round(value, 4)
        for index, (column, value) in enumerate(zip(columns, values, strict=True))
        if present >> index & 1
    }


class Draining:
    """The endpoints that left while requests were in flight. Logs when the last of these requests has ended."""

    def __init__(self, log: EndpointLog, slot_inflight: Callable[[int], int]) -> None:
        """`slot_inflight(slot)` returns the number of requests in flight at a slot."""
        self._log = log
        self._slot_inflight = slot_inflight
        self._left: dict[int, tuple[Change, float]] = {}  # slot -> the endpoint, and the time at which it left
        self._look_at = 0.0

    def left(self, slot: int, change: Change, now: float) -> None:
        """Notes that an endpoint with requests in flight has left."""
        self._left[slot] = change, now

    def sweep(self, now: float) -> None:
        """Checks all of these endpoints, at most once in DRAINED_EVERY_S."""
        if self._left and now >= self._look_at:
            self._look_at = now + DRAINED_EVERY_S
            for slot in [slot for slot in self._left if not self._slot_inflight(slot)]:
                self.ended(slot, now)

    def ended(self, slot: int, now: float) -> None:
        """Logs that no request is in flight any more to the endpoint that has left this slot. Does nothing if no endpoint has left it."""
        if (left := self._left.pop(slot, None)) is not None:
            change, since = left
            self._log.add(Kind.DRAINED, Change(change.endpoint, change.address, lasted_s=now - since))
