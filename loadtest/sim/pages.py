"""The pages of a simulated server: health, models and metrics, with the faults of the metrics page."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from loadtest.sim.exposition import CONTENT_TYPE
from loadtest.sim.faults import ServerFault
from loadtest.sim.http import chunk, head
from loadtest.sim.server import SimServer

JSON = b"application/json"
TEXT = b"text/plain; charset=utf-8"
DRIBBLE_PIECES = 16
ENDLESS_PERIOD_S = 0.005
ENDLESS_PIECE = b"".join(b'vllm:endless_bucket{engine="0",le="%d"} %d.0\n' % (n, n) for n in range(1600))


class Client(Protocol):
    """What a page needs of the connection that asks for it."""

    server: SimServer
    transport: Any
    timer: asyncio.TimerHandle | None
    busy: bool
    stuffed: bool
    ending: bool

    def answer(self, status: int, kind: bytes, body: bytes) -> None: ...
    def cut(self, kind: bytes, body: bytes) -> None: ...
    def end_stream(self) -> None: ...
    def abort(self) -> None: ...


def health(connection: Client) -> None:
    """Answers that the server is healthy."""
    connection.answer(200, TEXT, b"")


def models(connection: Client) -> None:
    """Lists the server's model and its adapters."""
    server = connection.server
    connection.answer(200, JSON, server.models.listing(int(server.started)))


def metrics(connection: Client) -> None:
    """Answers with the metrics page, in the form that the present fault demands."""
    server = connection.server
    server.counts["scrapes"] += 1
    server.advance()
    fault = server.active_fault()
    if fault is ServerFault.GARBAGE_METRICS:
        connection.answer(200, CONTENT_TYPE, server.garbage)
        return
    if fault is ServerFault.ENDLESS_METRICS:
        connection.busy = True
        connection.transport.write(head(200, CONTENT_TYPE, server.label, length=None, close=connection.ending))
        _pour(connection)
        return
    page = server.page.render(time.time(), not_a_number=fault is ServerFault.NAN_METRICS)
    if fault is ServerFault.HALF_PAGE:
        connection.cut(CONTENT_TYPE, page)
    elif fault is ServerFault.SLOW_METRICS:
        connection.busy = True
        connection.transport.write(head(200, CONTENT_TYPE, server.label, length=len(page), close=connection.ending))
        _dribble(connection, page, len(page) // DRIBBLE_PIECES + 1, server.fault.delay)
    else:
        connection.answer(200, CONTENT_TYPE, page)


def _pour(connection: Client) -> None:
    """Writes one more piece of an endless page, while the fault lasts and the client reads."""
    if connection.server.active_fault() is not ServerFault.ENDLESS_METRICS:
        connection.abort()
        return
    if not connection.stuffed:
        connection.transport.write(chunk(ENDLESS_PIECE))
    connection.timer = connection.server.loop.call_later(ENDLESS_PERIOD_S, _pour, connection)


def _dribble(connection: Client, rest: bytes, size: int, whole: float) -> None:
    """Writes the next piece of a slow page, and schedules the one after it.

    `rest`: what is left of the page. `size`: the size of a piece. `whole`: how many seconds the whole page should take.
    """
    if not rest:
        connection.timer = None
        connection.end_stream()
        return
    connection.transport.write(rest[:size])
    pause = whole / DRIBBLE_PIECES
    connection.timer = connection.server.loop.call_later(pause, _dribble, connection, rest[size:], size, whole)


PAGES: dict[bytes, Callable[[Client], None]] = {b"/metrics": metrics, b"/health": health, b"/v1/models": models}
