"""HTTP for plugins: one aiohttp client per worker. aiohttp is imported for the first request.

- Connections are kept alive. Their number is bounded, per host and in total. A request without a free connection waits, and the number of
  waiting requests is bounded, too. A kept connection is closed before most servers close it (uvicorn does after 5 s), so a request rarely
  gets a connection that the server is closing.
- No redirects, no proxies from the environment, no cookies, no compression.
- The size of an answer is bounded. The client has no timeouts, because `plugin_work` cancels requests that take too long.
- All failures are OSErrors that name method, URL and cause.
"""

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
        import aiohttp  # takes 11 MiB and 0.1 s, so only workers with plugins that use HTTP import it

        connector = aiohttp.TCPConnector(
            limit=CONNECTIONS_MAX, limit_per_host=CONNECTIONS_PER_HOST, keepalive_timeout=KEPT_S
        )
        self._failed = aiohttp.ClientError
        self._session: aiohttp.ClientSession = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept-encoding": "identity", "user-agent": "endpoint-picker"},
        )
        self._running = 0

    async def fetch(self, method: str, url: str, headers: Mapping[str, str] | None, body: bytes) -> HttpAnswer:
        """Sends one request and reads its whole answer. Raises OSError."""
        if self._running >= CONNECTIONS_PER_HOST + WAITING_MAX:
            raise OSError(f"{method} {url}: {self._running} requests of plugins are running already")
        self._running += 1
        began = time.perf_counter()
        try:
            sent = self._session.request(method, url, headers=headers, data=body or None, allow_redirects=False)
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
        await self._session.close()


async def _bounded(answer: "aiohttp.ClientResponse") -> bytes:
    pieces, size = [], 0
    async for piece in answer.content.iter_any():
        pieces.append(piece)
        size += len(piece)
        if size > BODY_BYTES_MAX:
            raise OSError(f"the answer has more than {BODY_BYTES_MAX >> 20} MiB")
    return b"".join(pieces)
