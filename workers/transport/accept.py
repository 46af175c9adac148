"""Decides which worker takes the next connection, and when a full connection may carry more streams.

`Gate`: all workers wait on one listening socket, which the parent has created. Envoy multiplexes all requests on few connections, so random
placement would be uneven. Therefore a worker accepts only while its load is the smallest among the workers that serve and have a fresh
heartbeat. A worker that is stopped or shows a wrong load must not keep connections waiting. So a worker that has seen the socket readable
for 20 ms accepts whatever its load is. In the load, each connection is counted as at least the streams that its first limit allows. So a
burst of connections is spread before their first streams arrive, and a pause between short streams does not look idle. The kernel hands
over connections in their order. So if LONG_QUEUE of them wait, as in a flood, every worker accepts several per turn of its loop: otherwise
new connections of a gateway would wait behind the flood, or the kernel would drop them, and they would be tried again after a second.

`FullConnections`: a low limit of streams makes Envoy open more connections, but a client that keeps a single connection waits for a place.
When a connection has been full for 20 ms and no worker has accepted a new one meanwhile, its limit doubles, unless its client has a pool of
connections. Envoy has a pool. It fills one connection before it uses the next, so its full connections stay full while others have room.
With raised limits, 97 of its streams went to 2 of 4 workers. Envoy is recognised by the headers that it adds. Its limits rise only when no
more connections can be accepted. The limit of an unknown client rises unless its host has another connection with room in this worker.
"""

import asyncio
import errno
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Protocol

from workers.transport.headers import ClientKind

FRESH_HEARTBEAT = 0.3
# How long a readable socket waits for the least loaded worker, and a full connection for its client to open another one.
PATIENCE = 0.02
RETRY = 0.002  # seconds after which a worker that is not the least loaded looks again
LONG_QUEUE = 64  # connections that wait for `accept`
# In one turn of the loop, a worker accepts 1 / QUEUE_SHARE of a long queue, at most AT_ONCE.
QUEUE_SHARE = 4
AT_ONCE = 64
FORGET = 5 * RETRY  # if the socket was not readable for this time, another worker has served it
QUEUED_AT = 24  # bytes into Linux's struct tcp_info: tcpi_unacked, which is the length of the queue of a listening socket
NO_ROOM_PAUSE = 0.05
NO_DESCRIPTORS_PAUSE = 0.1
LOG_EVERY = 10.0
NO_ROOM = "all places at this port are taken; start more workers, or raise the limit of open files"

OtherWorkers = Callable[[], Iterable[tuple[bool, int, float]]]  # (serving, load, seconds since its heartbeat)


class Accepting(NamedTuple):
    """The functions that a server calls about connections, because other workers accept from the same socket.

    `accepted`, `left`, `failed`: called when a connection was accepted, when a connection has ended, and when no connection could be
    accepted. `others`: returns the other workers. `anywhere`: returns how many connections all workers have accepted; None if this is the
    only worker.
    """

    accepted: Callable[[], None] = lambda: None
    left: Callable[[], None] = lambda: None
    failed: Callable[..., None] = lambda event, **fields: None
    others: OtherWorkers = tuple
    anywhere: Callable[[], int] | None = None


ALONE: Final = Accepting()


class Gate:
    """Accepts connections from the shared socket when it is this worker's turn.

    `room` returns how many connections may be accepted. If it returns more than one, most of them are closed at once (`Room.admits`), so
    the worker does not wait for its turn.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        load: Callable[[], int],
        others: OtherWorkers,
        take: Callable[[socket.socket], None],
        room: Callable[[], int] = lambda: 1,
        on_failure: Callable[..., None] = lambda event, **fields: None,
        queued: Callable[[socket.socket], int] | None = None,
    ) -> None:
        """`queued` returns how many connections wait at a listening socket."""
        self._loop = loop
        self._queued = queued or _queued
        self._listening = listening
        self._load = load
        self._others = others
        self._take = take
        self._room = room
        self._on_failure = on_failure
        self._readable_since: float | None = None
        self._seen_readable = 0.0  # when the socket was last seen readable
        self._retry: asyncio.TimerHandle | None = None
        self._open = False
        self._logged_at = -LOG_EVERY

    def open(self) -> None:
        if not self._open:
            self._open = True
            self._watch()

    def close(self) -> None:
        """Stops accepting. The socket stays open, because all workers share it."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._listening.fileno())
            if self._retry is not None:
                self._retry.cancel()
                self._retry = None

    def _watch(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listening.fileno(), self._readable)

    def _readable(self) -> None:
        now = self._loop.time()
        room = self._room()
        if not room:
            self._pause(NO_ROOM_PAUSE)
            self._report("no more connections are accepted: the worker has as many as it may", reason=NO_ROOM)
            return
        if room == 1 and (queued := self._queued(self._listening)) >= LONG_QUEUE:
            self._accept_several(min(queued // QUEUE_SHARE, AT_ONCE))
            return
        if room == 1 and not self._may_accept(now):
            self._pause(RETRY)
            return
        while room and self._accept():
            room -= 1

    def _accept_several(self, count: int) -> None:
        """Accepts up to `count` connections, as long as there is room."""
        while count and self._accept() and self._room() == 1:
            count -= 1

    def _accept(self) -> bool:
        """Accepts one connection. Returns False if no connection waits."""
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            self._readable_since = None  # another worker was faster
            return False
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._pause(NO_DESCRIPTORS_PAUSE)
            self._report("cannot accept a connection", reason=f"{error.strerror}; raise the limit of open files")
            return False
        self._readable_since = None
        accepted.setblocking(False)
        self._take(accepted)
        return True

    def _report(self, event: str, *, reason: str) -> None:
        now = self._loop.time()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            self._on_failure(event, reason=reason)

    def _may_accept(self, now: float) -> bool:
        if self._readable_since is None or now - self._seen_readable > FORGET:  # another worker has accepted in between
            self._readable_since = now
        self._seen_readable = now
        if now - self._readable_since >= PATIENCE:
            return True
        own_load = self._load()
        return all(own_load <= load or not serving or age >= FRESH_HEARTBEAT for serving, load, age in self._others())

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._retry = self._loop.call_later(seconds, self._watch)


def _queued(listening: socket.socket) -> int:
    """Returns how many connections wait at a listening socket, or 0 if the system does not report the number."""
    try:
        info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, QUEUED_AT + 4)
    except OSError:
        return 0
    return int.from_bytes(info[QUEUED_AT:], sys.byteorder)


class Limited(Protocol):
    """The part of a connection that `FullConnections` uses. `last`: whether its client can open no other connection at present."""

    @property
    def client(self) -> ClientKind: ...
    @property
    def host(self) -> str: ...
    @property
    def last(self) -> bool: ...
    def full(self) -> float | None: ...
    def raise_limit(self) -> None: ...


class FullConnections:
    """Raises the stream limit of connections that stay full."""

    def __init__(self, accepted_anywhere: Callable[[], int]) -> None:
        self._accepted_anywhere = accepted_anywhere
        # Full connection -> number of accepted connections when it was first seen full.
        self._waiting: dict[Limited, int] = {}

    def note(self, connection: Limited) -> bool:
        """Notes that the connection is full.

        Returns True if the caller must call `check` in `PATIENCE` seconds, False if that call is planned already.
        """
        if connection in self._waiting:
            return False
        self._waiting[connection] = self._accepted_anywhere()
        return len(self._waiting) == 1

    def forget(self, connection: Limited) -> None:
        self._waiting.pop(connection, None)

    def check(self, now: float, connections: Iterable[Limited]) -> bool:
        """Raises the limits that are due. Returns True if the caller must call this again in `PATIENCE` seconds."""
        accepted = self._accepted_anywhere()
        with_room = {c.host for c in connections if c.full() is None} if self._waiting else set()
        for connection, before in list(self._waiting.items()):
            since = connection.full()
            if since is None:
                del self._waiting[connection]
            elif accepted != before:
                self._waiting[connection] = accepted
            elif now - since >= PATIENCE and self._waits(connection, with_room):
                connection.raise_limit()
                del self._waiting[connection]
        return bool(self._waiting)

    @staticmethod
    def _waits(connection: Limited, with_room: set[str]) -> bool:
        """Returns whether the client can only wait for a place on this connection."""
        if connection.client is ClientKind.QUEUES or connection.last:
            return True
        return connection.client is ClientKind.UNKNOWN and connection.host not in with_room
