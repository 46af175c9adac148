"""HTTP for plugins: one aiohttp client per worker. The first request imports aiohttp, in a thread. The import takes 11 MiB and 0.1 s of CPU
time. On a busy CPU it would take seconds, and the parent would take the worker for a hung one.

- Connections are kept alive. Their number is bounded, per host and in total. A request without a free connection waits, and the number of
  waiting requests is bounded, too. A kept connection is closed before most servers close it (uvicorn does after 5 s), so a request rarely
  gets a connection that the server is closing.
- No redirects, no proxies from the environment, no cookies, no compression.
- The size of an answer is bounded. The client has no timeouts, because `plugin_work` cancels requests that take too long.
- All failures are OSErrors that name method, URL and cause.
"""

import asyncio
import importlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from epp.plugin import HttpAnswer

if TYPE_CHECKING:
    import aiohttp

CONNECTIONS_PER_HOST = 64
CONNECTIONS_MAX = 256
WAITING_MAX = 1024
KEPT_S = 4.0
BODY_BYTES_MAX = 16 << 20


class HttpClient:
    """Sends HTTP requests for a worker's plugins. Create it in the running loop, and call `close` at the worker's end."""

    def __init__(self) -> None:
        self._opening: asyncio.Task[aiohttp.ClientSession] | None = None
        self._failed: type[Exception] = OSError  # a base class of the client's errors
        self._running = 0

    async def fetch(self, method: str, url: str, headers: Mapping[str, str] | None, body: bytes) -> HttpAnswer:
        """Sends one request and reads its whole answer. Raises OSError."""
        if self._running >= CONNECTIONS_PER_HOST + WAITING_MAX:
            raise OSError(f"{method} {url}: {self._running} requests of plugins are running already")
        self._running += 1
        try:
            session = await asyncio.shield(self._opened())
            began = time.perf_counter()
            sent = session.request(method, url, headers=headers, data=body or None, allow_redirects=False)
            async with sent as answer:
                received = await _bounded(answer)
                seconds = time.perf_counter() - began
                return HttpAnswer(answer.status, {k.lower(): v for k, v in answer.headers.items()}, received, seconds)
        except OSError as problem:
            raise OSError(problem.errno, f"{method} {url}: {problem}") from problem
        except self._failed as problem:
            raise OSError(f"{method} {url}: {type(problem).__name__}: {problem}") from problem
        finally:
            self._running -= 1

    async def close(self) -> None:
        if self._opening is not None:
            await (await self._opening).close()

    def _opened(self) -> "asyncio.Task[aiohttp.ClientSession]":
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        return self._opening

    async def _open(self) -> "aiohttp.ClientSession":
        await asyncio.to_thread(importlib.import_module, "aiohttp")
        import aiohttp

        self._failed = aiohttp.ClientError
        connector = aiohttp.TCPConnector(limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_HOST, keepalive_timeout=KEPT_S)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept-encoding": "identity", "user-agent": "endpoint-picker"},
        )


async def _bounded(answer: "aiohttp.ClientResponse") -> bytes:
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > BODY_BYTES_MAX:
            raise OSError(f"the answer has more than {BODY_BYTES_MAX >> 20} MiB")
    return b"".join(pieces)
