"""A stream of bytes to the store, over TCP, TLS or a Unix socket. The stream reads only when its owner asks.

The event loop does not watch the socket. So messages of several replicas within one tick wake the supervisor up once, and cost one read. A
wake-up for each message would cost more than the message.
"""

import asyncio
import socket
import ssl
from typing import Final

READ_BYTES: Final = 1 << 16
READS_MAX: Final = 32  # reads in one call; the rest waits in the socket
CLOSED = "the store has closed the connection"


class ByteStream:
    """A connected stream, made by `open`. After an exception, only `close` may be called."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unsent = b""
        self._tls: ssl.SSLObject | None = None
        self._encrypted_in, self._encrypted_out = ssl.MemoryBIO(), ssl.MemoryBIO()

    @classmethod
    async def open(cls, where: tuple[str, int] | str, tls: ssl.SSLContext | None) -> "ByteStream":
        """Connects to a host and port, or to the path of a socket. Raises OSError or ssl.SSLError."""
        if isinstance(where, str):
            return cls(await _connected(socket.AF_UNIX, where))
        stream = cls(await _first_connected(*where))
        if tls is not None:
            try:
                await stream._encrypt(tls, where[0])
            except BaseException:
                stream.close()
                raise
        return stream

    def read(self) -> bytes:
        """Returns the received bytes without waiting, or b"". Raises OSError, also if the other side has closed the stream."""
        self._send_rest()
        parts: list[bytes] = []
        for _ in range(READS_MAX):
            try:
                data = self._socket.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            parts.append(self._arrived(data))
            if len(data) < READ_BYTES:
                break
        return b"".join(parts) if len(parts) != 1 else parts[0]

    async def wait(self) -> bytes:
        """Waits until bytes are received, and returns them. Raises the exceptions of `read`."""
        loop = asyncio.get_running_loop()
        if self._unsent:
            unsent, self._unsent = self._unsent, b""
            await loop.sock_sendall(self._socket, unsent)
        return self._arrived(await loop.sock_recv(self._socket, READ_BYTES))

    def write(self, data: bytes) -> None:
        """Sends what fits into the socket; the rest follows when the stream is read. Raises OSError."""
        if self._tls is not None:
            self._tls.write(data)
            data = self._encrypted_out.read()
        self._unsent += data
        self._send_rest()

    def close(self) -> None:
        """Closes the socket without a TLS shutdown."""
        self._socket.close()

    async def _encrypt(self, tls: ssl.SSLContext, host: str) -> None:
        """Does the handshake of TLS. Raises ssl.SSLError or OSError."""
        loop = asyncio.get_running_loop()
        encrypted = tls.wrap_bio(self._encrypted_in, self._encrypted_out, server_hostname=host)
        done = False
        while not done:
            try:
                encrypted.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            if self._encrypted_out.pending:
                await loop.sock_sendall(self._socket, self._encrypted_out.read())
            if not done:
                data = await loop.sock_recv(self._socket, READ_BYTES)
                if not data:
                    raise ConnectionError(CLOSED)
                self._encrypted_in.write(data)
        self._tls = encrypted

    def _send_rest(self) -> None:
        if not self._unsent:
            return
        try:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            return

    def _arrived(self, data: bytes) -> bytes:
        """Returns the content of received bytes."""
        if not data:
            raise ConnectionError(CLOSED)
        if self._tls is None:
            return data
        self._encrypted_in.write(data)
        parts: list[bytes] = []
        while True:
            try:
                part = self._tls.read(READ_BYTES)
            except ssl.SSLWantReadError:
                return b"".join(parts)
            if not part:
                raise ConnectionError(CLOSED)
            parts.append(part)


async def _first_connected(host: str, port: int) -> socket.socket:
    """Connects to the first address of a host that accepts. Raises the OSError of the last address."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failure = OSError(f"{host} has no address")
    for family, _, _, _, address in addresses:
        try:
            connected = await _connected(family, address)
        except OSError as refused:
            failure = refused
            continue
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connected
    raise failure


async def _connected(family: int, address: tuple[object, ...] | str) -> socket.socket:
    """Connects a new socket, which never blocks. Raises OSError."""
    new = socket.socket(family, socket.SOCK_STREAM)
    try:
        new.setblocking(False)
        await asyncio.get_running_loop().sock_connect(new, address)
    except BaseException:
        new.close()
        raise
    return new
