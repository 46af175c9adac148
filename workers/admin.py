"""HTTP on the metrics port: `/metrics`, `/healthz`, `/readyz`. GET and HEAD only, HTTP/1.0 and 1.1, plain text.

`Request` is sans-I/O: bytes in, one request line and the headers that matter out. `AdminServer` puts it on a transport. Scrapers
send short requests on few connections, so everything is small and bounded: heads, connections, idle time, answers that wait to
be sent. A body is never read: whoever announces one gets his answer and loses the connection.

What this does not do: authenticate. The port belongs on a network that only the monitoring reaches.
"""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import NamedTuple, cast

HEAD_BYTES_MAX = 16 << 10
CONNECTIONS_MAX = 64
IDLE_S = 30.0

PLAIN = "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What a page says."""

    body: bytes
    content_type: str = PLAIN
    status: HTTPStatus = HTTPStatus.OK


class Request(NamedTuple):
    """A request's head; `accept` is the Accept header."""

    method: str
    path: str
    accept: str
    keep_alive: bool


Page = Callable[[Request], Answer]


class BadRequest(Exception):
    """A head that is none."""

    def __init__(self, status: HTTPStatus) -> None:
        super().__init__(status.phrase)
        self.status = status


def parse_head(head: bytes) -> Request:
    """The head of a request, without the blank line. Raises BadRequest."""
    line, *fields = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise BadRequest(HTTPStatus.BAD_REQUEST)
    method, target, version = parts
    headers: dict[str, str] = {}
    for field in fields:
        name, colon, value = field.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        headers[name.lower()] = value.strip()
    connection = headers.get("connection", "").lower()
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    keep_alive = not has_body and (connection == "keep-alive" if version == "HTTP/1.0" else "close" not in connection)
    return Request(method, target.partition("?")[0], headers.get("accept", ""), keep_alive)


def encode(answer: Answer, *, keep_alive: bool, with_body: bool = True, extra: str = "") -> bytes:
    """An answer's bytes."""
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\nContent-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(answer.body)}\r\nConnection: {'keep-alive' if keep_alive else 'close'}\r\n{extra}\r\n"
    )
    return head.encode("latin-1") + (answer.body if with_body else b"")


class AdminServer:
    """The pages, and the connections that ask for them."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self.connections: set[_Connection] = set()

    def protocol(self) -> asyncio.Protocol:
        """For `loop.create_server`."""
        return _Connection(self)

    def answer(self, request: Request) -> bytes:
        """A request's answer, whatever it asks for."""
        page = self._pages.get(request.path)
        if page is None:
            known = ", ".join(self._pages)
            return self._refuse(HTTPStatus.NOT_FOUND, f"no such page; there are {known}", request)
        if request.method not in ("GET", "HEAD"):
            return self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only", request, "Allow: GET, HEAD\r\n")
        return encode(page(request), keep_alive=request.keep_alive, with_body=request.method == "GET")

    def close(self) -> None:
        """Drop all connections."""
        for connection in list(self.connections):
            connection.close()

    def _refuse(self, status: HTTPStatus, text: str, request: Request, extra: str = "") -> bytes:
        answer = Answer(f"{text}\n".encode(), status=status)
        return encode(answer, keep_alive=request.keep_alive, with_body=request.method != "HEAD", extra=extra)


class _Connection(asyncio.Protocol):
    """One client; answers one request after the other."""

    def __init__(self, server: AdminServer) -> None:
        self._server = server
        self._buffer = b""
        self._transport: asyncio.Transport
        self._idle: asyncio.TimerHandle | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        if len(self._server.connections) >= CONNECTIONS_MAX:
            transport.abort()
            return
        self._server.connections.add(self)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._idle is not None:
            self._idle.cancel()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._answer_all()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._paused and len(self._buffer) > HEAD_BYTES_MAX:
            self._transport.abort()  # asks on, but does not read the answers
        self._answer_all()

    def close(self) -> None:
        self._transport.close()

    def _answer_all(self) -> None:
        while not self._paused and not self._transport.is_closing():
            head, blank, rest = self._buffer.lstrip(b"\r\n").partition(b"\r\n\r\n")
            if len(head) > HEAD_BYTES_MAX:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
            if not blank:
                return
            self._buffer = rest
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        try:
            request = parse_head(head)
        except BadRequest as bad:
            self._refuse(bad.status)
            return
        self._transport.write(self._server.answer(request))
        if not request.keep_alive:
            self._transport.close()
        self._wait()

    def _refuse(self, status: HTTPStatus) -> None:
        self._transport.write(encode(Answer(b"", status=status), keep_alive=False))
        self._transport.close()

    def _wait(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._transport.abort)
