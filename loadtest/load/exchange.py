"""Plays one ext_proc stream as Envoy does: sends the headers and body of a request, then those of a model server's answer.

The messages are built once per case; a request only fills in the parts that make its prompt and its id unique. The exchange checks
that the picker names a target, returns all bytes of the request, and answers every message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from epp.protocol.codec import field, varint
from loadtest.load.h2_client import ClientStream
from loadtest.load.proto import ext_proc_pb2 as pb

# first bytes of answers
REQUEST_HEADERS, RESPONSE_HEADERS, REQUEST_BODY, RESPONSE_BODY = (number << 3 | 2 for number in (1, 2, 3, 4))
IMMEDIATE: Final = 7 << 3 | 2
KINDS: Final = {
    "request_headers": REQUEST_HEADERS,
    "response_headers": RESPONSE_HEADERS,
    "request_body": REQUEST_BODY,
    "response_body": RESPONSE_BODY,
    "immediate_response": IMMEDIATE,
}
FIRST_BYTES: Final = frozenset(KINDS.values())
ENDS: Final = b"\x10\x01"  # end_of_stream: true
DESTINATION: Final = b"x-gateway-destination-endpoint"
SHARED_TEXT: Final = "You are a helpful assistant. "
USAGE: Final = '"usage":{"prompt_tokens":250,"completion_tokens":100,"total_tokens":350}}'
ID_WIDTH: Final = 12


class Ending(Enum):
    """How a request ended, as the driver counts it."""

    OK = "ok"
    REFUSED = "refused"  # the picker answered with an error
    FAILED = "failed"  # the stream broke
    NO_TARGET = "no target"
    ALTERED = "altered"  # bytes are missing or were added


@dataclass(frozen=True)
class Shape:
    """The form of the requests and answers in one case."""

    prompt_bytes: int = 1000
    shared_bytes: int = 0  # the first bytes of the prompt, which are the same in all requests
    piece_bytes: int = 65_536  # the request's body is sent in messages of this size
    chunks: int = 1  # messages that make up the answer's body
    streamed: bool = False  # whether the answer consists of server-sent events
    pace_s: float = 0.0  # pause between chunks of the answer


class Messages:
    """Makes the messages to send. Does as little work as possible per request."""

    def __init__(self, shape: Shape, tag: str) -> None:
        self.shape = shape
        shared = (SHARED_TEXT * (shape.shared_bytes // len(SHARED_TEXT) + 1))[: shape.shared_bytes]
        stream = '"stream":true,' if shape.streamed else ""
        self._before = f'{{"model":"m",{stream}"prompt":"{shared}'.encode()
        self._after = b'","max_tokens":100,"temperature":0}'
        self._tag = tag
        self.body_bytes = len(self._before) + shape.prompt_bytes - shape.shared_bytes + len(self._after)
        marker = "0" * ID_WIDTH
        self._headers = _headers(
            ((":method", "POST"), (":path", "/v1/completions"), (":authority", "gateway.example"), (":scheme", "http"),
             ("user-agent", "openai-python/1.99"), ("accept", "application/json"), ("accept-encoding", "gzip, deflate"),
             ("authorization", "Bearer sk-0123456789abcdef0123456789abcdef"), ("content-type", "application/json"),
             ("content-length", str(self.body_bytes)), ("x-forwarded-for", "10.1.2.3"), ("x-forwarded-proto", "http"),
             ("x-request-id", f"7a1f3b52-0c5e-4f1d-9d0e-{marker}")),
            response=False,
        )  # fmt: skip
        self._id_at = self._headers.rindex(marker.encode())
        kind = "text/event-stream" if shape.streamed else "application/json"
        answer = ((":status", "200"), ("content-type", kind), ("server", "uvicorn"), ("date", "Sat, 21 Nov 2026 00:00:00 GMT"))
        self.answer_headers = _headers(answer, response=True)
        self.chunk, self.last = _chunks(shape)

    def headers(self, number: int) -> bytes:
        whole, at = self._headers, self._id_at
        return b"%b%012d%b" % (whole[:at], number, whole[at + ID_WIDTH :])

    def bodies(self, number: int) -> list[bytes]:
        """Returns the body of request `number`, as messages with `piece_bytes` of it each."""
        unique = f"{number}-{self._tag} ".encode()
        rest = self.shape.prompt_bytes - self.shape.shared_bytes
        body = self._before + (unique * (rest // len(unique) + 1))[:rest] + self._after
        size, step = len(body), self.shape.piece_bytes
        return [_body(4 << 3, body[at : at + step], last=at + step >= size) for at in range(0, size, step)]


def _headers(pairs: tuple[tuple[str, str], ...], *, response: bool) -> bytes:
    message = pb.ProcessingRequest()
    headers = message.response_headers if response else message.request_headers
    for name, value in pairs:
        headers.headers.headers.add(key=name, raw_value=value.encode())
    return message.SerializeToString()


def _body(tag: int, data: bytes, *, last: bool) -> bytes:
    payload = field(1, data) + (b"\x10\x01" if last else b"")
    return bytes((tag | 2,)) + varint(len(payload)) + payload


def _chunks(shape: Shape) -> tuple[bytes, bytes]:
    """Returns a middle chunk and the last chunk of the answer."""
    if not shape.streamed:
        choice = '"choices":[{"index":0,"text":"hello","finish_reason":"length"}],'
        text = f'{{"id":"cmpl-1","object":"text_completion","model":"m",{choice}{USAGE}'
        return b"", _body(5 << 3, text.encode(), last=True)
    head = 'data: {"id":"cmpl-1","object":"text_completion",'
    chunk = head + '"created":1763683200,"model":"m","choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":null}]}\n\n'
    last = f'{head}"model":"m","choices":[],{USAGE}\n\ndata: [DONE]\n\n'
    return _body(5 << 3, chunk.encode(), last=False), _body(5 << 3, last.encode(), last=True)


class Exchange:
    """The `Caller` of one stream. Calls `on_pick` when the picker has returned the whole request.

    Calls `on_end(ending, text)` exactly once, when the stream has ended.
    """

    __slots__ = ("_failure", "_left", "_messages", "_named", "_on_end", "_on_pick", "_returned", "_shape", "later", "stream")

    def __init__(
        self, messages: Messages, on_pick: Callable[[], None], on_end: Callable[[Ending, str], None], later: Callable[..., object]
    ) -> None:
        self._messages = messages
        self._shape = messages.shape
        self._on_pick = on_pick
        self._on_end = on_end
        self.later = later
        self._left = self._shape.chunks
        self._named = False
        self._returned = 0
        self._failure: tuple[Ending, str] | None = (Ending.FAILED, "the stream ended early")
        self.stream: ClientStream

    def begin(self, stream: ClientStream, number: int) -> None:
        self.stream = stream
        stream.send(self._messages.headers(number))
        for body in self._messages.bodies(number):
            stream.send(body)

    def message(self, message: bytes) -> None:
        tag = message[0]
        if tag not in FIRST_BYTES:
            tag = _kind(message)
        if tag == RESPONSE_BODY:
            if message.endswith(ENDS):
                self._failure = None if self._named and self._returned == self._messages.body_bytes else self._failure
                self.stream.half_close()
        elif tag == REQUEST_BODY:
            self._returned += _body_bytes(message)
            if message.endswith(ENDS):
                self._answered()
        elif tag == REQUEST_HEADERS:
            self._named = DESTINATION in message
        elif tag == IMMEDIATE:
            self._failure = (Ending.REFUSED, message[-200:].decode(errors="replace"))

    def _answered(self) -> None:
        if not self._named:
            self._failure = (Ending.NO_TARGET, "no destination in the answer")
        elif self._returned != self._messages.body_bytes:
            self._failure = (Ending.ALTERED, f"{self._returned} of {self._messages.body_bytes} bytes came back")
        self._on_pick()
        self.stream.send(self._messages.answer_headers)
        if self._shape.pace_s:
            self._next_chunk()
            return
        for _ in range(self._left - 1):
            self.stream.send(self._messages.chunk)
        self.stream.send(self._messages.last)

    def _next_chunk(self) -> None:
        self._left -= 1
        if self._left:
            self.stream.send(self._messages.chunk)
            self.later(self._shape.pace_s, self._next_chunk)
        else:
            self.stream.send(self._messages.last)

    def ended(self, status: str, text: str) -> None:
        if status != "0":
            self._on_end(Ending.FAILED, f"gRPC status {status}: {text}")
        elif self._failure is not None:
            self._on_end(*self._failure)
        else:
            self._on_end(Ending.OK, "")


def _kind(message: bytes) -> int:
    """Returns the kind of an answer that does not begin with its kind: the reference picker writes the metadata first."""
    return KINDS.get(pb.ProcessingResponse.FromString(message).WhichOneof("response") or "", 0)


def _body_bytes(message: bytes) -> int:
    """Returns the number of request bytes that this answer contains."""
    answer = pb.ProcessingResponse.FromString(message)
    return len(answer.request_body.response.body_mutation.streamed_response.body)
