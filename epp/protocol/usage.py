"""Incremental response scanner: token usage out of a JSON or SSE answer, however it is cut into chunks.

The scanner looks for the key `"usage"` followed by an object, outside of strings (where its quotes would be escaped), and
decodes just that object; the last one that is not null wins. It keeps at most USAGE_BYTES_MAX bytes.
"""

import re
from typing import Final

import msgspec

from epp.decision import Usage

KEY: Final = b'"usage"'
USAGE_BYTES_MAX: Final = 4096
_TOKENS: Final = re.compile(
    rb'"(?:[^"\\\\]|\\\\.)*"|["{}]', re.DOTALL
)  # whole strings, braces, and a quote that nothing closes
SUSPECT: Final = KEY + b"\\"  # a chunk that ends with one of these may have cut the key, or an escape before it
_KEY_BYTES: Final = frozenset(bytes((byte,)) for byte in SUSPECT)
_CARRY: Final = len(KEY)  # one byte more than a cut key leaves behind: the byte before it tells an escaped quote


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


_decoder = msgspec.json.Decoder(_Usage, strict=False)  # numbers may come as strings


class UsageScanner:
    """Feed it every chunk, or at least each while `pending`, each with KEY in it and each whose last byte is in SUSPECT.

    `usage` is what has been found so far.
    """

    __slots__ = ("_carry", "_open", "pending", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.pending = False  # the last chunk ended inside a key or its object, or may have
        self._carry = b""
        self._open: bytearray | None = None  # from the key on, while its object is incomplete

    def feed(self, chunk: bytes) -> None:
        """One piece of the body."""
        if self._open is None:
            carry = self._carry
            if KEY not in chunk and (not carry or KEY not in carry + chunk[: _CARRY + 1]):
                self._carry = chunk[-_CARRY:] if len(chunk) >= _CARRY else (carry + chunk)[-_CARRY:]
                self.pending = self._carry[-1:] in _KEY_BYTES
                return
            chunk = carry + chunk
        else:
            chunk = bytes(self._open) + chunk
            self._open = None
        self._scan(chunk)

    def _scan(self, data: bytes) -> None:
        at = data.find(KEY)
        while at >= 0:
            if at and data[at - 1] == 0x5C:  # \" : inside a string
                at = data.find(KEY, at + 1)
                continue
            begin = _value(data, at + len(KEY))
            if begin is None:  # colon or value not here yet
                return self._keep(data, at)
            if data[begin] == 0x7B:
                end = _object_end(data, begin)
                if end is None:
                    return self._keep(data, at)
                self._take(data[begin:end])
                begin = end
            at = data.find(KEY, begin)
        self._carry = data[-_CARRY:]
        self.pending = self._carry[-1:] in _KEY_BYTES

    def _keep(self, data: bytes, at: int) -> None:
        if len(data) - at <= USAGE_BYTES_MAX:
            self._open = bytearray(data[at:])
        self.pending = self._open is not None
        self._carry = b""

    def _take(self, text: bytes) -> None:
        try:
            u = _decoder.decode(text)
        except msgspec.MsgspecError:
            return  # another field of that name: not ours to judge
        prompt = u.prompt_tokens if u.prompt_tokens is not None else u.input_tokens
        completion = u.completion_tokens if u.completion_tokens is not None else u.output_tokens
        details = u.prompt_tokens_details or u.input_tokens_details
        if prompt is not None or completion is not None:
            self.usage = Usage(prompt, completion, details.cached_tokens if details else None)


def _value(data: bytes, at: int) -> int | None:
    """Where the value after a key starts; None: not in these bytes."""
    colon = False
    while at < len(data):
        byte = data[at]
        if byte == 0x3A and not colon:
            colon = True
        elif byte not in b" \t\r\n":
            return at
        at += 1
    return None


def _object_end(data: bytes, at: int) -> int | None:
    """One past the brace that closes the object opened at `at`; None: not in these bytes."""
    end = data.find(b"}", at) + 1
    if end and data.find(b"{", at + 1, end) < 0 and data.count(b'"', at, end) % 2 == 0:
        return end  # nothing nested: the usual form
    depth = 0
    for token in _TOKENS.finditer(data, at):
        kind = data[token.start()]
        if kind == 0x7B:
            depth += 1
        elif kind == 0x7D:
            depth -= 1
            if not depth:
                return token.end()
        elif token.end() - token.start() == 1:
            return None  # a string that is cut off
    return None
