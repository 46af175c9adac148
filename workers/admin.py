"""HTTP on the metrics port, whatever its pages are. GET and HEAD only, HTTP/1.0 and 1.1; TLS if wanted.

`Request` is sans-I/O: bytes in, one request line and the headers that matter out. `AdminServer` puts it on a transport. Scrapers
send short requests on few connections, so everything is small and bounded: heads, queries, connections (with those that are
still in their handshake), idle time, answers that wait to be sent. At the limit of connections a newcomer takes the place of who
has been silent longest, so that whoever holds places can't keep probes out. A body is never read: whoever announces one gets
his answer and loses the connection.

A long page is an iterator of pieces, and is sent as `pieces` says: in chunks, or until the connection ends (HTTP/1.0); with gzip if
the client takes it. A reader that takes nothing for STALLED_S is cut. A page that fails before its first piece is answered
with 500; one that fails later ends the connection, which HTTP/1.0 can't tell from its end.

Who may have a page is said by a `Guard`, at once or later; meanwhile the connection waits, and reads no further request. Client
certificates are asked for by TLS, before a byte of HTTP is read. Without either the port belongs on a network that only the
monitoring reaches.
"""

import asyncio
import functools
import itertools
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple, cast

from workers.log import Rarely
from workers.pieces import Delivery, Turns
from workers.transport.accept import Gate

HEAD_BYTES_MAX = 16 << 10
QUERY_BYTES_MAX = 2 << 10
CONNECTIONS_MAX = 64
IDLE_S = 30.0
STALLED_S = 30.0
LOOK_EVERY_S = 5.0  # at a reader of a long page
UNSENT_BYTES_MAX = 64 << 10  # with more than that no further answer or piece is made
HANDSHAKE_S = 10.0
GOODBYE_S = 2.0  # how long a peer may take to end TLS

PLAIN = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What a page says; `fields` are further lines of the head."""

    body: bytes | Iterator[bytes]
    content_type: str = PLAIN
    status: HTTPStatus = HTTPStatus.OK
    fields: str = ""


class Token(str):
    """A bearer token: no request that is printed shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<token>"


NO_TOKEN = Token()


class Request(NamedTuple):
    """A request's head; `accept` is the Accept header, `peer` the address (IPv4 as such) that it came from.

    `gzip` and `chunked` say what the client can read; `token` comes with `Authorization: Bearer`.
    """

    method: str
    path: str
    accept: str
    keep_alive: bool
    query: str = ""
    peer: str = ""
    gzip: bool = False
    chunked: bool = True
    token: Token = NO_TOKEN


class Verdict(NamedTuple):
    """Whether a request may have its page; if not, what it is answered."""

    status: HTTPStatus
    text: str = ""
    fields: str = ""


ALLOWED = Verdict(HTTPStatus.OK)

Page = Callable[[Request], Answer]
Guard = Callable[[Request], "Verdict | asyncio.Future[Verdict]"]


def all_may(_request: Request) -> Verdict:
    """The guard of a port that asks nobody."""
    return ALLOWED


class BadRequest(Exception):
    """A head that is none."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def parse_head(head: bytes, peer: str = "") -> Request:
    """The head of a request, without the blank line. Raises BadRequest."""
    line, *fields = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    method, target, version = parts
    path, _, query = target.partition("?")
    if len(query) > QUERY_BYTES_MAX:
        raise BadRequest(HTTPStatus.REQUEST_URI_TOO_LONG)
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip() or "\n" in field:
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        headers[name.lower()] = value.strip()
    connection = headers.get("connection", "").lower()
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    is_10 = version == "HTTP/1.0"
    keep_alive = not has_body and (connection == "keep-alive" if is_10 else "close" not in connection)
    gzip = _takes_gzip(headers.get("accept-encoding", ""))
    token = _token(headers.get("authorization", ""))
    return Request(method, path, headers.get("accept", ""), keep_alive, query, peer, gzip, not is_10, token)


def _token(authorization: str) -> Token:
    scheme, _, token = authorization.partition(" ")
    return Token(token.strip()) if scheme.lower() == "bearer" else NO_TOKEN


def _takes_gzip(accept_encoding: str) -> bool:
    """By name only; with a weight of zero it is refused."""
    for coding in accept_encoding.lower().split(","):
        name, _, weight = coding.partition(";")
        if name.strip() == "gzip":
            return weight.replace(" ", "").removeprefix("q=").strip("0.") != "" or not weight
    return False


def encode(answer: Answer, body: bytes, *, keep_alive: bool, with_body: bool = True) -> bytes:
    """An answer's bytes, if its body is known."""
    return _head(answer, keep_alive, f"Content-Length: {len(body)}\r\n") + (body if with_body else b"")


def encode_head(answer: Answer, request: Request) -> bytes:
    """The head of an answer that comes in pieces."""
    coding = "Vary: Accept-Encoding\r\n" + ("Content-Encoding: gzip\r\n" if request.gzip else "")
    chunked = "Transfer-Encoding: chunked\r\n" if request.chunked else ""
    return _head(answer, stays_open(request), coding + chunked)


def stays_open(request: Request) -> bool:
    """Whether the connection outlives an answer in pieces."""
    return request.keep_alive and request.chunked


def _head(answer: Answer, keep_alive: bool, fields: str) -> bytes:
    status = answer.status
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"{fields}Connection: {'keep-alive' if keep_alive else 'close'}\r\n{answer.fields}\r\n"
    )
    return head.encode("latin-1")


class AdminServer:
    """The pages, and the connections that ask for them."""

    def __init__(
        self,
        pages: Mapping[str, Page],
        report: Callable[[str], None] = lambda text: None,
        guard: Guard = all_may,
    ) -> None:
        self._pages = pages
        self._report = report
        self._guard = guard
        self.connections: set[_Connection] = set()
        self._handshakes: dict[_Connection, asyncio.Task[None]] = {}
        self.order = itertools.count()  # of beginning to be silent
        self._gate: Gate | None = None
        self._refused = Rarely("handshakes on the metrics port that failed", report)
        self._failed = Rarely("pages on the metrics port that failed", report)
        self.turns: Turns

    def serve(self, listening: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Accept connections, on the running loop, from a socket that listens already and stays its owner's."""
        listening.setblocking(False)
        loop = asyncio.get_running_loop()
        self.turns = Turns(loop)
        take = functools.partial(self._take, loop, context)
        self._gate = Gate(loop, listening, lambda: 0, tuple, take, on_failure=self._report)
        self._gate.open()

    @property
    def taken(self) -> int:
        """Connections, with those that are still in their handshake."""
        return len(self.connections) + len(self._handshakes)

    def admit(self, request: Request) -> "Verdict | asyncio.Future[Verdict]":
        """Whether it may have what it asks for; what is no page is nobody's secret."""
        return self._guard(request) if request.path in self._pages else ALLOWED

    def answer(self, request: Request) -> Answer:
        """The answer of a request that was admitted, whatever it asks for."""
        page = self._pages.get(request.path)
        if page is None:
            known = ", ".join(self._pages)
            return _refusal(HTTPStatus.NOT_FOUND, f"no such page; there are {known}")
        if request.method not in ("GET", "HEAD"):
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only", "Allow: GET, HEAD\r\n")
        try:
            return page(request)
        except Exception as fault:
            self.failed(request, fault)
            return FAILED

    def failed(self, request: Request, fault: Exception | None) -> None:
        """A page was not made as a whole; without a fault: others waited for too long."""
        why = "its reader was too slow for those that wait" if fault is None else repr(fault)
        self._failed.tell(asyncio.get_running_loop().time(), f"{request.path} for {request.peer}: {why}")

    def close(self) -> None:
        """Accept no more, and drop all connections."""
        if self._gate is not None:
            self._gate.close()
            self.turns.close()
        for handshake in self._handshakes.values():
            handshake.cancel()
        for connection in list(self.connections):
            connection.close()

    def _take(self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext | None, accepted: socket.socket) -> None:
        if self.taken >= CONNECTIONS_MAX and not self._make_room():
            accepted.close()
            return
        connection = _Connection(self)
        handshake = loop.create_task(self._connect(loop, context, accepted, connection))
        self._handshakes[connection] = handshake
        handshake.add_done_callback(functools.partial(self._connected, connection, accepted))

    def _make_room(self) -> bool:
        """Ends who has been silent longest; False: everybody is owed an answer."""
        silent = [one for one in (*self._handshakes, *self.connections) if not one.busy]
        if not silent:
            return False
        longest = min(silent, key=lambda one: one.silent)
        if (handshake := self._handshakes.pop(longest, None)) is not None:
            handshake.cancel()
        else:
            self.connections.discard(longest)
            longest.abort()
        return True

    def _connected(self, connection: "_Connection", accepted: socket.socket, handshake: "asyncio.Task[None]") -> None:
        self._handshakes.pop(connection, None)
        if handshake.cancelled():
            accepted.close()

    def joined(self, connection: "_Connection") -> None:
        """Its handshake is over."""
        self._handshakes.pop(connection, None)
        self.connections.add(connection)

    async def _connect(
        self,
        loop: asyncio.AbstractEventLoop,
        context: ssl.SSLContext | None,
        accepted: socket.socket,
        connection: "_Connection",
    ) -> None:
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context else None,
                ssl_shutdown_timeout=GOODBYE_S if context else None,
            )
        except OSError as refused:  # includes ssl.SSLError: no TLS, a version too old, no certificate or a wrong one
            accepted.close()
            self._refused.tell(loop.time(), str(refused))


def _refusal(status: HTTPStatus, text: str, fields: str = "") -> Answer:
    return Answer(f"{text}\n".encode(), status=status, fields=fields)


FAILED_VERDICT = Verdict(HTTPStatus.INTERNAL_SERVER_ERROR, "this page failed; the log says why")
FAILED_TEXT = f"{FAILED_VERDICT.text}\n".encode()
FAILED = Answer(FAILED_TEXT, status=FAILED_VERDICT.status)


class _Connection(asyncio.Protocol):
    """One client; answers one request after the other. It is the `Reader` of the page that it waits for."""

    def __init__(self, server: AdminServer) -> None:
        self._server = server
        self.silent = next(server.order)  # since then we have owed it nothing, whatever parts of a request it sends
        self._buffer = b""
        self._transport: asyncio.Transport
        self._peer = ""
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self._asked_all = False  # the client has closed its side
        self._asked: Request | None = None  # waits for its verdict
        self._delivery: tuple[Delivery, Request] | None = None
        self._held, self._moved_at = 0, 0.0  # bytes that wait to be taken, and when that last changed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES_MAX)
        peer = transport.get_extra_info("peername")
        self._peer = peer[0].removeprefix("::ffff:") if isinstance(peer, tuple) else ""
        self._server.joined(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._asked = None
        self._leave()
        if self._timer is not None:
            self._timer.cancel()

    def pause_writing(self) -> None:
        self._paused = True
        if self._delivery is not None:
            self._delivery[0].full = True

    def resume_writing(self) -> None:
        self._paused = False
        self._moved_at = asyncio.get_running_loop().time()
        if self._delivery is not None:
            self._server.turns.resume(self._delivery[0])
        self._answer_all()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self.busy and len(self._buffer) > HEAD_BYTES_MAX:
            self._cut()  # asks on, but does not read the answers
        self._answer_all()

    def eof_received(self) -> bool:
        """A client that only closed its side still gets what it asked for. TLS knows no such half."""
        self._asked_all = True
        owes = self._delivery is not None or self._asked is not None
        return owes and self._transport.get_extra_info("sslcontext") is None

    def abort(self) -> None:
        """Go in favour of another client, at once."""
        self._transport.abort()

    def close(self) -> None:
        """What is written is still sent, unless it is a part of a page."""
        if self._delivery is not None:
            self._cut()
        else:
            self._transport.close()

    def write(self, data: bytes) -> None:
        """A piece of a page."""
        if not self._transport.is_closing():  # the loop knows before `connection_lost` that the client is gone
            self._transport.write(data)

    def sent(self) -> None:
        """The page is whole."""
        assert self._delivery is not None
        self._end(keep_alive=stays_open(self._delivery[1]))
        self._answer_all()

    def broke_off(self, fault: Exception | None, *, begun: bool) -> None:
        """The page will not be whole."""
        assert self._delivery is not None
        request = self._delivery[1]
        self._server.failed(request, fault)
        if begun:
            self._cut()
        else:
            self._transport.write(encode(FAILED, FAILED_TEXT, keep_alive=request.keep_alive))
            self._end(keep_alive=request.keep_alive)
            self._answer_all()

    @property
    def unsent(self) -> int:
        """Bytes that wait for the client to take them, besides what the kernel holds."""
        return self._transport.get_write_buffer_size()

    @property
    def busy(self) -> bool:
        """Whether it is owed an answer, or a part of one."""
        return self._paused or self._asked is not None or self._delivery is not None

    def _answer_all(self) -> None:
        while not self.busy and not self._transport.is_closing():
            head, blank, rest = self._buffer.lstrip(b"\r\n").partition(b"\r\n\r\n")
            if len(head) > HEAD_BYTES_MAX:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
            if not blank:
                if self._asked_all:
                    self._transport.close()
                return
            self._buffer = rest
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        try:
            request = parse_head(head, self._peer)
        except BadRequest as bad:
            self._refuse(bad.status)
            return
        verdict = self._server.admit(request)
        if isinstance(verdict, asyncio.Future):
            self._asked = request
            verdict.add_done_callback(functools.partial(self._heard, request))
        else:
            self._give(request, verdict)

    def _heard(self, request: Request, verdict: "asyncio.Future[Verdict]") -> None:
        """A verdict that took its time; the client may be gone."""
        if self._asked is not request or self._transport.is_closing():
            return
        self._asked = None
        try:
            found = verdict.result()
        except asyncio.CancelledError:  # nobody will say any more
            self._transport.close()
            return
        except Exception as fault:
            self._server.failed(request, fault)
            found = FAILED_VERDICT
        self._give(request, found)
        self._answer_all()

    def _give(self, request: Request, verdict: Verdict) -> None:
        allowed = verdict.status is HTTPStatus.OK
        answer = self._server.answer(request) if allowed else _refusal(*verdict)
        if isinstance(answer.body, bytes):
            with_body = request.method != "HEAD"
            self._transport.write(encode(answer, answer.body, keep_alive=request.keep_alive, with_body=with_body))
        elif request.method == "GET":
            self._deliver(answer, answer.body, request)
            return
        else:
            self._transport.write(encode_head(answer, request))
        self._end(keep_alive=request.keep_alive)

    def _deliver(self, answer: Answer, body: Iterator[bytes], request: Request) -> None:
        delivery = Delivery(body, encode_head(answer, request), self, gzip=request.gzip, chunked=request.chunked)
        self._delivery = delivery, request
        self._server.turns.begin(delivery)
        self._look()

    def _leave(self) -> None:
        if self._delivery is not None:
            delivery, self._delivery = self._delivery[0], None
            self._server.turns.leave(delivery)
            self._wait()

    def _cut(self) -> None:
        self._leave()
        self._transport.abort()

    def _end(self, *, keep_alive: bool) -> None:
        """One answer is written."""
        self._delivery = None
        if not keep_alive:
            self._transport.close()
        self._wait()

    def _refuse(self, status: HTTPStatus) -> None:
        self._transport.write(encode(Answer(b"", status=status), b"", keep_alive=False))
        self._transport.close()

    def _wait(self) -> None:
        """For the next request, and for the client to take what is written."""
        self.silent = next(self._server.order)
        self._call_later(IDLE_S, self._transport.abort)

    def _look(self) -> None:
        """While a page is under way: cut a client that takes nothing."""
        assert self._delivery is not None
        now, held = asyncio.get_running_loop().time(), self.unsent
        if held != self._held or not self._delivery[0].full:
            self._held, self._moved_at = held, now
        if now - self._moved_at >= STALLED_S:
            self._cut()
        else:
            self._call_later(LOOK_EVERY_S, self._look)

    def _call_later(self, delay: float, act: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay, act)
