"""The endpoint table with the structures of shared memory in plain memory, and with a fake scraper."""

from collections.abc import Mapping
from typing import Any

from epp.data import ACTIVE_MODELS, KV_USAGE, WAITING
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor, Extracted
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefix_writer import OwnersExhausted
from shm.segment import Region
from shm.table import State, TableReader, TableSchema, TableWriter
from tests.reports import Reports
from tests.workers.recorder import Recorder
from tests.workers.shared.outlier_world import no_ejections
from workers.shared.documents import EndpointsView, NamesView, decode_endpoints
from workers.shared.ejection import Ejections
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.endpoint_log import EndpointLog
from workers.supervisor.endpoints.endpoints import EndpointTable, Reading
from workers.supervisor.endpoints.slots import IndexOwners

WANTED = (WAITING, KV_USAGE, ACTIVE_MODELS)
EXTRACTOR = CoreMetricsExtractor("x", CoreMetricsExtractor.Params())


def spec(name: str, host: str = "10.0.0.1", port: int = 8000, **labels: str) -> EndpointSpec:
    return EndpointSpec("default", name, host, port, tuple(labels.items()))


def page(waiting: float, *names: str) -> Extracted:
    return Extracted((waiting, 0.5), 3, {"active_models": frozenset(names)})


class Changes(Recorder):
    """Records the lines about endpoints. `pool` has those about the pool as a whole, which come after them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: list[str] = []

    def error(self, event: str, **fields: Any) -> None:
        self.pool.append(f"{event}: {fields['why']}")

    def info(self, event: str, **fields: Any) -> None:
        if event == "there are endpoints again":
            self.pool.append(event)
        else:
            super().info(event, **fields)


class FakeLoop:
    def __init__(self) -> None:
        self.soon: list[Any] = []

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)


class FakePace:
    def __init__(self) -> None:
        self.hastened: list[float] = []

    def hasten(self, now: float) -> None:
        self.hastened.append(now)


class FakeTarget:
    def __init__(self, tag: Any) -> None:
        self.tag, self.seconds, self.under_way = tag, -1.0, False
        self.pace = FakePace()

    def waits(self, now: float) -> bool:
        return self.under_way


class FakeScraper:
    def __init__(self) -> None:
        self.targets: dict[Any, tuple[int, tuple[str, int]]] = {}

    def add(self, tag: Any, slot: int, address: tuple[str, int], reader: Any, server: str, own: tuple[str, int]) -> Any:
        self.targets[tag] = slot, address
        return FakeTarget(tag)

    def change(self, target: Any, address: tuple[str, int], reader: Any, server: str, own: tuple[str, int]) -> None:
        self.targets[target.tag] = self.targets[target.tag][0], address

    def remove(self, target: Any) -> None:
        del self.targets[target.tag]

    def next_try_s(self, target: Any, now: float) -> float:
        return 0.04


class FakeOwners:
    def __init__(self) -> None:
        self.live: set[int] = set()
        self.next = 1
        self.limit = 60_000

    def new_owner(self) -> int:
        if self.next > self.limit:
            raise OwnersExhausted("all owner ids are taken")
        self.live.add(self.next)
        self.next += 1
        return self.next - 1

    def retire(self, owner: int) -> None:
        self.live.remove(owner)

    def owners(self) -> list[int]:
        return sorted(self.live)


class Shared:
    """The shared memory that outlives a supervisor, and the readers of workers."""

    def __init__(self, slots: int = 4, capacity: int = 4096) -> None:
        self.schema = TableSchema(("waiting_requests", "kv_cache_usage"), slots)
        self.region = Region(memoryview(bytearray(self.schema.bytes)))
        self.document_schema = DocumentSchema((capacity, capacity))
        self.documents = Region(memoryview(bytearray(self.document_schema.bytes)))
        self.owners = FakeOwners()
        self.inflight: dict[int, int] = {}
        self.reader = TableReader(self.schema, self.region)
        self.document_reader = DocumentReader(self.document_schema, self.documents)
        self.view = EndpointsView(self.document_reader)
        self.names = NamesView(self.document_reader)

    def predecessor(self) -> Any:
        found = self.document_reader.read(0)
        return decode_endpoints(found[1]) if found else []


class Supervisor:
    def __init__(
        self,
        shared: Shared,
        now: float = 100.0,
        *,
        debug: bool = False,
        remembered: Mapping[Any, int] | None = None,
        ejections: Ejections | None = None,
    ) -> None:
        self.shared, self.reports = shared, Reports()
        self.log = Changes()
        self.loop, self.scraper = FakeLoop(), FakeScraper()
        self.table = EndpointTable(
            self.loop,  # type: ignore[arg-type]
            table=TableWriter(shared.schema, shared.region),
            documents=DocumentWriter(shared.document_schema, shared.documents),
            index=IndexOwners(shared.owners, remembered, lambda number: f"pool {number}" if number else ""),
            readings=[Reading(EXTRACTOR, WANTED, fresh_for_s=0.2)] * 3,
            slot_inflight=lambda slot: shared.inflight.get(slot, 0),
            report=self.reports,
            log=EndpointLog(debug=debug, log=self.log),
            ejections=ejections or no_ejections(shared.schema.slots),
        )
        self.table.start(
            [self.scraper] * 3,  # type: ignore[list-item]
            predecessor=shared.predecessor(),
            copy=shared.reader.copy(),
            now=now,
        )

    def flush(self) -> None:
        while self.loop.soon:
            self.loop.soon.pop(0)()

    def apply(self, *specs: EndpointSpec, complete: bool = True) -> None:
        self.table.apply(set(specs), complete=complete)
        self.flush()

    def member(self, name: str) -> Any:
        return next(tag for tag in self.scraper.targets if tag.spec.name == name)


def seen(shared: Shared) -> dict[str, tuple[int, State]]:
    """The slot and the state of each endpoint that a worker sees, by name."""
    copy = shared.reader.copy()
    endpoints = shared.view.current()
    return {
        e.name: (e.slot, State(int(copy.state[e.slot])))
        for e in endpoints
        if e.slot < len(copy.rows) and copy.generation[e.slot] == e.generation and copy.state[e.slot]
    }
