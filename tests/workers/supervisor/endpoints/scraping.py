"""A scraper with connections that the test answers, on a clock of the test."""

import errno
from typing import Any

from epp.data import WAITING
from epp.plugins.extractors.core_metrics import CoreMetricsExtractor, Extracted
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.http_client import Dialing
from workers.supervisor.endpoints.scrape import Failure, Scraper
from workers.supervisor.endpoints.wheel import Target

PAGE = b"vllm:num_requests_waiting 3\n"


def answer(page: bytes = PAGE, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (more, len(page), page)


EXTRACTOR = CoreMetricsExtractor("x", CoreMetricsExtractor.Params())


def reader() -> Any:
    return EXTRACTOR.extraction({}, (WAITING,))


def never(_member: str) -> bool:
    return False


class FakeConnection:
    def __init__(self, net: "FakeNet", caller: Any) -> None:
        self.net, self.caller = net, caller
        self.usable, self.started, self.answers, self.requests = True, False, 0, 0
        net.open.add(self)

    def get(self, request: bytes) -> None:
        self.requests += 1
        self.net.requested.append(self)

    def close(self) -> None:
        self.usable = False
        self.net.open.discard(self)

    def answer(self, page: bytes = PAGE) -> None:
        self.answers += 1
        self.caller.answered(self, page)

    def lose(self, failure: Exception | None = None) -> None:
        self.close()
        self.caller.lost(self, failure)


class FakeAttempt:
    def __init__(self, net: "FakeNet", caller: Any, address: tuple[str, int]) -> None:
        self.net, self.caller, self.address = net, caller, address
        net.attempts.append(self)

    def cancel(self) -> None:
        self.net.attempts.remove(self)

    def succeed(self) -> FakeConnection:
        self.net.attempts.remove(self)
        connection = FakeConnection(self.net, self.caller)
        self.caller.connected(connection)
        return connection

    def fail(self, code: int = errno.ECONNREFUSED) -> None:
        self.net.attempts.remove(self)
        self.caller.unreachable(OSError(code, "no"))


class FakeKnock(FakeAttempt):
    def answer(self, code: int) -> None:
        self.net.attempts.remove(self)
        self.caller(code)


class FakeNet:
    def __init__(self) -> None:
        self.open: set[FakeConnection] = set()
        self.attempts: list[FakeAttempt] = []
        self.requested: list[FakeConnection] = []
        self.dialled = 0

    def knock(self, host: str, port: int, answered: Any) -> "FakeKnock":
        return FakeKnock(self, answered, (host, port))

    def connect(self, host: str, port: int, caller: Any) -> FakeAttempt:
        self.dialled += 1
        return FakeAttempt(self, caller, (host, port))


class Seen:
    """A sink that keeps all results."""

    def __init__(self) -> None:
        self.good: list[tuple[object, Extracted, int, float]] = []
        self.bad: list[tuple[object, str, bool]] = []
        self.failures: list[Failure] = []
        self.last: dict[object, float] = {}
        self.sweeps = 0

    def scraped(self, tag: object, extracted: Extracted, inflight: int, now: float) -> float | None:
        self.good.append((tag, extracted, inflight, now))
        self.last[tag] = now
        return None

    def failed(self, tag: object, failure: Failure, now: float) -> None:
        self.bad.append((tag, failure.cause, failure.refused))
        self.failures.append(failure)

    def sweep(self, now: float) -> None:
        self.sweeps += 1


class Bench:
    """A scraper with the time and the connections of the test."""

    def __init__(self, interval_s: float = 0.05, *, scrapes: bool = True, loop: Any = None) -> None:
        self.interval_s = interval_s
        self.net, self.seen, self.time, self.turns = FakeNet(), Seen(), 100.0, 0
        self.inflight = 0
        self.spent = 0.0
        self.scraper = self.made(self.seen, loop, scrapes=scrapes)

    def made(self, sink: Seen, loop: Any = None, *, scrapes: bool = True, budget: float | None = None) -> Scraper:
        return Scraper(
            loop,
            pacing=Pacing(self.interval_s, budget),
            dialing=Dialing(self.net.connect, self.net.knock),
            inflight=lambda slot: slot * 100 + self.inflight,
            sink=sink,
            scrapes=scrapes,
            now=lambda: self.time,
            spent=lambda: self.spent,
        )

    def turn(self, ticks: int = 1, tick_s: float = 0.005) -> None:
        for _ in range(ticks):
            self.time += tick_s
            self.turns += 1
            self.scraper.turn(self.time, self.turns)

    def connect_all(self) -> None:
        """Lets all endpoints connect, and answers their first scrapes."""
        while self.net.dialled < len(self.scraper):
            self.tick()

    def tick(self) -> int:
        """One tick, in which all connections open and all servers answer. Returns the number of answers."""
        self.net.requested.clear()
        self.turn(tick_s=self.interval_s / self.buckets())
        while self.net.attempts:
            self.net.attempts[0].succeed()
        for connection in self.net.requested:
            connection.answer()
        return len(self.net.requested)

    def buckets(self) -> int:
        return round(self.interval_s / min(max(self.interval_s / 10, 0.005), 0.025))

    def per_tick(self) -> list[int]:
        """The number of scrapes that begin at each tick of one interval. Answers them."""
        return [self.tick() for _ in range(self.buckets())]

    def up(self) -> tuple[Target, FakeConnection]:
        """Adds an endpoint and answers its first scrape."""
        target = self.scraper.add("a", 1, ("10.0.0.1", 8000), reader())
        self.turn()
        connection = self.net.attempts[0].succeed()
        connection.answer()
        return target, connection
