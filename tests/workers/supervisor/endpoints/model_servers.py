"""Real servers on loopback that answer scrapes as a test wants."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import uvloop

from tests.waiting import until
from tests.workers.supervisor.endpoints.scraping import Seen, reader
from workers.shared.scrape_pace import Pacing
from workers.supervisor.endpoints.http_client import Dialer, Dialing
from workers.supervisor.endpoints.scrape import Scraper

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(test: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test, 20))


def serving(*pieces: bytes, then: str = "keep", pause_s: float = 0.0) -> Serve:
    """A server that answers every request with these pieces."""

    async def serve(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        try:
            while await incoming.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    out.write(piece)
                    # A slow server.
                    await asyncio.sleep(pause_s)
                if then == "close":
                    break
                if then == "hang":
                    await asyncio.Event().wait()
                while then == "flood":
                    out.write(b"x" * 65536)
                    await out.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            out.close()

    return serve


class Servers:
    """Servers on free ports, and a scraper for all of them."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.servers: list[asyncio.Server] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        loop = asyncio.get_running_loop()
        dialer = Dialer(loop)
        self.scraper = Scraper(
            loop, pacing=Pacing(0.05), dialing=Dialing(dialer.dial, dialer.knock), inflight=lambda slot: 0, sink=self.seen
        )
        self.scraper.start()

    async def add(self, tag: str, serve: Serve) -> asyncio.Server:
        async def tracked(incoming: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self.tasks.add(task)
            await serve(incoming, out)

        server = await asyncio.start_server(tracked, "127.0.0.1", 0)
        self.servers.append(server)
        self.scraper.add(tag, 0, server.sockets[0].getsockname()[:2], reader())
        return server

    def good(self, tag: str) -> int:
        return sum(entry[0] == tag for entry in self.seen.good)

    def causes(self, tag: str) -> set[str]:
        return {cause for name, cause, _ in self.seen.bad if name == tag}

    async def close(self) -> None:
        self.scraper.close()
        for server in self.servers:
            server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        me = asyncio.current_task()
        await until(lambda: all(task is me or "wait_for" in repr(task) for task in asyncio.all_tasks()), "no task is left")
