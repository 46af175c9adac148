"""Decides when a TLS handshake may begin, and looks at the first bytes of a peer, before TLS takes them.

Hosts that begin too many handshakes must wait. Handshakes that would wait too long are refused.

A handshake costs a worker about 2 ms and costs its client nothing, because one fixed message is enough. Handshakes run on the same loop as
the streams. So each host has a pace: `GAP_S` between two handshakes, and `PER_SECOND` after the first `BURST`. A gateway that opens all its
connections at once stays within the burst. The pace bounds the share of a worker's time that one host can take.

When a connection that has carried a request closes, its handshake is given back to the burst, because its client has paid for it, too.
NGINX Gateway Fabric opens a connection for each request, so only the gap limits it.

This module does not limit all hosts together. The limit of connections bounds them.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from workers.transport.limits import HANDSHAKE_SECONDS, LINGER_SECONDS
from workers.transport.wrong_protocol import PEEK_BYTES, PLAINTEXT_PEER, http1_answer, speaks_http1, speaks_plaintext

GAP_S: Final = 0.005
PER_SECOND: Final = 50.0
BURST: Final = 64
WAIT_S_MAX: Final = 2.0
HOSTS_MAX: Final = 1024  # all hosts above this number share one pace
DISCARDED_BYTES: Final = 1 << 16
_OTHERS: Final = ""


class HandshakePace:
    """Keeps the paces of all hosts. Times are monotonic seconds."""

    def __init__(self) -> None:
        # Host -> when its last handshake begins, and when its burst is complete again.
        self._hosts: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def wait_s(self, host: str, now: float) -> float | None:
        """Counts a new handshake of the host, and returns the seconds until it may begin. If the handshake is refused, does not count it
        and returns None.
        """
        if host not in self._hosts and len(self._hosts) >= HOSTS_MAX:
            self._hosts = {known: pace for known, pace in self._hosts.items() if max(pace) > now}
            host = host if len(self._hosts) < HOSTS_MAX else _OTHERS
        last, whole_at = self._hosts.get(host, (now - GAP_S, now))
        begin = max(now, last + GAP_S, whole_at - (BURST - 1) / PER_SECOND)
        if begin - now > WAIT_S_MAX:
            return None
        self._hosts[host] = (begin, max(whole_at, begin) + 1 / PER_SECOND)
        return begin - now

    def give_back(self, host: str) -> None:
        """Stops counting one handshake of the host, because a connection of the host has carried a request."""
        host = host if host in self._hosts else _OTHERS
        if host in self._hosts:
            last, whole_at = self._hosts[host]
            self._hosts[host] = (last, whole_at - 1 / PER_SECOND)


async def first_bytes(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> bytes:
    """Returns the first bytes of a peer, up to PEEK_BYTES, and leaves them to the next reader. Raises TimeoutError after HANDSHAKE_SECONDS.

    Returns b"" if the peer has left without sending bytes.
    """
    readable = loop.create_future()
    loop.add_reader(accepted.fileno(), _done, readable)
    try:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            await readable
    finally:
        loop.remove_reader(accepted.fileno())
    try:
        return accepted.recv(PEEK_BYTES, socket.MSG_PEEK)
    except ConnectionResetError:
        return b""


def _done(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


async def speaks_tls(loop: asyncio.AbstractEventLoop, accepted: socket.socket, on_abuse: Callable[[str], None]) -> bool:
    """Looks at a peer's first bytes before TLS does. If the peer speaks plaintext, reports this and returns False. Raises OSError.

    A peer that leaves without sending bytes, such as a probe of a load balancer, has begun no handshake. A gateway begins at once. Plain
    HTTP/1 gets an answer that describes this port. A connection with plain HTTP/2 is only cut off, because no user would see a text.
    """
    begin = await first_bytes(loop, accepted)
    if not begin:
        return False
    if not speaks_plaintext(begin):
        return True
    on_abuse(f"{PLAINTEXT_PEER}, from {host_of(accepted)}")
    # unread bytes would make TCP reset the connection, and the peer could lose the answer
    accepted.recv(DISCARDED_BYTES)
    if speaks_http1(begin):
        accepted.send(http1_answer(begin, secure=True))
    accepted.shutdown(socket.SHUT_WR)
    await asyncio.sleep(LINGER_SECONDS)
    return False


def host_of(accepted: socket.socket) -> str:
    """Returns the peer's address, or "" if the peer has left already."""
    try:
        return str(accepted.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return ""
