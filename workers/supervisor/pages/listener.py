"""Accepts connections on the metrics port within a share of the process's time, and divides the places between hosts.

Accepted sockets wait until a place is free and their turn has come. There are CONNECTIONS_MAX places for waiting sockets, handshakes and
connections together. If all are taken, the host with the most places loses one to the new socket: that of the connection that has been
silent longest. So neither idle connections nor a flood from one host keep probes out. A TLS handshake runs outside all turns: its CPU
time is charged to the share, and few handshakes run at the same time.
"""

import asyncio
import errno
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from workers.supervisor.pages.turns import Share

ACCEPTS_AT_ONCE: Final = 4
ACCEPT_SHARE: Final = 0.1  # the share of the process's time that accepting may take
ACCEPT_BURST_S: Final = 0.02
NO_DESCRIPTORS_PAUSE_S: Final = 0.1


class Listener:
    """Calls `take` with each accepted socket and its host."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        take: Callable[[socket.socket, str], None],
        report: Callable[..., None],
        clock: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`cpu`: CPU seconds of this thread."""
        self._loop = loop
        self._listening = listening
        self._take = take
        self._report = report
        self._cpu = cpu
        self._share = Share(ACCEPT_SHARE, ACCEPT_BURST_S, clock)
        self._timer: Any = None

    def open(self) -> None:
        """Begins to accept."""
        self._timer = None
        self._loop.add_reader(self._listening.fileno(), self._readable)

    def close(self) -> None:
        """Accepts no more. The socket stays open: it belongs to the caller."""
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._loop.remove_reader(self._listening.fileno())

    def _readable(self) -> None:
        begun = self._cpu()
        try:
            for _ in range(ACCEPTS_AT_ONCE):
                accepted, peer = self._listening.accept()
                accepted.setblocking(False)
                self._take(accepted, peer[0].removeprefix("::ffff:"))
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            pass
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            self._report("cannot accept a connection on the metrics port", reason=f"{error.strerror}; raise the limit of open files")
            self._pause(NO_DESCRIPTORS_PAUSE_S)
            return
        self._share.spend(self._cpu() - begun)
        if wait_s := self._share.wait_s():
            self._pause(wait_s)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._timer = self._loop.call_later(seconds, self.open)
