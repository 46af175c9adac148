"""A TCP relay on loopback between a picker and its API server. It can become silent without closing a connection.

    passing   bytes pass in both directions
    silent    open connections carry no bytes in either direction and stay open: the half-open watch. New connections pass
    away      the port is closed, and open connections are reset

Each connection has two threads, because there are only few connections.
"""

import contextlib
import socket
import struct
import threading

CHUNK = 65_536
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Relay:
    """The relay. It uses the same port again after `leave` and `come_back`."""

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._host = host
        self._listener = self._listen(0)
        self.port: int = self._listener.getsockname()[1]
        self._links: set[_Link] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def silence(self) -> int:
        """Makes all open connections silent. Returns their number."""
        with self._lock:
            for link in self._links:
                link.silent.set()
            return len(self._links)

    def leave(self) -> None:
        """Refuses new connections and resets open ones, as if the server's machine were gone."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts; a close alone does not
        self._listener.close()
        with self._lock:
            links, self._links = self._links, set()
        for link in links:
            link.reset()

    def come_back(self) -> None:
        """Listens on the same port again."""
        self._listener = self._listen(self.port)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _listen(self, port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self._host, port))
        listener.listen(64)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:  # the listener was shut down
                return
            try:
                far = socket.create_connection(self._to)
            except OSError:
                near.close()
                continue
            link = _Link(near, far)
            with self._lock:
                self._links.add(link)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._copy, args=(link, one, other), daemon=True).start()

    def _copy(self, link: "_Link", one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(CHUNK):
                if not link.silent.is_set():
                    other.sendall(data)
            if not link.silent.is_set():
                other.shutdown(socket.SHUT_WR)
        with self._lock:
            link.halves -= 1
            if not link.halves:
                self._links.discard(link)
                link.close()


class _Link:
    def __init__(self, near: socket.socket, far: socket.socket) -> None:
        self.near, self.far = near, far
        self.silent = threading.Event()
        self.halves = 2

    def reset(self) -> None:
        for end in (self.near, self.far):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.near.close()
        self.far.close()
