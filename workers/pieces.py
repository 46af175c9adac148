"""Answers in pieces: a long page is made while it is sent, one piece in one turn of the event loop.

A page of metrics may have tens of megabytes, and the loop that sends it has scrapes and a heartbeat to keep on time. So a page is
an iterator of pieces, and `Turns` asks one page for one piece, lets the loop turn, and asks the next. A reader whose
buffer is full is left out until it has room again: it costs that buffer, one piece, and what the page remembers.

    waiting ──▶ under way ──▶ sent whole | broke off | left by its reader
                ≤ PAGES_MAX

Nothing is asked of a page that waits. While others wait, the page that is under way for longest is broken off once it took
FAIR_S: readers that take a little now and then do not keep all others out.

A piece may be empty: the page only wants the loop to turn. What this does not do: time readers that take nothing. Who owns the
connection looks at what it holds.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

PAGES_MAX = 8
FAIR_S = 10.0  # as long as a scraper waits by default
GZIP_LEVEL = 1
GZIP_WINDOW = 16 + zlib.MAX_WBITS
LAST_CHUNK = b"0\r\n\r\n"


class Coding:
    """Pieces -> bytes of an HTTP body: gzip if wanted, chunks if the version knows them."""

    def __init__(self, *, gzip: bool, chunked: bool) -> None:
        self._deflate = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW) if gzip else None
        self._chunked = chunked

    def piece(self, data: bytes) -> bytes:
        """Nothing, if it is kept to be compressed with what follows."""
        return self._chunk(data if self._deflate is None else self._deflate.compress(data))

    def end(self) -> bytes:
        """What is still kept, and the end."""
        rest = b"" if self._deflate is None else self._deflate.flush()
        return self._chunk(rest) + (LAST_CHUNK if self._chunked else b"")

    def _chunk(self, data: bytes) -> bytes:
        return (
            b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data
        )  # an empty chunk would be the last


class Reader(Protocol):
    """Who asked for a page."""

    def write(self, data: bytes) -> None: ...
    def sent(self) -> None:
        """The page is whole."""

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        """It will not be; `begun`: a part of it was written."""


class Delivery:
    """One page on its way to one reader. `full`: the reader has no room now."""

    def __init__(self, body: Iterator[bytes], head: bytes, reader: Reader, *, gzip: bool, chunked: bool) -> None:
        self._body = body
        self._head = head
        self._gzip, self._chunked = gzip, chunked
        self._coding: Coding | None = None
        self.reader = reader
        self.full = False

    @property
    def begun(self) -> bool:
        return not self._head

    def step(self) -> bool:
        """Make the next piece and send it; whether there may be more. The head waits for the first, so that its failure can be told."""
        if self._coding is None:  # a page that waits for its turn needs no compressor
            self._coding = Coding(gzip=self._gzip, chunked=self._chunked)
        piece = next(self._body, None)
        data = self._coding.end() if piece is None else self._coding.piece(piece)
        if data or piece is None:
            data, self._head = self._head + data, b""
            self.reader.write(data)
        return piece is not None


class Loop(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float: ...
    def call_soon(self, callback: Callable[[], None]) -> Any: ...
    def call_later(self, delay: float, callback: Callable[[], None]) -> Any: ...


class Turns:
    """Whose turn it is to make a piece."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._waiting: deque[Delivery] = deque()
        self._under_way: dict[Delivery, float] = {}  # since when, oldest first
        self._ready: deque[Delivery] = deque()
        self._scheduled = False
        self._timer: Any = None  # runs while pages wait

    def begin(self, delivery: Delivery) -> None:
        self._waiting.append(delivery)
        self._admit()

    def resume(self, delivery: Delivery) -> None:
        """Its reader has room again."""
        delivery.full = False
        self._make_ready(delivery)

    def leave(self, delivery: Delivery) -> None:
        """It is over, or its reader is gone."""
        for queue in (self._waiting, self._ready):
            if delivery in queue:
                queue.remove(delivery)
        self._under_way.pop(delivery, None)
        self._admit()

    def close(self) -> None:
        """Forget all deliveries; their readers are the caller's."""
        self._waiting.clear()
        self._ready.clear()
        self._under_way.clear()
        self._stop_timer()

    def _admit(self) -> None:
        while self._waiting and len(self._under_way) < PAGES_MAX:
            delivery = self._waiting.popleft()
            self._under_way[delivery] = self._loop.time()
            self._make_ready(delivery)
        if not self._waiting:
            self._stop_timer()
        elif self._timer is None:
            oldest = next(iter(self._under_way.values()))
            self._timer = self._loop.call_later(max(0.0, oldest + FAIR_S - self._loop.time()), self._make_room)

    def _make_room(self) -> None:
        self._timer = None
        delivery, since = next(iter(self._under_way.items()))
        if self._loop.time() - since >= FAIR_S:
            self._break_off(delivery, None)
        else:
            self._admit()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _make_ready(self, delivery: Delivery) -> None:
        if delivery in self._under_way and not delivery.full and delivery not in self._ready:
            self._ready.append(delivery)
            self._schedule()

    def _schedule(self) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One piece of one page."""
        self._scheduled = False
        if not self._ready:
            return
        delivery = self._ready.popleft()
        try:
            more = delivery.step()
        except Exception as fault:
            self._break_off(delivery, fault)
        else:
            if more:
                self._make_ready(delivery)
            elif delivery in self._under_way:  # its reader may have left while it was written to
                self.leave(delivery)
                delivery.reader.sent()
        self._schedule()

    def _break_off(self, delivery: Delivery, fault: Exception | None) -> None:
        self.leave(delivery)
        delivery.reader.broke_off(fault, begun=delivery.begun)
