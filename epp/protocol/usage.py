"""Reads token usage from a JSON, SSE or gRPC answer in chunks of any size.

`UsageScanner` looks for the key `"usage"` followed by an object, outside of strings (where the quotes of the key would be escaped), and
decodes only that object. If an answer has several such objects, the last one with token counts wins. The scanner keeps at most
USAGE_BYTES_MAX bytes. The other scanners are for APIs with other formats. A parser chooses the scanner by setting `request[ANSWER]`.
"""

import re
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import msgspec

from compiled.calls import find, flat_end
from epp.data import Datum
from epp.decision.decision import Usage
from epp.errors import UNREADABLE
from epp.protocol import wire
from epp.protocol.grpc_frames import Frames
from epp.protocol.usage_structs import ANTHROPIC_USAGE, META_INFO, TOKENS_MAX, USAGE, readable_fields

KEY: Final = b'"usage"'
USAGE_BYTES_MAX: Final = 4096
KEYS_MAX: Final = 64  # only the last keys of one piece are read; an event has one key
# Whole strings, braces, and a quote that nothing closes. Possessive: backtracking would take 130 bytes of memory per byte.
_TOKENS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}]', re.DOTALL)
_QUOTED: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
BLANKS_MAX: Final = 64  # on either side of a key's colon
SUSPECT: Final = KEY + b"\\"  # a chunk that ends with one of these bytes may end in the key, or in an escape before it
_KEY_BYTES: Final = frozenset(bytes((byte,)) for byte in SUSPECT)


class Scanner(Protocol):
    """Reads one answer in chunks. `usage`: the usage found so far, or None.

    `pending`: whether the scanner needs the next chunk in any case. If not, the caller may skip the chunk, unless it contains KEY or ends
    with a byte of SUSPECT. A scanner that looks for another key than KEY is always `pending`.
    """

    usage: Usage | None
    pending: bool

    def feed(self, chunk: bytes) -> None:
        """Reads one piece of the body."""


class AnswerHandling(NamedTuple):
    """Says how to read the answer to a request.

    `scanner`: makes the scanner for the usage in the answer; None for a `UsageScanner`. `skip`: whether to leave the answer unread.
    """

    scanner: Callable[[], Scanner] | None
    skip: bool = False


# If a parser with `reads_usage` does not set this, a `UsageScanner` reads the answer.
ANSWER: Final[Datum[AnswerHandling]] = Datum("answer", AnswerHandling)
UNSEEN: Final = AnswerHandling(None, skip=True)


class UsageScanner:
    """Reads the usage of JSON and SSE answers, which stands in objects under `key`. `Scanner` says which chunks it needs."""

    __slots__ = ("_carry", "_object", "_open", "pending", "usage")
    key: ClassVar[bytes] = KEY
    bytes_max: ClassVar[int] = USAGE_BYTES_MAX
    decoder: ClassVar[msgspec.json.Decoder[Any]] = USAGE

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.pending = False  # the last chunk ended, or may have ended, inside a key or its object
        self._carry = b""
        self._open: bytearray | None = None  # the bytes from the key on, while its object is incomplete
        self._object: _Object | None = None  # the object in those bytes, once it has begun

    def feed(self, chunk: bytes) -> None:
        """Reads one piece of the body."""
        if self._open is None:
            carry, key = self._carry, self.key
            reach = len(key)  # one byte more than a partial key: the byte before it shows whether the quote is escaped
            at = find(chunk, key)
            if at < 0 and (not carry or find(carry + chunk[: reach + 1], key) < 0):
                self._carry = chunk[-reach:] if len(chunk) >= reach else (carry + chunk)[-reach:]
                self.pending = self._carry[-1:] in _KEY_BYTES
            elif carry:
                self._scan(carry + chunk)
            else:
                self._scan(chunk, at)
        else:
            self._open += chunk
            self._continue(self._open)

    def _continue(self, data: bytearray) -> None:
        """Goes on reading after the kept bytes have grown."""
        found = self._object
        if found is None:
            self._open = None
            self._scan(bytes(data))
        elif (end := found.end(data)) is not None:
            self._open = self._object = None
            self._take(bytes(data[found.begin : end]))
            self._scan(bytes(data[end:]))
        elif len(data) > self.bytes_max:
            self._open = self._object = None
            self.pending = False

    def _scan(self, data: bytes, at: int | None = None) -> None:
        """Reads all whole objects. `at`: where the first key is, or -1 without a key; None if not known."""
        key = self.key
        if at is None:
            at = find(data, key)
        if len(data) > self.bytes_max and data.count(key, at) > KEYS_MAX:
            at = len(data)
            for _ in range(KEYS_MAX):
                at = data.rfind(key, 0, at)
        while at >= 0:
            if at and data[at - 1] == 0x5C:  # an escaped quote (\") is inside a string
                at = find(data, key, at + 1)
                continue
            begin = _value(data, at + len(key))
            if begin is None:  # the colon or the value has not arrived yet
                return self._keep(data, at)
            if data[begin] == 0x7B:
                end: int | None = flat_end(data, begin, begin + self.bytes_max)
                if not end:
                    found = _Object(begin, begin + self.bytes_max)
                    end = found.end(data)
                    if end is None:
                        return self._keep(data, at, found)
                self._take(data[begin:end])
                begin = end
            at = find(data, key, begin)
        self._carry = data[-len(key) - 1 :]  # includes the byte before a possible key
        self.pending = self._carry[-1:] in _KEY_BYTES

    def _keep(self, data: bytes, at: int, found: "_Object | None" = None) -> None:
        if len(data) - at <= self.bytes_max:
            self._open = bytearray(data[at:])
            self._object = found.moved(at) if found is not None else None
        self.pending = self._open is not None
        self._carry = b""

    def _take(self, text: bytes) -> None:
        try:
            found = self.decoder.decode(text)
        except UNREADABLE:
            try:
                found = readable_fields(text, self.decoder.type)
            except UNREADABLE:
                return  # no JSON: the answer is not what it seems
        self._read(found)

    def _read(self, u: Any) -> None:
        prompt = u.prompt_tokens if u.prompt_tokens is not None else u.input_tokens
        completion = u.completion_tokens if u.completion_tokens is not None else u.output_tokens
        details = u.prompt_tokens_details or u.input_tokens_details
        if prompt is not None or completion is not None:
            self.usage = Usage(prompt, completion, details.cached_tokens if details else None)


class AnthropicScanner(UsageScanner):
    """Reads Anthropic's usage. `input_tokens` lacks tokens that were read from a cache or written to a cache, so the prompt is the sum of
    three figures (https://docs.anthropic.com/en/api/messages).

    In a stream the first event has the input tokens, later events have the output tokens. For each figure, the last event that has it is
    used.
    """

    __slots__ = ("_known",)
    decoder = ANTHROPIC_USAGE

    def __init__(self) -> None:
        super().__init__()
        self._known: list[int | None] = [None, None, None, None]

    def _read(self, found: Any) -> None:
        told = (
            found.input_tokens, found.output_tokens, found.cache_read_input_tokens, found.cache_creation_input_tokens
        )  # fmt: skip
        self._known = [before if now is None else now for before, now in zip(self._known, told, strict=True)]
        computed, completion, read, written = self._known
        prompt = None if computed is None else min(computed + (read or 0) + (written or 0), TOKENS_MAX)
        if any(figure is not None for figure in told):
            self.usage = Usage(prompt, completion, read)


class SglangScanner(UsageScanner):
    """Reads the `meta_info` of SGLang's own API. Every event of a stream has a `meta_info`; the one with a finish reason is used."""

    __slots__ = ("_stream",)
    key = b'"meta_info"'
    bytes_max = 1 << 14
    decoder = META_INFO

    def __init__(self) -> None:
        super().__init__()
        self.pending = True
        self._stream: bool | None = None  # None before the first chunk

    def feed(self, chunk: bytes) -> None:
        if self._stream is None and (start := chunk.lstrip()[:1]):
            self._stream = start not in (b"{", b"[")
        super().feed(chunk)
        self.pending = True

    def _read(self, info: Any) -> None:
        if self._stream and info.finish_reason is None:
            return
        if info.prompt_tokens is not None or info.completion_tokens is not None:
            self.usage = Usage(info.prompt_tokens or 0, info.completion_tokens or 0, info.cached_tokens)


class _FrameScanner:
    """Reads the messages of a gRPC answer. Skips malformed messages."""

    __slots__ = ("_frames", "pending", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.pending = True
        self._frames = Frames()

    def feed(self, chunk: bytes) -> None:
        """Reads one piece of the body."""
        for message in self._frames.feed(chunk):
            try:
                self._read(message)
            except ValueError:
                continue

    def _read(self, message: bytes | memoryview) -> None:
        raise NotImplementedError


class VllmGenerateScanner(_FrameScanner):
    """Reads vLLM's GenerateResponse: a chunk of a stream, or the complete answer."""

    __slots__ = ()

    def _read(self, message: bytes | memoryview) -> None:
        for number, value in wire.fields(message):
            if number in _GENERATED:
                prompt, completion, cached = _numbers(wire.submessage(value), _GENERATED[number])
                if prompt or completion:
                    self.usage = Usage(prompt, completion, cached)


_GENERATED: Final = {1: (2, 3, 4), 2: (3, 4, 5)}  # chunk, complete -> prompt, completion and cached tokens


class VllmEmbedScanner(_FrameScanner):
    """Reads vLLM's EmbedResponse."""

    __slots__ = ()

    def _read(self, message: bytes | memoryview) -> None:
        (prompt,) = _numbers(message, (2,))
        if prompt:
            self.usage = Usage(prompt, 0)


class HttpBodyScanner(_FrameScanner):
    """Reads Vertex AI's answers: google.api.HttpBody with OpenAI's JSON as its data, in one or several messages."""

    __slots__ = ("_inner", "_texts")

    def __init__(self) -> None:
        super().__init__()
        self._inner = UsageScanner()
        self._texts: list[bytes | memoryview] = []

    def feed(self, chunk: bytes) -> None:
        """Reads one piece of the body."""
        super().feed(chunk)
        texts, self._texts = self._texts, []
        if texts:  # joined first, because otherwise each of many tiny texts would cause the kept bytes to be read again
            self._inner.feed(b"".join(texts))
            self.usage = self._inner.usage

    def _read(self, message: bytes | memoryview) -> None:
        self._texts += [wire.submessage(value) for number, value in wire.fields(message) if number == 2]


def _numbers(message: bytes | memoryview, wanted: tuple[int, ...]) -> list[int]:
    """Returns the values of the `wanted` number fields, in that order; 0 for a missing field."""
    found = dict.fromkeys(wanted, 0)
    for field, value in wire.fields(message):
        if field in found:
            found[field] = wire.number(value)
    return [found[field] for field in wanted]


def _value(data: bytes, at: int) -> int | None:
    """Returns where the value after a key starts; None if the value has not arrived yet. `at`: the end of the key.

    If no colon and value follow, the text is not a key. In this case, returns some position at which no object begins.
    """
    colon = False
    most = at + BLANKS_MAX
    while at < len(data):
        byte = data[at]
        if byte == 0x3A and not colon:
            colon = True
            most = at + BLANKS_MAX
        elif byte not in b" \t\r\n":
            return at if colon else at - 1  # this was no key; the byte before opens no object
        elif at == most:
            return at
        at += 1
    return None


class _Object:
    """Finds the brace that closes the object opened at `begin`, before `most`. The bytes may arrive in any pieces, and each byte is read
    once, because searching from the beginning with every piece took 1.5 s for 4 KB that arrived byte by byte.
    """

    __slots__ = ("_at", "_depth", "_most", "_quoted", "begin")

    def __init__(self, begin: int, most: int) -> None:
        self.begin = begin
        self._most = most
        self._at = begin  # everything before this was read
        self._depth = 0
        self._quoted = False  # inside a string

    def moved(self, by: int) -> "_Object":
        """Adjusts the positions after the first `by` bytes were removed."""
        self.begin -= by
        self._most -= by
        self._at -= by
        return self

    def end(self, data: bytes | bytearray) -> int | None:
        """Returns the position after the brace that closes the object; None if the brace is not in these bytes.

        `data`: the bytes of the last call, extended by what has arrived since.
        """
        at, most = self._at, min(self._most, len(data))
        if self._quoted:
            at = self._at = _QUOTED.match(data, at, most).end()  # type: ignore[union-attr]  # it also matches nothing
            if at == most or data[at] != 0x22:
                return None
            at += 1
            self._quoted = False
        depth = self._depth
        for token in _TOKENS.finditer(data, at, most):
            kind = data[token.start()]
            if kind == 0x7B:
                depth += 1
            elif kind == 0x7D:
                depth -= 1
                if not depth:
                    return token.end()
            elif token.end() - token.start() == 1:  # the string continues beyond these bytes
                most = token.end()
                self._quoted = True
                break
        self._at, self._depth = most, depth
        return None
