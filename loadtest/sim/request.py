"""Parses OpenAI request bodies into requests for the engine.

`Body` has the fields of all four APIs. A prompt becomes bytes; the hashes of their blocks identify the KV blocks of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

PROMPTS_MAX = 64


class ApiError(Exception):
    """A request is wrong. Its answer is an OpenAI error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    def body(self) -> bytes:
        """Returns the error object as JSON."""
        kinds = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}
        error = {"message": str(self), "type": kinds.get(self.status, "InternalServerError"), "param": self.param, "code": self.status}
        return msgspec.json.encode({"error": error})


class StreamOptions(msgspec.Struct):
    """The part of `stream_options` that changes an answer."""

    include_usage: bool = False


class Body(msgspec.Struct):
    """The fields of all four APIs that this server uses. The server ignores all other fields."""

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


@dataclass(frozen=True, slots=True)
class Ask:
    """A parsed request: the values that the engine and the shapes of answers need."""

    model: str
    lora: str | None
    hashes: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    choices: int
    origin: int  # the state of the random generator from which the words of the answer are drawn
    remote_decode: bool = False  # whether another server continues with the KV blocks of this request
    prompt: bytes = b""  # only for servers that publish KV events
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a server: the base model under one or more names, and LoRA adapters.

    `block_size`: tokens per KV block. `seed`: the seed for the words of answers. `keeps_prompts`: whether `Ask.prompt` is filled.
    """

    names: tuple[str, ...]
    loras: tuple[str, ...]
    block_size: int
    seed: int
    keeps_prompts: bool = False

    def resolve(self, requested: str | None) -> tuple[str, str | None]:
        """Returns (model, adapter or None) for the name in a request. An empty or missing name means the base model. Raises ApiError."""
        if not requested:
            return self.names[0], None
        if requested in self.names:
            return requested, None
        if requested in self.loras:
            return requested, requested
        raise ApiError(404, f"The model `{requested}` does not exist.", param="model")

    def listing(self, created: int) -> bytes:
        """Returns the answer to GET /v1/models. `created`: Unix time in seconds."""
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


def prompt_texts(value: str | list[Any] | None, field: str) -> list[bytes]:
    """Returns the prompts in a string, a list of strings, a list of token ids, or a list of such lists. Raises ApiError."""
    if isinstance(value, str) and value:
        return [value.encode()]
    if not isinstance(value, list) or not value:
        raise ApiError(400, f"{field} must be a non-empty string or array", param=field)
    if all(isinstance(item, int) for item in value):
        return [token_bytes(value, field)]
    if len(value) > PROMPTS_MAX:
        raise ApiError(400, f"{field} has {len(value)} items; the limit is {PROMPTS_MAX}", param=field)
    if all(isinstance(item, str) for item in value):
        return [item.encode() for item in value]
    if all(isinstance(item, list) for item in value):
        return [token_bytes(item, field) for item in value]
    raise ApiError(400, f"{field} mixes strings and token ids", param=field)


def token_bytes(tokens: list[Any], field: str) -> bytes:
    """Encodes each token id in four bytes, so that the token count stays exact. Raises ApiError."""
    try:
        return b"".join([token.to_bytes(4, "little") for token in tokens])
    except (AttributeError, OverflowError):
        raise ApiError(400, f"{field} contains items that are not token ids", param=field) from None


def chat_text(messages: list[dict[str, Any]], tools: list[Any] | None) -> bytes:
    """Joins all messages into one prompt. If a conversation gets longer, its earlier prompt is a prefix of the new one."""
    parts = [msgspec.json.encode(tools)] if tools else []
    for message in messages:
        content = message.get("content")
        text = content.encode() if isinstance(content, str) else msgspec.json.encode(content)
        role = str(message.get("role", "user")).encode()
        parts.append(b"<|" + role + b"|>" + text + b"<|end|>")
    return b"".join(parts)
