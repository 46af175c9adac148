"""gzip, read with a limit: what comes out never grows beyond what the caller allows, whatever went in."""

import zlib
from typing import Final

from epp.errors import Cause, Refused

GZIP: Final = 16 + zlib.MAX_WBITS
MEMBERS_MAX: Final = 64  # of one body


class TooLong(ValueError):
    """More comes out than is allowed."""


def gunzip(data: bytes | memoryview, limit: int) -> bytes:
    """The content of one or several gzip members. Raises TooLong, or ValueError for what is no whole gzip."""
    parts: list[bytes] = []
    left = limit
    for _ in range(MEMBERS_MAX):
        member = zlib.decompressobj(GZIP)
        try:
            parts.append(member.decompress(data, left + 1))
        except zlib.error as error:
            raise ValueError(f"no gzip: {error}") from None
        left -= len(parts[-1])
        if left < 0:
            raise TooLong(f"more than {limit} bytes unpacked")
        if not member.eof:
            raise ValueError("gzip is cut off")
        data = member.unused_data
        if not data:
            return parts[0] if len(parts) == 1 else b"".join(parts)
    raise ValueError(f"gzip of more than {MEMBERS_MAX} members")


def unpacked(body: bytes | memoryview, coding: str, limit: int) -> bytes | memoryview:
    """A request's body without its content coding. Raises Refused: not gzip, or more than `limit` bytes."""
    name = coding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in ("gzip", "x-gzip"):
        raise Refused(
            Cause.INVALID_BODY, f"content-encoding '{name[:40]}' is not supported: send the body plain or as gzip"
        )
    try:
        return gunzip(body, limit)
    except TooLong:
        raise Refused(Cause.BODY_TOO_LARGE, str(limit)) from None
    except ValueError as problem:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {problem}") from None
