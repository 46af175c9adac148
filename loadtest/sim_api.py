"""OpenAI request bodies -> what the engine is asked; tokens -> response bytes, in vLLM's shapes.

One shape per API: `whole` renders an unstreamed answer; `opening`, `token` and `closing` the
server-sent events of a streamed one. Texts are deterministic: words drawn by a linear congruence
that starts from the seed and the prompt, the same on every server. Every request generates exactly
its max tokens (16 unless it says otherwise), so it always ends for `length`. Nothing here does I/O
or reads a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgspec
import xxhash

from loadtest.kv_pool import block_hashes, token_count

MAX_TOKENS_DEFAULT = 16
PROMPTS_MAX = 64
EMBEDDING_SIZE = 8
MASK = 2**64 - 1
WORDS = (
    b"time year people way day man thing woman life child world school state family student group "
    b"country problem hand part place case week company system program question work government "
    b"number night point home water room mother area money story fact month lot right study book "
    b"eye job word business issue side kind head house service friend father power hour game line "
    b"end member law"
).split(b" ")
assert len(WORDS) == 64, "the six top bits of the congruence choose one"


class ApiError(Exception):
    """A request that is answered with an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        """The error object."""
        kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
        error = {
            "message": str(self),
            "type": kinds.get(self.status, "InternalServerError"),
            "param": self.param,
            "code": self.status,
        }
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    """The part of `stream_options` that changes an answer."""

    include_usage: bool = False


class Body(msgspec.Struct):
    """The fields of all four APIs that matter here; others are accepted and ignored."""

    model: str | None = None
    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    input: str | list[Any] | None = None
    instructions: str | None = None
    tools: list[Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    seed: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(Body)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the engine and the response shapes need it."""

    model: str
    lora: str | None
    hashes: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    choices: int
    origin: int  # where the words start
    remote_decode: bool = False  # another server goes on with the KV blocks of this one


@dataclass(frozen=True, slots=True)
class Models:
    """What a server serves: the base model under one or more names, and adapters."""

    names: tuple[str, ...]
    loras: tuple[str, ...]
    block_size: int
    seed: int

    def resolve(self, asked: str | None) -> tuple[str, str | None]:
        """(model, adapter) for the name in a request; without a name the base model."""
        if not asked:
            return self.names[0], None
        if asked in self.names:
            return asked, None
        if asked in self.loras:
            return asked, asked
        raise ApiError(404, f"The model `{asked}` does not exist.", param="model")

    def listing(self, created: int) -> bytes:
        """The answer to GET /v1/models."""
        base = self.names[0]
        parents = [(name, None) for name in self.names] + [(name, base) for name in self.loras]
        data = [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": name if parent is None else parent,
                "parent": parent,
            }
            for name, parent in parents
        ]
        return msgspec.json.encode({"object": "list", "data": data})


def parse(shape: type[Shape], raw: bytes, models: Models) -> Ask:
    """A request body -> Ask. Raises ApiError."""
    try:
        body = _decoder.decode(raw)
    except msgspec.DecodeError as error:  # also the base of ValidationError
        raise ApiError(400, f"The request body is not valid: {error}") from None
    model, lora = models.resolve(body.model)
    prompts = shape.prompts(body)
    prompt = b"\0".join(prompts) if len(prompts) > 1 else prompts[0]
    max_tokens = shape.max_tokens(body)
    if max_tokens < 0 or (max_tokens == 0 and shape.generates):
        raise ApiError(400, f"max_tokens must be at least 1, got {max_tokens}", param="max_tokens")
    salt = f"{model}\0{body.cache_salt or ''}".encode()
    return Ask(
        model=model,
        lora=lora,
        hashes=block_hashes(prompt, models.block_size, salt),
        prompt_tokens=token_count(prompt),
        max_tokens=max_tokens,
        stream=body.stream is True and shape.generates,
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        choices=len(prompts),
        origin=xxhash.xxh3_64_intdigest(prompt, (models.seed + (body.seed or 0)) & MASK),
        remote_decode=bool((body.kv_transfer_params or {}).get("do_remote_decode")),
    )


def words(origin: int) -> Iterator[bytes]:
    """The endless text that starts at `origin`; every word but the first begins with a space."""
    state = origin
    space = b""
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) & MASK
        yield space + WORDS[state >> 58]
        space = b" "


def text_of(ask: Ask, choice: int = 0) -> bytes:
    """The whole completion."""
    return b"".join(islice(words(ask.origin + choice), ask.max_tokens))


def prompt_texts(value: str | list[Any] | None, field: str) -> list[bytes]:
    """A string, strings, token ids or lists of token ids -> one or several prompts."""
    if isinstance(value, str) and value:
        return [value.encode()]
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{field} must be a non-empty string or array", param=field)
    if all(isinstance(item, int) for item in value):
        return [token_bytes(value, field)]
    if len(value) > PROMPTS_MAX:
        raise ApiError(400, f"{field} has {len(value)} items, at most {PROMPTS_MAX}", param=field)
    if all(isinstance(item, str) for item in value):
        return [item.encode() for item in value]
    if all(isinstance(item, list) for item in value):
        return [token_bytes(item, field) for item in value]
    raise ApiError(400, f"{field} mixes strings and token ids", param=field)


def token_bytes(tokens: list[Any], field: str) -> bytes:
    """Token ids as four bytes each, so that the token count stays exact."""
    try:
        return b"".join([token.to_bytes(4, "little") for token in tokens])
    except (AttributeError, OverflowError):
        raise ApiError(400, f"{field} has something else than token ids", param=field) from None


def chat_text(messages: list[dict[str, Any]], tools: list[Any] | None) -> bytes:
    """Messages as one prompt: a conversation that goes on keeps its beginning."""
    parts = [msgspec.json.encode(tools)] if tools else []
    for message in messages:
        content = message.get("content")
        text = content.encode() if isinstance(content, str) else msgspec.json.encode(content)
        role = str(message.get("role", "user")).encode()
        parts.append(b"<|" + role + b"|>" + text + b"<|end|>")
    return b"".join(parts)


def usage(ask: Ask, cached: int) -> dict[str, Any]:
    """The usage object of completions, chat and embeddings."""
    completion = ask.max_tokens * ask.choices
    return {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def transfer(ask: Ask, number: str) -> dict[str, Any]:
    """Where a decode server finds the prompt's KV blocks, if it asked."""
    if not ask.remote_decode:
        return {}
    place = {"remote_engine_id": number, "remote_block_ids": list(range(len(ask.hashes))), "remote_host": "sim"}
    return {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, **place, "remote_port": 1}}


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"


class Shape(ABC):
    """How one API reads its prompt and writes its answer. One instance per request."""

    generates = False

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        self.ask = ask
        self.number = number
        self.created = created

    @staticmethod
    @abstractmethod
    def prompts(body: Body) -> list[bytes]:
        """The prompts of a request, at least one. Raises ApiError."""

    @staticmethod
    @abstractmethod
    def max_tokens(body: Body) -> int:
        """How many tokens the request generates."""

    @abstractmethod
    def whole(self, cached: int) -> bytes:
        """The unstreamed answer."""


class StreamShape(Shape):
    """An API that generates text, at once or as server-sent events."""

    generates = True

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        super().__init__(ask, number, created)
        self._words = [words(ask.origin + choice) for choice in range(ask.choices)]

    @staticmethod
    def max_tokens(body: Body) -> int:
        return MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens

    def opening(self) -> bytes:
        """Events before the first token."""
        return b""

    @abstractmethod
    def token(self, *, last: bool) -> bytes:
        """Events of the next token."""

    @abstractmethod
    def closing(self, cached: int) -> bytes:
        """Events after the last token."""


class Completion(StreamShape):
    """/v1/completions"""

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        super().__init__(ask, number, created)
        model = msgspec.json.encode(ask.model)
        ident = f"cmpl-{number}".encode()
        self._chunk_head = b'{"id":"%s","object":"text_completion","created":%d,"model":%s,"choices":' % (
            ident,
            created,
            model,
        )

    @staticmethod
    def prompts(body: Body) -> list[bytes]:
        return prompt_texts(body.prompt, "prompt")

    def whole(self, cached: int) -> bytes:
        choices = [
            {
                "index": choice,
                "text": text_of(self.ask, choice).decode(),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
            for choice in range(self.ask.choices)
        ]
        more = msgspec.json.encode({"usage": usage(self.ask, cached)} | transfer(self.ask, self.number))
        return b"%s%s,%s" % (self._chunk_head, msgspec.json.encode(choices), more[1:])

    def token(self, *, last: bool) -> bytes:
        reason = b'"length"' if last else b"null"
        return b"".join(
            b'data: %s[{"index":%d,"text":"%s","logprobs":null,"finish_reason":%s,'
            b'"stop_reason":null}],"usage":null}\n\n' % (self._chunk_head, choice, next(text), reason)
            for choice, text in enumerate(self._words)
        )

    def closing(self, cached: int) -> bytes:
        return _usage_chunk(self.ask, self._chunk_head, cached) + event(b"[DONE]")


def _usage_chunk(ask: Ask, head: bytes, cached: int) -> bytes:
    if not ask.include_usage:
        return b""
    return event(b'%s[],"usage":%s}' % (head, msgspec.json.encode(usage(ask, cached))))


class Chat(StreamShape):
    """/v1/chat/completions"""

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        super().__init__(ask, number, created)
        self._ident = f"chatcmpl-{number}"
        self._chunk_head = b'{"id":"%s","object":"chat.completion.chunk","created":%d,"model":%s,"choices":' % (
            self._ident.encode(),
            created,
            msgspec.json.encode(ask.model),
        )

    @staticmethod
    def prompts(body: Body) -> list[bytes]:
        if not body.messages:
            raise ApiError(400, "messages must be a non-empty array", param="messages")
        return [chat_text(body.messages, body.tools)]

    @staticmethod
    def max_tokens(body: Body) -> int:
        asked = body.max_completion_tokens
        return StreamShape.max_tokens(body) if asked is None else asked

    def whole(self, cached: int) -> bytes:
        ask = self.ask
        message = {"role": "assistant", "content": text_of(ask).decode(), "tool_calls": []}
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        answer = {
            "id": self._ident,
            "object": "chat.completion",
            "created": self.created,
            "model": ask.model,
            "choices": [choice],
            "usage": usage(ask, cached),
        }
        return msgspec.json.encode(answer | transfer(ask, self.number))

    def opening(self) -> bytes:
        return event(
            self._chunk_head + b'[{"index":0,"delta":{"role":"assistant","content":""},'
            b'"logprobs":null,"finish_reason":null}]}'
        )

    def token(self, *, last: bool) -> bytes:
        reason = b'"length","stop_reason":null' if last else b"null"
        word = next(self._words[0])
        return event(
            b'%s[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}'
            % (self._chunk_head, word, reason)
        )

    def closing(self, cached: int) -> bytes:
        return _usage_chunk(self.ask, self._chunk_head, cached) + event(b"[DONE]")


class Embedding(Shape):
    """/v1/embeddings"""

    @staticmethod
    def prompts(body: Body) -> list[bytes]:
        return prompt_texts(body.input, "input")

    @staticmethod
    def max_tokens(body: Body) -> int:
        return 0

    def whole(self, cached: int) -> bytes:
        ask = self.ask
        data = [
            {"object": "embedding", "index": choice, "embedding": vector(ask.origin + choice)}
            for choice in range(ask.choices)
        ]
        answer = {
            "id": f"embd-{self.number}",
            "object": "list",
            "created": self.created,
            "model": ask.model,
            "data": data,
            "usage": usage(ask, cached),
        }
        return msgspec.json.encode(answer)


def vector(origin: int) -> list[float]:
    """A deterministic embedding, each number in [-1, 1)."""
    numbers = []
    for _ in range(EMBEDDING_SIZE):
        origin = (origin * 6364136223846793005 + 1442695040888963407) & MASK
        numbers.append((origin >> 40) / 2**23 - 1)
    return numbers


class Responses(StreamShape):
    """/v1/responses"""

    @staticmethod
    def prompts(body: Body) -> list[bytes]:
        if isinstance(body.input, list) and all(isinstance(item, dict) for item in body.input):
            prompt = chat_text(body.input, body.tools)
        else:
            prompt = b"".join(prompt_texts(body.input, "input"))
        return [(body.instructions or "").encode() + prompt]

    @staticmethod
    def max_tokens(body: Body) -> int:
        asked = body.max_output_tokens
        return MAX_TOKENS_DEFAULT if asked is None else asked

    def _response(self, status: str, cached: int | None) -> dict[str, Any]:
        ask = self.ask
        answer: dict[str, Any] = {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "model": ask.model,
            "status": status,
            "output": [],
            "usage": None,
        }
        if cached is not None:
            text = {"type": "output_text", "text": text_of(ask).decode(), "annotations": []}
            message = {
                "id": f"msg_{self.number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
            answer["output"] = [message]
            answer["usage"] = {
                "input_tokens": ask.prompt_tokens,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": ask.max_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": ask.prompt_tokens + ask.max_tokens,
            }
        return answer

    def whole(self, cached: int) -> bytes:
        return msgspec.json.encode(self._response("completed", cached) | transfer(self.ask, self.number))

    @staticmethod
    def _event(kind: str, fields: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({"type": kind} | fields)
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    def opening(self) -> bytes:
        return self._event("response.created", {"response": self._response("in_progress", None)})

    def token(self, *, last: bool) -> bytes:
        delta = next(self._words[0]).decode()
        place = {"item_id": f"msg_{self.number}", "output_index": 0, "content_index": 0}
        return self._event("response.output_text.delta", place | {"delta": delta})

    def closing(self, cached: int) -> bytes:
        return self._event("response.completed", {"response": self._response("completed", cached)})


SHAPES: dict[bytes, type[Shape]] = {
    b"/v1/completions": Completion,
    b"/v1/chat/completions": Chat,
    b"/v1/embeddings": Embedding,
    b"/v1/responses": Responses,
}
