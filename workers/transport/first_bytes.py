"""Looks at the first bytes of a peer, before TLS takes them."""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from workers.transport.limits import HANDSHAKE_SECONDS, LINGER_SECONDS
from workers.transport.wrong_protocol import PEEK_BYTES, PLAINTEXT_PEER, http1_answer, speaks_http1, speaks_plaintext

DISCARDED_BYTES: Final = 1 << 16


async def first_bytes(loop: asyncio.AbstractEventLoop, accepted: socket.socket) -> bytes:
    """Returns what a peer has sent first, up to PEEK_BYTES, and leaves it to the next reader. Raises TimeoutError after HANDSHAKE_SECONDS.

    b"": the peer has left without a word.
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

    A peer that leaves without a word has begun no handshake: so do probes of load balancers. A gateway begins at once.
    Plain HTTP/1 gets an answer that says what this port is. A gateway that speaks plain HTTP/2 is only cut off, because it shows nobody
    a text.
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
    """Returns the peer's address; "" if the peer has left already."""
    try:
        return str(accepted.getpeername()[0]).removeprefix("::ffff:")
    except OSError:
        return ""
