"""Replicas that read one server and share its pages through a store of the test, on a clock of the test.

Each replica has a real scraper, endpoint table and `Pages`, in plain memory. Messages are encoded and decoded as between real replicas.
"""

from collections.abc import Callable

from epp.data import KV_USAGE, WAITING
from shm.documents import DocumentWriter
from shm.table import TableWriter
from tests.reports import Reports
from tests.workers.shared.outlier_world import no_ejections
from tests.workers.supervisor.endpoints.scraping import FakeConnection, FakeNet
from tests.workers.supervisor.endpoints.tables import EXTRACTOR, Changes, FakeLoop, Shared, spec
from workers.replicas.endpoint_places import Places
from workers.replicas.pages import Pages
from workers.replicas.reading import decode
from workers.replicas.wire import FORM, Message, encode
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.endpoint_log import EndpointLog
from workers.supervisor.endpoints.endpoints import EndpointTable, Reading
from workers.supervisor.endpoints.http_client import Dialing
from workers.supervisor.endpoints.member import Member
from workers.supervisor.endpoints.scrape import Scraper
from workers.supervisor.endpoints.slots import IndexOwners
from workers.supervisor.shared_pages import SharedPages

TICK_S = 0.005
COST_S = 0.015
LATENCY_TICKS = 3  # from a turn of one replica's exchange to that of another one
WANTED = (WAITING, KV_USAGE)
LIMITS = {0: 2.0**53, 1: 1.0}  # the most that each can be; neither can be below 0
COLUMNS = 7


class Server:
    """The one model server. `pages`: how often its page was read."""

    def __init__(self) -> None:
        self.waiting = 3.0
        self.pages = 0
        self.alive = True

    def page(self) -> bytes:
        self.pages += 1
        return b"vllm:num_requests_waiting %f\nvllm:kv_cache_usage_perc 0.5\n" % self.waiting


class Replica:
    """One replica. Its table gives the server a slot and an owner of its own."""

    def __init__(self, world: "World", number: int) -> None:
        self.world, self.number = world, number
        self.shared, self.loop, self.net = Shared(), FakeLoop(), FakeNet()
        self.pages = Pages(Places(self.shared.view))
        self.running = True
        self.cut = False  # whether the server refuses this replica
        self.inflight = 3
        self.log = Changes()
        self.answers: dict[FakeConnection, int] = {}  # a connection with a request -> ticks until the answer
        self.table = EndpointTable(
            self.loop,  # type: ignore[arg-type]
            table=TableWriter(self.shared.schema, self.shared.region),
            documents=DocumentWriter(self.shared.document_schema, self.shared.documents),
            index=IndexOwners(self.shared.owners),
            readings=[Reading(EXTRACTOR, WANTED, fresh_for_s=2.0)],
            slot_inflight=lambda _slot: 0,
            report=Reports(),
            log=EndpointLog(debug=False, log=self.log),
            ejections=no_ejections(self.shared.schema.slots),
        )
        self.sharing = SharedPages(self.table, self.pages, lambda _slot: self.inflight, LIMITS)
        self.scraper = Scraper(
            None,  # type: ignore[arg-type]
            pacing=Pacing(0.05, 0.01),
            dialing=Dialing(self.net.connect, self.net.knock),
            inflight=lambda _slot: self.inflight,
            sink=self.sharing,
            now=lambda: world.now,
        )
        self.table.start([self.scraper], now=world.now)
        self.pages.share(COLUMNS, len(WANTED), self.sharing.told)
        others = [spec(f"other-{n}", "10.0.0.9", 9000 + n) for n in range(number)]
        self.table.apply(others)  # they take slots and owners
        self.table.apply([*others, spec("server")])
        self.table.apply([spec("server")])

    @property
    def member(self) -> Member:
        (member,) = self.table.by_slot.values()
        return member

    def row(self) -> tuple[float, float, float]:
        """Returns what a worker sees: the waiting requests, the time of the page, and the requests in flight then."""
        copy = self.shared.reader.copy()
        slot = self.member.handle.slot
        return float(copy.column(0)[slot]), float(copy.updated_at[slot]), float(copy.inflight_at_scrape[slot])

    def turn(self, turns: int) -> None:
        """One tick: the scraper's turn, answers of the server, and what the event loop has to do then."""
        self.scraper.turn(self.world.now, turns)
        server = self.world.server
        for attempt in list(self.net.attempts):
            if server.alive and not self.cut:
                attempt.succeed()
            else:
                attempt.fail()
        for connection in self.net.requested:
            self.answers[connection] = round(COST_S / TICK_S) + 1
        self.net.requested.clear()
        for connection in list(self.answers):
            self.answers[connection] -= 1
            if not self.answers[connection]:
                del self.answers[connection]
                if connection in self.net.open:
                    connection.answer(server.page())
        while self.loop.soon:
            self.loop.soon.pop(0)()

    def message(self, sequence: int) -> bytes:
        self.pages._places.refresh()
        rows = self.pages.take(self.world.now)
        return b"" if rows is None else encode(Message(FORM, f"r{self.number}", 1, 1, sequence, pages=rows))

    def hear(self, data: bytes) -> None:
        self.pages.hear(decode(data).pages, self.world.now)
        self.pages.apply()

    def lose_connection(self) -> None:
        for connection in list(self.net.open):
            connection.lose()


class World:
    """`count` replicas, which begin 20 ms after each other. `store`: whether messages come through."""

    def __init__(self, count: int) -> None:
        self.now, self.ticks = 100.0, 0
        self.server = Server()
        self.store = True
        self.replicas = [Replica(self, number) for number in range(count)]
        self._on_the_way: list[tuple[int, Replica, bytes]] = []

    def run(self, seconds: float, each: Callable[[], None] = lambda: None) -> int:
        """Lets time pass. Returns how many pages were read."""
        before = self.server.pages
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.ticks += 1
            for replica in self.replicas:
                if replica.running and self.ticks > 4 * replica.number:
                    replica.turn(self.ticks - 4 * replica.number)
                    self._publish(replica)
            self._deliver()
            each()
        return self.server.pages - before

    def _publish(self, sender: Replica) -> None:
        data = sender.message(self.ticks)
        if data and self.store:
            due = self.ticks + LATENCY_TICKS
            self._on_the_way += [(due, other, data) for other in self.replicas if other is not sender]

    def _deliver(self) -> None:
        due = [entry for entry in self._on_the_way if entry[0] <= self.ticks]
        self._on_the_way = [entry for entry in self._on_the_way if entry[0] > self.ticks]
        for _, receiver, data in due:
            if receiver.running:
                receiver.hear(data)

    def kill_server(self) -> None:
        """Ends the server's process: connections break, and its port refuses."""
        self.server.alive = False
        for replica in self.replicas:
            replica.lose_connection()
