"""Replicas in one process for tests: real areas, a real prefix index and a real store, without workers and endpoints."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from shm.areas import Areas, AreaSchema
from shm.budgets import BudgetRow, BudgetsSchema, BudgetSums
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.flow_areas import FlowAreas, FlowSchema
from shm.prefix_index import IndexSchema
from shm.prefix_writer import IndexWriter
from shm.remote_area import RemoteArea, RemoteSchema
from tests.shm.memory import region_for
from workers.replicas.address import parse_address, secret_of
from workers.replicas.budgets import ReplicaBudgets
from workers.replicas.endpoint_places import OwnLoad, Places
from workers.replicas.exchange import Exchange, ExchangeParts
from workers.replicas.pages import Pages
from workers.replicas.store import StoreLink, StoreNames, password_of
from workers.replicas.taught import Taught
from workers.replicas.waiting import Waiting, WaitingInPools
from workers.replicas.wire import ONLY, ROWS_MAX
from workers.shared.documents import ENDPOINTS, EndpointRecord, EndpointsView, encode
from workers.shared.objectives import ObjectivesView

SLOTS = 16
WAIT_S = 30.0
HASHES = np.arange(1, 9, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


class Replica:
    """One replica. `slots`: address of an endpoint -> slot. Slots and owners differ between replicas, as in reality."""

    def __init__(
        self,
        url: str,
        name: str,
        slots: dict[str, int],
        *,
        secret: int = 1,
        file: str = "",
        priorities: tuple[int, ...] = (0,),
        rows_max: int = ROWS_MAX,
    ) -> None:
        areas, remote, index = AreaSchema(SLOTS, (), (), (), areas=2), RemoteSchema(SLOTS, 4), IndexSchema(1024)
        documents = DocumentSchema((4096, 4096, 4096))
        region = region_for(documents)
        self.remote = RemoteArea(remote, region_for(remote))
        self.areas = Areas(areas, region_for(areas), self.remote)
        self.areas.set_serving(1, True)
        self.own = self.areas.area(1)
        self.index = IndexWriter(index, region_for(index))
        for _ in range(slots[min(slots)]):
            self.index.new_owner()
        self.slots = slots
        self.owners = {address: self.index.new_owner() for address in slots}
        self._documents = DocumentWriter(documents, region)
        self.know(*slots)
        self.reports: list[str] = []
        address = parse_address(url)

        async def open_link(own: str) -> StoreLink:
            names = StoreNames("p", cluster=False, database=address.database)
            return await StoreLink.open(address, names, password_of(address, file), own)

        places = Places(EndpointsView(DocumentReader(documents, region)))
        flow = FlowSchema(4, 1)
        self.flow = FlowAreas(flow, region_for(flow), self.areas)
        objectives = ObjectivesView(DocumentReader(documents, region), priorities)
        self.waiting = Waiting(self.flow, objectives, self.remote)
        self.taught = Taught(self.index, places)
        self.pages = Pages(places)
        budgets, used = BudgetsSchema(1), [1]
        self.budgets = region_for(budgets)
        shared = ReplicaBudgets(BudgetSums(budgets, self.budgets, used), BudgetRow(budgets, self.budgets, 1, used))
        own, waiting = OwnLoad(self.areas, places, rows_max), WaitingInPools({ONLY: self.waiting})
        self.exchange = Exchange(
            ExchangeParts(open_link, self.remote, places, own, self.taught, self.index, waiting, self.pages, shared),
            name=name,
            most=8,
            secret=secret,
            kept=secret_of(secret),
            now=time.monotonic,
            ticks=lambda: 1,
            report=lambda event, **fields: self.reports.append(f"{event}: {fields}"),
        )

    def know(self, *addresses: str) -> None:
        """Publishes the endpoints document with these endpoints."""
        records = [EndpointRecord("d", a, *a.split(":")[:1], int(a.split(":")[1]), {}, self.slots[a], 1, self.owners[a]) for a in addresses]
        self._documents.write(ENDPOINTS, encode(records))

    def serve(self, address: str, requests: int, tokens: int = 0) -> None:
        """Sets what this replica has in flight."""
        self.own.inflight[self.slots[address]] = requests
        self.own.tokens[self.slots[address]] = tokens

    def of_others(self, address: str) -> tuple[int, int]:
        """What a worker of this replica sees that others have in flight."""
        slot = self.slots[address]
        if not self.remote.fresh(time.monotonic()):
            return 0, 0
        return int(self.remote.requests[slot]), int(self.remote.tokens[slot])

    def teach(self, address: str) -> None:
        """Does what the bus does after a request."""
        self.taught.insert(HASHES, np.full(len(HASHES), self.owners[address], np.uint16), 1)

    def holds(self, address: str) -> int:
        """How many blocks the index has for an endpoint. An entry may stand for several."""
        return self.index.held(self.owners[address])


@asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[None]:
    """Runs the exchanges during a `with` block."""
    tasks = [asyncio.ensure_future(replica.exchange.run()) for replica in replicas]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in done), done
