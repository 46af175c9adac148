"""Serves one connection of the metrics port: reads requests with h11 and answers them one by one.

A request waits for its turn (`turns.Turns`), and the connection reads nothing more until then. Probes go first. A client is limited in
the bytes that it sends before its answer, in blank lines, in requests, and in the time for which it reads nothing of a page. The server
disconnects a client that exceeds a limit, and names its address in the log.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final, Protocol, cast

import h11

from workers.supervisor.pages.http_messages import (
    HEAD_BYTES_MAX,
    BadRequest,
    coding_fields,
    new_connection,
    next_head,
    request_of,
    response,
)
from workers.supervisor.pages.page import Fields, PageAnswer, Request, Verdict, refusal
from workers.supervisor.pages.page_streaming import Delivery, RoundRobinSender
from workers.supervisor.pages.turns import Turns
from workers.transport.abuse import Bucket

IDLE_S = 30.0
STALLED_S = 30.0
LOOK_EVERY_S = 5.0  # how often a client that receives a long page is checked
UNSENT_BYTES_MAX = 64 << 10  # while more bytes wait for a client, the server makes no answer and no piece for it
READ_BYTES: Final = 4 << 10  # bytes per read; few, so that a flood takes little memory
BLANK_BYTES_MAX: Final = 4  # blank bytes before a request line, where RFC 9112 (2.2) lets a client send an empty line
PROBES: Final = (b"GET /healthz ", b"GET /readyz ", b"HEAD /healthz ", b"HEAD /readyz ")
AHEAD: Final = "sends more and does not wait for its answers"
REQUESTS_BURST: Final = 100
REQUESTS_PER_S: Final = 20.0

FAILED_VERDICT: Final = Verdict(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the log says why")
FAILED: Final = refusal(*FAILED_VERDICT)
SOON: Final[Fields] = (("Retry-After", "1"),)
CROWDED: Final = refusal(HTTPStatus.SERVICE_UNAVAILABLE, "too many clients wait for a page", SOON)
TOO_MANY: Final = refusal(HTTPStatus.TOO_MANY_REQUESTS, "too many requests on one connection", SOON)


class Owner(Protocol):
    """The part of the server that connections use."""

    order: Iterator[int]  # gives a number to each moment at which a connection becomes silent
    sender: RoundRobinSender
    turns: Turns

    def admit(self, request: Request) -> "Verdict | asyncio.Future[Verdict]": ...
    def answer(self, request: Request) -> PageAnswer: ...
    def joined(self, connection: "Connection") -> None: ...
    def left(self, connection: "Connection") -> None: ...
    def failed(self, request: Request, fault: Exception) -> None: ...
    def costly(self, host: str, why: str) -> None: ...


class Connection(asyncio.BufferedProtocol):
    """The connection of one client, which is also the `Reader` of a page in pieces.

    `silent`: the number of the moment at which its last answer ended. The connection with the lowest number has been silent longest.
    """

    def __init__(self, server: Owner, host: str) -> None:
        self._server = server
        self.host = host
        self.silent = next(server.order)
        self._state = new_connection()
        self._space = bytearray(READ_BYTES)  # the transport reads into it
        self._arrived = bytearray()  # bytes that were not passed to h11 yet
        self._left = 0  # bytes that h11 has got and not parsed yet
        self._blank = 0  # blank bytes before the next request
        self._bucket: Bucket | None = None
        self._scheduled = False  # whether this connection has asked for a turn
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._client_done = False  # the client has closed its sending side
        self._pending: Request | None = None  # the request that waits for its verdict
        self._delivery: tuple[Delivery, Request, PageAnswer] | None = None
        self._unread = 0, 0.0  # the bytes of a page that wait for the client, and when their number last changed

    # Calls of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        self._server.joined(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._pending = None
        self._arrived.clear()
        self._leave()

    def pause_writing(self) -> None:
        self._paused = True
        if self._delivery is not None:
            self._server.sender.full(self._delivery[0])

    def resume_writing(self) -> None:
        self._paused = False
        self._unread = self._unread[0], asyncio.get_running_loop().time()
        if self._delivery is not None:
            self._server.sender.resume(self._delivery[0])
        self._take_turn()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        self._arrived += memoryview(self._space)[:nbytes]
        ahead = self._left + len(self._arrived)
        if self.awaits_answer and ahead > HEAD_BYTES_MAX:
            self._cut(AHEAD)
        else:
            self._take_turn()

    def eof_received(self) -> bool:
        """Answers a client that has closed only its sending side. With TLS, answers at once, because TLS ends both sides together."""
        self._client_done = True
        if self._transport.get_extra_info("sslcontext") is not None:
            self._turn()  # answers at once: the transport closes after this call
            return False
        self._take_turn()
        return True

    # Calls of the server.

    @property
    def busy(self) -> bool:
        """Whether the client still waits for an answer or a part of one."""
        return self._scheduled or self.awaits_answer

    @property
    def awaits_answer(self) -> bool:
        """Whether a request was read and its answer is not completely sent, perhaps because the client has not read its end."""
        if self._delivery is not None or self._pending is not None:
            return True
        return self._paused and not self._transport.is_closing()

    @property
    def unsent(self) -> int:
        """The number of bytes that wait for the client in this process; the kernel may hold more."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        """Ends the connection at once, to make room for another one."""
        self._transport.abort()

    def close(self) -> None:
        """Ends the connection after all written bytes are sent, or at once in the middle of a page."""
        if self._delivery is not None:
            self._leave()
            self._transport.abort()
        else:
            self._transport.close()

    # Calls of the sender, see `Reader`.

    def write(self, data: bytes) -> None:
        """Sends a piece of a page, the first one together with the head."""
        if self._transport.is_closing():  # the transport knows that the client is gone before it calls `connection_lost`
            return
        self._transport.write(self._begin_page() + (self._state.send(h11.Data(data=data)) or b""))

    def sent(self) -> None:
        """Ends a complete page, so that the next request can be answered."""
        if self._transport.is_closing():
            return
        self._transport.write(self._begin_page() + self._end_of_message())
        self._delivery = None
        self._end()

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        """Gives a page up: answers with 500 if no part of it was sent, otherwise ends the connection.

        `fault`: the exception of the page; None if the page must make room for other pages.
        """
        assert self._delivery is not None
        request = self._delivery[1]
        if fault is not None:
            self._server.failed(request, fault)
        elif begun:
            self._server.costly(self.host, f"reads {request.path} too slowly while others wait")
        else:
            self._server.costly(self.host, f"asks for {request.path} too often")
        self._leave()
        if begun:
            self._transport.abort()
        else:
            self._answer(request, CROWDED if fault is None else FAILED)

    # Requests.

    def _take_turn(self) -> None:
        """Asks for a turn, unless the connection has asked already or the client waits for an answer."""
        if not self.busy and not self._transport.is_closing() and (self._arrived or self._left or self._client_done):
            self._scheduled = True
            self._transport.pause_reading()  # otherwise each byte of a slow client would wake the loop up
            turns = self._server.turns
            ask = turns.urgent if self._arrived.startswith(PROBES) else turns.prompt
            ask(self._turn, self.host)

    def _turn(self) -> None:
        """Reads the next request, if it has arrived completely, and begins to answer it."""
        self._scheduled = False
        if self._transport.is_closing():
            return
        self._transport.resume_reading()
        if self.awaits_answer:
            return
        while not self._left and self._blank < BLANK_BYTES_MAX and self._arrived.startswith(b"\r\n"):
            del self._arrived[:2]
            self._blank += 2
        if self._arrived:
            self._state.receive_data(bytes(self._arrived))
            self._arrived.clear()
        try:
            head = next_head(self._state)
            self._left = len(self._state.trailing_data[0])
            if self._left > HEAD_BYTES_MAX:
                self._cut(AHEAD)
            elif head is not None:
                self._blank = 0
                self._admit(request_of(head, self.host))
            elif self._client_done:
                self._transport.close()
        except BadRequest as bad:
            self._server.costly(self.host, f"sends malformed requests ({bad})")
            if self._state.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._send(refusal(bad.status, str(bad)), close=True)
            self._transport.close()

    def _admit(self, request: Request) -> None:
        if self._bucket is None:
            self._bucket = Bucket(REQUESTS_BURST, REQUESTS_PER_S, asyncio.get_running_loop().time())
        if not self._bucket.take(asyncio.get_running_loop().time()):
            self._server.costly(self.host, f"sends more than {REQUESTS_PER_S:g} requests per second")
            self._send(TOO_MANY, close=True)
            self._transport.close()
            return
        verdict = self._server.admit(request)
        if isinstance(verdict, asyncio.Future):
            self._pending = request
            verdict.add_done_callback(functools.partial(self._decided, request))
        else:
            self._respond(request, verdict)

    def _decided(self, request: Request, verdict: "asyncio.Future[Verdict]") -> None:
        """Handles a verdict for which the request had to wait. The client may have left in that time."""
        if self._pending is not request or self._transport.is_closing():
            return
        self._pending = None
        try:
            found = verdict.result()
        except asyncio.CancelledError:  # the guard is closing and will not decide
            self._transport.close()
            return
        except Exception as fault:
            self._server.failed(request, fault)
            found = FAILED_VERDICT
        self._respond(request, found)

    # Answers.

    def _respond(self, request: Request, verdict: Verdict) -> None:
        allowed = verdict.status is HTTPStatus.OK
        answer = self._server.answer(request) if allowed else refusal(*verdict)
        if isinstance(answer.body, bytes):
            self._answer(request, answer)
        elif request.method == "HEAD":
            self._transport.write(self._head(answer, request) + self._end_of_message())
            self._end()
        else:
            delivery = Delivery(answer.body, self, gzip=request.gzip, endless=answer.endless)
            self._delivery = delivery, request, answer
            self._server.sender.begin(delivery)
            if self._delivery is not None:  # `begin` breaks a delivery off at once if too many pages wait
                self._look()

    def _answer(self, request: Request, answer: PageAnswer) -> None:
        """Sends an answer with a short body."""
        self._send(answer, with_body=request.method != "HEAD")
        self._end()

    def _send(self, answer: PageAnswer, *, with_body: bool = True, close: bool = False) -> None:
        body = answer.body
        assert isinstance(body, bytes)
        close = close or self._state.their_state is h11.SEND_BODY  # a body is not read
        out = self._state.send(response(answer, more=(("Content-Length", str(len(body))),), close=close)) or b""
        if with_body and body:
            out += self._state.send(h11.Data(data=body)) or b""
        self._transport.write(out + self._end_of_message())

    def _begin_page(self) -> bytes:
        """Returns the head of the page if it was not sent yet, else b""."""
        if self._state.our_state is not h11.SEND_RESPONSE:
            return b""
        assert self._delivery is not None
        _, request, answer = self._delivery
        return self._head(answer, request)

    def _head(self, answer: PageAnswer, request: Request) -> bytes:
        close = self._state.their_state is h11.SEND_BODY
        return self._state.send(response(answer, more=coding_fields(request), close=close)) or b""

    def _end_of_message(self) -> bytes:
        return self._state.send(h11.EndOfMessage()) or b""

    def _end(self) -> None:
        """Closes the connection after an answer, or waits for the next request."""
        if self._state.our_state is h11.DONE and self._state.their_state is h11.DONE:
            self._state.start_next_cycle()
            self._wait()
            self._take_turn()
        else:
            self._transport.close()
            self._wait()

    # Limits.

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._delivery is not None:
            delivery, self._delivery = self._delivery[0], None
            self._server.sender.leave(delivery)

    def _cut(self, why: str) -> None:
        """Ends the connection of a client that costs too much."""
        self._server.costly(self.host, why)
        self._leave()
        self._transport.abort()

    def _wait(self) -> None:
        """Ends the connection after IDLE_S unless another request arrives."""
        self.silent = next(self._server.order)
        self._call_later(IDLE_S, self._transport.abort)

    def _look(self) -> None:
        """Ends the connection if the client has read no byte of a page for STALLED_S."""
        assert self._delivery is not None
        held, moved_at = self._unread
        now = asyncio.get_running_loop().time()
        if self.unsent != held or self._delivery[0].full_since is None:
            self._unread = self.unsent, now
        elif now - moved_at >= STALLED_S:
            self._cut(f"has read nothing of {self._delivery[1].path} for {STALLED_S:g} s")
            return
        self._call_later(LOOK_EVERY_S, self._look)

    def _call_later(self, delay: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, act)
