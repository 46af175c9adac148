"""Unpacks gzip with two limits: the limit of the caller, and a ratio that real text does not exceed.

A kilobyte of gzip can unpack to a megabyte of zeros. Text and JSON shrink 3 to 20 times, so content that shrinks more than RATIO_MAX times
is refused, because it would only cost memory. Content of up to FREE_BYTES is harmless and allowed at any ratio.
"""

import zlib
from collections.abc import Generator
from typing import Final, TypeAlias

from epp.errors import Cause, Refused

GZIP: Final = 16 + zlib.MAX_WBITS
MEMBERS_MAX: Final = 64  # gzip members in one body
RATIO_MAX: Final = 50  # unpacking briefly holds the content twice: 100 bytes of memory per byte that was sent
FREE_BYTES: Final = 1 << 20  # content of up to this many bytes is allowed at any ratio
STEP_BYTES: Final = 1 << 19  # unpacked per step: 1 to 2 ms
READ_BYTES: Final = 1 << 17  # input per step

Unpacking: TypeAlias = Generator[int, None, bytes]


class TooLong(ValueError):
    """Says that the content is longer than the limit."""


def reach(size: int, limit: int) -> int:
    """Returns the longest content that is allowed for `size` bytes of gzip if the caller allows `limit` bytes."""
    return min(limit, FREE_BYTES + RATIO_MAX * size)


def slices(data: bytes | memoryview, limit: int) -> Unpacking:
    """Unpacks one or several gzip members in steps, and returns the content. Yields after each step how many bytes the step has unpacked,
    so that other streams can run in between. Raises TooLong, and ValueError if the data are not complete gzip.
    """
    view, at, members = memoryview(data), 0, 1
    parts: list[bytes] = []
    before = left = limit = reach(len(data), limit)
    member, chunk, short = zlib.decompressobj(GZIP), b"", True
    while True:
        if short and not chunk:
            chunk = bytes(view[at : at + READ_BYTES])
            at += len(chunk)
            if not chunk:
                raise ValueError("gzip is cut off")
        room = min(left + 1, STEP_BYTES)
        try:
            parts.append(part := member.decompress(chunk, room))
        except zlib.error as error:
            raise ValueError(f"not gzip: {error}") from None
        left -= len(part)
        if left < 0:
            raise TooLong(f"more than {limit} bytes unpacked")
        chunk, short = member.unconsumed_tail, len(part) < room
        if member.eof:
            at -= len(member.unused_data)
            if at == len(view):
                break
            if members == MEMBERS_MAX:
                raise ValueError(f"gzip of more than {MEMBERS_MAX} members")
            member, chunk, short, members = zlib.decompressobj(GZIP), b"", True, members + 1
        else:
            yield before - left
            before = left
    if len(parts) > 1:
        yield before - left
    return parts[0] if len(parts) == 1 else b"".join(parts)


def gunzip(data: bytes | memoryview, limit: int) -> bytes:
    """Unpacks at once and returns the content. Raises like `slices`."""
    return at_once(slices(data, limit))


def at_once(steps: Unpacking) -> bytes:
    """Runs all steps and returns the content."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            content: bytes = done.value
            return content


def body_slices(body: bytes | memoryview, coding: str, limit: int) -> Unpacking | None:
    """Unpacks the body of a request in steps (see `slices`). Returns None if the body has no content coding. Raises Refused, at once or in
    a step, if the coding is not gzip or the content has more than `limit` bytes.
    """
    name = coding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "x-gzip"):
        raise Refused(Cause.INVALID_BODY, f"content-encoding '{name[:40]}' is not supported: send the body plain or as gzip")
    return _or_refused(body, limit)


def _or_refused(body: bytes | memoryview, limit: int) -> Unpacking:
    try:
        return (yield from slices(body, limit))
    except TooLong:
        raise Refused(Cause.BODY_TOO_LARGE, str(reach(len(body), limit))) from None
    except ValueError as problem:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {problem}") from None
