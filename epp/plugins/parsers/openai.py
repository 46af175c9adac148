"""OpenAI's API: only the fields that routing needs are decoded; everything else is skipped without building objects.

Canonical prompt bytes, so that equal conversations share prefixes whatever the JSON formatting around them:
- chat: tools, then of each message in order its role, its content (text, or the blocks' JSON) and its tool calls;
- completions and embeddings: the text; several texts one after the other; token ids as little-endian 32-bit words;
- responses: instructions, tools, input; conversations: the items; images: the prompt.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _parts
from epp.request import Parts, Prompt, Request

Raw = msgspec.Raw
EMPTY = Raw()
BACKSLASH = b"\\"
TOKEN_MAX = 2**32 - 1


class _Body(msgspec.Struct):
    model: Any = None
    stream: Any = None
    cache_salt: Any = None


class _Completion(_Body):
    prompt: Raw = EMPTY
    max_tokens: Any = None


class _Embedding(_Body):
    input: Raw = EMPTY


class _Message(msgspec.Struct):
    role: Raw = EMPTY
    content: Raw = EMPTY
    tool_calls: Raw = EMPTY
    name: Raw = EMPTY


class _Chat(_Body):
    messages: list[_Message] | None = None
    tools: Raw = EMPTY
    max_completion_tokens: Any = None
    max_tokens: Any = None


class _Responses(_Body):
    input: Raw = EMPTY
    instructions: Raw = EMPTY
    tools: Raw = EMPTY
    max_output_tokens: Any = None


class _Conversation(_Body):
    items: Raw = EMPTY


class _Image(_Body):
    prompt: Raw = EMPTY


def text_of(raw: Raw) -> bytes:
    """A JSON value as canonical bytes: of a string its UTF-8 text, of anything else its JSON as it stands."""
    view = memoryview(raw)
    if bytes(view[:1]) != b'"':
        return b"" if bytes(view[:5]) == b"null" else bytes(view)
    text = bytes(view[1:-1])  # the one copy of a long prompt
    if BACKSLASH not in text:
        return text
    decoded: str = msgspec.json.decode(raw)
    return decoded.encode("utf-8", "surrogatepass")


def _blank(raw: Raw) -> bool:
    view = memoryview(raw)
    return len(view) < 5 and bytes(view) in (b"", b"null", b'""', b"[]", b"{}")


_text_or_tokens = msgspec.json.Decoder(str | list[str | int | list[int]])


def _prompt_bytes(raw: Raw) -> bytes:
    """String, array of strings, array of token ids, or array of those. Raises ValueError for a mixed or foreign shape."""
    if bytes(memoryview(raw)[:1]) == b'"':
        return text_of(raw)
    value = _text_or_tokens.decode(raw)
    if not value:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    kinds = {type(item) for item in value}
    if kinds == {str}:
        return b"".join(item.encode("utf-8", "surrogatepass") for item in value)
    if kinds == {int}:
        return _tokens(value)
    if kinds == {list}:
        return b"".join(_tokens(item) for item in value)
    raise ValueError("an array of prompts holds texts or token ids, not both")


def _tokens(ids: Sequence[int]) -> bytes:
    if any(not 0 <= token <= TOKEN_MAX for token in ids):
        raise ValueError("token ids are integers from 0 to 4294967295")
    return struct.pack(f"<{len(ids)}I", *ids)


def _whole(*candidates: Any) -> int | None:
    for value in candidates:
        if type(value) is int and value >= 0:
            return value
        if type(value) is float and value >= 0 and value.is_integer():
            return int(value)
    return None


def _require(raw: Raw, kind: str, name: str) -> None:
    if _blank(raw):
        raise Refused(Cause.INVALID_BODY, f"invalid {kind} request: must have {name} field")


def _read_prompt(raw: Raw, kind: str, name: str) -> Prompt:
    try:
        made = _prompt_bytes(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        if _blank(raw):
            made = b""
        else:
            raise Refused(Cause.INVALID_BODY, f"invalid {kind} request: {name}: {error}") from None
    if not made:
        raise Refused(Cause.INVALID_BODY, f"invalid {kind} request: must have {name} field")
    return Prompt(lambda: made)


def _completion(body: _Completion, request: Request) -> None:
    request.prompt = _read_prompt(body.prompt, "completions", "prompt")
    request.max_tokens = _whole(body.max_tokens)


def _embedding(body: _Embedding, request: Request) -> None:
    request.prompt = _read_prompt(body.input, "embeddings", "input")


def _chat(body: _Chat, request: Request) -> None:
    if not body.messages:
        raise Refused(Cause.INVALID_BODY, "invalid chat completions request: must have valid messages field")
    request.prompt = Prompt(lambda: _chat_bytes(body))
    request.max_tokens = _whole(body.max_completion_tokens, body.max_tokens)


def _chat_bytes(body: _Chat) -> bytes:
    parts = [text_of(body.tools)]
    for message in body.messages or ():
        parts += (text_of(message.role), b"\n", text_of(message.content), text_of(message.tool_calls), b"\n")
    return b"".join(parts)


def _responses(body: _Responses, request: Request) -> None:
    _require(body.input, "responses", "input")
    request.prompt = Prompt(lambda: b"\n".join((text_of(body.instructions), text_of(body.tools), _open(body.input))))
    request.max_tokens = _whole(body.max_output_tokens)


def _open(raw: Raw) -> bytes:
    """A list without its closing bracket, so that a longer list starts with the same bytes."""
    text = text_of(raw)
    return text[:-1].rstrip() if text[:1] == b"[" else text


def _conversation(body: _Conversation, request: Request) -> None:
    _require(body.items, "conversations", "items")
    request.prompt = Prompt(lambda: _open(body.items))


def _image(body: _Image, request: Request) -> None:
    _require(body.prompt, "images generations", "prompt")
    request.prompt = Prompt(lambda: text_of(body.prompt))


_Api = tuple[msgspec.json.Decoder[Any], Callable[[Any, Request], None], Callable[[bytes | memoryview], Parts]]
_API: dict[str, _Api] = {
    "chat/completions": (msgspec.json.Decoder(_Chat), _chat, _parts.chat),
    "chat/completions/render": (msgspec.json.Decoder(_Chat), _chat, _parts.chat),
    "completions": (msgspec.json.Decoder(_Completion), _completion, _parts.completions),
    "completions/render": (msgspec.json.Decoder(_Completion), _completion, _parts.completions),
    "embeddings": (msgspec.json.Decoder(_Embedding), _embedding, _parts.embeddings),
    "responses": (msgspec.json.Decoder(_Responses), _responses, _parts.responses),
    "conversations": (msgspec.json.Decoder(_Conversation), _conversation, _parts.conversations),
    "images/generations": (msgspec.json.Decoder(_Image), _image, _parts.images),
}
_LONGEST_FIRST = sorted(_API, key=len, reverse=True)


@functools.lru_cache(maxsize=1024)
def _api(path: str) -> _Api:
    path = path.rstrip("/")
    for suffix in _LONGEST_FIRST:
        if path.endswith(suffix):
            return _API[suffix]
    return _API["completions"]


@plugin("openai-parser")
class OpenAI(Parser):
    """Completions, chat, embeddings, responses, conversations, images and the render variants."""

    paths = tuple(_API)
    app_protocols = ("h2c", "http")
    reads_usage = True

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        decoder, read, parts = _api(path)
        try:
            decoded = decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None
        model = decoded.model
        if not isinstance(model, str) or not model:
            raise Refused(Cause.MODEL_MISSING)
        request.model = request.target_model = model
        request.streaming = decoded.stream is True
        if isinstance(decoded.cache_salt, str):
            request.cache_salt = decoded.cache_salt
        read(decoded, request)
        prompt = request.prompt
        prompt.body, prompt.read = body, parts
