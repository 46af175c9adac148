"""The name of a model in JSON bodies: replaced on the way in, given back on the way out; no other byte changes.

Request: the body is scanned by msgspec, which tells where the raw value of the top-level member `model` stands (escapes, blanks
and nested members of that name included); the bytes around it are copied. Of a member that is given several times all are
replaced, whichever of them the model server reads. A body without one gets it as its first member.

Answer: `"model":"<target>"`, with or without a blank behind the colon, becomes `"model":"<asked for>"` wherever it stands and
however the answer is cut into pieces. At most one such text less a byte is held back from one piece to the next. In a JSON string
its quotes would be escaped, so texts that models write are not touched. An answer with a content coding passes as it is; who
rewrites a request therefore takes its `accept-encoding` away (`REMOVED`).
"""

import json
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np

from epp.errors import Cause, Refused

REMOVED: Final = (
    "accept-encoding",
    "content-encoding",
)  # of a rewritten request: it goes on plain, and so comes its answer
MODELS_MAX: Final = 2  # members `model` of one body
PAIRS_KEPT: Final = 256  # names come from clients: so many, and no longer than this together
KEPT_CHARS_MAX: Final = 1024
_BLANKS: Final = b" \t\r\n"
_KEY: Final = b'"model"'
_BEGIN: Final = _KEY[:2]  # rarer than the quote alone
_ESCAPED: Final = b"\\u006"  # how each of its letters begins where it is escaped

Body = bytes | memoryview
Span = tuple[int, int]


class _Named(msgspec.Struct):
    model: msgspec.Raw = msgspec.Raw()


_named: Final = msgspec.json.Decoder(_Named)


def with_model(body: Body, model: str) -> bytes:
    """The JSON object `body` with this model. Raises Refused."""
    name = msgspec.json.encode(model)
    parts: list[Body] = []
    at = 0
    for start, end in model_spans(body):
        parts += (body[at:start], name)
        at = end
    if not parts:
        return _with_member(bytes(body), name)
    parts.append(body[at:])
    return b"".join(parts)


def model_spans(body: Body) -> list[Span]:
    """Where the values of the top-level members `model` of a JSON object stand, in order. Raises Refused."""
    spans: list[Span] = []
    text = body
    while (span := _last(text)) is not None:
        if len(spans) == MODELS_MAX:
            raise Refused(Cause.INVALID_BODY, f"invalid request body: 'model' is given more than {MODELS_MAX} times")
        spans.append(span)
        before = bytes(text[: span[0]]).rstrip(_BLANKS)[:-1].rstrip(_BLANKS)  # up to its key's last quote
        before = before[: before.rfind(b'"', 0, -1)]  # no quote stands inside: it would be another key
        if _KEY not in before and _ESCAPED not in before:
            break
        text = before + b'"":0}'  # the same object without its last model
    return spans[::-1]


def _last(text: Body) -> Span | None:
    """The last one, which is the one that counts."""
    try:
        raw = memoryview(_named.decode(text).model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None
    if not len(raw):
        return None
    start = _address(raw) - _address(text)  # a Raw is a view of what was decoded
    return start, start + len(raw)


def _address(data: Body) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _with_member(body: bytes, name: bytes) -> bytes:
    inside = body.index(b"{") + 1
    rest = body[inside:]
    comma = b"" if rest.lstrip(_BLANKS).startswith(b"}") else b","
    return body[:inside] + _KEY + b":" + name + comma + rest


def _pairs(target: str, asked: str) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """What is sought and what takes its place, and the length of the longest that is sought."""
    back = msgspec.json.encode(asked)
    spelled = dict.fromkeys((msgspec.json.encode(target), json.dumps(target).encode()))
    pairs = tuple((_KEY + colon + name, _KEY + colon + back) for name in spelled for colon in (b":", b": "))
    return pairs, max(len(sought) for sought, _ in pairs)


_kept = lru_cache(PAIRS_KEPT)(_pairs)


class ModelRestorer:
    """Feed it every piece of an answer in order; it gives what goes to the client. `rest` is what it holds at the end."""

    __slots__ = ("_held", "_longest", "_pairs")

    def __init__(self, target: str, asked: str) -> None:
        pairs = _kept if len(target) + len(asked) <= KEPT_CHARS_MAX else _pairs
        self._pairs, self._longest = pairs(target, asked)
        self._held = b""

    def feed(self, piece: Body) -> bytes:
        """The next piece, with the name restored, up to what may be the beginning of one."""
        data = self._held + piece
        if _KEY in data:
            for sought, back in self._pairs:
                data = data.replace(sought, back)
        at = data.find(_BEGIN, max(0, len(data) - self._longest + 1))
        while at >= 0:
            tail = data[at:]
            if any(sought.startswith(tail) for sought, _ in self._pairs):
                self._held = tail
                return data[:at]
            at = data.find(_BEGIN, at + 1)
        if data.endswith(b'"'):
            self._held = b'"'
            return data[:-1]
        self._held = b""
        return data

    def rest(self) -> bytes:
        """The answer has ended."""
        rest, self._held = self._held, b""
        return rest
