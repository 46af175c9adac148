"""Serves HTTP on the metrics port: GET and HEAD, HTTP/1.0 and 1.1, with or without TLS.

    turns           accepts connections, and runs their work act by act, within shares of the process's time
    connection      reads requests with h11, one at a time, and limits the work that a client causes
    page_streaming  sends long pages piece by piece

Accepted sockets wait until their turn has come. There are CONNECTIONS_MAX places for waiting sockets, handshakes and connections together.
If all are taken, the host with the most places loses one to the new socket: that of the connection that has been silent longest. So neither
idle connections nor a flood from one host keep probes out. A TLS handshake runs outside all turns: its CPU time is charged to the share.

`page` has the values that pages take and return. Scrapers send short requests on few connections, so everything has a small limit:
heads, queries, connections (including those in their TLS handshake), requests, idle time, and answers that wait to be sent. The server
never reads a body: it answers a request that announces one, and then ends the connection. A client that costs more than it should
is disconnected, counted, and named in the log.

A long page is an iterator of pieces. It is sent in chunks, or until the connection ends (HTTP/1.0), and compressed if the client accepts
gzip. A page that has nothing to send for a while yields a Pause. A page that fails before its first piece is answered with 500. A page that
fails later ends the connection; an HTTP/1.0 client cannot distinguish this from the end of the page.

A `Guard` decides, at once or later, whether a request may get its page. Meanwhile the connection waits and reads no further request.
TLS verifies client certificates before HTTP begins. A port with neither a guard nor client certificates belongs on a
network that only the monitoring can reach.
"""

import asyncio
import functools
import itertools
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

from workers.host.log import Rarely
from workers.supervisor.pages.connection import FAILED, Connection
from workers.supervisor.pages.page import ALLOWED, Guard, Page, PageAnswer, Request, Verdict, allow_all, refusal
from workers.supervisor.pages.page_streaming import RoundRobinSender
from workers.supervisor.pages.turns import HostQueues, Listener, Turns

CONNECTIONS_MAX = 64
HANDSHAKE_COST_S = 0.002  # CPU time that is charged for a TLS handshake; RSA of 2,048 bits takes 1.3 ms
HANDSHAKE_S = 10.0
GOODBYE_S = 2.0  # limit of the closing TLS exchange


class AdminServer:
    """Serves pages by their path. Each accepted socket becomes a `Connection`."""

    def __init__(
        self,
        pages: Mapping[str, Page],
        report: Callable[..., None] = lambda text, **fields: None,
        guard: Guard = allow_all,
        on_costly: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_costly` is called for each client that costs too much."""
        self._pages = pages
        self._report = report
        self._guard = guard
        self._on_costly = on_costly
        self.connections: set[Connection] = set()
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}
        self._line: HostQueues[socket.socket] = HostQueues()  # accepted sockets that wait for their handshake
        self._connecting = False  # whether a turn was asked for, to connect the next socket of the line
        self.order: Iterator[int] = itertools.count()
        self._listener: Listener | None = None
        self._context: ssl.SSLContext | None = None
        self._refused = Rarely("handshakes on the metrics port that failed", report)
        self._failed = Rarely("pages on the metrics port that failed", report)
        self._costly = Rarely("clients of the metrics port that cost too much", report)
        self._loop: asyncio.AbstractEventLoop
        self.sender: RoundRobinSender
        self.turns: Turns

    def serve(self, listening: socket.socket, context: ssl.SSLContext | None = None) -> None:
        """Accepts connections from a listening socket on the running loop. `close` leaves the socket open for the caller."""
        listening.setblocking(False)
        self._loop = loop = asyncio.get_running_loop()
        self._context = context
        self.turns = Turns(loop, on_used_up=lambda host: self.costly(host, "takes most of the time that this port may use"))
        self.sender = RoundRobinSender(loop, self.turns)
        self._listener = Listener(loop, listening, self._take, self._report)
        self._listener.open()

    @property
    def taken(self) -> int:
        """The number of connections, including those before or in their TLS handshake."""
        return len(self.connections) + len(self._handshakes) + len(self._line)

    def admit(self, request: Request) -> "Verdict | asyncio.Future[Verdict]":
        """Returns the guard's verdict on a request. Admits every request for a path without a page, because 404 reveals nothing."""
        return self._guard(request) if request.path in self._pages else ALLOWED

    def answer(self, request: Request) -> PageAnswer:
        """Returns the answer to an admitted request: its page, 404, 405, or 500 if the page raises an exception."""
        page = self._pages.get(request.path)
        if page is None:
            known = ", ".join(path for path in self._pages if not path.startswith("/ui/"))
            return refusal(HTTPStatus.NOT_FOUND, f"no such page; the pages are {known}")
        if request.method not in ("GET", "HEAD"):
            return refusal(HTTPStatus.METHOD_NOT_ALLOWED, "GET and HEAD only", (("Allow", "GET, HEAD"),))
        try:
            return page(request)
        except Exception as fault:
            self.failed(request, fault)
            return FAILED

    def failed(self, request: Request, fault: Exception) -> None:
        """Reports a page that was not completed."""
        self._failed.tell(self._loop.time(), f"{request.path} for {request.peer}: {fault!r}")

    def costly(self, host: str, why: str) -> None:
        """Counts and reports a client that costs too much. Most callers also disconnect it."""
        self._on_costly()
        self._costly.tell(self._loop.time(), f"{host} {why}")

    def close(self) -> None:
        """Accepts no more connections and ends the open connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.turns.close()
            self.sender.close()
        for accepted in self._line.clear():
            accepted.close()
        for connection in list(self._handshakes):
            self._end(connection)
        for connection in list(self.connections):
            connection.close()

    def joined(self, connection: Connection) -> None:
        """Counts a connection as open: its handshake is complete."""
        if self._handshakes.pop(connection, None) is None:
            connection.abort()  # this connection lost its place to another one during the handshake
        else:
            self.connections.add(connection)
        self._connect_next()

    def left(self, connection: Connection) -> None:
        """Forgets a connection that is gone."""
        self.connections.discard(connection)

    # Accepting.

    def _take(self, accepted: socket.socket, host: str) -> None:
        if self.taken >= CONNECTIONS_MAX and not self._make_room(host):
            accepted.close()
            return
        self._line.add(host, accepted)
        self._connect_next()

    def _make_room(self, newcomer: str) -> bool:
        """Frees a place: ends the connection that has been silent longest, of the host with the most connections. Returns False if no
        connection may end.

        Connections with an answer under way stay. Connections that wait for their turn end only if `newcomer` is another host.
        """
        candidates = [one for one in (*self._handshakes, *self.connections) if not one.awaits_answer]
        counts = self._line.counts() + Counter(one.host for one in candidates)
        if not counts:
            return False
        host, number = counts.most_common(1)[0]
        of_host = [one for one in candidates if one.host == host]
        silent = [one for one in of_host if not one.busy]
        if not silent and self._line.counts()[host]:
            self._line.take(host)[1].close()  # it has waited longest
        elif not silent and counts[newcomer] >= number:
            return False
        else:
            self._end(min(silent or of_host, key=lambda one: one.silent))
        if number > 1:
            self.costly(host, f"has {number} connections when others need a place")
        return True

    def _end(self, connection: Connection) -> None:
        """Ends a connection or its handshake at once. Without TLS there is no handshake to cancel, and `joined` ends the connection."""
        if (handshake := self._handshakes.pop(connection, None)) is not None:
            if self._context is not None:
                handshake.cancel()
        else:
            self.connections.discard(connection)
            connection.abort()

    def _connect_next(self) -> None:
        """Asks for a turn to connect the next socket of the line."""
        if self._line and not self._connecting and self._listener is not None:
            self._connecting = True
            self.turns.urgent(self._begin_handshake)

    def _begin_handshake(self) -> None:
        self._connecting = False
        if not self._line:
            return
        host, accepted = self._line.take()
        connection = Connection(self, host)
        handshake = self._loop.create_task(self._connect(accepted, connection))
        self._handshakes[connection] = handshake
        handshake.add_done_callback(functools.partial(self._connected, connection, accepted))
        if self._context is not None:
            self.turns.charge(HANDSHAKE_COST_S)
        self._connect_next()

    def _connected(self, connection: Connection, accepted: socket.socket, handshake: "asyncio.Task[None]") -> None:
        self._handshakes.pop(connection, None)
        if handshake.cancelled():
            accepted.close()
        self._connect_next()

    async def _connect(self, accepted: socket.socket, connection: Connection) -> None:
        context = self._context
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_S if context else None,
                ssl_shutdown_timeout=GOODBYE_S if context else None,
            )
        except OSError as refused:  # includes ssl.SSLError: no TLS, a version too old, no certificate or a wrong one
            accepted.close()
            self._refused.tell(self._loop.time(), f"{connection.host}: {refused}")
