"""Replaces the name of the model in JSON requests, and restores it in answers. No other byte changes.

Request: msgspec scans the body and returns the position of the raw value of the top-level member `model`. It handles escapes, blanks
and nested members of that name. The bytes around the value are copied. If the member occurs several times, all are replaced,
because it is unknown which one the model server reads. A body without the member gets it as its first member.

Answer: `"model":"<target>"`, with or without a blank after the colon, becomes `"model":"<requested>"` at any position, however the
answer is divided into pieces. If the end of a piece may be the beginning of such a text, it is held back until the next piece. In a JSON
string the quotes are escaped, so text that a model writes is not changed. An answer with a content coding (gzip) passes unchanged. So
code that rewrites a request has to remove its `accept-encoding` (`REMOVED`).
"""

import json
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from epp.errors import Cause, Refused

REMOVED: Final = ("accept-encoding", "content-encoding")  # removed from a rewritten request, so that request and answer are plain
MODELS_MAX: Final = 2  # members `model` in one body that are accepted
PAIRS_KEPT: Final = 256  # cached pairs; clients choose the names, so number and length are limited
KEPT_CHARS_MAX: Final = 1024
# The one member that is read. Made by `defstruct`, because msgspec cannot read annotations of compiled classes.
_named: Final = msgspec.json.Decoder(msgspec.defstruct("_Named", [("model", msgspec.Raw, msgspec.Raw())]))
_BLANKS: Final = b" \t\r\n"
_KEY: Final = b'"model"'
_BEGIN: Final = _KEY[:2]  # searched at the end of a piece, because it is rarer than a quote alone
_ESCAPED: Final = b"\\u006"  # begins each letter of the key if it is escaped

Body = bytes | memoryview
Span = tuple[int, int]


def with_model(body: Body, model: str) -> bytes:
    """Returns the JSON object `body` with `model` as the value of its member `model`. Raises Refused."""
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
    """Returns (start, end) of the value of each top-level member `model` of a JSON object, in order. Raises Refused."""
    spans: list[Span] = []
    text = body
    while (span := _last(text)) is not None:
        if len(spans) == MODELS_MAX:
            raise Refused(Cause.INVALID_BODY, f"invalid request body: 'model' occurs more than {MODELS_MAX} times")
        spans.append(span)
        before = bytes(text[: span[0]]).rstrip(_BLANKS)[:-1].rstrip(_BLANKS)  # up to the last quote of the key
        before = before[: before.rfind(b'"', 0, -1)]  # a key with a quote inside is not `model`
        if _KEY not in before and _ESCAPED not in before:
            break
        text = before + b'"":0}'  # the same object without its last model
    return spans[::-1]


def _last(text: Body) -> Span | None:
    """Returns (start, end) of the value of the last top-level member `model`; None: there is none. The decoder returns the last one."""
    try:
        named: Any = _named.decode(text)
        raw = memoryview(named.model)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None
    if not len(raw):
        return None
    start = _address(raw) - _address(text)  # a Raw is a view of the decoded bytes
    return start, start + len(raw)


def _address(data: Body) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def _with_member(body: bytes, name: bytes) -> bytes:
    inside = body.index(b"{") + 1
    rest = body[inside:]
    comma = b"" if rest.lstrip(_BLANKS).startswith(b"}") else b","
    return body[:inside] + _KEY + b":" + name + comma + rest


def _pairs(target: str, requested: str) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """Returns ((text to find, its replacement), …) and the length of the longest text to find. A target may be spelled with escapes."""
    back = msgspec.json.encode(requested)
    spelled = dict.fromkeys((msgspec.json.encode(target), json.dumps(target).encode()))
    pairs = tuple((_KEY + colon + name, _KEY + colon + back) for name in spelled for colon in (b":", b": "))
    return pairs, max(len(target_text) for target_text, _ in pairs)


_kept = lru_cache(PAIRS_KEPT)(_pairs)


class ModelRestorer:
    """Restores the requested name in an answer. Feed it all pieces in order, then send `rest` to the client."""

    __slots__ = ("_held", "_longest", "_pairs")

    def __init__(self, target: str, requested: str) -> None:
        pairs = _kept if len(target) + len(requested) <= KEPT_CHARS_MAX else _pairs
        self._pairs, self._longest = pairs(target, requested)
        self._held = b""

    def feed(self, piece: Body) -> bytes:
        """Returns the bytes that can go to the client. Holds back what may be the beginning of a text to replace."""
        data = self._held + piece
        if _KEY in data:
            for target_text, back in self._pairs:
                data = data.replace(target_text, back)
        at = data.find(_BEGIN, max(0, len(data) - self._longest + 1))
        while at >= 0:
            tail = data[at:]
            if any(target_text.startswith(tail) for target_text, _ in self._pairs):
                self._held = tail
                return data[:at]
            at = data.find(_BEGIN, at + 1)
        if data.endswith(b'"'):
            self._held = b'"'
            return data[:-1]
        self._held = b""
        return data

    def rest(self) -> bytes:
        """Returns the bytes that were held back. Call it at the end of the answer."""
        rest, self._held = self._held, b""
        return rest
