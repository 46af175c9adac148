"""Looks at the first bytes of a peer, before TLS takes them."""

import asyncio
import socket

from workers.transport.limits import HANDSHAKE_SECONDS
from workers.transport.wrong_protocol import PEEK_BYTES


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
