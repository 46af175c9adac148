"""HTTP for plugins: one client per worker, over aiohttp, which is imported with the first request.

- Connections are kept and bounded per host and in all; who finds none free waits, and so many wait at most. A kept connection is
  closed before servers usually do it (uvicorn after 5 s), so that a request rarely meets one that is just closing.
- No redirects, no proxies from the environment, no cookies, no compression.
- An answer is bounded. Timeouts are those of `plugin_work`, which cancels.
- What goes wrong is an OSError that names method, URL and cause.
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
    """Made inside the running loop; `close` at the worker's end."""

    def __init__(self) -> None:
        import aiohttp  # 11 MiB and 0.1 s, which workers without such plugins do not pay

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
        self._under_way = 0

    async def fetch(self, method: str, url: str, headers: Mapping[str, str] | None, body: bytes) -> HttpAnswer:
        """One request and its whole answer."""
        if self._under_way >= CONNECTIONS_PER_HOST + WAITING_MAX:
            raise OSError(f"{method} {url}: {self._under_way} requests of plugins are under way")
        self._under_way += 1
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
            self._under_way -= 1

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
