"""Attacks the TLS handshakes of an ext_proc port from many addresses: halves of it, garbled names, and garbage after it.

`tests.faults.attacks` runs them by name. `garble` returns how many of its connections the picker closed.
"""

import contextlib
import itertools
import random
import select
import socket
import time
from collections.abc import Iterator

from tests.tls_client import client_hello

HOSTS = [f"127.0.0.{number}" for number in range(4, 20)]
AT_ONCE = 200
SERVER_NAME = "picker.attack"


def _messages(rng: random.Random) -> Iterator[bytes]:
    whole = client_hello(SERVER_NAME)
    at = whole.index(SERVER_NAME.encode())
    for kind in itertools.cycle(range(6)):
        if kind == 0:  # half a handshake; the rest never comes
            yield whole[: rng.randrange(1, len(whole))]
        elif kind == 1:  # garbage for a name
            yield whole[:at] + rng.randbytes(len(SERVER_NAME)) + whole[at + len(SERVER_NAME) :]
        elif kind == 2:  # a name whose length is wrong
            yield whole[: at - 2] + b"\xff\xff" + whole[at:]
        elif kind == 3:  # the longest name
            yield client_hello(".".join(["x" * 63] * 3))
        elif kind == 4:  # a handshake and a second one, as a client of TLS 1.2 would ask for another key
            yield whole + whole
        else:  # records of garbage
            yield whole + b"\x16\x03\x03\x40\x00" + rng.randbytes(1 << 14)


def garble(port: int, seconds: float) -> int:
    """Keeps AT_ONCE connections open, replaces each one that ends, and reads no answer completely."""
    until, closed = time.monotonic() + seconds, 0
    messages, hosts = _messages(random.Random(1)), itertools.cycle(HOSTS)
    held: dict[int, socket.socket] = {}
    poll = select.epoll()
    try:
        while time.monotonic() < until:
            for _ in range(min(50, AT_ONCE - len(held))):
                peer = socket.socket()
                peer.setblocking(False)
                peer.bind((next(hosts), 0))
                peer.connect_ex(("127.0.0.1", port))
                held[peer.fileno()] = peer
                poll.register(peer, select.EPOLLOUT)
            for number, event in poll.poll(0.02):
                if event == select.EPOLLOUT:
                    with contextlib.suppress(OSError):  # it may be closed already
                        held[number].send(next(messages))
                    poll.modify(number, select.EPOLLRDHUP)
                else:
                    poll.unregister(number)
                    held.pop(number).close()
                    closed += 1
    finally:
        for peer in held.values():
            peer.close()
        poll.close()
    return closed
