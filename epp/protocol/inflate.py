"""gzip, read with a limit: what comes out never grows beyond what the caller allows, nor beyond what text can shrink by.

A kilobyte of gzip may stand for a megabyte of zeros. Text and JSON shrink 3 to 20 times; what claims more than RATIO_MAX costs memory
and is worth nothing, except for short content, where it does no harm."""

import zlib
from collections.abc import Generator
from typing import Final, TypeAlias

from epp.errors import Cause, Refused

GZIP: Final = 16 + zlib.MAX_WBITS
MEMBERS_MAX: Final = 64  # of one body
RATIO_MAX: Final = 50  # unpacking needs the content twice for a moment: 100 bytes for one that was sent
FREE_BYTES: Final = 1 << 20  # at any ratio
STEP_BYTES: Final = 1 << 19  # unpacked at a stretch, which takes a millisecond or two
READ_BYTES: Final = 1 << 17  # for that

Unpacking: TypeAlias = Generator[None, None, bytes]


class TooLong(ValueError):
    """More comes out than is allowed."""


def reach(size: int, limit: int) -> int:
    """How long the content of `size` bytes of gzip may be, where `limit` is allowed."""
    return min(limit, FREE_BYTES + RATIO_MAX * size)


def slices(data: bytes | memoryview, limit: int) -> Unpacking:
    """The content of one or several gzip members, unpacked in steps: after each, others may have their turn. The generator returns
    it. Raises TooLong, or ValueError for what is no whole gzip."""
    view, at, members = memoryview(data), 0, 1
    parts: list[bytes] = []
    left = limit = reach(len(data), limit)
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
            raise ValueError(f"no gzip: {error}") from None
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
            yield
    if len(parts) > 1:
        yield
    return parts[0] if len(parts) == 1 else b"".join(parts)


def gunzip(data: bytes | memoryview, limit: int) -> bytes:
    """All that `slices` gives, at once."""
    return at_once(slices(data, limit))


def at_once(steps: Unpacking) -> bytes:
    """All steps, one after the other."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            content: bytes = done.value
            return content


def body_slices(body: bytes | memoryview, coding: str, limit: int) -> Unpacking | None:
    """A request's body without its content coding, unpacked in steps; None: it has none. Raises Refused, at once or in a step: not
    gzip, or more than `limit` bytes."""
    name = coding.strip().lower()
    if name in ("", "identity"):
        return None
    if name not in ("gzip", "x-gzip"):
        raise Refused(
            Cause.INVALID_BODY, f"content-encoding '{name[:40]}' is not supported: send the body plain or as gzip"
        )
    return _judged(body, limit)


def _judged(body: bytes | memoryview, limit: int) -> Unpacking:
    try:
        return (yield from slices(body, limit))
    except TooLong:
        raise Refused(Cause.BODY_TOO_LARGE, str(reach(len(body), limit))) from None
    except ValueError as problem:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {problem}") from None
