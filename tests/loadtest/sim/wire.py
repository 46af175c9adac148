"""A small HTTP client over real loopback sockets, and fleets of simulated servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from loadtest.sim.engine import EngineSettings
from loadtest.sim.fleet import Fleet
from loadtest.sim.server import ServerSettings

PATIENCE_S = 20.0
QUICK = EngineSettings(decode_s=0.0005, prefill_s_per_token=1e-6, lora_load_s=0.0)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The data of server-sent events, decoded except for [DONE]."""
        lines = self.body.decode().split("\n")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [text if text == "[DONE]" else json.loads(text) for text in data]


class Client:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, path: str, body: Any = None, *, headers: Iterable[str] = (), version: str = "1.1") -> None:
        """Sends a GET without a body, or a POST with one. A body that is not bytes is encoded as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/{version}", "Host: sim"]
        lines += headers
        if body is not None:
            lines.append(f"Content-Length: {len(raw)}")
        head = "\r\n".join([*lines, "", ""]).encode()
        self.writer.write(head if body is None else head + raw)

    async def receive(self) -> Answer:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.rstrip("\r\n").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            body = b"".join([piece async for piece in self._chunks()])
        else:
            body = await self.reader.read()
        return Answer(int(first.split(" ")[1]), headers, body)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            if not size:
                return
            yield data[:-2]

    async def ask(self, path: str, body: Any = None, **options: Any) -> Answer:
        self.send(path, body, **options)
        return await self.receive()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:  # the server closed first
            return


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield client
    finally:
        await client.close()


async def ask(port: int, path: str, body: Any = None, **options: Any) -> Answer:
    """Sends one request on a new connection."""
    async with connected(port) as client:
        return await client.ask(path, body, **options)


def with_fleet(work: Callable[[Fleet], Awaitable[None]], *, servers: int = 1, roles: Sequence[str] = ("",), **options: Any) -> None:
    """Runs `work` against a fleet on free ports, under uvloop like `loadtest.sim.main`.

    `options` are the fields of ServerSettings.
    """

    async def run() -> None:
        settings = ServerSettings(**({"engine": QUICK} | options))
        fleet = Fleet([("127.0.0.1", 0)] * servers, settings, roles)
        await fleet.listen()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await work(fleet)
        finally:
            fleet.close()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def until(condition: Callable[[], bool]) -> None:
    """Waits until `condition` is true. PATIENCE_S in `with_fleet` limits the wait."""
    while not condition():
        await asyncio.sleep(0.001)
