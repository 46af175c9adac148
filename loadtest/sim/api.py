"""Implements the four APIs of a simulated model server: request bodies go in, response bytes in the format of vLLM come out.

There is one `Shape` per API. `whole` renders an unstreamed answer; `opening`, `token` and `closing` render the server-sent events of a
streamed answer. Every server generates the same text for the same prompt and seed. Every answer has exactly the request's max tokens
(default 16), so its finish reason is always `length`. The module does no I/O and reads no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec
import xxhash

from loadtest.sim.kv_dialects import tokens_of
from loadtest.sim.kv_pool import block_hashes, token_count
from loadtest.sim.request import ApiError, Ask, Body, Models, chat_text, prompt_texts
from loadtest.sim.text import MASK, text_of, vector, words

MAX_TOKENS_DEFAULT = 16

_decoder = msgspec.json.Decoder(Body)


def parse(shape: type[Shape], raw: bytes, models: Models) -> Ask:
    """Parses a request body. Raises ApiError."""
    try:
        body = _decoder.decode(raw)
    except msgspec.DecodeError as error:  # msgspec.ValidationError is a subclass of this, so it is caught, too
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
        prompt=prompt if models.keeps_prompts else b"",
        cache_salt=body.cache_salt or "",
    )


def rendered(shape: type[Shape], raw: bytes, models: Models) -> bytes:
    """Returns the token ids of a request's prompts, as JSON like that of vLLM's render endpoints. Raises ApiError."""
    try:
        body = _decoder.decode(raw)
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The request body is not valid: {error}") from None
    models.resolve(body.model)
    answers = [{"token_ids": tokens_of(prompt), "features": None} for prompt in shape.prompts(body)]
    return msgspec.json.encode(answers if shape is Completion else answers[0])


def usage(ask: Ask, cached: int) -> dict[str, Any]:
    """Returns the usage object of completions, chats and embeddings. `cached`: prompt tokens that were cached."""
    completion = ask.max_tokens * ask.choices
    return {
        "prompt_tokens": ask.prompt_tokens,
        "total_tokens": ask.prompt_tokens + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def transfer(ask: Ask, number: str) -> dict[str, Any]:
    """Returns the fields that tell a decode server where the prompt's KV blocks are; no fields unless the request asked for them."""
    if not ask.remote_decode:
        return {}
    place = {"remote_engine_id": number, "remote_block_ids": list(range(len(ask.hashes))), "remote_host": "sim"}
    return {"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, **place, "remote_port": 1}}


def event(data: bytes) -> bytes:
    """Returns one server-sent event with this data."""
    return b"data: " + data + b"\n\n"


class Shape(ABC):
    """Renders the answers of one API, and finds the prompts in its requests. There is one instance per request."""

    generates = False

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        self.ask = ask
        self.number = number
        self.created = created

    @staticmethod
    @abstractmethod
    def prompts(body: Body) -> list[bytes]:
        """Returns the prompts of a request, at least one. Raises ApiError."""

    @staticmethod
    @abstractmethod
    def max_tokens(body: Body) -> int:
        """Returns the number of tokens that the request generates."""

    @abstractmethod
    def whole(self, cached: int) -> bytes:
        """Returns the unstreamed answer. `cached`: prompt tokens that were cached."""


class StreamShape(Shape):
    """An API that generates text, in one piece or as server-sent events."""

    generates = True

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        super().__init__(ask, number, created)
        self._words = [words(ask.origin + choice) for choice in range(ask.choices)]

    @staticmethod
    def max_tokens(body: Body) -> int:
        return MAX_TOKENS_DEFAULT if body.max_tokens is None else body.max_tokens

    def opening(self) -> bytes:
        """Returns the events before the first token."""
        return b""

    @abstractmethod
    def token(self, *, last: bool) -> bytes:
        """Returns the events of the next token. `last`: whether it is the last token."""

    @abstractmethod
    def closing(self, cached: int) -> bytes:
        """Returns the events after the last token. `cached`: prompt tokens that were cached."""


class Completion(StreamShape):
    """/v1/completions"""

    def __init__(self, ask: Ask, number: str, created: int) -> None:
        super().__init__(ask, number, created)
        model = msgspec.json.encode(ask.model)
        ident = f"cmpl-{number}".encode()
        self._chunk_head = b'{"id":"%s","object":"text_completion","created":%d,"model":%s,"choices":' % (ident, created, model)

    @staticmethod
    def prompts(body: Body) -> list[bytes]:
        return prompt_texts(body.prompt, "prompt")

    def whole(self, cached: int) -> bytes:
        choices = [
            {"index": choice, "text": text_of(self.ask, choice).decode(), "logprobs": None, "finish_reason": "length", "stop_reason": None}
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
        limit = body.max_completion_tokens
        return StreamShape.max_tokens(body) if limit is None else limit

    def whole(self, cached: int) -> bytes:
        ask = self.ask
        message = {"role": "assistant", "content": text_of(ask).decode(), "tool_calls": []}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
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
        return event(self._chunk_head + b'[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}')

    def token(self, *, last: bool) -> bytes:
        reason = b'"length","stop_reason":null' if last else b"null"
        word = next(self._words[0])
        return event(b'%s[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":%s}]}' % (self._chunk_head, word, reason))

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
        data = [{"object": "embedding", "index": choice, "embedding": vector(ask.origin + choice)} for choice in range(ask.choices)]
        answer = {
            "id": f"embd-{self.number}",
            "object": "list",
            "created": self.created,
            "model": ask.model,
            "data": data,
            "usage": usage(ask, cached),
        }
        return msgspec.json.encode(answer)


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
        limit = body.max_output_tokens
        return MAX_TOKENS_DEFAULT if limit is None else limit

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
            message = {"id": f"msg_{self.number}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
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


RENDERED: dict[bytes, type[Shape]] = {
    b"/v1/completions/render": Completion,
    b"/v1/chat/completions/render": Chat,
    b"/v1/responses/render": Responses,
}
SHAPES: dict[bytes, type[Shape]] = {
    b"/v1/completions": Completion,
    b"/v1/chat/completions": Chat,
    b"/v1/embeddings": Embedding,
    b"/v1/responses": Responses,
}
