"""OpenAI's JSON bodies -> `Request`: only the fields that routing needs are decoded, everything else is skipped without objects.

Shared by the parsers whose bodies are, or contain, such JSON. The model's name is read here, but that there is one is asked by who
forwards it under that name.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import msgspec

from epp.errors import Cause, Refused
from epp.model_rewrite import MODEL_CHARS_MAX
from epp.plugins.parsers import _canonical, _parts
from epp.plugins.parsers._canonical import BRACKET, EMPTY, QUOTE, UNREADABLE, Message, Raw, first, present
from epp.request import Parts, Prompt, Request

T = TypeVar("T")
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Scalar: TypeAlias = (
    str | int | float | bool | None
)  # of any kind, but no tree, which would hold up the loop by its making


class Body(msgspec.Struct):
    """What all kinds of bodies have."""

    model: Scalar = None
    stream: Scalar = None
    cache_salt: Scalar = None


class _Completion(Body):
    prompt: Raw = EMPTY
    max_tokens: Scalar = None


class _Embedding(Body):
    input: Raw = EMPTY


class Front(Body):
    """Of conversations: what a template puts before the messages, or is told for all of them."""

    chat_template: Raw = EMPTY
    chat_template_kwargs: Raw = EMPTY
    documents: Raw = EMPTY
    tools: Raw = EMPTY


class _Chat(Front):
    messages: list[Message] | None = None
    max_completion_tokens: Scalar = None
    max_tokens: Scalar = None


class _Crowd(Front):
    messages: Raw = EMPTY
    max_completion_tokens: Scalar = None
    max_tokens: Scalar = None


class _Responses(Front):
    input: Raw = EMPTY
    instructions: Raw = EMPTY
    previous_response_id: Raw = EMPTY
    conversation: Raw = EMPTY
    prompt: Raw = EMPTY
    max_output_tokens: Scalar = None


class _Conversation(Body):
    items: Raw = EMPTY


class _Image(Body):
    prompt: Raw = EMPTY


_texts = msgspec.json.Decoder(list[Raw])
_token_ids = msgspec.json.Decoder(list[TokenId])
_token_lists = msgspec.json.Decoder(list[list[TokenId]])


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | memoryview) -> T:
    """A body as JSON. Raises Refused."""
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None


def whole(*candidates: Any) -> int | None:
    """The first that is a whole number from 0 on."""
    for value in candidates:
        if type(value) is int and value >= 0:
            return value
        if type(value) is float and value >= 0 and value.is_integer():
            return int(value)
    return None


def named(request: Request, model: Any) -> None:
    """The model that the body names; it must. Names are kept when their request is gone, in metrics and caches."""
    if not isinstance(model, str) or not model:
        raise Refused(Cause.MODEL_MISSING)
    if len(model) > MODEL_CHARS_MAX:
        problem = f"invalid request body: a model's name has at most {MODEL_CHARS_MAX} characters"
        raise Refused(Cause.INVALID_BODY, problem)
    request.model = request.target_model = model


def _must_have(kind: str, name: str) -> Refused:
    return Refused(Cause.INVALID_BODY, f"invalid {kind} request: must have {name} field")


def blank(raw: Raw) -> bool:
    view = memoryview(raw)
    return len(view) < 5 and bytes(view) in (b"", b"null", b'""', b"[]", b"{}")


def _prompt(raw: Raw, kind: str, name: str) -> Prompt:
    """A text, texts, token ids, or several lists of those; nothing mixed."""
    if blank(raw):
        raise _must_have(kind, name)
    if first(raw) == QUOTE:
        return Prompt(lambda: _canonical.texts((raw,))[0])
    try:
        prompts, between = _listed(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(Cause.INVALID_BODY, f"invalid {kind} request: {name}: {error}") from None
    if not any(prompts):
        raise _must_have(kind, name)
    made = Prompt(lambda: between.join(prompts))
    if len(prompts) > 1:
        made.several = prompts
    return made


def _listed(raw: Raw) -> tuple[list[bytes], bytes]:
    """Prompts, and what stands between them where they count as one."""
    entry = bytes(memoryview(raw)[1:64]).lstrip()[:1]
    if entry == b'"':
        if (many := _canonical.many_texts(raw)) is not None:
            return [many], b""
        texts = _texts.decode(raw)
        if any(first(text) != QUOTE for text in texts):
            raise msgspec.ValidationError("an array of prompts holds texts or token ids, not both")
        return _canonical.texts(texts), _canonical.PROMPT
    if entry == b"[":
        if len(memoryview(raw)) > _canonical.SURE_BYTES:
            many = bytes(memoryview(raw)[:-1])
            if many.count(b",") > _canonical.TEXTS_MAX:
                return [many], b""
        return _canonical.token_ids([ids for ids in _token_lists.decode(raw) if ids]), _canonical.TOKENS_BETWEEN
    ids, rest = _canonical.first_ids(raw)
    return [_canonical.token_ids([_token_ids.decode(ids)])[0] + rest], b""


def _completion(body: _Completion, request: Request) -> None:
    request.prompt = _prompt(body.prompt, "completions", "prompt")
    request.max_tokens = whole(body.max_tokens)


def _embedding(body: _Embedding, request: Request) -> None:
    request.prompt = _prompt(body.input, "embeddings", "input")


def _image(body: _Image, request: Request) -> None:
    request.prompt = _prompt(body.prompt, "images generations", "prompt")


def _chat(body: _Chat, request: Request) -> None:
    messages = body.messages
    if not messages:
        raise _must_have("chat completions", "valid messages")
    request.prompt = Prompt(lambda: _canonical.conversation(front(body), messages))
    request.max_tokens = whole(body.max_completion_tokens, body.max_tokens)


def _crowd(body: _Crowd, request: Request) -> None:
    """A chat with more messages and parts than are looked at one by one."""
    messages = body.messages
    if blank(messages) or first(messages) != BRACKET:
        raise _must_have("chat completions", "valid messages")
    request.prompt = Prompt(lambda: _canonical.as_json(front(body), messages))
    request.max_tokens = whole(body.max_completion_tokens, body.max_tokens)


def _responses(body: _Responses, request: Request) -> None:
    if not present(body.input):
        raise _must_have("responses", "input")
    before = ((b"after", body.previous_response_id), (b"in", body.conversation), (b"prompt", body.prompt))
    request.prompt = Prompt(lambda: _canonical.items((*before, *front(body)), body.instructions, body.input))
    request.max_tokens = whole(body.max_output_tokens)


def _conversation(body: _Conversation, request: Request) -> None:
    if blank(body.items):
        raise _must_have("conversations", "items")
    request.prompt = Prompt(lambda: _canonical.items((), EMPTY, body.items))


def front(body: Front) -> tuple[tuple[bytes, Raw], ...]:
    """What stands before the messages."""
    return (
        (b"template", body.chat_template),
        (b"arguments", body.chat_template_kwargs),
        (b"documents", body.documents),
        (b"tools", body.tools),
    )


Api = tuple[msgspec.json.Decoder[Any], Callable[[Any, Request], None], Callable[[bytes | memoryview], Parts]]
API: Final[dict[str, Api]] = {
    "chat/completions": (msgspec.json.Decoder(_Chat), _chat, _parts.chat),
    "chat/completions/render": (msgspec.json.Decoder(_Chat), _chat, _parts.chat),
    "completions": (msgspec.json.Decoder(_Completion), _completion, _parts.completions),
    "completions/render": (msgspec.json.Decoder(_Completion), _completion, _parts.completions),
    "embeddings": (msgspec.json.Decoder(_Embedding), _embedding, _parts.embeddings),
    "responses": (msgspec.json.Decoder(_Responses), _responses, _parts.responses),
    "conversations": (msgspec.json.Decoder(_Conversation), _conversation, _parts.conversations),
    "images/generations": (msgspec.json.Decoder(_Image), _image, _parts.images),
}
_crowd_decoder: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(_Crowd)
_LONGEST_FIRST: Final = sorted(API, key=len, reverse=True)
_REACH: Final = len(_LONGEST_FIRST[0])


def api_of(path: str) -> Api:
    """By the longest suffix; an unknown path is one of completions."""
    return _api_of(path.rstrip("/")[-_REACH:])  # no more is remembered: paths come from clients, and may be long


@functools.lru_cache(maxsize=1024)
def _api_of(end: str) -> Api:
    return next((API[suffix] for suffix in _LONGEST_FIRST if end.endswith(suffix)), API["completions"])


def read(request: Request, api: Api, body: bytes | memoryview) -> Any:
    """Fills prompt, streaming, max_tokens and cache_salt of `request`; gives what the body says of the model. Raises Refused."""
    decoder, fill, parts = api
    if fill is _chat and _canonical.crowded(body):
        decoder, fill = _crowd_decoder, _crowd
    found = decoded(decoder, body)
    request.streaming = found.stream is True
    if isinstance(found.cache_salt, str):
        request.cache_salt = found.cache_salt
    fill(found, request)
    prompt = request.prompt
    prompt.body, prompt.read = body, parts
    return found.model
