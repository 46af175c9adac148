"""Which worker takes the next connection, and when a full connection may carry more.

All workers wait on one listening socket that the parent made. Envoy multiplexes everything on few connections, so chance is
a bad judge: a worker accepts only while its load is the smallest among workers that serve and whose heartbeat is fresh. As
a stopped or wrong neighbour must not keep connections waiting, a worker that has seen the socket readable for 20 ms accepts
whatever its load. Load counts every connection as at least the streams it was invited to bring, so that a burst of connects
is spread before the first stream arrives, and a pause between short streams doesn't look like idleness.

The other half: a low stream limit makes Envoy open more connections, but a client that keeps one connection waits for a
place. A connection that has been full for 20 ms while no worker accepted a new one is allowed twice as many, unless its client
has a pool. Envoy fills one connection before it uses the next, so its full connections stay full while others have room:
raising them moved 97 streams onto 2 of 4 workers. Envoy is known by the headers it adds, and is raised only where no more
connections can be accepted. A client that can't be told is raised unless its host has another connection with room here.
"""

import errno
import socket
from collections.abc import Callable, Iterable
from typing import Protocol

from workers.transport.headers import ClientKind

FRESH_HEARTBEAT = 0.3
PATIENCE = 0.02  # a readable socket, or a full connection, is left alone for so long
RETRY = 0.002  # how soon a worker that is not the least loaded looks again
FORGET = 5 * RETRY  # a socket that was not seen readable for so long has been served meanwhile
NO_ROOM_PAUSE = 0.05
NO_DESCRIPTORS_PAUSE = 0.1
LOG_EVERY = 10.0

Others = Callable[[], Iterable[tuple[bool, int, float]]]  # (serving, load, seconds since its heartbeat)


class Loop(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float: ...
    def add_reader(self, fd: int, callback: Callable[[], None]) -> None: ...
    def remove_reader(self, fd: int) -> bool: ...
    def call_later(self, delay: float, callback: Callable[[], None]) -> "Timer": ...


class Timer(Protocol):
    def cancel(self) -> None: ...


class Gate:
    """Accepts from the shared socket when it is this worker's turn."""

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket,
        load: Callable[[], int],
        others: Others,
        take: Callable[[socket.socket], None],
        room: Callable[[], bool] = lambda: True,
        on_failure: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._load = load
        self._others = others
        self._take = take
        self._room = room
        self._on_failure = on_failure
        self._readable_since: float | None = None
        self._seen_readable = 0.0  # the last time
        self._retry: Timer | None = None
        self._open = False
        self._logged_at = -LOG_EVERY

    def open(self) -> None:
        if not self._open:
            self._open = True
            self._watch()

    def close(self) -> None:
        """Accept no more. The socket stays open: it is everyone's."""
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
        if not self._room():
            self._pause(NO_ROOM_PAUSE)
            self._complain(
                now,
                "as many connections are open as a worker takes; start more workers, or raise the limit of open files",
            )
            return
        if not self._may_accept(now):
            self._pause(RETRY)
            return
        try:
            accepted, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            self._readable_since = None  # another worker was faster
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._pause(NO_DESCRIPTORS_PAUSE)
            self._complain(now, f"can't accept a connection: {error.strerror}; raise the limit of open files")
            return
        self._readable_since = None
        accepted.setblocking(False)
        self._take(accepted)

    def _complain(self, now: float, text: str) -> None:
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            self._on_failure(text)

    def _may_accept(self, now: float) -> bool:
        if self._readable_since is None or now - self._seen_readable > FORGET:  # in between another worker took it
            self._readable_since = now
        self._seen_readable = now
        if now - self._readable_since >= PATIENCE:
            return True
        mine = self._load()
        return all(mine <= load or not serving or age >= FRESH_HEARTBEAT for serving, load, age in self._others())

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._retry = self._loop.call_later(seconds, self._watch)


class Limited(Protocol):
    """A connection, as far as its stream limit goes."""

    @property
    def client(self) -> ClientKind: ...
    @property
    def host(self) -> str: ...
    def full(self) -> float | None: ...
    def raise_limit(self) -> None: ...


class FullConnections:
    """Raises the limit of connections that stay full."""

    def __init__(self, accepted_anywhere: Callable[[], int]) -> None:
        self._accepted_anywhere = accepted_anywhere
        self._waiting: dict[Limited, int] = {}  # accepted connections when it was first seen full

    def note(self, connection: Limited) -> bool:
        """This one is full; True: `check` is needed in `PATIENCE` seconds, and was not before."""
        if connection in self._waiting:
            return False
        self._waiting[connection] = self._accepted_anywhere()
        return len(self._waiting) == 1

    def forget(self, connection: Limited) -> None:
        self._waiting.pop(connection, None)

    def check(self, now: float, connections: Iterable[Limited], more: bool) -> bool:
        """Raise where it is due; True: look again in `PATIENCE` seconds. `more`: new connections can be accepted."""
        accepted = self._accepted_anywhere()
        with_room = {c.host for c in connections if c.full() is None} if self._waiting else set()
        for connection, before in list(self._waiting.items()):
            since = connection.full()
            if since is None:
                del self._waiting[connection]
            elif accepted != before:
                self._waiting[connection] = accepted
            elif now - since >= PATIENCE and self._waits(connection, with_room, more):
                connection.raise_limit()
                del self._waiting[connection]
        return bool(self._waiting)

    @staticmethod
    def _waits(connection: Limited, with_room: set[str], more: bool) -> bool:
        """The client has nowhere else to go."""
        if connection.client is ClientKind.QUEUES or not more:
            return True
        return connection.client is ClientKind.UNKNOWN and connection.host not in with_room
