"""A transport over `grpc.aio`: a well-known alternative to our own engine, and the reference in comparisons with it.

    grpc's poller thread ─ socket pair ─▶ loop ─▶ RPC coroutine   calls the application, waits until the stream is over
                                               ├▶ reader task     messages -> handler
                                               └▶ writer task     queue -> grpc, one message at a time; exists only while there are any

This module imports grpc, which is not fork-safe. So it must be imported only in a worker, after the fork. grpc.aio cannot use an existing
listening socket. So each worker binds the port with SO_REUSEPORT, and the kernel spreads connections at random.

Invariant: **a task that waits for grpc is never cancelled**, because grpc.aio leaks the memory of an operation whose waiter is cancelled.
When a client leaves, grpc cancels the RPC coroutine, which waits for a future of ours. The operations of the reader and the writer then
fail by themselves. The coroutine ends as cancelled only when both tasks have ended. Operations that fail inside grpc still leak a few
hundred bytes for each client that cancels.

grpc does the rest: windows, floods, header limits, handshakes, compression, and GOAWAY on draining connections. It reports no events of
connections, so we know connections only by their streams. A stream that opens after `drain` is refused.
"""

import asyncio
import contextlib
import functools
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import grpc  # type: ignore[import-untyped]
import grpc.aio  # type: ignore[import-untyped]

from workers.transport.abuse import VIOLATION
from workers.transport.answer_blocks import STATUS_TEXT_MAX
from workers.transport.interface import Application, Buffer, Clock, Handler, Metadata, Status
from workers.transport.limits import Budget, Limits
from workers.transport.tls import Material

TICK: Final = 1.0
DRAIN_MAX: Final = 1e6  # seconds; the caller of `drain` has a shorter limit
# Gateways ping idle connections more often than once in 5 minutes, which is grpc's default limit.
PING_GAP_MS: Final = 1000
LEAVE_S: Final = 0.01  # when a client leaves, grpc reports the end of its messages this long before it cancels the RPC
PREFIX: Final = 5
CANCELLED: Final = 1
HANDLER_FAILED: Final = "the handler of this stream failed"


class Call:
    """One stream. Its handler uses it as a `Stream`. grpc.aio tells neither its authority nor its port."""

    __slots__ = (
        "_context", "_done", "_ended", "_held", "_kept", "_queue", "_reader", "_server", "_status", "_text", "_writer",
        "authority", "handler", "progress",
    )  # fmt: skip

    def __init__(self, server: "Server") -> None:
        self._server = server
        self.authority = ""
        self.handler: Handler | None = None  # None if the handler gets no more calls
        self._queue: deque[bytes] = deque()
        self._held = 0  # bytes of the queue, and of the message that grpc has not taken yet
        self._kept = 0  # bytes that the handler keeps
        self._ended = False
        self._status, self._text = Status.OK, ""
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._context: Any
        self._done: asyncio.Future[None]  # done when the status may be sent
        self.progress = 0.0  # the time at which grpc last took a message from the queue

    # Calls of the handler, see `interface.Stream`.

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

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        self.send_raw(b"".join(parts))

    def hold(self, count: int) -> bool:
        if self._ended:
            return False
        budget = self._server.budget
        self._kept += count
        budget.used += count
        if budget.used > budget.limit:
            budget.relieve(None, budget.used - budget.limit)
        within = self._kept <= self._server.limits.connection_held and budget.used <= budget.limit
        return within and not self._ended

    def peer(self) -> str:
        return str(self._context.peer())

    def port(self) -> int:
        return 0

    def gathered(self) -> int:
        return 0  # grpc keeps incomplete messages to itself

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
        if status == Status.INVALID_ARGUMENT:
            self._server.on_abuse(f"{VIOLATION}: {text}, from {self._context.peer()}")
        if self._writer is None:
            self._settle()

    # Calls of grpc and the server.

    async def run(self, path: str, metadata: Metadata, context: Any) -> None:
        """Serves the RPC from its beginning to its status."""
        server = self._server
        self._context = context
        self._done = server.loop.create_future()
        self._open(path, metadata)
        if self.handler is not None:
            self._reader = server.loop.create_task(self._read())
        try:
            await self._done
        except asyncio.CancelledError:  # the client has left, or the server is aborted
            self._lose()
            tasks = [task for task in (self._reader, self._writer) if task is not None]
            if tasks:
                await asyncio.wait(tasks)
            raise
        if self._status or self._text:
            context.set_code(self._status)
            context.set_details(self._text[:STATUS_TEXT_MAX].encode(errors="replace").decode())

    def stalled(self, since: float) -> bool:
        """Returns whether messages wait for the peer, and the peer has taken no message since the time `since`."""
        return self._writer is not None and self.progress < since

    def give_up(self, cause: str) -> None:
        """Ends the stream because its peer does not read what we send."""
        self._server.on_abuse(f"{cause}: from {self._context.peer()}")
        self._lose()
        self._status, self._text = CANCELLED, cause
        self._settle()

    def _open(self, path: str, metadata: Metadata) -> None:
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
        with contextlib.suppress(grpc.aio.BaseError):  # raised when the RPC ends while we read
            while self.handler is not None:
                message = await read()
                if message is grpc.aio.EOF:  # if the client has left, grpc cancels the RPC coroutine a little later
                    self._server.loop.call_later(LEAVE_S, self._half_close)
                    return
                self._deliver(message)

    def _half_close(self) -> None:
        if not self._done.cancelled():
            self._deliver(None)

    async def _write(self) -> None:
        queue, server = self._queue, self._server
        write, now = self._context.write, server.now
        try:
            while queue:
                message = queue.popleft()
                await write(message)
                self.progress = now()
                self._hold(-min(len(message) + PREFIX, self._held))  # after a loss, nothing is held any more
        except grpc.aio.BaseError:  # the client has left; grpc cancels `run`, too
            self._drop()
            return
        self._writer = None
        if self._ended:
            self._settle()

    def _deliver(self, message: bytes | None) -> None:
        """Gives a message to the handler. None means that the client sends nothing more."""
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
        """Drops unsent messages and tells the handler, because the stream is gone."""
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
    """The current certificate and client CAs of a port (`workers.process.certificates` replaces them)."""

    @property
    def material(self) -> Material: ...


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves gRPC on a port that each worker binds separately."""

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
        self._peers: Counter[str] = Counter()  # number of streams by peer address
        self._server: Any = None
        self._starting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._ticker: asyncio.TimerHandle | None = None

    # Calls of the worker.

    def serve(self, held: socket.socket, application: Application, certificates: Certificates | None = None) -> None:
        """Accepts connections on the port to which `held` is bound. Call this in the running loop. Raises OSError."""
        self.application = application
        self._server = grpc.aio.server(handlers=(self,), options=self._options())
        host = "[::]" if held.family == socket.AF_INET6 else "0.0.0.0"
        address = f"{host}:{held.getsockname()[1]}"
        try:
            if certificates is None:
                self._server.add_insecure_port(address)
            else:
                self._server.add_secure_port(address, Credentials(certificates).server_credentials())
        except RuntimeError as error:
            raise OSError(f"grpc cannot bind {address}: another user's process or another picker has it") from error
        self._starting = self.loop.create_task(self._server.start())
        self._ticker = self.loop.call_later(TICK, self._tick)

    @property
    def connections(self) -> int:
        """The number of connections that have streams, because grpc shows no others. At least 1 while grpc drains."""
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
        """Drains, because grpc has no other way to stop accepting."""
        self.drain()

    def drain(self) -> None:
        """Sends GOAWAY. Open streams are served to their end, and new ones are refused."""
        if self._stopping is None:
            self._stopping = self.loop.create_task(self._stop(DRAIN_MAX))

    def abort(self) -> None:
        """Cuts all connections now."""
        if self._stopping is None or not self._stopping.done():
            self._stopping = self.loop.create_task(self._stop(None))

    async def closed(self) -> None:
        """Waits until `drain` or `abort` is done. Then the server has no tasks or timers in the loop."""
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    # Calls of grpc.

    def service(self, details: Any) -> Any:
        """Returns the method handler for a new RPC."""
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
            # Fixed, because a client with a single connection must not starve.
            ("grpc.max_concurrent_streams", limits.streams_max),
            ("grpc.max_metadata_size", limits.header_list),
            ("grpc.absolute_max_metadata_size", limits.header_list),
            ("grpc.http2.min_ping_interval_without_data_ms", PING_GAP_MS),
        ]


def _encoded(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


class Credentials:
    """TLS credentials for grpc. grpc asks for changes at every handshake, on a separate thread.

    New material is used from the next handshake on. grpc chooses protocol versions and ciphers.
    """

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._used = certificates.material

    def server_credentials(self) -> Any:
        """Returns the argument for `add_secure_port`."""
        required = bool(self._used.client_ca)
        return grpc.dynamic_ssl_server_credentials(_configuration(self._used), self._changed, required)

    def _changed(self) -> Any:
        """Returns the new configuration, or None without a change."""
        material = self._certificates.material
        if material is self._used:
            return None
        self._used = material
        return _configuration(material)


def _configuration(material: Material) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.chain)], material.client_ca or None)
