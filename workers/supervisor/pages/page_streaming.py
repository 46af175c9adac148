"""Sends long pages in pieces: one piece per turn of the event loop, while earlier pieces are sent.

A page of metrics may have tens of megabytes, and the supervisor's event loop must also scrape and send heartbeats on time. So a page is an
iterator of pieces. `RoundRobinSender` takes one piece from one page, as a patient act of `turns`, and continues with the next page. It
skips a page while the reader's buffer is full, or while the page pauses. The memory of a page is the reader's buffer, one piece, and the
state of the iterator.

    waiting ──▶ under way ──▶ complete | broken off | abandoned by its reader
    ≤ WAITING_MAX  ≤ PAGES_MAX

The iterator of a waiting page is not started. A free place goes to the host with the fewest pages under way. If too many pages wait, the
host with the most waiting pages loses its last one. Slow readers do not keep others out: while pages wait, the sender breaks off a page
with a reader that has taken no bytes for SLOW_S. Without such a page, it breaks off the oldest page after FAIR_S. An endless page waits for
no place and takes none, because its owner limits their number.

This module sets no time limit for readers that read no bytes: the owner of the connection does so.
"""

import asyncio
import zlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, Final, Protocol

from workers.supervisor.pages.page import Pause, Piece
from workers.supervisor.pages.turns import Turns

PAGES_MAX: Final = 8
WAITING_MAX: Final = 24
FAIR_S: Final = 10.0  # the default time-out of a Prometheus scrape
SLOW_S: Final = 1.0
GZIP_LEVEL: Final = 1
GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


class Coding:
    """Encodes the pieces of a body with gzip, or not at all."""

    def __init__(self, *, gzip: bool, at_once: bool = False) -> None:
        """`at_once`: whether the compressor keeps no part of a piece."""
        self._at_once = at_once
        self._deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW) if gzip else None

    def piece(self, data: bytes) -> bytes:
        """Encodes a piece. Returns b"" if the compressor keeps the piece for now."""
        if self._deflate is None or not data:
            return data
        packed = self._deflate.compress(data)
        return packed + self._deflate.flush(zlib.Z_SYNC_FLUSH) if self._at_once else packed

    def end(self) -> bytes:
        """Returns the bytes that the compressor has kept."""
        return b"" if self._deflate is None else self._deflate.flush()


class Reader(Protocol):
    """The receiver of a page."""

    @property
    def host(self) -> str:
        """The reader's address. The places for pages are divided between hosts."""

    def write(self, data: bytes) -> None: ...
    def sent(self) -> None:
        """Tells the reader that the page is complete."""

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        """Tells the reader that the page ends early. `fault`: the exception of the page, or None. `begun`: whether a part was written."""


class Delivery:
    """Sends one page to one reader. `full_since`: the time since which the reader's buffer has been full, or None while it has room."""

    def __init__(self, body: Iterator[Piece], reader: Reader, *, gzip: bool, endless: bool = False) -> None:
        """`endless`: whether the page has no end. Such a page takes no place of other pages."""
        self.endless = endless
        self._body = body
        self._gzip = gzip
        self._coding: Coding | None = None
        self.reader = reader
        self.full_since: float | None = None
        self.begun = False

    def step(self) -> float | None:
        """Generates and sends the next piece. Returns the pause before the next piece in seconds, or None after the last piece."""
        if self._coding is None:  # created at the first piece, because a waiting page needs no compressor
            self._coding = Coding(gzip=self._gzip, at_once=self.endless)
        piece = next(self._body, None)
        if isinstance(piece, Pause):
            return piece.seconds
        data = self._coding.end() if piece is None else self._coding.piece(piece)
        if data:
            self.begun = True
            self.reader.write(data)
        return None if piece is None else 0.0


class RoundRobinSender:
    """Sends the pieces of several pages in turn."""

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: Turns) -> None:
        self._loop = loop
        self._turns = turns
        self._waiting: deque[Delivery] = deque()
        self._under_way: dict[Delivery, float] = {}  # delivery -> time of its start, oldest first
        self._ready: deque[Delivery] = deque()
        self._pausing: dict[Delivery, Any] = {}  # delivery -> timer that ends its pause
        self._scheduled = False
        self._timer: Any = None  # runs while pages wait

    def begin(self, delivery: Delivery) -> None:
        """Queues a delivery until there is a place for it. An endless delivery begins at once."""
        if delivery.endless:
            self._under_way[delivery] = self._loop.time()
            self._make_ready(delivery)
            return
        self._waiting.append(delivery)
        self._admit()
        if len(self._waiting) > WAITING_MAX:
            waiting = Counter(each.reader.host for each in self._waiting)
            host = max(waiting, key=waiting.__getitem__)
            last = next(each for each in reversed(self._waiting) if each.reader.host == host)
            self._break_off(last, None)

    def full(self, delivery: Delivery) -> None:
        """Notes that the reader's buffer is full, so that the delivery waits."""
        delivery.full_since = self._loop.time()

    def resume(self, delivery: Delivery) -> None:
        """Continues a delivery, because the reader's buffer has room again."""
        delivery.full_since = None
        self._make_ready(delivery)

    def leave(self, delivery: Delivery) -> None:
        """Removes a delivery that is over, or that has lost its reader."""
        for queue in (self._waiting, self._ready):
            if delivery in queue:
                queue.remove(delivery)
        if (timer := self._pausing.pop(delivery, None)) is not None:
            timer.cancel()
        self._under_way.pop(delivery, None)
        self._admit()

    def close(self) -> None:
        """Removes all deliveries. The caller closes their connections."""
        self._waiting.clear()
        self._ready.clear()
        self._under_way.clear()
        for timer in self._pausing.values():
            timer.cancel()
        self._pausing.clear()
        self._stop_timer()

    def _admit(self) -> None:
        while self._waiting and len(self._pages()) < PAGES_MAX:
            places = Counter(delivery.reader.host for delivery in self._pages())
            delivery = min(self._waiting, key=lambda waiting: places[waiting.reader.host])
            self._waiting.remove(delivery)
            self._under_way[delivery] = self._loop.time()
            self._make_ready(delivery)
        if not self._waiting:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self._loop.call_later(min(SLOW_S, self._fair_in()), self._make_room)

    def _pages(self) -> list[Delivery]:
        """Returns the pages under way that take a place, oldest first."""
        return [delivery for delivery in self._under_way if not delivery.endless]

    def _fair_in(self) -> float:
        """Returns the seconds until the oldest page has been under way for FAIR_S."""
        return max(0.0, self._under_way[self._pages()[0]] + FAIR_S - self._loop.time())

    def _make_room(self) -> None:
        """Breaks off the page of the reader that has taken no bytes for longest, at least for SLOW_S. Without such a page, breaks off the
        oldest page after FAIR_S.
        """
        self._timer = None
        now = self._loop.time()
        slow = [(since, each) for each in self._pages() if (since := each.full_since) is not None]
        since, delivery = min(slow, key=lambda pair: pair[0], default=(now, None))
        if now - since < SLOW_S:
            delivery = self._pages()[0] if not self._fair_in() else None
        if delivery is not None:
            self._break_off(delivery, None)
        else:
            self._admit()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_ready(self, delivery: Delivery) -> None:
        if delivery in self._under_way and delivery.full_since is None and delivery not in self._ready and delivery not in self._pausing:
            self._ready.append(delivery)
            self._schedule()

    def _go_on(self, delivery: Delivery) -> None:
        """Continues a page after its pause."""
        del self._pausing[delivery]
        self._make_ready(delivery)

    def _schedule(self) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._turns.patient(self._turn)

    def _turn(self) -> None:
        """Sends one piece of one page."""
        self._scheduled = False
        if not self._ready:
            return
        delivery = self._ready.popleft()
        try:
            pause_s = delivery.step()
        except Exception as fault:
            self._break_off(delivery, fault)
        else:
            if pause_s is None:
                if delivery in self._under_way:  # the reader may have left during the write
                    self.leave(delivery)
                    delivery.reader.sent()
            elif pause_s and delivery in self._under_way:
                self._pausing[delivery] = self._loop.call_later(pause_s, self._go_on, delivery)
            else:
                self._make_ready(delivery)
        self._schedule()

    def _break_off(self, delivery: Delivery, fault: Exception | None) -> None:
        self.leave(delivery)
        delivery.reader.broke_off(fault, begun=delivery.begun)
