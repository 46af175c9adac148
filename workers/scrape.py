"""Scrape loops: every endpoint's page, each on its own clock.

One `Scraper` serves all endpoints of one data source. It has no task per endpoint or per scrape:
a wheel of buckets turns once per interval, an endpoint stays in one bucket from its appearance to
its removal, and a turn of the wheel starts the bucket's scrapes. Newcomers go into the emptiest
bucket, so phases are spread.

    wheel   | bucket 0 | bucket 1 | ... | bucket n-1 |      one bucket per tick, n ticks = interval
    target  idle -> (connecting ->) waiting -> idle         `began` is set in between
    sweep   oldest first over what is connecting, waiting: limits cost nothing while all is well

- A scrape that is still under way when its bucket comes again is left alone; that turn is counted.
- Connections are opened in the order of asking, a bounded number per tick, so that very many servers
  that cannot be reached are each asked less often, and the others as before.
- One scrape's failure, slowness or nonsense touches no other: nothing here waits for a server.
- A kept connection that goes is followed by one attempt at once, at most once per turn, so that a
  killed server is known after two attempts, not after two intervals.
- After removal nothing is reported of an endpoint any more, whatever arrives.

`Freshness` is the policy of fresh, stale, unknown and down, as pure code.

What this does not do: choose endpoints, read pages' meaning, or write shared memory; that is for
`discovery`, the extractor and the sink.
"""

import asyncio
import errno
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import islice
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from epp.plugins.extractors.core_metrics import Extracted, ExtractError
from epp.plugins.extractors.metrics_source import MetricsDataSource
from shm.table import State
from workers.http_client import (
    REFUSED,
    Attempt,
    Connect,
    Connection,
    Dialer,
    HttpError,
    get_request,
    tls_context,
)

INTERVAL_S_MIN = 0.05
CONNECT_S_MAX = 0.2  # TCP only; with TLS the whole scrape's limit counts
SCRAPE_S_MAX = 1.0
TICK_S_MIN = 0.005
TICK_S_MAX = 0.025
TICKS_PER_INTERVAL = 10
DIALS_PER_S_MAX = 6400  # a fifth of a core; 5,000 endpoints that cannot be reached would take more than one

FRESH_INTERVALS = 4
FRESH_S_MIN = 0.2
REFUSALS_TO_DOWN = 2
# A server that refuses for long is asked less often: connecting costs more than a scrape.
REFUSALS_TO_PAUSE = 20
PAUSE_S = 0.25
FLOOD_PAUSE_S = 1.0
# A page that takes long to read is read less often: others are to be scraped meanwhile.
LARGE_PAGE_BYTES = 1 << 17  # a shorter one takes less; to look at the CPU's clock twice takes 1.5 us of 50 for a scrape
COSTLY_S = 0.02
COSTLY_PAUSE = 10.0  # times what it took, up to FLOOD_PAUSE_S

Member = TypeVar("Member", bound=Hashable)


def source_tls(source: MetricsDataSource) -> ssl.SSLContext | None:
    """For pages over https, None for http. Raises ValueError with what is wrong with the certificates."""
    if source.scheme == "http":
        return None
    authorities = "" if source.insecure_skip_verify else source.ca_cert_path
    own = (
        ("caCertPath", authorities),
        ("clientCertPath", source.client_cert_path),
        ("clientKeyPath", source.client_key_path),
    )
    files = ", ".join(f"{name} {path}" for name, path in own if path)
    try:
        return tls_context(
            None if source.insecure_skip_verify else authorities, source.client_cert_path, source.client_key_path
        )
    except OSError as refused:  # ssl.SSLError is one
        why = getattr(refused, "reason", None) or refused.strerror or "not PEM, or the key has a password"
        needs = "PEM certificates, and a certificate's own unencrypted PEM key"
        raise ValueError(f"plugin '{source.name}': {files}: not usable ({why}); need {needs}") from refused


def fresh_for(interval_s: float) -> float:
    """How long the values of a good scrape count as fresh."""
    return max(FRESH_INTERVALS * interval_s, FRESH_S_MIN)


class Health:
    """What is known of one endpoint's scrapes."""

    __slots__ = ("down", "refusals", "seen_at", "state")

    def __init__(self, state: State = State.UNKNOWN, seen_at: float = 0.0) -> None:
        self.state = state
        self.seen_at = seen_at
        self.down = False
        self.refusals = 0


class Freshness(Generic[Member]):
    """Fresh, stale, unknown; down. Every answer is a function of the calls and their `now`."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._members: dict[Member, Health] = {}
        self._fresh: dict[Member, None] = {}  # oldest good scrape first

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: Member) -> Health:
        """Not scraped yet."""
        health = self._members[member] = Health()
        return health

    def adopt(self, member: Member, *, scraped: bool, down: bool, now: float) -> Health:
        """Known from a predecessor; its values stay what they are until the limit from now."""
        health = self._members[member] = Health(State.FRESH if scraped else State.UNKNOWN, now)
        health.down = down
        if scraped:
            self._fresh[member] = None
        return health

    def forget(self, member: Member) -> None:
        """The endpoint has left."""
        self._members.pop(member, None)
        self._fresh.pop(member, None)

    def good(self, member: Member, now: float) -> Health:
        """A page was taken."""
        health = self._members[member]
        health.state, health.seen_at = State.FRESH, now
        health.down, health.refusals = False, 0
        self._fresh.pop(member, None)
        self._fresh[member] = None
        return health

    def failed(self, member: Member, *, refused: bool) -> bool:
        """A scrape brought nothing; True when that makes the endpoint down."""
        health = self._members[member]
        health.refusals = health.refusals + 1 if refused else 0
        newly_down = health.refusals >= REFUSALS_TO_DOWN and not health.down
        health.down |= newly_down
        return newly_down

    def newly_stale(self, now: float) -> list[Member]:
        """Those whose last good scrape has just become too old; each is told once."""
        stale: list[Member] = []
        for member in self._fresh:
            health = self._members[member]
            if now - health.seen_at < self.limit_s:
                break
            health.state = State.STALE
            stale.append(member)
        for member in stale:
            del self._fresh[member]
        return stale


class Failure(NamedTuple):
    """Why a scrape brought nothing."""

    cause: str  # one word
    text: str
    refused: bool = False  # nobody listens
    again: bool = False  # tried anew at once, not at the next turn


class PageReader(Protocol):
    """Reads the pages of one server."""

    def extract(self, page: bytes) -> Extracted: ...


class Sink(Protocol):
    """Where results go. Called from the loop; `tag` is what the target was added with."""

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> None: ...

    def failed(self, tag: object, failure: Failure, now: float) -> None: ...

    def sweep(self, now: float) -> None: ...


class ScrapeCounters:
    """What the scraper did since it was made; nothing here ever falls.

    Each scrape that began ends as one of taken, poll error and extract error, unless its endpoint leaves before. `late` counts
    turns at which a scrape was due while the one before was still under way; it is no scrape.
    """

    def __init__(self) -> None:
        self.scrapes = 0
        self.taken = 0
        self.late = 0
        self.extract_errors = 0
        self.poll_errors: Counter[str] = Counter()


class Target:
    """One endpoint's loop; the caller of its connection."""

    __slots__ = (
        "_scraper",
        "attempt",
        "began",
        "bucket",
        "connection",
        "host",
        "inflight",
        "not_before",
        "port",
        "reader",
        "refusals",
        "request",
        "retried",
        "seconds",
        "slot",
        "tag",
    )

    def __init__(
        self,
        scraper: "Scraper",
        tag: object,
        slot: int,
        address: tuple[str, int],
        reader: PageReader,
    ) -> None:
        self._scraper = scraper
        self.tag = tag
        self.slot = slot
        self.reader = reader
        self.bucket: dict[Target, None] = {}
        self.connection: Connection | None = None
        self.attempt: Attempt | None = None
        self.began = -1.0
        self.inflight = 0
        self.not_before = 0.0
        self.refusals = 0
        self.retried = False
        self.seconds = -1.0  # of the last scrape that ended, however
        self.move(address)

    def move(self, address: tuple[str, int]) -> None:
        self.host = address[0]
        self.port = self._scraper.port or address[1]
        self.request = get_request(self.host, self.port, self._scraper.path)

    def connected(self, connection: Connection) -> None:
        self._scraper.connected(self, connection)

    def unreachable(self, failure: OSError) -> None:
        self._scraper.unreachable(self, failure)

    def answered(self, connection: Connection, page: bytes) -> None:
        self._scraper.answered(self, connection, page)

    def garbled(self, connection: Connection, failure: HttpError) -> None:
        self._scraper.garbled(self, connection, failure)

    def lost(self, connection: Connection, failure: Exception | None) -> None:
        self._scraper.lost(self, connection, failure)


class Scraper:
    """All scrape loops of one data source."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        interval_s: float,
        path: str = "/metrics",
        port: int | None = None,
        connect: Connect,
        connect_s_max: float = CONNECT_S_MAX,
        inflight: Callable[[int], int],
        sink: Sink,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent`: seconds of CPU, so that a page that was interrupted by others is not taken for a costly one."""
        self.interval_s = max(interval_s, INTERVAL_S_MIN)
        self.path = path
        self.port = port
        self.counters = ScrapeCounters()
        self._loop = loop
        self._connect = connect
        self._connect_s_max = connect_s_max
        self._inflight = inflight
        self._sink = sink
        self._now = now
        self._spent = spent
        self._tick_s = min(max(self.interval_s / TICKS_PER_INTERVAL, TICK_S_MIN), TICK_S_MAX)
        buckets = max(1, round(self.interval_s / self._tick_s))
        self._wheel: list[dict[Target, None]] = [{} for _ in range(buckets)]
        self._dials_per_tick = math.ceil(DIALS_PER_S_MAX * self._tick_s)
        self._to_dial: dict[Target, None] = {}  # in the order of asking
        self._connecting: dict[Target, float] = {}  # oldest first, as are those under way
        self._under_way: dict[Target, None] = {}
        self._started_at = 0.0
        self._turns = 0
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def of(
        cls,
        source: MetricsDataSource,
        loop: asyncio.AbstractEventLoop,
        *,
        interval_s: float,
        tls: ssl.SSLContext | None,
        inflight: Callable[[int], int],
        sink: Sink,
    ) -> Self:
        """As a data source is configured; `tls` is `source_tls` of it."""
        return cls(
            loop,
            interval_s=interval_s,
            path=source.path,
            port=source.port,
            connect=Dialer(loop, tls).dial,
            connect_s_max=SCRAPE_S_MAX if tls else CONNECT_S_MAX,
            inflight=inflight,
            sink=sink,
        )

    def __len__(self) -> int:
        return sum(map(len, self._wheel))

    def next_try_s(self, target: Target, now: float) -> float:
        """How long until the target's next turn that is no pause."""
        place = next(number for number, bucket in enumerate(self._wheel) if bucket is target.bucket)
        turn = self._turns + (place - self._turns) % len(self._wheel)
        due = self._started_at + (turn + 1) * self._tick_s
        round_s = len(self._wheel) * self._tick_s
        pauses = math.ceil(max(target.not_before - due, 0.0) / round_s)
        return max(due + pauses * round_s - now, 0.0)

    def start(self) -> None:
        """Turn the wheel from now on."""
        self._started_at = self._now()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def close(self) -> None:
        """Stop, and close what is open."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for bucket in self._wheel:
            for target in list(bucket):
                self.remove(target)

    def add(self, tag: object, slot: int, address: tuple[str, int], reader: PageReader) -> Target:
        """An endpoint appeared; its first scrape follows within few ticks."""
        target = Target(self, tag, slot, address, reader)
        target.bucket = min(self._wheel, key=len)
        target.bucket[target] = None
        self._to_dial[target] = None
        return target

    def change(self, target: Target, address: tuple[str, int], reader: PageReader) -> None:
        """The endpoint is scraped elsewhere, or read otherwise, from now on."""
        self._drop(target)
        target.reader = reader
        target.move(address)
        target.not_before = 0.0
        self._to_dial[target] = None

    def remove(self, target: Target) -> None:
        """The endpoint left."""
        target.bucket.pop(target, None)
        self._drop(target)

    def _drop(self, target: Target) -> None:
        self._end(target)
        self._to_dial.pop(target, None)
        if target.attempt is not None:
            target.attempt.cancel()
            target.attempt = None
        if target.connection is not None:
            target.connection.close()
            target.connection = None

    def _tick(self) -> None:
        now = self._now()
        turns = int((now - self._started_at) / self._tick_s)
        due = self._started_at + (turns + 1) * self._tick_s - now
        self._timer = self._loop.call_later(max(due, 0.001), self._tick)
        self.turn(now, turns)

    def turn(self, now: float, turns: int) -> None:
        """Do what the ticks up to number `turns` ask for; each bucket once at most."""
        self._give_up(now)
        wheel = self._wheel
        for number in range(max(self._turns, turns - len(wheel)), turns):
            for target in wheel[number % len(wheel)]:
                self._due(target, now)
        self._turns = max(turns, self._turns)
        for target in list(islice(self._to_dial, self._dials_per_tick)):
            del self._to_dial[target]
            self._begin(target, now)
        self._sink.sweep(now)

    def _due(self, target: Target, now: float) -> None:
        if target.began >= 0.0:
            self.counters.late += 1
        elif now >= target.not_before:
            target.retried = False
            if target.connection is None:
                self._to_dial[target] = None
            else:
                self._begin(target, now)

    def _begin(self, target: Target, now: float) -> None:
        target.began = now
        self._under_way[target] = None
        self.counters.scrapes += 1
        if target.connection is not None:
            self._send(target, target.connection)
        else:
            self._dial(target, now)

    def _dial(self, target: Target, now: float) -> None:
        self._connecting[target] = now
        target.attempt = self._connect(target.host, target.port, target)

    def _send(self, target: Target, connection: Connection) -> None:
        target.inflight = self._inflight(target.slot)
        connection.get(target.request)

    def _end(self, target: Target) -> None:
        target.began = -1.0
        self._under_way.pop(target, None)
        self._connecting.pop(target, None)

    def _give_up(self, now: float) -> None:
        hanging = []
        for target, since in self._connecting.items():
            if now - since < self._connect_s_max:
                break
            text = f"no connection within {self._connect_s_max} s"
            hanging.append((target, Failure("connect-timeout", text)))
        for target in self._under_way:
            if now - target.began < SCRAPE_S_MAX:
                break
            hanging.append((target, Failure("timeout", f"no whole page within {SCRAPE_S_MAX} s")))
        for target, failure in hanging:
            if target.began >= 0.0:
                began = target.began
                self._drop(target)
                self._fail(target, failure, began, now)

    def _fail(self, target: Target, failure: Failure, began: float, now: float) -> None:
        self._end(target)
        target.seconds = now - began
        self.counters.poll_errors[failure.cause] += 1
        target.refusals = target.refusals + 1 if failure.refused else 0
        if target.refusals >= REFUSALS_TO_PAUSE:
            target.not_before = now + PAUSE_S
        elif failure.cause == "too-large":
            target.not_before = now + FLOOD_PAUSE_S
        self._sink.failed(target.tag, failure, now)

    def connected(self, target: Target, connection: Connection) -> None:
        """An attempt succeeded: the scrape that it was made for goes on."""
        target.attempt = None
        target.connection = connection
        self._connecting.pop(target, None)
        self._send(target, connection)

    def unreachable(self, target: Target, failure: OSError) -> None:
        """An attempt failed."""
        target.attempt = None
        refused = failure.errno in REFUSED or failure.errno == errno.ECONNRESET
        cause = "refused" if refused else "unreachable"
        self._fail(target, Failure(cause, str(failure), refused), target.began, self._now())

    def answered(self, target: Target, connection: Connection, page: bytes) -> None:
        """A page is in."""
        now = self._now()
        target.seconds = now - target.began
        self._end(target)
        target.refusals = 0
        if not connection.usable:
            target.connection = None
        large = len(page) > LARGE_PAGE_BYTES
        before = self._spent() if large else 0.0
        try:
            extracted = target.reader.extract(page)
        except ExtractError as failure:
            self.counters.extract_errors += 1
            self._sink.failed(target.tag, Failure("extract", str(failure)), now)
            return
        finally:
            if large and (took := self._spent() - before) > COSTLY_S:
                target.not_before = now + min(took * COSTLY_PAUSE, FLOOD_PAUSE_S)
        self.counters.taken += 1
        self._sink.scraped(target.tag, extracted, target.inflight, now)

    def garbled(self, target: Target, connection: Connection, failure: HttpError) -> None:
        """The answer is none, or bytes came that nobody asked for."""
        target.connection = None
        connection.close()
        if target.began >= 0.0:
            self._fail(target, Failure(failure.cause, str(failure)), target.began, self._now())

    def lost(self, target: Target, connection: Connection, failure: Exception | None) -> None:
        """The connection went: a reused one is replaced at once, to know whether the server did."""
        now = self._now()
        target.connection = None
        may_retry = connection.answers > 0 and not target.retried
        target.retried = True
        if target.began >= 0.0:
            if may_retry and not connection.started:
                self._dial(target, now)  # the request met a connection that was being closed
                return
            reset = isinstance(failure, ConnectionResetError)
            refused = reset and connection.answers == 0 and not connection.started
            inside = "inside" if connection.started else "before"
            text = f"the connection ended {inside} the answer" + (f": {failure}" if str(failure or "") else "")
            cause = "refused" if refused else "closed"
            self._fail(target, Failure(cause, text, refused, may_retry and now >= target.not_before), target.began, now)
        if may_retry and now >= target.not_before:
            self._begin(target, now)
