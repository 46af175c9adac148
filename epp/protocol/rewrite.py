"""Replaces the name of the model and the cache salt in JSON requests, and restores the name in answers. No other byte changes.

Request: msgspec scans the body and returns the position of the raw value of the top-level member, such as `model`. msgspec handles escapes,
blanks and nested members of that name. The bytes around the value are copied. If the member occurs several times, all are replaced, because
it is unknown which one the model server reads. A body without the member gets it as its first member; the kernels find several times as
fast as msgspec that a body lacks the member.

Answer: `"model":"<target>"`, with or without a blank after the colon, becomes `"model":"<requested>"` at any position, however the
answer is divided into pieces. If the end of a piece may be the beginning of such a text, this end is held back until the next piece. In a
JSON string the quotes are escaped, so text that a model writes is not changed. An answer with a content coding (gzip) passes unchanged. So
code that rewrites a request has to remove the request's `accept-encoding` (`REMOVED`).
"""

import json
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np

from compiled import calls
from epp.errors import UNREADABLE, Cause, Refused
from epp.protocol.surrogates import replaced

REMOVED: Final = ("accept-encoding", "content-encoding")  # removed from a rewritten request, so that request and answer are plain
MEMBERS_MAX: Final = 2  # members of one name in one body that are accepted
BEGIN_BYTES: Final = 256  # a body has its first brace and the next character within this number of bytes, unless it begins with many blanks
PAIRS_KEPT: Final = 256  # cached pairs; clients choose the names, so number and length are limited
KEPT_CHARS_MAX: Final = 1024
_BLANKS: Final = b" \t\r\n"
_BRACE: Final = 0x7B
_QUOTE: Final = 0x22
_KEY: Final = b'"model"'
_BEGIN: Final = _KEY[:2]  # to search at the end of a piece: these two bytes are rarer than a quote alone
_MISSING: Final = msgspec.Raw()

Body = bytes | memoryview
Span = tuple[int, int]


class Member:
    """A top-level member of requests, with a text as its value."""

    __slots__ = ("_decoder", "_escapes", "_key", "_names", "name")

    def __init__(self, name: str) -> None:
        """`name`: consists of ASCII letters and `_`."""
        self.name = name
        self._names = (name.encode(),)
        self._key = b'"' + self._names[0] + b'"'
        # The possible beginnings of an escape of one of the name's letters.
        self._escapes = tuple(sorted({b"\\u00%x" % (letter >> 4) for letter in self._names[0]}))
        # Made by `defstruct`, because msgspec cannot read annotations of compiled classes.
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("_Named", [(name, msgspec.Raw, _MISSING)]))

    def text(self, value: str) -> bytes:
        """Returns the member with this value, and a comma: the text to insert into a JSON object that lacks the member."""
        return b"".join((self._key, b":", msgspec.json.encode(value), b","))

    def lacks(self, body: Body) -> bool:
        """Returns whether the body is surely a JSON object without this member. If this returns False, `put` finds out."""
        found = calls.members(body, self._names, _MISSING)
        return found is not None and found[0] is _MISSING

    def put(self, body: Body, value: str) -> bytes:
        """Returns the JSON object `body` with `value` as the value of this member. Raises Refused."""
        spans = [] if self.lacks(body) else self._spans(body)
        if not spans:
            return inserted(body, *insertion(body, self.text(value)))
        text = msgspec.json.encode(value)
        parts: list[Body] = []
        at = 0
        for start, end in spans:
            parts += (body[at:start], text)
            at = end
        parts.append(body[at:])
        return b"".join(parts)

    def _spans(self, body: Body) -> list[Span]:
        try:
            return self.spans(body)
        except Refused:
            readable = replaced(body)  # a text of the same length, with every value at its place
            if readable is None:
                raise
            return self.spans(readable)

    def spans(self, body: Body) -> list[Span]:
        """Returns (start, end) of the value of each such member of a JSON object, in order. Raises Refused."""
        spans: list[Span] = []
        text = body
        while (span := self._last(text)) is not None:
            if len(spans) == MEMBERS_MAX:
                raise Refused(Cause.INVALID_BODY, f"invalid request body: '{self.name}' occurs more than {MEMBERS_MAX} times")
            spans.append(span)
            before = bytes(text[: span[0]]).rstrip(_BLANKS)[:-1].rstrip(_BLANKS)  # up to the last quote of the key
            before = before[: before.rfind(b'"', 0, -1)]  # a key with a quote inside is another key
            if self._key not in before and not any(escape in before for escape in self._escapes):
                break
            text = before + b'"":0}'  # the same object without its last such member
        return spans[::-1]

    def _last(self, text: Body) -> Span | None:
        """Returns (start, end) of the value of the last such member, or None. The decoder returns the last member of a name."""
        try:
            named: Any = self._decoder.decode(text)
            raw = memoryview(getattr(named, self.name))
        except UNREADABLE as error:
            raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None
        if not len(raw):
            return None
        start = _address(raw) - _address(text)  # a Raw is a view of the decoded bytes
        return start, start + len(raw)


_MODEL: Final = Member("model")


def with_model(body: Body, model: str) -> bytes:
    """Returns the JSON object `body` with `model` as the value of its member `model`. Raises Refused."""
    return _MODEL.put(body, model)


def _address(data: Body) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


def insertion(body: Body, member: bytes) -> tuple[int, bytes]:
    """Returns where to insert a first member into a JSON object, and the text to insert. `member`: the member and a comma."""
    if len(body) > 1 and body[0] == _BRACE and body[1] == _QUOTE:
        return 1, member
    view = memoryview(body)
    begin = bytes(view[:BEGIN_BYTES])
    if not begin.lstrip(_BLANKS)[1:].lstrip(_BLANKS):
        begin = bytes(view)
    at = begin.index(b"{") + 1
    return at, member[:-1] if begin[at:].lstrip(_BLANKS).startswith(b"}") else member


def inserted(body: Body, at: int, text: bytes) -> bytes:
    """Returns the body with a text inserted. A long body is copied only once."""
    view = memoryview(body)
    return b"".join((view[:at], text, view[at:]))


def _pairs(target: str, requested: str) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
    """Returns ((text to find, its replacement), …) and the length of the longest text to find. A target may be written with escapes."""
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
        """Returns the bytes that can go to the client. Holds back an end that may be the beginning of a text to replace."""
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
        """Returns the bytes that were held back. Call this at the end of the answer."""
        rest, self._held = self._held, b""
        return rest
