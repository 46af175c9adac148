"""Attacks the metrics port, and files that the picker watches. `tests.faults.attacks` runs these attacks by name.

Each function takes the port, or the file, and the seconds for which it attacks. It returns how many of its connections were closed.
"""

import contextlib
import itertools
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

CLIENTS = 8
SLOW_READERS = 100
FLAPS_PER_S = 100
PIECE = 64 << 10

Bytes = Callable[[], Iterator[bytes]]


def _blank_lines() -> Iterator[bytes]:
    return itertools.repeat(b"\r\n" * (PIECE // 2))


def _blank_lines_slowly() -> Iterator[bytes]:
    return itertools.repeat(b"\r\n")


def _pipelined() -> Iterator[bytes]:
    return itertools.repeat(b"GET / HTTP/1.0\n\n" * 1000)


def _requests() -> Iterator[bytes]:
    return itertools.repeat(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")


def _endless_head() -> Iterator[bytes]:
    return itertools.chain([b"GET /metrics HTTP/1.1\r\nHost: x\r\n"], itertools.repeat(b"X-Y: z\r\n"))


def _page(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def _pages() -> Iterator[bytes]:
    return itertools.repeat(_page("/metrics"))


_of_all_pages = itertools.cycle(("/metrics", "/debug/decisions", "/healthz", "/readyz", "/nothing"))


def _every_page() -> Iterator[bytes]:
    """Yields requests for one page without end. The next connection asks for the next page."""
    return itertools.repeat(_page(next(_of_all_pages)).replace(b"Connection: close\r\n", b""))


def _connected(port: int) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), 5)
    client.setblocking(False)
    return client


def pour(port: int, script: Bytes, seconds: float, *, clients: int = CLIENTS, read: bool = True) -> int:
    """Sends on several connections as fast as the picker reads, and replaces each connection that ends.

    `read`: whether it reads the answers.
    """
    until, closed = time.monotonic() + seconds, 0
    held: dict[socket.socket, tuple[Iterator[bytes], bytes]] = {}
    while time.monotonic() < until:
        while len(held) < clients:
            with contextlib.suppress(OSError):
                held[_connected(port)] = (script(), b"")
        readable, writable, _ = select.select(list(held) if read else [], list(held), [], 0.1)
        for client in {*readable, *writable}:
            pieces, pending = held[client]
            try:
                if client in readable and not client.recv(1 << 18):
                    raise ConnectionError
                if client in writable:
                    pending = pending or next(pieces)
                    held[client] = (pieces, pending[client.send(pending) :])
            except BlockingIOError:
                pass
            except OSError:
                del held[client]
                client.close()
                closed += 1
        if not read:
            time.sleep(0.01)
    for client in held:
        client.close()
    return closed


def reconnect(port: int, seconds: float) -> int:
    """Opens connections and closes them at once."""
    until, closed = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            _connected(port).close()
            closed += 1
    return closed


def flap(file: str, seconds: float) -> int:
    """Rewrites an endpoints file FLAPS_PER_S times a second: endpoints appear, change and go. Restores it at the end."""
    path, until, count = Path(file), time.monotonic() + seconds, 0
    original = path.read_bytes()
    entry = '- {{name: flap-{0}, address: 127.1.{1}.{0}, port: "9", labels: {{turn: "{1}"}}}}\n'
    while time.monotonic() < until:
        count += 1
        more = "".join(entry.format(n, count % 250) for n in range(count % 50)).encode()
        path.with_suffix(".new").write_bytes(original + (more if count % 7 else b"- {broken"))
        path.with_suffix(".new").replace(path)
        time.sleep(1 / FLAPS_PER_S)
    path.write_bytes(original)
    return count


PAGE_ATTACKS: dict[str, Callable[[int, float], int]] = {
    "pages: blank lines": lambda port, seconds: pour(port, _blank_lines, seconds, read=False),
    "pages: blank lines slowly": lambda port, seconds: pour(port, _blank_lines_slowly, seconds),
    "pages: pipelining": lambda port, seconds: pour(port, _pipelined, seconds),
    "pages: many requests": lambda port, seconds: pour(port, _requests, seconds),
    "pages: endless head": lambda port, seconds: pour(port, _endless_head, seconds),
    "pages: scrapes": lambda port, seconds: pour(port, _pages, seconds, clients=32),
    "pages: slow readers": lambda port, seconds: pour(port, _every_page, seconds, clients=SLOW_READERS, read=False),
    "pages: connections": reconnect,
}
FILE_ATTACKS: dict[str, Callable[[str, float], int]] = {"endpoints file": flap}
