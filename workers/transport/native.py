"""The native transport: our own HTTP/2 engine on the event loop. An asyncio `Protocol` drives each connection. A server owns them all.

Each read makes one call of the engine and at most one write. (`BufferedProtocol` and `writelines` were tried and made no difference.)
Answers that handlers give at other times are written once per turn of the loop. When the kernel takes no more bytes, the engine keeps
answers in their streams, where they are bounded. Then we also stop reading, so a peer that does not read cannot send more.

At the limit of connections, unused ones are closed. So a client that only holds connections cannot keep a gateway out.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast

from workers.transport.accept import ALONE, PATIENCE, Accepting, FullConnections, Gate
from workers.transport.handshakes import HandshakePace, host_of, speaks_tls
from workers.transport.headers import ClientKind
from workers.transport.http2 import Connection
from workers.transport.interface import Application, Clock, Handler
from workers.transport.limits import HANDSHAKE_SECONDS, LINGER_SECONDS, SLOW_HANDSHAKE_SECONDS, Budget, Limits, connections_max_here
from workers.transport.room import Places, Room
from workers.transport.turn import Turn

TICK: Final = 0.5
DEADLINE_HEARTBEAT: Final = 0.05  # how late a deadline may be noticed; without deadlines, there is no heartbeat
# Bytes in the asyncio transport. Above HIGH, answers wait in their streams until the number falls below LOW.
WRITE_HIGH: Final = 1048576
WRITE_LOW: Final = 262144
CLOSING_TICKS: Final = 10  # how many ticks a peer may take to read our GOAWAY


class ServerProtocol(asyncio.Protocol):
    """Drives one connection: carries bytes between its asyncio transport and its engine."""

    def __init__(self, server: "Server", room: Room) -> None:
        self._server = server
        self.room = room
        self._loop = server.loop
        self._now = server.now
        self._clock = server.clock
        self._turn = server.turn
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
            self._blame,
            server.on_error,
            server.expect_deadlines,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)
        transport.set_write_buffer_limits(WRITE_HIGH, WRITE_LOW)
        peer = transport.get_extra_info("peername")
        self.host = self.connection.host = peer[0].removeprefix("::ffff:") if isinstance(peer, tuple) else ""
        own = transport.get_extra_info("sockname")
        self.connection.port = own[1] if isinstance(own, tuple) else 0
        self._write = transport.write
        self._server.joined(self)
        self._flush()

    def data_received(self, data: bytes) -> None:
        connection = self.connection
        connection.now = self._clock.now = now = self._now()
        if self._turn.over(now):
            connection.put_off(data)
            self._fall_behind()
            return
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
        """Stops reading until the rest of this read is handled, so that other connections get their turn."""
        if not self._behind:
            self._behind = True
            self._transport.pause_reading()
            self._put_off()

    def _put_off(self) -> None:
        seconds = self.connection.slow_until - self._now()
        if seconds > 0:
            self._loop.call_later(seconds, self._go_on)
        else:
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        connection = self.connection
        connection.now = self._clock.now = now = self._now()
        if self._turn.over(now):
            self._put_off()
            return
        connection.go_on()
        self._flush()
        if connection.behind and not connection.closing:
            self._put_off()
            return
        self._behind = False
        if connection.room and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False  # close, because a half-open connection is of no use

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
            if self._closing_ticks > CLOSING_TICKS:  # the peer does not even read our GOAWAY
                self._transport.abort()

    def expire(self, now: float) -> bool:
        """Enforces the short time limits. Returns True if it must be called again at the next heartbeat."""
        more = self.connection.expire(now)
        self._flush()
        return more

    # Methods for `Room`.

    @property
    def busy(self) -> bool:
        return bool(self.connection.streams) or self.connection.leaving

    @property
    def used(self) -> bool:
        return self.connection.used

    @property
    def idle_since(self) -> float:
        return self.connection.idle_since

    def drain(self) -> None:
        self.connection.now = self._now()
        self.connection.drain()
        self._flush()

    def make_room(self) -> None:
        """Closes the connection at once, to make room for other connections."""
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

    @property
    def last(self) -> bool:
        return self.room.full

    def raise_limit(self) -> None:
        self.connection.raise_limit()

    def _blame(self, cause: str) -> None:
        """Reports what the peer has done, with its address. The address follows a colon, as all details do."""
        self._server.on_abuse(f"{cause}{',' if ':' in cause else ':'} from {self.host}")

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
        """Closes the connection soon. If bytes of the peer were unread then, TCP would send a reset, and the peer could lose our GOAWAY."""
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
        accepting: Accepting = ALONE,
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
        self.turn = Turn(loop)
        self._accepting = accepting
        self._places = Places(connections_max_here() if connections_max is None else connections_max, lambda: self.connections)
        self._full = FullConnections(accepting.anywhere or (lambda: self.accepted))
        self._protocols: set[ServerProtocol] = set()
        self._handshakes: dict[asyncio.Task[None], float] = {}  # handshake -> when it began
        self._pace = HandshakePace()
        self._gates: list[Gate] | None = []  # None if the server does not accept any more
        self._ssl_context: ssl.SSLContext | None = None
        self._draining = False
        self._leaving = False
        self._ticker: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._closed: asyncio.Future[None] | None = None

    # Methods for the worker.

    def serve(
        self, first: socket.socket, application: Application, ssl_context: ssl.SSLContext | None = None, more: Sequence[socket.socket] = ()
    ) -> None:
        """Accepts connections from a socket that already listens, and from `more`. Streams tell them apart by `Stream.port`."""
        self.application = application
        self._ssl_context = ssl_context
        self._gates = []
        self._ticker = self._ticker or self.loop.call_later(TICK, self._tick)
        self.serve_also((first, *more))

    def serve_also(self, more: Sequence[socket.socket]) -> None:
        """Accepts connections from more sockets, unless the server has stopped accepting."""
        if self._gates is not None:
            self._gates += map(self._gate, more)

    @property
    def connections(self) -> int:
        return len(self._protocols) + len(self._handshakes)

    @property
    def streams(self) -> int:
        return sum(len(p.connection.streams) for p in self._protocols)

    def load(self) -> int:
        """Returns the load that `Gate` compares. A connection is counted as at least the streams that its first limit allows."""
        first = self.limits.streams_first
        open_ = sum(max(len(p.connection.streams), first) for p in self._protocols)
        return open_ + first * len(self._handshakes)

    def handlers(self) -> list[Handler]:
        """Returns the handlers of all open streams."""
        handlers = (stream.handler for p in self._protocols for stream in p.connection.streams.values())
        return [handler for handler in handlers if handler is not None]

    def stop_accepting(self) -> None:
        for gate in self._gates or ():
            gate.close()
        self._gates = None

    def drain(self) -> None:
        """Sends GOAWAY. Each connection closes when its last stream has ended."""
        self._draining = True
        for protocol in list(self._protocols):
            protocol.drain()

    def abort(self) -> None:
        """Cuts all connections now."""
        self.stop_accepting()
        for handshake in list(self._handshakes):
            handshake.cancel()
        for protocol in list(self._protocols):
            protocol.abort()

    async def closed(self) -> None:
        """Waits until no connection is left. After that, unless the server still accepts, it has no timers or readers in the loop."""
        while self.connections:
            self._closed = self._closed or self.loop.create_future()
            await self._closed
        for timer in (self._ticker, self._expiry):
            if timer is not None:
                timer.cancel()
        self._ticker = self._expiry = None

    # Methods for protocols.

    def expect_deadlines(self) -> None:
        """Starts the heartbeat for deadlines, because a stream or a connection has a deadline. One heartbeat serves all of them."""
        if self._expiry is None:
            self._expiry = self.loop.call_later(DEADLINE_HEARTBEAT, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        now = self.now()
        if sum(protocol.expire(now) for protocol in list(self._protocols)):
            self.expect_deadlines()

    def joined(self, protocol: ServerProtocol) -> None:
        self._protocols.add(protocol)
        protocol.room.members.add(protocol)
        if self._draining:
            protocol.connection.drain()

    def left(self, protocol: ServerProtocol) -> None:
        self._protocols.discard(protocol)
        protocol.room.members.discard(protocol)
        self._full.forget(protocol)
        if self._ssl_context is not None and protocol.connection.used:
            self._pace.give_back(protocol.host.removeprefix("::ffff:"))
        self._note_closed()
        if not self._leaving:  # one report per turn of the loop, because many may leave in one turn
            self._leaving = True
            self.loop.call_soon(self._report_left)

    def _report_left(self) -> None:
        self._leaving = False
        self._accepting.left()

    def full(self, protocol: ServerProtocol) -> None:
        if protocol.full() is not None and self._full.note(protocol):
            self.loop.call_later(PATIENCE, self._check_full)

    # The rest.

    def _gate(self, listening: socket.socket) -> Gate:
        listening.setblocking(False)
        accepting = self._accepting
        room = Room(self._places, lambda host: self.on_abuse(f"connections: from {host}"))
        failed = partial(accepting.failed, port=listening.getsockname()[1])
        gate = Gate(self.loop, listening, self.load, accepting.others, partial(self._take, room), partial(self._room_left, room), failed)
        gate.open()
        return gate

    def _room_left(self, room: Room) -> int:
        """Returns how many connections may be accepted, see `Room`. At the limit, also cancels slow handshakes."""
        now, members = self.now(), room.members
        left = room.left(len(members), now, (protocol for protocol in self._protocols if protocol in members))
        if not left:
            slow = now - SLOW_HANDSHAKE_SECONDS
            for handshake in [task for task, began in self._handshakes.items() if began <= slow and task in members]:
                handshake.cancel()
        return left

    def _take(self, room: Room, accepted: socket.socket) -> None:
        host = host_of(accepted)
        wait_s = self._handshake_wait_s(host) if room.admits(host, len(room.members)) else None
        if wait_s is None:
            accepted.close()
            return
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        handshake = self.loop.create_task(self._connect(room, accepted, host, wait_s))
        self._handshakes[handshake] = self.now()
        room.members.add(handshake)
        handshake.add_done_callback(partial(self._connected, room))
        self.accepted += 1
        self._accepting.accepted()

    def _handshake_wait_s(self, host: str) -> float | None:
        """Returns the seconds until a TLS handshake may begin. Returns None if the host has begun too many, or has left."""
        if self._ssl_context is None:
            return 0.0
        if not host:
            return None
        wait_s = self._pace.wait_s(host, self.now())
        if wait_s is None:
            self.on_abuse(f"handshakes: {host} begins too many TLS connections; some are refused")
        return wait_s

    async def _connect(self, room: Room, accepted: socket.socket, host: str, wait_s: float) -> None:
        secure = self._ssl_context is not None
        try:
            if wait_s:
                await asyncio.sleep(wait_s)
            if secure and not await speaks_tls(self.loop, accepted, self.on_abuse):
                accepted.close()
                return
            made, seconds = partial(ServerProtocol, self, room), HANDSHAKE_SECONDS if secure else None
            await self.loop.connect_accepted_socket(made, accepted, ssl=self._ssl_context, ssl_handshake_timeout=seconds)
        except TimeoutError:  # the first bytes did not arrive in time
            accepted.close()
            self.on_abuse(f"handshake failed: nothing came within {HANDSHAKE_SECONDS:g} s, from {host}")
        except OSError as failed:  # the peer has left, or speaks no TLS, or no version that this server accepts
            accepted.close()
            wrong = isinstance(failed, ssl.SSLError)
            what = f"failed: {failed}" if wrong else f"given up: the peer left before it was complete ({failed})"
            self.on_abuse(f"handshake {what}, from {host}")
        except asyncio.CancelledError:
            accepted.close()
            raise

    def _connected(self, room: Room, handshake: "asyncio.Task[None]") -> None:
        self._handshakes.pop(handshake, None)
        room.members.discard(handshake)
        if not handshake.cancelled() and (error := handshake.exception()) is not None:
            self.on_error(error)
        self._note_closed()

    def _note_closed(self) -> None:
        if not self.connections and self._closed is not None and not self._closed.done():
            self._closed.set_result(None)
            self._closed = None

    def _check_full(self) -> None:
        if self._full.check(self.now(), self._protocols):
            self.loop.call_later(PATIENCE, self._check_full)

    def _tick(self) -> None:
        self._ticker = self.loop.call_later(TICK, self._tick)
        now = self.now()
        for protocol in list(self._protocols):
            protocol.tick(now)
