"""What the supervisor tells of endpoints: who came, went and changed, and, for debugging, everything it knows.

    EndpointTable ─ tell ─▶ changes of one kind, gathered ─ flush, once per tick ─▶ few lines
    shared memory ─ Snapshots, every 5 s, at debug only ─▶ one record in parts that fit into a line each

- An endpoint is in one condition: unknown, fresh, stale or down. Each change is told with the condition before, how long that
  lasted, and the cause of the last failed scrape. One that stays unknown is told of once.
- A kind of change has `LINES_MAX` lines in hand and gets one back per second. As many endpoints as there are lines left get a
  line each; more of them share one that counts them and names the first. With no line left, changes wait and are counted.
- So nothing is lost but detail: every change is in a line of its own, or in a count (`changes`, `suppressed`).
- A snapshot is cut between endpoints, never inside one. Its parts go out one by one: a pipe takes no burst of hundreds.

What this does not do: decide in which condition an endpoint is (`endpoints` does), or write lines (`log` does).
"""

import asyncio
import enum
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import structlog

from shm.table import DOWN, State, TableReader
from workers.documents import EndpointsView, NamesView
from workers.log import LINE_BYTES_MAX

LINES_MAX = 5  # of one kind, at once
LINES_PER_S = 1.0
NAMED_MAX = 8  # in a line about many
COUNTED_MAX = 4096  # endpoints told apart between two lines; changes of further ones are counted all the same
TEXT_MAX = 400
NAME_MAX = 400

SNAPSHOT_EVERY_S = 5.0
PART_EVERY_S = 0.025
ENVELOPE_BYTES = 512  # what stands around a part's endpoints
PART_BYTES_MAX = LINE_BYTES_MAX - ENVELOPE_BYTES

STATES = {State.FRESH: "fresh", State.STALE: "stale", State.UNKNOWN: "unknown"}


class Condition(enum.Enum):
    """What an endpoint is at present."""

    UNKNOWN = "unknown"
    FRESH = "fresh"
    STALE = "stale"
    DOWN = "down"


class Kind(enum.Enum):
    """What happened to an endpoint; the value ends the event's name."""

    APPEARED = "appeared"
    TAKEN_OVER = "taken over"
    LEFT = "left"
    DRAINED = "drained"
    FRESH = "fresh"
    STALE = "stale"
    DOWN = "down"
    UP = "up"
    UNREADABLE = "not readable"  # nothing was ever known of it, scrape after scrape


WARNED = frozenset((Kind.STALE, Kind.DOWN, Kind.UNREADABLE))


class Placed(Protocol):
    """Something with a name and an address."""

    @property
    def namespace(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


def shown(endpoint: Placed) -> tuple[str, str]:
    """Name and address, as lines show them."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"{endpoint.namespace}/{endpoint.name}"[:NAME_MAX], f"{host}:{endpoint.port}"


class Change(NamedTuple):
    """One endpoint's change; what is not known is left out of the line."""

    endpoint: str
    address: str
    previous: Condition | None = None
    lasted_s: float | None = None
    cause: str = ""
    in_flight: int = 0
    why: str = ""  # the cause in full

    def fields(self) -> dict[str, Any]:
        """As in a line about this endpoint alone."""
        found: dict[str, Any] = {"endpoint": self.endpoint, "address": self.address}
        if self.previous is not None:
            found["previous"] = self.previous.value
        if self.lasted_s is not None:
            found["lasted_s"] = round(self.lasted_s, 3)
        if self.cause:
            found["cause"] = self.cause
        if self.why:
            found["why"] = self.why[:TEXT_MAX]
        if self.in_flight:
            found["in_flight"] = self.in_flight
        return found


class Gathered:
    """Changes of one kind since its last line, and how many lines it may still have."""

    def __init__(self) -> None:
        self.changes: dict[str, Change] = {}  # the last one of each endpoint that can be named
        self.times: Counter[str] = Counter()
        self.uncounted = 0
        self.previous: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self._lines = float(LINES_MAX)
        self._at = 0.0

    def add(self, change: Change) -> None:
        """To be told with the next line."""
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
        """What may be told now, and whether it is about many."""
        self._lines = min(self._lines + (now - self._at) * LINES_PER_S, LINES_MAX)
        self._at = now
        if self._lines < 1.0:
            return []
        if not self.uncounted and len(self.times) <= self._lines:
            told = [(False, self._single(change)) for change in self.changes.values()]
            self._lines -= len(told)
        else:
            told = [(True, self._summary())]
            self._lines = 0.0  # whatever goes on with so many is told a second later
        self._forget()
        return told

    def _single(self, change: Change) -> dict[str, Any]:
        fields = change.fields()
        if (times := self.times[change.endpoint]) > 1:
            fields["suppressed"] = times - 1
        return fields

    def _summary(self) -> dict[str, Any]:
        changes = self.times.total() + self.uncounted
        fields: dict[str, Any] = {"endpoints": len(self.times), "first": list(self.changes)}
        if changes > len(self.times):
            fields["changes"] = changes
        if self.previous:
            fields["previous"] = dict(self.previous)
        if self.causes:
            fields["causes"] = dict(self.causes)
        if why := next((change.why for change in self.changes.values() if change.why), ""):
            fields["why"] = why[:TEXT_MAX]  # of one of them
        return fields

    def _forget(self) -> None:
        self.changes.clear()
        self.times.clear()
        self.previous.clear()
        self.causes.clear()
        self.uncounted = 0


class EndpointLog:
    """Tells of changes, few lines at a time; with `debug` of each failed scrape too."""

    def __init__(self, *, debug: bool = False, log: Any = None) -> None:
        self.debug = debug
        self._log = structlog.get_logger() if log is None else log
        self._gathered = {kind: Gathered() for kind in Kind}
        self._waiting: dict[Kind, None] = {}

    def tell(self, kind: Kind, change: Change) -> None:
        """At the next flush, or later when there is too much of the kind."""
        self._gathered[kind].add(change)
        self._waiting[kind] = None

    def flush(self, now: float) -> None:
        """Write what may be written."""
        if not self._waiting:
            return
        for kind in list(self._waiting):
            write = self._log.warning if kind in WARNED else self._log.info
            lines = self._gathered[kind].lines(now)
            for of_many, fields in lines:
                write(f"endpoint{'s' if of_many else ''} {kind.value}", **fields)
            if lines:
                del self._waiting[kind]

    def scrape_failed(
        self, endpoint: str, address: str, cause: str, text: str, *, failures: int, next_try_s: float
    ) -> None:
        """One line for each, as long as the log takes them; ask for `debug` first."""
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
    """Logs all endpoints with their values, again and again, from what workers see of them."""

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
        """The first one comes when there was time for scrapes."""
        self._timer = self._loop.call_later(SNAPSHOT_EVERY_S, self._turn)

    def close(self) -> None:
        """No more."""
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
        """(state, name, what is known) of each endpoint, state by state."""
        copy = self._table.copy()
        held = [e for e in self._endpoints.current() if e.slot < len(copy.rows)]
        slots = [endpoint.slot for endpoint in held]
        words = (copy.generation, copy.state, copy.flags, copy.updated_at, copy.present)
        columns = [copy.column(index)[slots].tolist() for index in range(len(self._table.schema.columns))]
        found = list(zip(range(len(held)), held, *(word[slots].tolist() for word in words), strict=True))
        names = self._names.current()
        for state, group in STATES.items():
            for place, endpoint, generation, its_state, flags, updated_at, present in found:
                if its_state != state or generation != endpoint.generation:
                    continue
                name, address = shown(endpoint)
                row = _standing(address, flags, now - updated_at if updated_at else None)
                row |= _values(self._table.schema.columns, [column[place] for column in columns], present)
                row |= {column: len(of) for column, of in names.get((endpoint.slot, generation), {}).items()}
                yield group, name, row


def parts(rows: Iterable[tuple[str, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Records of whole endpoints, by state, each short enough for a line; at least one."""
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


def _standing(address: str, flags: int, age_s: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"address": address}
    if age_s is not None:
        row["age_s"] = round(age_s, 3)
    if flags & DOWN:
        row["down"] = True
    return row


def _values(columns: Sequence[str], values: Sequence[float], present: int) -> dict[str, float]:
    """Those that were ever reported; whole numbers without a point."""
    return {
        column: int(value) if value.is_integer() else round(value, 4)
        for index, (column, value) in enumerate(zip(columns, values, strict=True))
        if present >> index & 1
    }
