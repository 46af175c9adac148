"""The scrape state of each endpoint, and a wheel of buckets that says when each has its turn.

The wheel turns once per interval. Each tick is the turn of one bucket, so the scrapes of many endpoints are spread.
"""

import math
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

from epp.plugins.extractors._pages import NONE, Extracted, ExtractError, Reader
from workers.host.log import error_text
from workers.shared.scrape_pace import Pace, Pacing
from workers.supervisor.endpoints.http_answer import HttpError
from workers.supervisor.endpoints.http_client import Attempt, Connected, get_request

Address: TypeAlias = tuple[str, int]  # host and port
FLOOD_PAUSE_S: Final = 1.0
# A page that is slow to parse is scraped less often, so that the other pages get their time. Shorter pages are not measured, because
# reading the CPU clock twice takes 1.5 us of a scrape's 50.
LARGE_PAGE_BYTES: Final = 1 << 17
COSTLY_S: Final = 0.02
COSTLY_PAUSE: Final = 10.0  # the pause is this multiple of the page's CPU time, up to FLOOD_PAUSE_S
TICK_S_MIN: Final = 0.005
TICK_S_MAX: Final = 0.025
TICKS_PER_INTERVAL: Final = 10
TOGETHER: Final = 8  # endpoints per bucket; with a page of 32 KB each, they keep the loop busy for half a millisecond
SPREAD: Final = 0.618  # distance between a bucket and the next one to be filled, as a share of all buckets


class Scrapes(Protocol):
    """The owner of a target, which gets the events of the connection."""

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
        self.asks = False  # whether the present attempt asks for a page; otherwise it only opens the connection
        self.keeps = False  # whether the server keeps connections after an answer
        self.inflight = 0
        self.not_before = 0.0
        self.refusals = 0
        self.retried = False
        self.seconds = -1.0  # duration of the last scrape, good or failed
        self.problems: Mapping[str, str] = NONE  # unreadable values of the last accepted page
        self.refusal: str | None = None  # why the page was refused, while the own address is tried
        self.move(address, server, own)

    def waits(self, now: float) -> bool:
        """Returns whether no page is missing: a page is under way, or the next page is not due yet."""
        return self.began >= 0.0 or self.pace.waits(now)

    def read(self, page: bytes, now: float, spent: Callable[[], float]) -> Extracted:
        """Parses a page. After a slow page, the next scrape comes later. Raises ExtractError.

        `spent` returns the CPU time of the thread in seconds.
        """
        large = len(page) > LARGE_PAGE_BYTES
        before = spent() if large else 0.0
        try:
            return self.reader.extract(page)
        except ExtractError:
            raise
        except Exception as fault:  # of an extractor, perhaps of a foreign one: a failure of this page only
            raise ExtractError(f"its extractor failed: {error_text(fault)}") from fault
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


class Wheel:
    """Says which endpoints have their turn. `tick_s`, `round_s`: the time of one tick and of all ticks of a round. `turns`: the ticks until
    now.
    """

    def __init__(self, interval_s: float) -> None:
        self.tick_s = min(max(interval_s / TICKS_PER_INTERVAL, TICK_S_MIN), TICK_S_MAX)
        count = max(1, round(interval_s / self.tick_s))
        self.round_s = count * self.tick_s
        self.turns = 0
        self._buckets: list[dict[Target, None]] = [{} for _ in range(count)]
        self._order = _spread(count)

    def targets(self) -> list[Target]:
        """Returns all endpoints."""
        return [target for bucket in self._buckets for target in bucket]

    def costs(self) -> list[float]:
        """Returns the cost of a page in seconds for each server with a page that was read."""
        return [target.pace.cost_s for target in self.targets() if target.pace.cost_s]

    def add(self, target: Target) -> None:
        """Puts a new endpoint into its bucket."""
        buckets = self._buckets
        free = [buckets[place] for place in self._order if len(buckets[place]) < TOGETHER]
        target.bucket = free[0] if free else min(buckets, key=len)
        target.bucket[target] = None

    def turn(self, turns: int) -> list[Target]:
        """Turns up to tick number `turns`. Returns the endpoints that have their turn, each once, even after missed turns."""
        buckets = self._buckets
        numbers = range(max(self.turns, turns - len(buckets)), turns)
        self.turns = max(turns, self.turns)
        return [target for number in numbers for target in buckets[number % len(buckets)]]

    def ticks_to_wait(self, most: int) -> int:
        """Returns the number of ticks until the next turn of a bucket with a busy endpoint, at most `most`.

        For resting endpoints, a delay of a few ticks is short compared with the time between their pages. So an idle pool seldom wakes up.
        """
        for ticks in range(1, most):
            if not all(target.pace.rests for target in self._buckets[(self.turns + ticks - 1) % len(self._buckets)]):
                return ticks
        return most

    def next_try_s(self, target: Target, started_at: float, now: float) -> float:
        """Returns the time until the endpoint's next scrape, in seconds. The pause after failures is included.

        `started_at`: the time at which the wheel started to turn.
        """
        place = next(number for number, bucket in enumerate(self._buckets) if bucket is target.bucket)
        due = started_at + (self.turns + (place - self.turns) % len(self._buckets) + 1) * self.tick_s
        pauses = math.ceil(max(target.not_before - due, 0.0) / self.round_s)
        return max(due + pauses * self.round_s - now, 0.0)


def _spread(buckets: int) -> list[int]:
    """Returns the numbers of all buckets, in an order in which the first few are far from each other."""
    step = next(n for n in range(max(round(SPREAD * buckets), 1), 2 * buckets) if math.gcd(n, buckets) == 1)
    return [place * step % buckets for place in range(buckets)]
