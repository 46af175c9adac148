"""Serves one client connection of a simulated server: reads requests, writes answers, and shows faults.

A connection serves one request at a time. It keeps reading during the request, so that it notices when
the client leaves. It then cancels the request, which frees the request's KV blocks at once. Pipelined
requests wait in the `RequestReader`. The connection stops reading while more than UNREAD_MAX bytes wait.

The server owns the engine and calls `send_whole` and `send_token`. The connection writes the bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import msgspec

from loadtest.sim import http as sim_http
from loadtest.sim.api import RENDERED, SHAPES, Shape, StreamShape, parse, rendered
from loadtest.sim.engine import Job
from loadtest.sim.exchange import SimExchange
from loadtest.sim.faults import EMPTY_STATUS, BadFault, RequestFault, ServerFault, parse_header, parse_order
from loadtest.sim.http import BadHttp, HttpRequest, RequestReader, chunk
from loadtest.sim.pages import JSON, PAGES, TEXT
from loadtest.sim.request import ApiError, Ask
from loadtest.sim.server import SimServer
from loadtest.sim.stages import DECODING, Stages

EVENTS = b"text/event-stream; charset=utf-8"
UNREAD_MAX = 1024 * 1024


class Connection(asyncio.Protocol):
    """One client connection: reads requests and answers them in order."""

    def __init__(self, server: SimServer) -> None:
        self.server = server
        self.transport: Any = None  # uvloop's transport is not a subclass of asyncio.Transport
        self.reader = RequestReader()
        self.exchange: SimExchange | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.busy = False
        self.stuffed = False
        self.stalled = False
        self.http10 = False
        self.ending = False

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server.connections.discard(self)
        self.ending = True
        if self.timer is not None:
            self.timer.cancel()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            self.server.cancel(exchange)

    def pause_writing(self) -> None:
        self.stuffed = True

    def resume_writing(self) -> None:
        self.stuffed = False
        if not self.busy:
            self._serve(b"")

    def data_received(self, data: bytes) -> None:
        if self.busy or self.stuffed:
            # Pipelined requests wait in the reader. Stop reading if there are too many of them.
            self.reader.hold(data)
            if self.reader.buffered > UNREAD_MAX and not self.stalled:
                self.stalled = True
                self.transport.pause_reading()
            return
        self._serve(data)

    def _serve(self, data: bytes) -> None:
        try:
            while not (self.busy or self.stuffed or self.ending):
                request = self.reader.receive(data)
                data = b""
                if request is None:
                    if self.reader.expects_continue:
                        self.transport.write(sim_http.CONTINUE)
                    break
                self._handle(request)
        except BadHttp as error:
            self.ending = True
            self.answer(error.status, TEXT, f"{error}\n".encode())
        if self.stalled and not (self.busy or self.stuffed or self.ending):
            self.stalled = False
            self.transport.resume_reading()

    def _next(self) -> None:
        """Ends the current request and continues with the next request in the reader."""
        self.busy = False
        self.exchange = None
        if not self.ending and self.reader.buffered:
            self.server.loop.call_soon(self._serve, b"")

    # Answers

    def abort(self) -> None:
        """Ends the connection at once, even during a request."""
        self.ending = True
        self.transport.abort()

    def answer(self, status: int, kind: bytes, body: bytes, extra: bytes = b"") -> None:
        """Writes a whole answer."""
        extra = self.server.label + extra
        head = sim_http.head(status, kind, extra, length=len(body), close=self.ending)
        self.transport.write(head + body)
        if self.ending:
            self.transport.close()

    def _handle(self, request: HttpRequest) -> None:
        self.http10 = request.http10
        self.ending = not request.keep_alive
        path = request.path
        if path.startswith(b"/sim/"):
            self._control(request)
            return
        if self.server.active_fault() is ServerFault.HANG:
            self.busy = True
            return
        shape = SHAPES.get(path)
        if shape is not None and request.method == b"POST":
            self._ask(request, shape)
        elif path in RENDERED and request.method == b"POST":
            self._render(request, RENDERED[path])
        elif path in PAGES and request.method == b"GET":
            PAGES[path](self)
        elif path in PAGES or path in RENDERED or shape is not None:
            self.answer(405, TEXT, b"use another method for this path\n")
        else:
            self.answer(404, JSON, b'{"detail":"Not Found"}')

    def _control(self, request: HttpRequest) -> None:
        server = self.server
        if request.path == b"/sim/stats":
            all_servers = request.query == b"all"
            servers = server.fleet.servers if all_servers else [server]
            stats = [server.stats() for server in servers]
            self.answer(200, JSON, msgspec.json.encode(stats if all_servers else stats[0]))
        elif request.path == b"/sim/fault" and request.method == b"POST":
            self._order(request.body)
        else:
            self.answer(404, TEXT, b"valid paths: GET /sim/stats[?all] and POST /sim/fault\n")

    def _order(self, raw: bytes) -> None:
        try:
            order = parse_order(raw)
            target = self.server.fleet.find(self.server, order.server)
        except BadFault as error:
            self.answer(400, TEXT, f"{error}\n".encode())
            return
        target.order(order)
        done = {"server": target.name, "fault": order.kind.value, "seconds": order.seconds}
        self.answer(200, JSON, msgspec.json.encode(done))

    # Requests for a model

    def _ask(self, request: HttpRequest, kind: type[Shape]) -> None:
        server = self.server
        server.counts["requests"] += 1
        echo = b"x-sim-body-sha256: %s\r\nx-sim-body-bytes: %d\r\n" % (hashlib.sha256(request.body).hexdigest().encode(), len(request.body))
        try:
            fault, delay = self._request_fault(request)
            if fault is RequestFault.HANG:
                self.busy = True
                return
            if fault is RequestFault.ERROR:
                _fail(self, echo)
                return
            exchange = self._exchange(parse(kind, request.body, server.models), kind, echo)
            if fault is RequestFault.CUT:
                exchange.cut_after = max(1, exchange.job.max_tokens // 2)
            stages = Stages.named(request.headers) if server.role in DECODING else None
            if stages is not None:
                work = self._after_stages(exchange, stages, request, delay)
                exchange.delayed = server.fleet.spawn(work)
            elif fault is RequestFault.SLOW:
                exchange.delayed = server.loop.call_later(delay, self._submit_late, exchange)
            else:
                server.submit(exchange)
        except ApiError as error:
            self._refuse(error, echo)
        else:
            self.busy = True
            self.exchange = exchange

    def _render(self, request: HttpRequest, kind: type[Shape]) -> None:
        try:
            body = rendered(kind, request.body, self.server.models)
        except ApiError as error:
            self.answer(error.status, JSON, error.body())
        else:
            self.answer(200, JSON, body)

    def _refuse(self, error: ApiError, echo: bytes) -> None:
        self.answer(error.status, JSON, error.body(), echo)

    def _request_fault(self, request: HttpRequest) -> tuple[RequestFault, float]:
        """Returns the fault of this request and its delay in seconds.

        A fault that the request asks for takes precedence over a fault of the server.
        """
        header = request.headers.get(b"x-sim-fault")
        if header is not None:
            try:
                return parse_header(header)
            except BadFault as error:
                raise ApiError(400, str(error)) from None
        fault = self.server.active_fault()
        if fault is ServerFault.ERROR:
            return RequestFault.ERROR, 0.0
        if fault is ServerFault.SLOW:
            return RequestFault.SLOW, self.server.fault.delay
        return RequestFault.NONE, 0.0

    def _exchange(self, ask: Ask, kind: type[Shape], echo: bytes) -> SimExchange:
        server = self.server
        number = f"{server.name}-{server.counts['requests']}"
        server.counts["prefilled_for_others"] += ask.remote_decode
        shape = kind(ask, number, int(server.started))
        job = Job(ask.hashes, ask.prompt_tokens, ask.max_tokens, streams=ask.stream, lora=ask.lora, prompt=ask.prompt, salt=ask.cache_salt)
        return SimExchange(self, shape, job, echo)

    async def _after_stages(self, exchange: SimExchange, stages: Stages, request: HttpRequest, delay: float) -> None:
        """Runs the stages before decode, then submits the request to the engine. The server cancels the task if the client leaves."""
        counts = self.server.counts
        try:
            await asyncio.sleep(delay)
            served = await stages.run(request.path, request.body)
        except ApiError as error:
            counts["stage_errors"] += 1
            self._refuse(error, exchange.echo)
            self._next()
            return
        counts["encoded_elsewhere"] += len(served.encoders)
        counts["prefilled_elsewhere"] += served.cached_tokens is not None
        exchange.echo += served.headers()
        exchange.prefill_cached = served.cached_tokens
        exchange.job.transferred = served.cached_tokens is not None
        self._submit_late(exchange)

    def _submit_late(self, exchange: SimExchange) -> None:
        try:
            self.server.submit(exchange)
        except ApiError as error:
            self._refuse(error, exchange.echo)
            self._next()

    def send_whole(self, exchange: SimExchange) -> None:
        """Sends the answer of an unstreamed request that the engine has finished."""
        body = exchange.shape.whole(exchange.cached)
        exchange.sent = exchange.job.generated
        if exchange.cut_after is not None:
            self.cut(JSON, body, exchange.echo)
            return
        self.answer(200, JSON, body, exchange.echo)
        self._next()

    def cut(self, kind: bytes, body: bytes, extra: bytes = b"") -> None:
        """Announces a whole answer, sends half of it, and closes the connection."""
        extra = self.server.label + extra
        head = sim_http.head(200, kind, extra, length=len(body), close=False)
        self.ending = True
        self.transport.write(head + body[: len(body) // 2])
        self.transport.close()

    def send_token(self, exchange: SimExchange) -> None:
        """Sends the next token of a streamed request."""
        shape, job = exchange.shape, exchange.job
        assert isinstance(shape, StreamShape)
        out = b""
        if exchange.sent == 0:
            out = self._stream_head(exchange.echo) + self._piece(shape.opening())
        exchange.sent += 1
        if exchange.cut_after is not None and exchange.sent > exchange.cut_after:
            self.ending = True
            self.transport.close()
            return
        last = exchange.sent == job.max_tokens
        data = shape.token(last=last)
        if last:
            data += shape.closing(exchange.cached)
        out += self._piece(data)
        if last and not self.http10:
            out += sim_http.LAST_CHUNK
        self.transport.write(out)
        if last:
            self.end_stream()

    def _stream_head(self, echo: bytes) -> bytes:
        extra = self.server.label + echo
        if self.http10:
            self.ending = True
            extra += b"Connection: close\r\n"
            return b"HTTP/1.1 200 OK\r\nContent-Type: " + EVENTS + b"\r\n" + extra + b"\r\n"
        return sim_http.head(200, EVENTS, extra, length=None, close=self.ending)

    def _piece(self, data: bytes) -> bytes:
        return data if self.http10 or not data else chunk(data)

    def end_stream(self) -> None:
        if self.ending:
            self.transport.close()
        self._next()


def _fail(connection: Connection, echo: bytes) -> None:
    """Answers at once, as the request or the order of a fault demands."""
    status = connection.server.fault.status
    error = ApiError(status, "the request or POST /sim/fault asked for this failure")
    connection.answer(status, JSON, b"" if status == EMPTY_STATUS else error.body(), echo)
