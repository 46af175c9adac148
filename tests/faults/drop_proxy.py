"""A TCP proxy on loopback that can drop everything, as a partition does: connections stay open, and nothing arrives."""

import asyncio
import contextlib
import threading
from typing import Self

LOOPBACK = "127.0.0.1"
CHUNK = 1 << 16


class DropProxy:
    """Forwards connections to a port. While `drops` is true, it accepts new ones and forwards nothing; what is dropped is lost."""

    def __init__(self, to_port: int) -> None:
        self.drops = False
        self.port = 0
        self._to_port = to_port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._loop: asyncio.AbstractEventLoop
        self._over: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accepted, LOOPBACK, 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._over.wait()
        server.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            with contextlib.suppress(OSError):
                there, back = await asyncio.open_connection(LOOPBACK, self._to_port)
                writers.append(back)
                await asyncio.gather(self._forward(reader, back), self._forward(there, writer))
        finally:
            for each in writers:
                each.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            if not self.drops:
                writer.write(data)
                await writer.drain()
        writer.close()
