"""Gets one page over HTTP as the picker would: straight from the server, never through the proxy that the environment names.

Commands ask servers that the picker reaches by their addresses, and ports of this machine. A proxy reaches neither.
"""

import http.client
import math
import ssl
import time
import urllib.request
from collections.abc import Mapping
from typing import Final, NamedTuple

READ_BYTES: Final = 1 << 16
SHOWN_CHARS: Final = 200
NO_FIELDS: Final[Mapping[str, str]] = {}


class NoHttpError(OSError):
    """Raised for an answer that is not HTTP, or not complete."""


class HttpPage(NamedTuple):
    """A page. `date`: its header `Date`, or ""."""

    content: bytes
    date: str


def get(
    url: str,
    timeout_s: float,
    *,
    bytes_max: int,
    within_s: float = math.inf,
    context: ssl.SSLContext | None = None,
    fields: Mapping[str, str] = NO_FIELDS,
) -> HttpPage:
    """Returns the first `bytes_max` bytes of a page. Raises OSError, and ValueError for a wrong URL.

    `timeout_s`: limit for each step. `within_s`: limit for the whole page, so that a server that sends byte by byte ends, too.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    until = time.monotonic() + within_s
    parts, size = [], 0
    try:
        with opener.open(urllib.request.Request(url, headers=dict(fields)), timeout=timeout_s) as answer:
            while size < bytes_max and (part := answer.read1(min(READ_BYTES, bytes_max - size))):
                parts.append(part)
                size += len(part)
                if time.monotonic() > until:
                    raise TimeoutError(f"no whole page within {within_s:g} s")
            if size < bytes_max and answer.length:
                raise http.client.IncompleteRead(b"", answer.length)
            return HttpPage(b"".join(parts), answer.headers.get("Date", ""))
    except http.client.HTTPException as strange:
        raise NoHttpError(f"no complete answer over HTTP: {repr(strange)[:SHOWN_CHARS]}") from strange
