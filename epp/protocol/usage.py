"""Incremental response scanners: token usage out of a JSON, SSE or gRPC answer, however it is cut into chunks.

`UsageScanner` looks for the key `"usage"` followed by an object, outside of strings (where its quotes would be escaped), and
decodes just that object; the last one that is not null wins. It keeps at most USAGE_BYTES_MAX bytes. The others are for APIs
that say it otherwise. A parser chooses by `request[ANSWER]`, when it knows what it has read.
"""

import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final, NamedTuple, Protocol

import msgspec

from epp.data import Datum
from epp.decision import Usage
from epp.protocol import wire
from epp.protocol.grpc_frames import Frames

KEY: Final = b'"usage"'
USAGE_BYTES_MAX: Final = 4096
KEYS_MAX: Final = 64  # of one piece that are looked at, the last ones; an event has one
# Whole strings, braces, and a quote that nothing closes. Possessive: nothing is kept to go back to, which took 130 bytes a byte.
_TOKENS: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|["{}]', re.DOTALL)
_QUOTED: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
BLANKS_MAX: Final = 64  # on either side of a key's colon
SUSPECT: Final = KEY + b"\\"  # a chunk that ends with one of these may have cut the key, or an escape before it
_KEY_BYTES: Final = frozenset(bytes((byte,)) for byte in SUSPECT)


class Scanner(Protocol):
    """Reads one answer. Who feeds it may leave out a chunk while it is not `pending`, if the chunk has no KEY in it and its
    last byte is not in SUSPECT; one that looks for something else is always `pending`."""

    usage: Usage | None
    pending: bool

    def feed(self, chunk: bytes) -> None:
        """One piece of the body."""


class Answer(NamedTuple):
    """What is to become of a request's answer: who reads its usage (None: nobody), or that it is not looked at at all."""

    scanner: Callable[[], Scanner] | None
    skip: bool = False


ANSWER: Final[Datum[Answer]] = Datum("answer", Answer)  # its default: what the parser's class says
UNSEEN: Final = Answer(None, skip=True)


# As in the gRPC APIs. A server that says more, or less than 0, is not believed: sums of it would leave their words in shared memory.
Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Details(msgspec.Struct):
    cached_tokens: Tokens | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decoder = msgspec.json.Decoder(_Usage, strict=False)  # numbers may come as strings


class UsageScanner:
    """Feed it every chunk, or at least each while `pending`, each with KEY in it and each whose last byte is in SUSPECT.

    `usage` is what has been found so far.
    """

    __slots__ = ("_carry", "_object", "_open", "pending", "usage")
    key: ClassVar[bytes] = KEY
    bytes_max: ClassVar[int] = USAGE_BYTES_MAX

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.pending = False  # the last chunk ended inside a key or its object, or may have
        self._carry = b""
        self._open: bytearray | None = None  # from the key on, while its object is incomplete
        self._object: _Object | None = None  # in those bytes, once it has begun

    def feed(self, chunk: bytes) -> None:
        """One piece of the body."""
        if self._open is None:
            carry = self._carry
            key = self.key
            reach = len(key)  # one byte more than a cut key leaves behind: the byte before it tells an escaped quote
            if key not in chunk and (not carry or key not in carry + chunk[: reach + 1]):
                self._carry = chunk[-reach:] if len(chunk) >= reach else (carry + chunk)[-reach:]
                self.pending = self._carry[-1:] in _KEY_BYTES
                return
            self._scan(carry + chunk)
        else:
            self._open += chunk
            self._go_on(self._open)

    def _go_on(self, data: bytearray) -> None:
        """What was kept has grown."""
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

    def _scan(self, data: bytes) -> None:
        key = self.key
        at = data.find(key)
        if len(data) > self.bytes_max and data.count(key, at) > KEYS_MAX:
            at = len(data)
            for _ in range(KEYS_MAX):
                at = data.rfind(key, 0, at)
        while at >= 0:
            if at and data[at - 1] == 0x5C:  # \" : inside a string
                at = data.find(key, at + 1)
                continue
            begin = _value(data, at + len(key))
            if begin is None:  # colon or value not here yet
                return self._keep(data, at)
            if data[begin] == 0x7B:
                end: int | None = _plain_end(data, begin, begin + self.bytes_max)
                if not end:
                    found = _Object(begin, begin + self.bytes_max)
                    end = found.end(data)
                    if end is None:
                        return self._keep(data, at, found)
                self._take(data[begin:end])
                begin = end
            at = data.find(key, begin)
        self._carry = data[-len(key) - 1 :]  # with what stands before a key that was none
        self.pending = self._carry[-1:] in _KEY_BYTES

    def _keep(self, data: bytes, at: int, found: "_Object | None" = None) -> None:
        if len(data) - at <= self.bytes_max:
            self._open = bytearray(data[at:])
            self._object = found.moved(at) if found is not None else None
        self.pending = self._open is not None
        self._carry = b""

    def _take(self, text: bytes) -> None:
        try:
            u = _decoder.decode(text)
        except UNREADABLE:
            return  # another field of that name: not ours to judge
        prompt = u.prompt_tokens if u.prompt_tokens is not None else u.input_tokens
        completion = u.completion_tokens if u.completion_tokens is not None else u.output_tokens
        details = u.prompt_tokens_details or u.input_tokens_details
        if prompt is not None or completion is not None:
            self.usage = Usage(prompt, completion, details.cached_tokens if details else None)


class _Reported(msgspec.Struct):
    input_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None


_reported = msgspec.json.Decoder(_Reported, strict=False)


class AnthropicScanner(UsageScanner):
    """Of a stream the first event says what went in, later ones what came out: what is said last of each number counts."""

    __slots__ = ()

    def _take(self, text: bytes) -> None:
        try:
            said = _reported.decode(text)
        except UNREADABLE:
            return
        known = self.usage or Usage()
        prompt, completion, cached = said.input_tokens, said.output_tokens, said.cache_read_input_tokens
        found = Usage(
            known.prompt if prompt is None else prompt,
            known.completion if completion is None else completion,
            known.cached if cached is None else cached,
        )
        if found != Usage():
            self.usage = found


class _MetaInfo(msgspec.Struct):
    finish_reason: Any = None
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cached_tokens: Tokens | None = None


_meta_info = msgspec.json.Decoder(_MetaInfo, strict=False)


class SglangScanner(UsageScanner):
    """`meta_info`; every event of a stream has one, and the one with a finish reason counts."""

    __slots__ = ("_stream",)
    key = b'"meta_info"'
    bytes_max = 1 << 14

    def __init__(self) -> None:
        super().__init__()
        self.pending = True
        self._stream: bool | None = None  # None: nothing has come yet

    def feed(self, chunk: bytes) -> None:
        if self._stream is None and (start := chunk.lstrip()[:1]):
            self._stream = start not in (b"{", b"[")
        super().feed(chunk)
        self.pending = True

    def _take(self, text: bytes) -> None:
        try:
            said = _meta_info.decode(text)
        except UNREADABLE:
            return
        if self._stream and said.finish_reason is None:
            return
        if said.prompt_tokens is not None or said.completion_tokens is not None:
            self.usage = Usage(said.prompt_tokens or 0, said.completion_tokens or 0, said.cached_tokens)


class _FrameScanner:
    """Messages of a gRPC answer, one after the other; what is malformed says nothing."""

    __slots__ = ("_frames", "pending", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.pending = True
        self._frames = Frames()

    def feed(self, chunk: bytes) -> None:
        """One piece of the body."""
        for message in self._frames.feed(chunk):
            try:
                self._read(message)
            except ValueError:
                continue

    def _read(self, message: bytes | memoryview) -> None:
        raise NotImplementedError


class VllmGenerateScanner(_FrameScanner):
    """vLLM's GenerateResponse: a chunk of a stream, or the whole."""

    __slots__ = ()

    def _read(self, message: bytes | memoryview) -> None:
        for number, value in wire.fields(message):
            if number in _GENERATED:
                prompt, completion, cached = _numbers(wire.submessage(value), _GENERATED[number])
                if prompt or completion:
                    self.usage = Usage(prompt, completion, cached)


_GENERATED: Final = {1: (2, 3, 4), 2: (3, 4, 5)}  # chunk, complete -> prompt, completion and cached tokens


class VllmEmbedScanner(_FrameScanner):
    """vLLM's EmbedResponse."""

    __slots__ = ()

    def _read(self, message: bytes | memoryview) -> None:
        (prompt,) = _numbers(message, (2,))
        if prompt:
            self.usage = Usage(prompt, 0)


class HttpBodyScanner(_FrameScanner):
    """Vertex AI's answers: google.api.HttpBody, whose data is OpenAI's JSON, in one or several messages."""

    __slots__ = ("_inner", "_texts")

    def __init__(self) -> None:
        super().__init__()
        self._inner = UsageScanner()
        self._texts: list[bytes | memoryview] = []

    def feed(self, chunk: bytes) -> None:
        """One piece of the body."""
        super().feed(chunk)
        texts, self._texts = self._texts, []
        if texts:  # at once: many tiny ones would each look at what is kept again
            self._inner.feed(b"".join(texts))
            self.usage = self._inner.usage

    def _read(self, message: bytes | memoryview) -> None:
        self._texts += [wire.submessage(value) for number, value in wire.fields(message) if number == 2]


def _numbers(message: bytes | memoryview, wanted: tuple[int, ...]) -> list[int]:
    """Fields that are numbers, in the order wanted; 0 where one is missing."""
    found = dict.fromkeys(wanted, 0)
    for field, value in wire.fields(message):
        if field in found:
            found[field] = wire.number(value)
    return [found[field] for field in wanted]


def _value(data: bytes, at: int) -> int | None:
    """Where the value after a key starts, or something that is no object; None: not in these bytes."""
    colon = False
    most = at + BLANKS_MAX
    while at < len(data):
        byte = data[at]
        if byte == 0x3A and not colon:
            colon = True
            most = at + BLANKS_MAX
        elif byte not in b" \t\r\n":
            return at if colon else at - 1  # no key after all: what stands before it opens nothing
        elif at == most:
            return at
        at += 1
    return None


def _plain_end(data: bytes, at: int, most: int) -> int:
    """One past the brace that closes the object opened at `at`, in the usual form; 0: something is nested, or it ends elsewhere."""
    end = data.find(b"}", at, most) + 1
    if end and data.find(b"{", at + 1, end) < 0 and data.count(b'"', at, end) % 2 == 0:
        return end
    return 0


class _Object:
    """Looks for the brace that closes the object opened at `begin`, before `most`. Its bytes come in any pieces, and each is
    read once: read from the beginning with every piece, 4 KB byte by byte took 1.5 s."""

    __slots__ = ("_at", "_depth", "_most", "_quoted", "begin")

    def __init__(self, begin: int, most: int) -> None:
        self.begin = begin
        self._most = most
        self._at = begin  # read up to here
        self._depth = 0
        self._quoted = False  # inside a string

    def moved(self, by: int) -> "_Object":
        """The bytes before `by` are gone."""
        self.begin -= by
        self._most -= by
        self._at -= by
        return self

    def end(self, data: bytes | bytearray) -> int | None:
        """One past the brace; None: not in these bytes, which are those of the last time and what has come since."""
        at, most = self._at, min(self._most, len(data))
        if self._quoted:
            at = self._at = _QUOTED.match(data, at, most).end()  # type: ignore[union-attr]  # it matches nothing, too
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
            elif token.end() - token.start() == 1:  # a string that is cut off
                most = token.end()
                self._quoted = True
                break
        self._at, self._depth = most, depth
        return None
