"""A running picker's endpoint table, as its workers see it: through the shared memory, read-only, as often as every millisecond."""

import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from shm import observe
from shm.documents import DocumentReader, DocumentSchema
from shm.segment import SegmentError
from shm.table import State, TableCopy, TableReader, TableSchema
from tests.e2e.cluster import Picker
from workers.documents import ENDPOINTS, EndpointRecord, decode_endpoints
from workers.objectives import ObjectivesView

SAMPLE_S = 0.001
ATTACH_S = 20.0


class Seat(NamedTuple):
    """An endpoint: what it is, and its place. Another server behind the same name has another place."""

    name: str
    host: str
    port: int
    uid: str
    slot: int
    generation: int

    @property
    def is_what(self) -> tuple[str, str, int, str]:
        """Comparable with what the API server says."""
        return self.name, self.host, self.port, self.uid


class Moved(NamedTuple):
    """One change that was seen."""

    at: float  # no later than this, by time.monotonic
    appeared: frozenset[Seat]
    left: frozenset[Seat]


class Table:
    """Of one picker; stays valid when its supervisor is replaced."""

    def __init__(self, picker: Picker, run_dir: Path) -> None:
        deadline = time.monotonic() + ATTACH_S
        while True:
            picker.child.check()
            try:
                seen = observe.find(str(run_dir), metrics_port=picker.metrics)
                self._segments, parts = observe.attach(seen.segments)
                break
            except SegmentError:
                assert time.monotonic() < deadline, picker.child.tail()
                time.sleep(0.05)
        for part in parts.values():
            if isinstance(part.schema, DocumentSchema):
                self._documents = DocumentReader(part.schema, part.region)
                break
        self._objectives = ObjectivesView(self._documents, ())
        (table,) = (part for part in parts.values() if isinstance(part.schema, TableSchema))
        assert isinstance(table.schema, TableSchema)
        self._table = TableReader(table.schema, table.region)
        self._copy: TableCopy | None = None
        self._version = -1
        self._lock = threading.Lock()
        self._records: list[EndpointRecord] = []

    def look(self) -> frozenset[Seat]:
        """What can be picked now. Threads share a table: one looks at a time."""
        with self._lock:
            return self._look()

    def _look(self) -> frozenset[Seat]:
        if self._documents.version(ENDPOINTS) != self._version:
            found = self._documents.read(ENDPOINTS)
            if found is not None:
                self._version, blob = found
                self._records = decode_endpoints(blob) if blob else []
        copy = self._copy = self._table.copy(self._copy)  # as workers do: a row that is being written is as it was
        return frozenset(
            Seat(r.name, r.host, r.port, r.uid, r.slot, r.generation)
            for r in self._records
            if r.slot < len(copy.rows)
            and int(copy.generation[r.slot]) == r.generation
            and int(copy.state[r.slot]) != State.FREE
        )

    def priority(self, objective: str) -> int | None:
        """As workers read it."""
        with self._lock:
            return self._objectives.priority(objective)


class Watched:
    """A thread that looks at a table all the time and keeps what moved; `with` it."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.moved: list[Moved] = []
        self.samples = 0
        self._seats = table.look()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _fault: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()

    def left(self) -> list[tuple[float, Seat]]:
        """Who left until now, and when."""
        self._sample()
        return [(moved.at, seat) for moved in self.moved for seat in moved.left]

    def appeared(self) -> list[tuple[float, Seat]]:
        self._sample()
        return [(moved.at, seat) for moved in self.moved for seat in moved.appeared]

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            seats = self.table.look()
            self.samples += 1
            if seats != self._seats:
                self.moved.append(Moved(time.monotonic(), seats - self._seats, self._seats - seats))
                self._seats = seats
