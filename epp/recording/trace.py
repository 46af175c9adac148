"""Joins the records of a recording to requests with outcomes, and says which endpoints there are at any time.

    records ─▶ Trace.add ─▶ the endpoints and what was scraped of them, configurations
                  └─ requests ─▶ one `Traced` per request, when its outcome is known

A recording is read once, from its beginning. Requests come in the order in which they ended; requests without an outcome come last.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from epp.recording.records import Batch, Configured, Decided, Ended, EndpointList, Lost, Member, Opened, Record, Scraped, floats, ints

WAITING_MAX: Final = 1 << 20  # requests whose outcome is still to come; beyond this number, the oldest one is taken as without an outcome
SCRAPES_MAX: Final = 1 << 20  # scrapes that are kept per endpoint, the latest ones

Floats = NDArray[np.float64]
Slot = tuple[int, int]  # slot and generation of an endpoint


class Traced(NamedTuple):
    """One request. `at`: the arrival in seconds since the epoch; 0 if the beginning of the file is missing. `worker`: the worker's number.

    `endpoints`: the endpoints of the request's endpoint_list, in the order of rows; None for an endpoint that the recording does not
    describe, and for each endpoint of a lost list. `config`: the configuration; None if the recording does not describe it. `ended`: None
    if the end was not recorded.
    """

    at: float
    worker: int
    stream: int
    decided: Decided
    ended: Ended | None
    endpoints: Sequence[Member | None]
    config: Configured | None

    @property
    def number(self) -> str:
        """Names the request within its recording."""
        return f"{self.stream:08x}-{self.decided.number}"

    def considered(self) -> Sequence[Member | None]:
        """Returns the endpoints that the request might have got, in the order of `decided.inflight`."""
        rows = self.decided.rows
        return self.endpoints if rows is None else [self.endpoints[row] for row in ints(rows).tolist()]

    def target(self) -> Member | None:
        """Returns the endpoint that served the request, else the chosen endpoint; None if the request was refused."""
        slots = [self.ended.slot] if self.ended is not None else self.decided.targets[:1]
        return next((each for each in self.endpoints if each is not None and each.slot in slots), None)


class Trace:
    """The content of a recording up to the present record. `lost`: number of missing records."""

    def __init__(self) -> None:
        self.opened: Opened | None = None
        self.members: dict[Slot, Member] = {}  # all endpoints that have ever joined
        self.here: dict[int, Member] = {}  # slot -> the endpoint there at this moment of the recording
        self.columns: list[str] = []
        self.configs: dict[int, Configured] = {}  # by number; if configurations of several pools have one number, the latest
        self._of_pools: dict[tuple[int, str], Configured] = {}
        self.lost = 0
        self._scraped: dict[int, list[tuple[float, Floats, int]]] = {}  # slot -> (time, values, state), in order
        self._endpoint_lists: dict[tuple[int, int], list[Member | None]] = {}
        self._waiting: dict[tuple[int, int], Traced] = {}
        self._stream = self._worker = 0

    def add(self, record: Record) -> Traced | None:
        """Takes the next record. Returns a request if its outcome is known now."""
        if isinstance(record, Decided):
            return self._decided(record)
        if isinstance(record, Ended):
            begun = self._waiting.pop((self._stream, record.number), None)
            return None if begun is None else begun._replace(ended=record)
        if isinstance(record, Batch):
            self._stream, self._worker = record.stream, record.worker
        elif isinstance(record, Scraped):
            self._add_scraped(record)
        elif isinstance(record, EndpointList):
            self._endpoint_lists[self._stream, record.number] = [
                self.members.get(key) for key in zip(ints(record.slots).tolist(), ints(record.generations).tolist(), strict=True)
            ]
        elif isinstance(record, Member):
            self._add_member(record)
        elif isinstance(record, Configured):
            self.configs[record.generation] = self._of_pools[record.generation, record.pool] = record
        elif isinstance(record, Opened):
            self.opened = record
        elif isinstance(record, Lost):
            self.lost += record.records
        return None

    def unfinished(self) -> Iterator[Traced]:
        """Yields the requests whose end was not recorded."""
        waiting, self._waiting = self._waiting, {}
        yield from waiting.values()

    def scraped(self, slot: int, at: float) -> tuple[Floats, int] | None:
        """Returns the values, ordered as `columns`, and the state of an endpoint as of `at` (monotonic seconds); None if not scraped."""
        for time, values, state in reversed(self._scraped.get(slot, ())):
            if time <= at:
                return values, state
        return None

    def _decided(self, record: Decided) -> Traced | None:
        opened = self.opened
        at = 0.0 if opened is None else opened.unix_s + (record.at - opened.monotonic_s)
        endpoints = self._endpoint_lists.get((self._stream, record.endpoint_list)) or [None] * _rows(record)
        config = self._of_pools.get((record.generation, record.pool))
        found = Traced(at, self._worker, self._stream, record, None, endpoints, config)
        if record.refused:
            return found
        self._waiting[self._stream, record.number] = found
        return self._waiting.pop(next(iter(self._waiting))) if len(self._waiting) > WAITING_MAX else None

    def _add_member(self, record: Member) -> None:
        if record.joined:
            self.members[record.slot, record.generation] = self.here[record.slot] = record
        elif (there := self.here.get(record.slot)) is not None and there.generation == record.generation:
            del self.here[record.slot]

    def _add_scraped(self, record: Scraped) -> None:
        self.columns = record.columns or self.columns
        slots = ints(record.slots).tolist()
        values = floats(record.values).reshape(len(slots), -1)
        for slot, at, row, state in zip(slots, floats(record.scraped_at).tolist(), values, record.states, strict=True):
            kept = self._scraped.setdefault(slot, [])
            kept.append((at, row, state))
            if len(kept) > SCRAPES_MAX:
                del kept[: SCRAPES_MAX // 2]


def _rows(decided: Decided) -> int:
    """Returns how many endpoints the list of a request has at least, if the list itself was lost."""
    considered = len(ints(decided.inflight)) if decided.rows is None else max(ints(decided.rows).tolist(), default=-1) + 1
    return considered if decided.matched is None else max(considered, len(floats(decided.matched)))


def requests(batches: Iterable[list[Record]], trace: Trace | None = None) -> Iterator[Traced]:
    """Yields all requests of a recording, in the order of their ends; then requests without an end. `trace` takes all records."""
    trace = trace or Trace()
    for batch in batches:
        for record in batch:
            if (found := trace.add(record)) is not None:
                yield found
    yield from trace.unfinished()
