"""Reads the answers of the store in RESP 3, within limits, so that a hostile store can neither fill the memory nor cause other exceptions.

    answers   +text, -error, :number, $bytes, _ (none), and small arrays and maps of these
    messages  >3 "message" channel data

An answer has at most REPLY_BYTES_MAX bytes, ELEMENTS_MAX elements and DEPTH_MAX levels. A size beyond the limit is refused before its bytes
arrive.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from compiled.calls import answers
from workers.replicas.wire import MESSAGE_BYTES_MAX

REPLY_BYTES_MAX: Final = 2 * MESSAGE_BYTES_MAX
LINE_BYTES_MAX: Final = 4096
ELEMENTS_MAX: Final = 64
DEPTH_MAX: Final = 4
DIGITS_MAX: Final = 19
NEGATIVE: Final = re.compile(rb"-[0-9]{1,19}")
ARRAYS: Final = {ord("*"): 1, ord(">"): 1, ord("~"): 1, ord("%"): 2}  # kind -> elements per counted item


class InvalidReply(Exception):
    """Raised if the store has sent bytes that are no RESP 3, or that exceed the limits."""


class Refusal(NamedTuple):
    """An error as an answer of the store."""

    text: str


class _More(Exception):
    """Raised if the rest of an answer has not arrived yet."""


class Replies:
    """Collects received bytes, and yields complete answers and messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields each complete message as a pair of channel and content, and each complete answer as Refusal, bytes, int, None, or a list
        of these. Raises InvalidReply.
        """
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        try:
            while at < end:
                usual, at = answers(data, at, REPLY_BYTES_MAX)
                yield from usual
                if at < end:
                    value, at = _value(data, at, 0)
                    yield value
        except _More:
            if end - at > REPLY_BYTES_MAX:
                raise InvalidReply(f"an answer of more than {REPLY_BYTES_MAX} bytes") from None
        self._rest = data[at:]


def _value(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    """Returns the value that begins at `at`, and the position of its end. Raises _More or InvalidReply."""
    stop = data.find(b"\r\n", at, at + LINE_BYTES_MAX)
    if stop < 0:
        if len(data) - at >= LINE_BYTES_MAX:
            raise InvalidReply("a line without end")
        raise _More
    kind, line, at = data[at], data[at + 1 : stop], stop + 2
    if kind == 0x24:  # $
        size = _number(line)
        if size == -1:
            return None, at
        if not 0 <= size <= REPLY_BYTES_MAX:
            raise InvalidReply(f"an answer has a negative size or more than {REPLY_BYTES_MAX} bytes")
        if len(data) < at + size + 2:
            raise _More
        return data[at : at + size], at + size + 2
    if kind == 0x3A:  # :
        return _number(line), at
    if kind == 0x2B:  # +
        return line, at
    if kind == 0x2D:  # -
        return Refusal(line.decode(errors="replace")), at
    if kind == 0x5F:  # _
        return None, at
    if kind not in ARRAYS or depth >= DEPTH_MAX:
        raise InvalidReply("an answer of a kind that no store sends to the picker")
    count = _number(line) * ARRAYS[kind]
    if not 0 <= count <= ELEMENTS_MAX:
        raise InvalidReply(f"a negative number of elements or more than {ELEMENTS_MAX}")
    values = []
    for _ in range(count):
        value, at = _value(data, at, depth + 1)
        values.append(value)
    return values, at


def _number(line: bytes) -> int:
    if not (line.isdigit() and len(line) <= DIGITS_MAX) and NEGATIVE.fullmatch(line) is None:
        raise InvalidReply("a number was expected")
    return int(line)
