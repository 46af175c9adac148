"""Our own HTTP/2 engine on the event loop: an asyncio `Protocol` around each connection, and the server that owns them.

One read is one call of the engine and at most one write (`BufferedProtocol` and `writelines` were tried: no difference).
Answers that handlers give at other times are written once per turn of the loop. When the kernel takes no more, the engine
keeps answers in their streams (bounded there) and we stop reading: a peer that doesn't read is not listened to either.

At the limit of connections the ones that are of no use make room, so that whoever holds places can't keep a gateway out.
"""

import asyncio
import os
import resource
import socket
import ssl
from collections.abc import Callable
from typing import cast

from workers.transport.accept import PATIENCE, FullConnections, Gate, Others
from workers.transport.headers import ClientKind
from workers.transport.http2 import Connection
from workers.transport.interface import Application, Clock, Handler
from workers.transport.limits import (
    HANDSHAKE_SECONDS,
    IDLE_SECONDS,
    SLOW_HANDSHAKE_SECONDS,
    UNUSED_SECONDS,
    Budget,
    Limits,
    connections_allowed,
)
from workers.transport.strangers import PEEK_BYTES, TLS_RECORD, http1_answer, speaks_http1

TICK = 0.5
DEADLINE_BEAT = 0.05  # how late a deadline may be seen; there is no beat while there is none
WRITE_HIGH, WRITE_LOW = 1 << 20, 1 << 18  # bytes in the transport at which answers stay in their streams
LINGER_SECONDS = 0.2
READ_AWAY = 1 << 16
DISPLACED_AT_ONCE = 32  # every NO_ROOM_PAUSE
CLOSING_TICKS = 10  # how long a peer may take to read our farewell


class ServerProtocol(asyncio.Protocol):
    """One connection: carries bytes between its transport and its engine."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._loop = server.loop
        self._now = server.now
        self._clock = server.clock
        self.host = ""
        self._closing_ticks = 0
        self._lingering = False
        self._behind = False
        self.connection = Connection(
            server.application,
            server.now(),
            self._wake,
            server.limits,
            server.budget,
            server.on_abuse,
            server.on_error,
            server.expect_deadlines,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        peer = transport.get_extra_info("peername")
        self.host = peer[0] if isinstance(peer, tuple) else ""
        self._write = transport.write
        self._server.joined(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        connection.now = self._clock.now = self._now()
        connection.receive(data)
        out = connection.output()
        if out:
            self._write(out)
        if connection.full_since is not None:
            self._server.full(self)
        if connection.closing:
            self._close()
        elif connection.behind:
            self._fall_behind()

    def _fall_behind(self) -> None:
        """The rest of this read waits until others had their turn."""
        self._behind = True
        self._transport.pause_reading()
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        connection = self.connection
        connection.now = self._clock.now = self._now()
        connection.go_on()
        self._flush()
        if connection.behind and not connection.closing:
            self._loop.call_soon(self._go_on)
            return
        self._behind = False
        if connection.room and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # no use in a half-open connection: close it

    def pause_writing(self) -> None:
        self.connection.pause()
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        connection = self.connection
        connection.now = self._now()
        connection.resume()
        if not (connection.closing or self._behind or self._transport.is_closing()):
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self.connection.lost()
        self._server.left(self)

    def tick(self, now: float) -> None:
        connection = self.connection
        connection.tick(now)
        if connection.closing:
            self._flush()
        if connection.closing and self._transport.get_write_buffer_size():
            self._closing_ticks += 1
            if self._closing_ticks > CLOSING_TICKS:  # it doesn't even take our farewell
                self._transport.abort()

    def expire(self, now: float) -> bool:
        """End what has to end on time; True: there is more to look after."""
        more = self.connection.expire(now)
        self._flush()
        return more

    def make_room(self) -> None:
        """Go in favour of others, at once."""
        self._lingering = True
        self.connection.displace()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def full(self) -> float | None:
        return self.connection.full()

    @property
    def client(self) -> ClientKind:
        return self.connection.client

    def raise_limit(self) -> None:
        self.connection.raise_limit()

    def _wake(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        connection = self.connection
        out = connection.output()
        if out and not self._transport.is_closing():
            self._write(out)
        if connection.closing:
            self._close()

    def _close(self) -> None:
        """Close soon: at once, with bytes of the peer unread, TCP would take back our farewell."""
        if not self._lingering:
            self._lingering = True
            self._loop.call_later(LINGER_SECONDS, self._transport.close)


class Server:
    """Serves gRPC on a listening socket that may be shared with other processes."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: Limits | None = None,
        budget: Budget | None = None,
        on_abuse: Callable[[str], None] = lambda cause: None,
        on_error: Callable[[BaseException], None] = lambda error: None,
        on_accept: Callable[[], None] = lambda: None,
        on_leave: Callable[[], None] = lambda: None,
        on_accept_failure: Callable[[str], None] = lambda text: None,
        others: Others = tuple,
        accepted_anywhere: Callable[[], int] | None = None,
        connections_max: int | None = None,
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
        self.accepted = 0
        self._on_accept = on_accept
        self._on_leave = on_leave
        self._on_accept_failure = on_accept_failure
        self._others = others
        self._connections_max = _connections_max() if connections_max is None else connections_max
        self._full = FullConnections(accepted_anywhere or (lambda: self.accepted))
        self._protocols: set[ServerProtocol] = set()
        self._handshakes: dict[asyncio.Task[None], float] = {}  # and when they began
        self._gate: Gate | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._draining = False
        self._leaving = False
        self._ticker: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    # What the worker uses.

    def serve(
        self,
        listening: socket.socket,
        application: Application,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Accept connections from a socket that listens already."""
        listening.setblocking(False)
        self.application = application
        self._ssl_context = ssl_context
        self._gate = Gate(
            self.loop, listening, self.load, self._others, self._take, self._has_room, self._on_accept_failure
        )
        self._gate.open()
        if self._ticker is None:
            self._ticker = self.loop.call_later(TICK, self._tick)

    @property
    def connections(self) -> int:
        return len(self._protocols) + len(self._handshakes)

    @property
    def streams(self) -> int:
        return sum(len(p.connection.streams) for p in self._protocols)

    def load(self) -> int:
        """What the gated accept compares: a connection counts as at least the streams it was invited to bring."""
        first = self.limits.streams_first
        open_ = sum(max(len(p.connection.streams), first) for p in self._protocols)
        return open_ + first * len(self._handshakes)

    def handlers(self) -> list[Handler]:
        """Of all open streams."""
        streams = [stream for p in self._protocols for stream in p.connection.streams.values()]
        return [stream.handler for stream in streams if stream.handler is not None]

    def stop_accepting(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def drain(self) -> None:
        """Say goodbye gracefully: each connection closes when its last stream has ended."""
        self._draining = True
        for protocol in list(self._protocols):
            protocol.connection.now = self.now()
            protocol.connection.drain()

    def abort(self) -> None:
        """Cut all connections now."""
        self.stop_accepting()
        for handshake in list(self._handshakes):
            handshake.cancel()
        for protocol in list(self._protocols):
            protocol.abort()

    async def closed(self) -> None:
        """Wait until there is no connection left; then the server holds nothing of the loop any more
        unless it accepts."""
        while self.connections:
            self._closed = self._closed or self.loop.create_future()
            await self._closed
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    # What protocols call.

    def expect_deadlines(self) -> None:
        """A stream has a deadline, or a connection: one beat looks after all."""
        if self._expiry is None:
            self._expiry = self.loop.call_later(DEADLINE_BEAT, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self.now()
        if sum(protocol.expire(now) for protocol in list(self._protocols)):
            self.expect_deadlines()

    def joined(self, protocol: ServerProtocol) -> None:
        self._protocols.add(protocol)
        if self._draining:
            protocol.connection.drain()

    def left(self, protocol: ServerProtocol) -> None:
        self._protocols.discard(protocol)
        self._full.forget(protocol)
        self._note_closed()
        if not self._leaving:  # many may leave in one turn of the loop
            self._leaving = True
            self.loop.call_soon(self._say_left)

    def _say_left(self) -> None:
        self._leaving = False
        self._on_leave()

    def full(self, protocol: ServerProtocol) -> None:
        if protocol.full() is not None and self._full.note(protocol):
            self.loop.call_later(PATIENCE, self._check_full)

    # The rest.

    def _has_room(self) -> bool:
        """Below the limit of connections. At it, those that were never used make room at once, or else one that has been
        idle for long makes it in peace."""
        if self.connections < self._connections_max:
            return True
        now = self.now()
        before = now - UNUSED_SECONDS
        slow = now - SLOW_HANDSHAKE_SECONDS
        for handshake in [task for task, began in self._handshakes.items() if began <= slow]:
            handshake.cancel()
        idle = [p for p in self._protocols if not (p.connection.streams or p.connection.leaving)]
        unused = [p for p in idle if not p.connection.used and p.connection.idle_since <= before]
        for protocol in unused[:DISPLACED_AT_ONCE]:
            protocol.make_room()
        if not unused:
            longest = min((p.connection for p in idle), key=lambda c: c.idle_since, default=None)
            if longest is not None and now - longest.idle_since >= IDLE_SECONDS:
                longest.now = now
                longest.drain()
        return False

    def _take(self, accepted: socket.socket) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = self.loop.create_task(self._connect(accepted))
        self._handshakes[handshake] = self.now()
        handshake.add_done_callback(self._connected)
        self.accepted += 1
        self._on_accept()

    async def _connect(self, accepted: socket.socket) -> None:
        secure = self._ssl_context is not None
        try:
            if secure and not await self._speaks_tls(accepted):
                accepted.close()
                return
            await self.loop.connect_accepted_socket(
                lambda: ServerProtocol(self),
                accepted,
                ssl=self._ssl_context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if secure else None,
            )
        except OSError as failed:  # includes ssl.SSLError: a peer that left, or doesn't speak TLS
            accepted.close()
            self.on_abuse(f"handshake failed: {failed}")
        except asyncio.CancelledError:
            accepted.close()
            raise

    async def _speaks_tls(self, accepted: socket.socket) -> bool:
        """Look at a peer's first bytes before TLS does; who speaks HTTP/1 without TLS is told what this is. Raises OSError."""
        readable = self.loop.create_future()
        self.loop.add_reader(accepted.fileno(), _done, readable)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await readable
        finally:
            self.loop.remove_reader(accepted.fileno())
        begin = accepted.recv(PEEK_BYTES, socket.MSG_PEEK)
        if begin.startswith(TLS_RECORD) or not speaks_http1(begin):
            return True
        accepted.recv(READ_AWAY)  # what stays unread would take back the answer
        accepted.send(http1_answer(begin, secure=True))
        accepted.shutdown(socket.SHUT_WR)
        self.on_abuse("handshake failed: HTTP without TLS")
        await asyncio.sleep(LINGER_SECONDS)
        return False

    def _connected(self, handshake: "asyncio.Task[None]") -> None:
        self._handshakes.pop(handshake, None)
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            self.on_error(error)
        self._note_closed()

    def _note_closed(self) -> None:
        if not self.connections and self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
            self._closed = None

    def _check_full(self) -> None:
        more = self.connections < self._connections_max
        if self._full.check(self.now(), self._protocols, more):
            self.loop.call_later(PATIENCE, self._check_full)

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(TICK, self._tick)
        now = self.now()
        for protocol in list(self._protocols):
            protocol.tick(now)


def _connections_max() -> int:
    """What the limit of open files leaves for connections."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_allowed(files_max, len(os.listdir("/proc/self/fd")))


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
