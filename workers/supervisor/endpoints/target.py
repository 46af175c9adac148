"""The scrape state of one endpoint."""

from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

from epp.plugins.extractors._pages import NONE, Extracted, Reader
from workers.shared.scrape_pace import Pace, Pacing
from workers.supervisor.endpoints.http_answer import HttpError
from workers.supervisor.endpoints.http_client import Attempt, Connected, get_request

Address: TypeAlias = tuple[str, int]  # host and port
FLOOD_PAUSE_S: Final = 1.0
# A page that takes long to parse is scraped less often, so that the other pages get their time.
# Shorter pages are not measured, because reading the CPU clock twice takes 1.5 us of a scrape's 50.
LARGE_PAGE_BYTES: Final = 1 << 17
COSTLY_S: Final = 0.02
COSTLY_PAUSE: Final = 10.0  # the pause is this multiple of the page's CPU time, up to FLOOD_PAUSE_S


class Scrapes(Protocol):
    """The owner of a target: it gets what happens on the connection."""

    pacing: Pacing
    port: int | None
    path: str

    def connected(self, target: "Target", connection: Connected) -> None: ...
    def unreachable(self, target: "Target", failure: OSError) -> None: ...
    def answered(self, target: "Target", connection: Connected, page: bytes) -> None: ...
    def garbled(self, target: "Target", connection: Connected, failure: HttpError) -> None: ...
    def lost(self, target: "Target", connection: Connected, failure: Exception | None) -> None: ...


class Target:
    """The scrape state of one endpoint. It is also the `Caller` of the endpoint's connection."""

    __slots__ = (
        "_scraper", "asks", "attempt", "began", "bucket", "connection", "host", "inflight", "keeps", "not_before", "own", "pace", "port",
        "problems", "reader", "refusal", "refusals", "request", "retried", "seconds", "server", "slot", "tag",
    )  # fmt: skip

    def __init__(
        self, scraper: Scrapes, tag: object, slot: int, address: Address, reader: Reader, server: str, own: Address | None
    ) -> None:
        self._scraper = scraper
        self.tag = tag
        self.slot = slot
        self.reader = reader
        self.pace = Pace(scraper.pacing)
        self.bucket: dict[Target, None] = {}
        self.connection: Connected | None = None
        self.attempt: Attempt | None = None
        self.began = -1.0
        self.asks = False  # whether what began asks for a page; else it only opens the connection
        self.keeps = False  # whether the server keeps connections after an answer
        self.inflight = 0
        self.not_before = 0.0
        self.refusals = 0
        self.retried = False
        self.seconds = -1.0  # duration of the last scrape, good or failed
        self.problems: Mapping[str, str] = NONE  # what could not be read of the last page that was taken
        self.refusal: str | None = None  # why the page was refused, while the own address is tried
        self.move(address, server, own)

    def waits(self, now: float) -> bool:
        """Returns whether no page is missing: one is under way, or the next one is not due yet."""
        return self.began >= 0.0 or self.pace.waits(now)

    def read(self, page: bytes, now: float, spent: Callable[[], float]) -> Extracted:
        """Parses a page. After one that takes long, the next scrape comes later. Raises ExtractError.

        `spent` returns the CPU time of the thread in seconds.
        """
        large = len(page) > LARGE_PAGE_BYTES
        before = spent() if large else 0.0
        try:
            return self.reader.extract(page)
        finally:
            if large and (took := spent() - before) > COSTLY_S:
                self.not_before = now + min(took * COSTLY_PAUSE, FLOOD_PAUSE_S)

    def move(self, address: Address, server: str, own: Address | None) -> None:
        self.host = address[0]
        self.port = self._scraper.port or address[1]
        self.own = own if own != (self.host, self.port) else None  # the endpoint's address if its page is elsewhere
        self.server = server
        self.request = get_request(server or self.host, self.port, self._scraper.path)

    def connected(self, connection: Connected) -> None:
        self._scraper.connected(self, connection)

    def unreachable(self, failure: OSError) -> None:
        self._scraper.unreachable(self, failure)

    def answered(self, connection: Connected, page: bytes) -> None:
        self._scraper.answered(self, connection, page)

    def garbled(self, connection: Connected, failure: HttpError) -> None:
        self._scraper.garbled(self, connection, failure)

    def lost(self, connection: Connected, failure: Exception | None) -> None:
        self._scraper.lost(self, connection, failure)
