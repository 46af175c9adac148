"""Reads the endpoint table of a running picker as workers do: in shared memory, read-only, up to once per millisecond."""

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
from workers.shared.documents import ENDPOINTS, EndpointRecord, decode_endpoints
from workers.shared.objectives import ObjectivesView

SAMPLE_S = 0.001
ATTACH_S = 20.0


class EndpointRow(NamedTuple):
    """An endpoint and its row: slot and generation. Another server with the same name has another slot or generation."""

    name: str
    host: str
    port: int
    uid: str
    slot: int
    generation: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The endpoint without its row, to compare it with the API server's pods."""
        return self.name, self.host, self.port, self.uid


class TableChange(NamedTuple):
    """One change of the table. It happened before `at`."""

    at: float  # time.monotonic
    appeared: frozenset[EndpointRow]
    left: frozenset[EndpointRow]


class Table:
    """The endpoint table of one picker. It stays valid when the supervisor is replaced."""

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

    def look(self) -> frozenset[EndpointRow]:
        """The endpoints that can be picked now. Several threads can share a table."""
        with self._lock:
            return self._look()

    def _look(self) -> frozenset[EndpointRow]:
        if self._documents.version(ENDPOINTS) != self._version:
            found = self._documents.read(ENDPOINTS)
            if found is not None:
                self._version, blob = found
                self._records = decode_endpoints(blob) if blob else []
        copy = self._copy = self._table.copy(self._copy)  # as workers do: a row that is being written keeps its last values
        return frozenset(
            EndpointRow(r.name, r.host, r.port, r.uid, r.slot, r.generation)
            for r in self._records
            if r.slot < len(copy.rows) and int(copy.generation[r.slot]) == r.generation and int(copy.state[r.slot]) != State.FREE
        )

    def priority(self, objective: str) -> int | None:
        """The priority of an objective, as workers read it."""
        with self._lock:
            return self._objectives.priority(objective)


class Watched:
    """A context manager with a thread that reads a table all the time and keeps all changes."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.changes: list[TableChange] = []
        self.samples = 0
        self._rows = table.look()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _fault: BaseException | None, _trace: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()

    def count(self) -> int:
        """How many changes there were until now."""
        self._sample()
        return len(self.changes)

    def left(self) -> list[tuple[float, EndpointRow]]:
        """The endpoints that have left until now, with the time."""
        self._sample()
        return [(change.at, row) for change in self.changes for row in change.left]

    def appeared(self) -> list[tuple[float, EndpointRow]]:
        """The endpoints that have appeared until now, with the time."""
        self._sample()
        return [(change.at, row) for change in self.changes for row in change.appeared]

    def _run(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        with self._lock:
            rows = self.table.look()
            self.samples += 1
            if rows != self._rows:
                self.changes.append(TableChange(time.monotonic(), rows - self._rows, self._rows - rows))
                self._rows = rows
