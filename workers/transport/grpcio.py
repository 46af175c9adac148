"""The same streams carried by `grpc.aio`: the well-known alternative, and what our own engine is compared with.

    grpc's poller thread ─ socket pair ─▶ loop ─▶ RPC coroutine   calls the application, waits until the stream is over
                                               ├▶ reader task     messages -> handler
                                               └▶ writer task     queue -> grpc, one message at a time; only while there is something

Importing this module imports grpc, so that only a worker may do it, after the fork. grpc.aio cannot adopt a listening
socket: each worker binds the port for itself with SO_REUSEPORT, and the kernel spreads connections by chance.

Invariant: **a task that waits for grpc is never cancelled**, since grpc.aio loses the memory of an operation whose waiter
is. What grpc cancels when a client leaves is the RPC coroutine, and that one waits for a future of ours; the operations of
reader and writer fail by themselves then, and it is told to grpc as cancelled only when they have ended. What fails inside
grpc is lost all the same, a few hundred bytes for each client that cancels.

Left to grpc: windows, floods, header limits, handshakes, compression, how a draining connection says goodbye. It does not
tell about connections, so they are known by their streams; a stream that opens after `drain` is refused.
"""

import asyncio
import contextlib
import functools
import socket
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from workers.transport.headers import STATUS_TEXT_MAX
from workers.transport.interface import Application, Clock, Handler, Metadata, Status
from workers.transport.limits import Budget, Limits
from workers.transport.tls import Material

TICK: Final = 1.0
DRAIN_MAX: Final = 1e6  # seconds; whoever drains has a time-out of his own
PING_GAP_MS: Final = 1000  # gateways ping idle connections more often than grpc's default of 5 minutes allows
LEAVE_S: Final = 0.002  # from the end of what a client sends to the word that it left, if it did
PREFIX: Final = 5
CANCELLED: Final = 1
HANDLER_FAILED: Final = "the handler of this stream failed"


class Call:
    """One stream; its handler sees the `Stream` protocol of it."""

    __slots__ = (
        "_context", "_done", "_ended", "_held", "_kept", "_queue", "_reader", "_server", "_status", "_text", "_writer", "handler",
        "progress",
    )  # fmt: skip

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.handler: Handler | None = None  # None: it needs to hear nothing more
        self._queue: deque[bytes] = deque()
        self._held = 0  # of the queue and of the message that grpc has not taken yet
        self._kept = 0  # by the handler
        self._ended = False
        self._status, self._text = Status.OK, ""
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._context: Any
        self._done: asyncio.Future[None]  # the status may be sent
        self.progress = 0.0  # when grpc last took something of the queue

    # What the handler calls.

    def send(self, message: bytes) -> None:
        if not self._ended:
            self._queue.append(message)
            self._queued(len(message) + PREFIX)

    def send_raw(self, framed: bytes) -> None:
        if self._ended:
            return
        at, size = 0, len(framed)
        while at < size:
            start = at + PREFIX
            at = start + int.from_bytes(framed[at + 1 : start], "big")
            self._queue.append(framed[start:at])
        self._queued(size)

    def hold(self, count: int) -> bool:
        if self._ended:
            return False
        budget = self._server.budget
        self._kept += count
        budget.used += count
        return self._kept <= self._server.limits.connection_held and budget.used <= budget.limit

    def release(self) -> None:
        self._server.budget.used -= self._kept
        self._kept = 0

    def end(self, status: int = 0, text: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        self.release()
        self.handler = None
        self._status, self._text = status, text
        if self._writer is None:
            self._settle()

    # What grpc and the server call.

    async def run(self, path: str, metadata: Metadata, context: Any) -> None:
        """The RPC from its first moment to its status."""
        server = self._server
        self._context = context
        self._done = server.loop.create_future()
        self._open(path, metadata)
        if self.handler is not None:
            self._reader = server.loop.create_task(self._read())
        try:
            await self._done
        except asyncio.CancelledError:  # the client left, or the server is aborted
            self._lose()
            tasks = [task for task in (self._reader, self._writer) if task is not None]
            if tasks:
                await asyncio.wait(tasks)
            raise
        if self._status or self._text:
            context.set_code(self._status)
            context.set_details(self._text[:STATUS_TEXT_MAX].encode(errors="replace").decode())

    def stalled(self, since: float) -> bool:
        """The peer has taken nothing since then of what waits for it."""
        return self._writer is not None and self.progress < since

    def give_up(self, cause: str) -> None:
        """End a stream whose peer does not take what we send."""
        self._server.on_abuse(cause)
        self._lose()
        self._status, self._text = CANCELLED, cause
        self._settle()

    def _open(self, path: str, metadata: Metadata) -> None:
        """Ask the application for a handler."""
        server = self._server
        server.clock.now = server.now()
        try:
            handler = server.application(path, metadata, self)
        except Exception as error:
            server.on_error(error)
            self.end(Status.INTERNAL, HANDLER_FAILED)
            return
        if handler is None:
            self.end(Status.UNIMPLEMENTED, f"unknown method {path[:200]}")
        elif not self._ended:
            self.handler = handler

    async def _read(self) -> None:
        read = self._context.read
        with contextlib.suppress(grpc.aio.BaseError):  # raised when the RPC ended while we were reading
            while self.handler is not None:
                message = await read()
                if (
                    message is grpc.aio.EOF
                ):  # of a client that left too: grpc says that a little later, and in another place
                    self._server.loop.call_later(LEAVE_S, self._half_close)
                    return
                self._tell(message)

    def _half_close(self) -> None:
        if not self._done.cancelled():
            self._tell(None)

    async def _write(self) -> None:
        queue, server = self._queue, self._server
        write, now = self._context.write, server.now
        try:
            while queue:
                message = queue.popleft()
                await write(message)
                self.progress = now()
                self._hold(-min(len(message) + PREFIX, self._held))  # nothing is held if it was lost meanwhile
        except grpc.aio.BaseError:  # the client left: `run` is told as well
            self._drop()
            return
        self._writer = None
        if self._ended:
            self._settle()

    def _tell(self, message: bytes | None) -> None:
        """A message, or the end of what the client sends."""
        handler, server = self.handler, self._server
        if handler is None:
            return
        server.clock.now = server.now()
        try:
            if message is None:
                handler.half_closed()
            else:
                handler.message(message)
        except Exception as error:
            server.on_error(error)
            if self.handler is not None:
                self.end(Status.INTERNAL, HANDLER_FAILED)
                self._tell_closed(handler)

    def _tell_closed(self, handler: Handler) -> None:
        try:
            handler.closed()
        except Exception as error:
            self._server.on_error(error)

    def _lose(self) -> None:
        """The stream is gone, whatever was still to be sent."""
        self._ended = True
        self._drop()
        handler, self.handler = self.handler, None
        if handler is not None:
            self._tell_closed(handler)

    def _queued(self, size: int) -> None:
        within = self._hold(size)
        if self._writer is None:
            self.progress = self._server.now()
            self._writer = self._server.loop.create_task(self._write())
        if not (within and self._held <= self._server.limits.stream_output):
            self.give_up("output_limit")

    def _hold(self, size: int) -> bool:
        budget = self._server.budget
        self._held += size
        budget.used += size
        return budget.used <= budget.limit

    def _drop(self) -> None:
        self._queue.clear()
        self._hold(-self._held)
        self.release()

    def _settle(self) -> None:
        if not self._done.done():
            self._done.set_result(None)


class Certificates(Protocol):
    """What a port shows, and whom it accepts; others may take its place (`workers.certificates`)."""

    @property
    def material(self) -> Material: ...


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves gRPC on a port that every worker binds for itself."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits | None = None,
        budget: Budget | None = None,
        on_abuse: Callable[[str], None] = lambda cause: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        clock: Clock | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        self.loop = loop
        self.now = now or loop.time
        self.clock = clock or Clock()
        self.limits = limits or Limits()
        self.budget = budget or Budget()
        self.on_abuse = on_abuse
        self.on_error = on_error
        self.application: Application
        self._calls: set[Call] = set()
        self._peers: Counter[str] = Counter()  # streams by connection
        self._server: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # What the worker uses.

    def serve(self, held: socket.socket, application: Application, certificates: Certificates | None = None) -> None:
        """Accept connections on the port of a socket that holds it. Called on the loop. Raises OSError."""
        self.application = application
        self._server = grpc.aio.server(handlers=(self,), options=self._options())
        host = "[::]" if held.family == socket.AF_INET6 else "0.0.0.0"
        address = f"{host}:{held.getsockname()[1]}"
        try:
            if certificates is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, Credentials(certificates).made())
        except RuntimeError as error:
            raise OSError(f"grpc cannot bind {address}: another user's process or another picker has it") from error
        self._starting = self.loop.create_task(self._server.start())
        self._ticker = self.loop.call_later(TICK, self._tick)

    @property
    def connections(self) -> int:
        """Those that have streams; grpc tells about no others, but whether there are any when it has said goodbye."""
        leaving = self._stopping is not None and not self._stopping.done()
        return len(self._peers) or int(leaving)

    @property
    def streams(self) -> int:
        return len(self._calls)

    def handlers(self) -> list[Handler]:
        return [call.handler for call in self._calls if call.handler is not None]

    def load(self) -> int:
        return len(self._calls)

    def stop_accepting(self) -> None:
        """grpc can do this only as a part of `drain`."""
        self.drain()

    def drain(self) -> None:
        """Say goodbye gracefully: open streams are served to their end, new ones are refused."""
        if self._stopping is None:
            self._stopping = self.loop.create_task(self._stop(DRAIN_MAX))

    def abort(self) -> None:
        """Cut all connections now."""
        if self._stopping is None or not self._stopping.done():
            self._stopping = self.loop.create_task(self._stop(None))

    async def closed(self) -> None:
        """Wait until what `drain` or `abort` began is done; then the server holds nothing of the loop any more."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    # What grpc calls.

    def service(self, details: Any) -> Any:
        """A new RPC: whoever serves it."""
        call = functools.partial(self._call, details.method, details.invocation_metadata)
        return grpc.stream_stream_rpc_method_handler(call)

    # The rest.

    async def _call(self, path: str, metadata: Any, _messages: Any, context: Any) -> None:
        call, peer = Call(self), context.peer()
        self._calls.add(call)
        self._peers[peer] += 1
        try:
            await call.run(path, tuple((_encoded(name), _encoded(value)) for name, value in metadata), context)
        finally:
            self._calls.discard(call)
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    async def _stop(self, grace: float | None) -> None:
        if self._starting is not None:
            await self._starting
        if self._server is not None:
            await self._server.stop(grace)
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(TICK, self._tick)
        since = self.now() - self.limits.stall_seconds
        for call in [call for call in self._calls if call.stalled(since)]:
            call.give_up("output_stalled")

    def _options(self) -> list[tuple[str, int]]:
        limits = self.limits
        return [
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", limits.message),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", limits.streams_max),  # fixed: who keeps one connection must not starve
            ("grpc.max_metadata_size", limits.header_list),
            ("grpc.absolute_max_metadata_size", limits.header_list),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_GAP_MS),
        ]


def _encoded(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class Credentials:
    """TLS as grpc wants it. grpc asks at every handshake, on a thread of its own: what took the place of the first material
    since then is used from there on. Protocol versions and ciphers are grpc's."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._used = certificates.material

    def made(self) -> Any:
        """For `add_secure_port`."""
        required = bool(self._used.client_ca)
        return grpc.dynamic_ssl_server_credentials(_configuration(self._used), self._changed, required)

    def _changed(self) -> Any:
        """None: nothing has."""
        material = self._certificates.material
        if material is self._used:
            return None
        self._used = material
        return _configuration(material)


def _configuration(material: Material) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.client_ca or None)
