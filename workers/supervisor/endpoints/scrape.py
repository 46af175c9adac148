"""Scrapes the metrics page of every endpoint, at most once per interval.

One `Scraper` serves all endpoints of one data source, without a task per endpoint or per scrape. A wheel of buckets (`wheel`) turns once
per interval, and each tick starts the scrapes of one bucket. The answers of a bucket arrive together, wake up the process once, and change
the table once.

    timer   at the next tick that has work: a bucket with a busy endpoint, connections to open, or the sink's `sweep` every `SWEEP_S`
    target  idle -> (connecting ->) waiting -> idle         `began` is set except when idle
    limits  each turn ends the scrapes that take too long: oldest first, up to the first one within its limit, so it is cheap

- At its turn an endpoint is scraped if a page is due (`pace`). With a budget, turns pass without a page. The connection stays open until
  the next page. If the server has closed it, the next turn opens another one, without asking for a page. Where servers keep no connection
  after an answer, each turn tries whether the server still accepts one.
- If a scrape is still under way when the next one is due, no new one starts, and the turn is counted as late.
- Connections are opened in the order of the requests, at most a fixed number per tick. So many unreachable servers delay only the attempts
  to reach these servers.
- A slow, failing or malformed answer affects no other scrape, because the scraper never blocks for a server.
- If a page is not at its endpoint's own address, and the page's address refuses the connection, the scraper tries to connect to the own
  address. Only if the own address refuses, too, is the endpoint treated as refusing.
- When an idle connection breaks, the scraper connects to the server again at once, but only once per turn. So it detects a killed server
  after two attempts, not after two intervals. If the server accepts, it may have been restarted: the scraper reads its page, if the budget
  allows. It does not read the page if another replica reads this server's pages, because servers close idle connections, and only the other
  replica's connection is not idle.
- After an endpoint was removed, nothing is reported about it.

This module does not choose endpoints, interpret pages, or write shared memory; `discovery`, the extractor and the sink do so.
"""

import asyncio
import errno
import functools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple, Protocol

from epp.plugins.extractors._pages import Extracted, ExtractError, Reader
from workers.shared.freshness import SCRAPE_S_MAX
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.http_answer import HttpError
from workers.supervisor.endpoints.http_client import REFUSED, Connected, Dialing
from workers.supervisor.endpoints.wheel import FLOOD_PAUSE_S, Address, Target, Wheel

EXTRACT: Final = "extract"  # the cause of a failed scrape with a page that was fetched and then refused as a whole
INTERVAL_S_MIN: Final = 0.05
SWEEP_S: Final = 0.025  # the most time between two calls of the sink's `sweep`
LATER_S: Final = 0.001  # added to timers: event loops count in milliseconds, and a timer that fires too early wakes up the process in vain
# This many connection attempts take a fifth of a core. Without a limit, 5,000 unreachable endpoints would take more than one core.
DIALS_PER_S_MAX: Final = 6400

# A server that keeps refusing is tried less often, because a connection attempt costs more than a scrape.
REFUSALS_TO_PAUSE: Final = 20
PAUSE_S: Final = 0.25
# A server that got its first request for a while is asked for a page after this time, because the page would delay the first token.
FIRST_TOKEN_S: Final = 0.2
# If a page shows this many times the requests in flight, and a few more, the server has clients besides this picker and its replicas.
FOREIGN: Final = 1.25
FOREIGN_MIN: Final = 4


class Failure(NamedTuple):
    """Why a scrape failed."""

    cause: str  # one word
    text: str
    refused: bool = False  # no process listens at the endpoint's own address
    again: bool = False  # the next try comes at once, not at the next turn
    serves: bool = False  # the endpoint's own address accepts connections, or has answered that it does not have such a page


class Sink(Protocol):
    """Receives the results of scrapes, in calls from the event loop. `tag`: the object with which the endpoint was added."""

    def scraped(self, tag: object, extracted: Extracted, inflight_at_scrape: int, now: float) -> float | None:
        """Takes the values of a good page. Returns the requests at the server, or None if the pages do not show them."""

    def failed(self, tag: object, failure: Failure, now: float) -> None: ...

    def sweep(self, now: float) -> None: ...


class ScrapeCounters:
    """Counts of the scraper since its start. No count ever falls.

    Each scrape ends as taken, poll error or extract error, unless its endpoint is removed before. `late` counts the turns at which a scrape
    was due while the previous one was still under way. Such a turn starts no scrape. `unread`: unreadable values of accepted pages. A cause
    is counted when it appears on an endpoint's page, and not again while it lasts. `foreign`: pages that show more requests than the picker
    has in flight at the server.
    """

    def __init__(self) -> None:
        self.scrapes = 0
        self.taken = 0
        self.late = 0
        self.extract_errors = 0
        self.unread = 0
        self.foreign = 0
        self.poll_errors: Counter[str] = Counter()

    def took(self, problems: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Counts an accepted page. `problems`: its unreadable values. `before`: the unreadable values of the endpoint's previous page."""
        self.taken += 1
        if problems or before:
            self.unread += len(problems.keys() - before.keys())


class Scraper:
    """Scrapes all endpoints of one data source."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        pacing: Pacing,
        path: str = "/metrics",
        port: int | None = None,
        dialing: Dialing,
        inflight: Callable[[int], int],
        sink: Sink,
        scrapes: bool = True,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """`inflight(slot)` returns the number of requests in flight at a slot. `now` returns the time in seconds.

        `scrapes`: if False, endpoints are added but not scraped. The sink's `sweep` runs even then.

        `spent` returns the CPU time of the thread in seconds. With wall time, a page that only waited for the CPU would look costly.
        """
        self.pacing = pacing._replace(interval_s=max(pacing.interval_s, INTERVAL_S_MIN))
        self.path = path
        self.port = port
        self.counters = ScrapeCounters()
        self._loop = loop
        self._connect, self._knock, self._connect_s_max = dialing
        self._inflight = inflight
        self._sink = sink
        self._scrapes = scrapes
        self._now = now
        self._spent = spent
        self.wheel = Wheel(self.pacing.interval_s)
        self._idle_ticks = max(1, int(SWEEP_S / self.wheel.tick_s))  # the most ticks between two turns of the wheel
        self._dials_per_tick = math.ceil(DIALS_PER_S_MAX * self.wheel.tick_s)
        self._to_dial: dict[Target, None] = {}  # targets that wait for a connection, in the order of their requests
        self._connecting: dict[Target, float] = {}  # target -> when the attempt began; oldest first, as in `_under_way`
        self._under_way: dict[Target, None] = {}
        self._started_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self.wheel.targets())

    def next_try_s(self, target: Target, now: float) -> float:
        """Returns the time until the target's next scrape, in seconds. The pause after failures is included."""
        return self.wheel.next_try_s(target, self._started_at, now)

    def start(self) -> None:
        """Starts the wheel."""
        self._started_at = self._now()
        self._plan(self._started_at)

    def close(self) -> None:
        """Stops the wheel and closes all connections."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for target in self.wheel.targets():
            self.remove(target)

    def add(self, tag: object, slot: int, address: Address, reader: Reader, server: str = "", own: Address | None = None) -> Target:
        """Adds an endpoint. Its first scrape begins within a few ticks.

        `address`: the address of its page. `server`: the name in its certificate; "" means the address. `own`: its own address; None means
        the address of the page.
        """
        target = Target(self, tag, slot, address, reader, server, own)
        if not self._scrapes:
            return target
        self.wheel.add(target)
        self._dial_soon(target)
        return target

    def change(self, target: Target, address: Address, reader: Reader, server: str = "", own: Address | None = None) -> None:
        """Changes the addresses or the page reader of an endpoint."""
        self._drop(target)
        target.reader = reader
        target.move(address, server, own)
        target.not_before = 0.0
        target.pace.retry()
        if self._scrapes:
            self._dial_soon(target)

    def remove(self, target: Target) -> None:
        """Removes an endpoint."""
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
        try:
            self.turn(now, int((now - self._started_at) / self.wheel.tick_s))
        finally:
            self._plan(now)

    def _plan(self, now: float) -> None:
        """Sets the timer to the next tick that has work to do."""
        ticks = self.ticks_to_wait()
        due = self._started_at + (self.wheel.turns + ticks) * self.wheel.tick_s - now
        self._timer = self._loop.call_later(max(due, 0.0) + LATER_S, self._tick)

    def ticks_to_wait(self) -> int:
        """Returns the number of ticks between the last turn and the next one that has work to do."""
        if self._to_dial:
            return 1
        return self.wheel.ticks_to_wait(self._idle_ticks)

    def _dial_soon(self, target: Target) -> None:
        """Queues the endpoint for a connection at the next tick. If the queue was empty, sets the timer to one tick from now, because the
        timer may be set to a later tick.
        """
        if not self._to_dial and self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(self.wheel.tick_s, self._tick)
        self._to_dial[target] = None

    def turn(self, now: float, turns: int) -> None:
        """Does all work that is due before tick number `turns`."""
        self._give_up(now)
        for target in self.wheel.turn(turns):
            self._due(target, now)
        for target in list(islice(self._to_dial, self._dials_per_tick)):
            del self._to_dial[target]
            self._begin(target, now)
        self._sink.sweep(now)

    def _due(self, target: Target, now: float) -> None:
        pace = target.pace
        if pace.rests and self._inflight(target.slot):
            pace.hasten(now + FIRST_TOKEN_S + pace.spare_s)
        due = pace.due(now)
        if target.began >= 0.0:
            # A budget pays for a slow page: the next page comes later, and no page is missed.
            self.counters.late += due and self.pacing.budget is None
        elif now >= target.not_before:
            target.retried = False
            if target.connection is None:
                self._to_dial[target] = None
            elif due:
                self._begin(target, now)

    def _begin(self, target: Target, now: float) -> None:
        target.began = now
        self._under_way[target] = None
        target.asks = target.pace.due(now)
        if target.asks:
            target.pace.asked(now)
            self.counters.scrapes += 1
        elif not target.keeps:
            self._try(target, now)
            return
        if target.connection is None:
            self._dial(target, now)
        else:
            self._send(target, target.connection)

    def _try(self, target: Target, now: float) -> None:
        """Finds out whether the server accepts connections. No page is asked for."""
        self._connecting[target] = now
        target.attempt = self._knock(target.host, target.port, functools.partial(self._tried, target))

    def _tried(self, target: Target, code: int) -> None:
        if code:
            self.unreachable(target, OSError(code, os.strerror(code)))
        else:
            target.attempt = None
            self._end(target)

    def _dial(self, target: Target, now: float) -> None:
        self._connecting[target] = now
        target.attempt = self._connect(target.host, target.port, target)

    def _send(self, target: Target, connection: Connected) -> None:
        target.inflight = self._inflight(target.slot)
        connection.get(target.request)

    def _end(self, target: Target) -> None:
        target.began, target.refusal = -1.0, None
        self._under_way.pop(target, None)
        self._connecting.pop(target, None)

    def _give_up(self, now: float) -> None:
        for target, failure in list(_hanging(self._connecting, self._under_way, self._connect_s_max, now)):
            if target.began >= 0.0:
                began = target.began
                self._drop(target)
                self._fail(target, failure, began, now)

    def _fail(self, target: Target, failure: Failure, began: float, now: float) -> None:
        self._end(target)
        target.seconds = now - began
        target.pace.retry()
        self.counters.poll_errors[failure.cause] += 1
        target.refusals = target.refusals + 1 if failure.cause == "refused" else 0
        if target.refusals >= REFUSALS_TO_PAUSE:
            target.not_before = now + PAUSE_S
        elif failure.cause == "too-large":
            target.not_before = now + FLOOD_PAUSE_S
        self._sink.failed(target.tag, failure, now)

    def connected(self, target: Target, connection: Connected) -> None:
        """Sends the request of the scrape if a page is due, now that the connection is open."""
        target.attempt = None
        target.connection = connection
        self._connecting.pop(target, None)
        if target.asks:
            self._send(target, connection)
        else:
            self._end(target)

    def unreachable(self, target: Target, failure: OSError) -> None:
        """Ends the scrape as failed, because its connection could not be opened."""
        target.attempt = None
        if failure.errno in REFUSED or failure.errno == errno.ECONNRESET:
            self._refused(target, str(failure))
        else:
            self._fail(target, Failure("unreachable", str(failure)), target.began, self._now())

    def _refused(self, target: Target, text: str) -> None:
        """Ends the scrape as failed, because the address of the page refuses. If the endpoint's own address is another one, tries this
        address first.
        """
        if target.own is None:
            self._fail(target, Failure("refused", text, refused=True), target.began, self._now())
            return
        target.refusal = f"{target.host}:{target.port}: {text}"
        self._connecting[target] = self._now()
        target.attempt = self._knock(*target.own, functools.partial(self._knocked, target))

    def _knocked(self, target: Target, code: int) -> None:
        target.attempt = None
        text = f"{target.refusal}; the server itself accepts connections" if code == 0 else str(target.refusal)
        failure = Failure("refused", text, refused=code in REFUSED, serves=code == 0)
        self._fail(target, failure, target.began, self._now())

    def answered(self, target: Target, connection: Connected, page: bytes) -> None:
        """Ends the scrape: parses the complete page and gives its values to the sink."""
        target.seconds = (now := self._now()) - target.began
        target.pace.read(target.seconds)
        self._end(target)
        target.refusals = 0
        target.keeps = connection.usable
        if not target.keeps:
            target.connection = None
        try:
            extracted = target.read(page, now, self._spent)
        except ExtractError as failure:
            self.counters.extract_errors += 1
            self._sink.failed(target.tag, Failure(EXTRACT, str(failure), serves=target.own is None), now)
            return
        self.counters.took(extracted.problems, target.problems)
        target.problems = extracted.problems
        requests = self._sink.scraped(target.tag, extracted, target.inflight, now)
        if requests is not None:
            inflight = self._inflight(target.slot)
            target.pace.shows(requests, target.inflight, inflight)
            self.counters.foreign += requests > FOREIGN * max(target.inflight, inflight) + FOREIGN_MIN

    def garbled(self, target: Target, connection: Connected, failure: HttpError) -> None:
        """Closes the connection, because the answer is malformed or came without a request. Ends a scrape under way as failed."""
        target.connection = None
        connection.close()
        if target.began >= 0.0:
            serves = failure.serves and target.own is None
            self._fail(target, Failure(failure.cause, str(failure), serves=serves), target.began, self._now())

    def lost(self, target: Target, connection: Connected, failure: Exception | None) -> None:
        """Handles a broken connection. If no first answer was expected, connects again at once, to find out whether the server is gone."""
        now = self._now()
        target.connection = None
        may_retry = (connection.answers > 0 or target.began < 0.0) and not target.retried
        if not target.pace.spare_s:
            target.pace.hasten(now)
        target.retried = True
        if target.began >= 0.0:
            if may_retry and not connection.started:
                self._dial(target, now)  # the server closed the connection while the request was being sent
                return
            inside = "inside" if connection.started else "before"
            text = f"the connection ended {inside} the answer" + (f": {failure}" if str(failure or "") else "")
            if isinstance(failure, ConnectionResetError) and connection.answers == 0 and not connection.started:
                self._refused(target, text)
                return
            again = may_retry and now >= target.not_before
            self._fail(target, Failure("closed", text, again=again), target.began, now)
        if may_retry and now >= target.not_before:
            self._begin(target, now)


def _hanging(connecting: Mapping[Target, float], under_way: Iterable[Target], s_max: float, now: float) -> Iterator[tuple[Target, Failure]]:
    """Yields the scrapes that take too long. Both collections have the oldest first. `s_max`: how long a connection may take."""
    for target, since in connecting.items():
        if now - since < s_max:
            break
        yield target, Failure("connect-timeout", target.refusal or f"no connection within {s_max} s")
    for target in under_way:
        if now - target.began < SCRAPE_S_MAX:
            break
        yield target, Failure("timeout", f"no complete page within {SCRAPE_S_MAX} s")
