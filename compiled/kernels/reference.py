"""The kernels in NumPy and plain Python. They define what the kernels in C compute, and run where those are not built."""

import re
from collections.abc import Coroutine, Mapping
from functools import reduce
from operator import xor
from struct import Struct
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

UUID: Final = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
SHIFT_BYTES_MAX: Final = 256  # how far from its old position `recall` looks for a series
AMBIGUOUS: Final = (b"\n#", b"\n\n", b"\n\r", b"\n ", b"\n\t")  # the family may continue after such a line, or with it
ENDS: Final = (b"\n# HELP ", b"\n# TYPE ", b"\n# EOF")  # the family ends before such a line
NO_SAMPLE: Final = (b"#", b"\n", b"\r")
MESSAGE: Final = re.compile(rb">3\r\n\$7\r\nmessage\r\n\$([0-9]{1,10})\r\n")
SIZE: Final = re.compile(rb"..\$([0-9]{1,10})\r\n", re.DOTALL)  # behind the channel
NUMBER: Final = re.compile(rb":([0-9]{1,18})\r\n")

find: Final = bytes.find
# framed_message(data, at): reads, at data[at:at + 14], the header of an HTTP/2 frame and the prefix of a gRPC message. Returns five
# numbers: the frame's length and type in one word, flags, stream; the message's compressed flag and length.
framed_message: Final = Struct(">IBIBI").unpack_from


def data_header(size: int, number: int) -> bytes:
    """Returns the header of a DATA frame without flags, for a payload of `size` bytes on stream `number`."""
    return (size << 48 | number).to_bytes(9, "big")  # type and flags are 0


def numbered(frame: bytes, number: int) -> bytes:
    """Returns the same frame with another stream number."""
    return frame[:5] + number.to_bytes(4, "big") + frame[9:]


def header(message: bytes, needle: bytes, start: int, end: int) -> str | None:
    """Returns the value of a header in message[start:end] as Latin-1 text; None if the header is not there, or not encoded as gateways
    encode it.

    `needle`: the bytes before the length of the value.
    """
    key = message.find(needle, start, end)
    at = key + len(needle)
    if key < 2 or at >= min(end, len(message)):
        return None
    size = message[at]
    # The length of the entry proves that this is a header: tag, length, key, tag, length, value.
    proven = message[key - 2] == 0x0A and message[key - 1] == len(needle) + 1 + size
    if size > 0x7F or at + size >= min(end, len(message)) or not proven:
        return None
    return message[at + 1 : at + 1 + size].decode("latin-1")


def header_values(message: bytes, names: tuple[str, ...], start: int, end: int) -> tuple[str | None, ...] | None:
    """Returns the values of some headers. None means that the caller has to decode all headers.

    The kernel in C returns None, too, for headers that it does not read. This function always returns None.
    """
    return None


def mentions(data: bytes, text: bytes, start: int, end: int) -> bool:
    """Returns whether `text` occurs in data[start:end], in any case of its ASCII letters. `text`: must be in lower case."""
    return text in data[start:end].lower()


def is_uuid(text: str) -> bool:
    """Returns whether a text is a UUID in the usual form: hexadecimal digits in groups of 8, 4, 4, 4 and 12."""
    return UUID.fullmatch(text) is not None


def flat_end(data: bytes, at: int, most: int) -> int:
    """Returns the position after the brace that closes the JSON object opened at `at`. Returns 0 if the object is nested, or does not end
    before `most`, or the brace is inside a string.
    """
    end = data.find(b"}", at, most) + 1
    flat = end and data.find(b"{", at + 1, end) < 0 and data.count(b'"', at, end) % 2 == 0
    return end if flat else 0


def step(coroutine: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
    """Runs a coroutine until it waits or ends. Returns (False, the object that the coroutine waits for) or (True, its result)."""
    try:
        return False, coroutine.send(None)
    except StopIteration as done:
        return True, done.value


def fewest(values: Floats) -> Floats:
    """Returns scores from 0 to 1, the highest for the lowest value: (max - x) / (max - min). If all values are equal, all scores are 1.

    If one value is NaN, all scores are NaN.
    """
    if len(values) == 0:
        return np.empty(0)
    low, high = np.minimum.reduce(values), np.maximum.reduce(values)
    if low == high:
        return np.ones(len(values))
    scores: Floats = (high - values) / (high - low)
    return scores


def waiting(inflight: NDArray[Any], before: Floats, scraped: Floats) -> Floats:
    """Returns max(scraped, inflight - before), one number per endpoint: how many requests wait, including those sent since the scrape."""
    since: Floats = inflight - before
    return np.maximum(since, scraped, out=since)


def mean_pressure(inflight: NDArray[Any], before: Floats, least: Floats, full: float) -> float:
    """Returns the mean of max(least, (inflight - before) / full) over at least one endpoint. Raises ValueError if the lengths differ."""
    if not len(inflight) == len(before) == len(least) > 0:
        raise ValueError("mean_pressure: the arrays differ in length")
    total = 0.0
    for pressure in np.maximum((inflight - before) / full, least).tolist():  # one after the other, as the kernel in C adds them
        total += pressure
    return total / len(inflight)


def add_scaled(totals: Floats, scores: NDArray[Any], weight: float) -> None:
    """Adds weight * scores to `totals`, in place. A single score is added to all totals. Raises ValueError if the lengths differ."""
    totals += scores if weight == 1.0 else weight * scores


def copied(values: Floats) -> Floats:
    """Returns a copy."""
    return values.copy()


def reused(held: Floats, each: float, tokens: int, sizes: Floats) -> Floats:
    """Returns how many of the `tokens` of a prompt each server reuses: of `held` blocks of `each` tokens, whole blocks of its own size
    (`sizes`), but never the last token.
    """
    return np.floor(np.minimum(held * each, max(tokens - 1, 0)) / sizes) * sizes


def share(blocks: Floats, total: float) -> Floats:
    """Returns blocks / total."""
    return blocks / total


def token_load(ahead: Floats, tokens: int, held: Floats | None, block_tokens: float, threshold: float) -> Floats:
    """Returns 1 - t / threshold per endpoint, where t is ahead + max(tokens - held * block_tokens, 0), limited to 0 ... threshold.

    `ahead`: tokens in flight at each endpoint. `tokens`: the tokens of the prompt. `held`: blocks of the prompt that each endpoint has
    cached; None: t is ahead + tokens, limited in the same way.
    """
    load: Floats = ahead + (float(tokens) if held is None else np.maximum(tokens - held * block_tokens, 0.0))
    return 1.0 - load.clip(0.0, threshold) / threshold


def highest(totals: Floats) -> list[int]:
    """Returns the indices of the largest total. NaN is treated as less than every number. If all totals are NaN, returns all indices."""
    numbers = totals == totals
    if not numbers.any():
        return list(range(len(totals)))
    found: list[int] = np.flatnonzero(totals == np.where(numbers, totals, -np.inf).max()).tolist()
    return found


def raise_to(cells: Floats, at: int, value: float) -> None:
    """Sets the cell with index `at` to `value` if the cell is less. Raises IndexError."""
    if at < 0:
        raise IndexError(f"raise_to: there is no cell {at}")
    cells[at] = max(float(cells[at]), value)


def increase(words: memoryview, at: int, by: int = 1) -> None:
    """Adds `by` to the word at `at`. `words`: signed words of 64 bits. Raises IndexError."""
    words[at] += by


def seal(words: memoryview) -> None:
    """Sets the last word so that the XOR of all words is 0. `words`: unsigned words of 64 bits, at least one."""
    words[-1] = reduce(xor, words[:-1], 0)


def by_row(depths: Mapping[int, int], row_of: Mapping[int, int], rows: int) -> Floats:
    """Turns a mapping from owner to depth into an array with one depth per row, by `row_of` (owner -> row).

    Leaves out owners that have no row. A row gets 0 if `depths` has no owner of it.
    """
    found = [0.0] * rows  # filling a list is faster: 1.3 us for eight owners, against 3.9 us for storing into an array
    for owner, depth in depths.items():
        row = row_of.get(owner)
        if row is not None:
            found[row] = depth
    return np.array(found, dtype=np.float64)


# Texts of JSON


def members(text: bytes | memoryview, names: tuple[bytes, ...], missing: object) -> tuple[Any, ...] | None:
    """Returns the JSON texts of some members of an object; `missing` for a member that the object lacks. None means that msgspec has to
    read the whole object.

    The kernel in C returns None, too, for every text that it does not read. This function always returns None.
    """
    return None


def items(text: bytes | memoryview) -> list[bytes | memoryview] | None:
    """Returns the JSON texts of the items of an array, or None as `members` does."""
    return None


# Answers of servers


def plain_head(data: bytes | memoryview, most: int) -> tuple[int, int] | None:
    """Returns (where the body begins, its length), if `data` begin with a plain head of an answer of at most `most` bytes. Else None.

    A plain head has status 200, HTTP/1.1 and Content-Length, and says nothing about Connection, Content-Encoding or Transfer-Encoding. None
    means that the general decoder has to read the answer; this function always returns None.
    """
    return None


def recall(page: bytes, text: bytes, at: int, name_line: bytes, type_line: bytes) -> tuple[int, float] | None:
    """Returns (position of `text`, value after it), if `text` stands at or near position `at` and its series is alone. Else None.

    `text` begins with the newline before the series, or before the TYPE line of its family. `name_line`: a newline and the name of the
    family. `type_line`: how the TYPE line of the family begins. A series is alone if it is certainly the only one of its family.
    """
    if not page.startswith(text, at):
        at = page.find(text, max(at - SHIFT_BYTES_MAX, 0), at + len(text) + SHIFT_BYTES_MAX)
    start = at + len(text)
    end = page.find(b"\n", start)
    if not 0 <= at < end or not _alone(page, at, end, text.startswith(type_line, 1), name_line, type_line):
        return None
    try:
        return None if b"_" in page[start:end] else (at, float(page[start:end]))
    except ValueError:
        return None  # a timestamp follows the value, or the value is no number


def _alone(page: bytes, at: int, end: int, typed: bool, name_line: bytes, type_line: bytes) -> bool:
    """Returns whether the line between the newlines at `at` and `end` is certainly the only series of its family.

    `typed`: whether the TYPE line of the family is right above the line, so no other series is above.
    """
    if page.startswith(name_line, end) or (page.startswith(AMBIGUOUS, end) and not page.startswith(ENDS, end)):
        return False
    if typed:
        return True
    above = page.rfind(b"\n", 0, at) + 1
    return page.startswith(type_line, above) or not page.startswith((name_line[1:], *NO_SAMPLE), above)


def answers(data: bytes, at: int, most: int) -> tuple[list[int | tuple[bytes, bytes]], int]:
    """Reads from `at` on what a replica store nearly always sends: numbers, and messages as pairs of channel and content, each of at most
    `most` bytes. Returns the complete items, and where the last one ends.
    """
    found: list[int | tuple[bytes, bytes]] = []
    while (number := NUMBER.match(data, at)) is not None or (head := MESSAGE.match(data, at)) is not None:
        if number is not None:
            found.append(int(number[1]))
            at = number.end()
            continue
        assert head is not None
        begin = head.end() + int(head[1])
        size = SIZE.match(data, begin)
        if size is None or max(int(head[1]), int(size[1])) > most or len(data) < size.end() + int(size[1]) + 2:
            break
        end = size.end() + int(size[1])
        found.append((data[head.end() : begin], data[size.end() : end]))
        at = end + 2
    return found, at
