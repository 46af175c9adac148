"""Reads OpenAI's JSON bodies into a `Request`. Decodes only the fields that routing needs, and creates no objects for the others.

All parsers of bodies that are, or contain, such JSON share this module. `read` does not require the name of a model. Parsers whose
requests need a model also call `named`.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import msgspec

from epp.errors import UNREADABLE, Cause, Refused
from epp.plugins.parsers import _canonical, _extents, _parts, _plain_prompts
from epp.plugins.parsers._canonical import BRACKET, QUOTE, first, present
from epp.plugins.parsers._reader import Reader
from epp.plugins.parsers._structs import EMPTY, Chat, Completion, Conversation, Crowd, Embedding, Front, Image, Raw, Responses, TokenId
from epp.protocol.usage_structs import TOKENS_MAX
from epp.request import Parts, Prompt, Request
from epp.request.model_rewrite import MODEL_CHARS_MAX

_texts: Final = msgspec.json.Decoder(list[Raw])
_token_ids: Final = msgspec.json.Decoder(list[TokenId])
_token_lists: Final = msgspec.json.Decoder(list[list[TokenId]])


def decoded(reader: Reader, body: bytes | memoryview) -> Any:
    """Decodes a body as JSON. Raises Refused if it is not readable."""
    try:
        return reader.decode(body)
    except UNREADABLE as error:
        raise Refused(Cause.INVALID_BODY, f"invalid request body: {error}") from None


def whole(*candidates: Any) -> int | None:
    """Returns the first candidate that is a whole number of 0 or more, lowered to TOKENS_MAX: clients may send hundreds of digits."""
    for value in candidates:
        if type(value) is int and value >= 0:
            return min(value, TOKENS_MAX)
        if type(value) is float and value >= 0 and value.is_integer():
            return min(int(value), TOKENS_MAX)
    return None


def named(request: Request, model: Any) -> None:
    """Sets the request's model to the body's `model`. Raises Refused if it is missing, or too long to keep in metrics and caches."""
    if not isinstance(model, str) or not model:
        raise Refused(Cause.MODEL_MISSING)
    if len(model) > MODEL_CHARS_MAX:
        problem = f"invalid request body: a model's name has at most {MODEL_CHARS_MAX} characters"
        raise Refused(Cause.INVALID_BODY, problem)
    request.model = request.target_model = model


def salt(request: Request, value: Any) -> None:
    """Sets the request's cache salt to the body's salt, or EMPTY if the body has no salt."""
    request.salted = value is not EMPTY
    if isinstance(value, str):
        request.cache_salt = value


def _must_have(kind: str, name: str) -> Refused:
    return Refused(Cause.INVALID_BODY, f"invalid {kind} request: must have {name} field")


def blank(raw: Any) -> bool:
    """Returns whether a JSON value is missing, null or empty. `raw`: `Raw`, bytes or a view."""
    text = raw if isinstance(raw, bytes) else bytes(memoryview(raw)[:5])
    return len(text) < 5 and text in (b"", b"null", b'""', b"[]", b"{}")


def _prompt(raw: Raw, kind: str, name: str) -> Prompt:
    """Reads a prompt: a text, a list of texts, a list of token ids, or a list of such lists. Raises Refused.

    `kind`, `name`: the kind of request and the field's name, for error messages.
    """
    if blank(raw):
        raise _must_have(kind, name)
    if first(raw) == QUOTE:
        return Prompt(lambda: _plain_prompts.texts((raw,))[0])
    try:
        prompts, between = _listed(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Refused(Cause.INVALID_BODY, f"invalid {kind} request: {name}: {error}") from None
    if not any(prompts):
        raise _must_have(kind, name)
    prompt = Prompt(lambda: between.join(prompts))
    if len(prompts) > 1:
        prompt.several = prompts
    return prompt


def _listed(raw: Raw) -> tuple[list[bytes], bytes]:
    """Returns the prompts of a list, and the separator that joins them."""
    entry = bytes(memoryview(raw)[1:64]).lstrip()[:1]
    if entry == b'"':
        if (many := _plain_prompts.many_texts(raw)) is not None:
            return [many], b""
        texts = _texts.decode(raw)
        if any(first(text) != QUOTE for text in texts):
            raise msgspec.ValidationError("an array of prompts holds texts or token ids, not both")
        return _plain_prompts.texts(texts), _canonical.PROMPT
    if entry == b"[":
        if len(memoryview(raw)) > _canonical.SURE_BYTES:
            many = bytes(memoryview(raw)[:-1])
            if many.count(b",") > _plain_prompts.TEXTS_MAX:
                return [many], b""
        return _plain_prompts.token_ids([ids for ids in _token_lists.decode(raw) if ids]), _canonical.TOKENS_BETWEEN
    ids, rest = _plain_prompts.first_ids(raw)
    return [_plain_prompts.token_ids([_token_ids.decode(ids)])[0] + rest], b""


def _completion(body: Completion, request: Request) -> None:
    embedded = blank(body.prompt) and not blank(body.prompt_embeds)
    if embedded:
        request.prompt = Prompt(lambda: _plain_prompts.embeddings(body.prompt_embeds))
    else:
        request.prompt = _prompt(body.prompt, "completions", "prompt")
    request.max_tokens = whole(body.max_tokens)
    prompts = _extents.prompts_of(body.prompt_embeds if embedded else body.prompt, len(request.prompt.several))
    _extents.describe(request, choices=_extents.choices_of(body.n, body.best_of), prompts=prompts)


def _embedding(body: Embedding, request: Request) -> None:
    given = body.messages if blank(body.input) else body.input
    if _conversations(given):
        request.prompt = Prompt(lambda: _canonical.items(front(body), EMPTY, given))
        _extents.describe(request, unseen=_extents.item_tokens(given))
        return
    prompt = request.prompt = _prompt(body.input, "embeddings", "input")
    _extents.describe(request, prompts=_extents.prompts_of(body.input, len(prompt.several)))


def _conversations(raw: Raw) -> bool:
    """Returns whether a value is a list of messages, or a list of such lists."""
    return bytes(memoryview(raw)[:64]).translate(None, b" \t\r\n").startswith((b"[{", b"[[{"))


def _image(body: Image, request: Request) -> None:
    request.prompt = _prompt(body.prompt, "images generations", "prompt")
    # An answer may have URLs instead of images.
    _extents.describe(request, choices=_extents.choices_of(body.n), hidden=True)


def _chat(body: Chat, request: Request) -> None:
    messages = body.messages
    if not messages:
        raise _must_have("chat completions", "valid messages")
    request.prompt = Prompt(lambda: _canonical.conversation(front(body), messages))
    request.max_tokens = whole(body.max_completion_tokens, body.max_tokens)
    unseen, hidden = _extents.media_tokens(messages), body.include_reasoning is False
    if unseen or hidden or body.n is not None:
        _extents.describe(request, choices=_extents.choices_of(body.n), unseen=unseen, hidden=hidden)


def _crowd(body: Crowd, request: Request) -> None:
    """Reads a chat with so many messages and parts that decoding them one by one would take too long."""
    messages = body.messages
    if blank(messages) or first(messages) != BRACKET:
        raise _must_have("chat completions", "valid messages")
    request.prompt = Prompt(lambda: _canonical.as_json(front(body), messages))
    request.max_tokens = whole(body.max_completion_tokens, body.max_tokens)
    _extents.describe(request, choices=_extents.choices_of(body.n), hidden=body.include_reasoning is False)


def _responses(body: Responses, request: Request) -> None:
    if not present(body.input):
        raise _must_have("responses", "input")
    before = ((b"after", body.previous_response_id), (b"in", body.conversation), (b"prompt", body.prompt))
    request.prompt = Prompt(lambda: _canonical.items((*before, *front(body)), body.instructions, body.input))
    request.max_tokens = whole(body.max_output_tokens)
    stored = any(present(raw) for _, raw in before)
    _extents.describe(request, unseen=_extents.CONTEXT_TOKENS if stored else _extents.item_tokens(body.input))


def _conversation(body: Conversation, request: Request) -> None:
    if blank(body.items):
        raise _must_have("conversations", "items")
    request.prompt = Prompt(lambda: _canonical.items((), EMPTY, body.items))


def front(body: Front) -> tuple[tuple[bytes, Raw], ...]:
    """Returns the values that come before the messages, with names."""
    return (
        (b"template", body.chat_template),
        (b"arguments", body.chat_template_kwargs),
        (b"documents", body.documents),
        (b"tools", body.tools),
    )


Api = tuple[Reader, Callable[[Any, Request], None], Callable[[bytes | memoryview], Parts]]
API: Final[dict[str, Api]] = {
    "chat/completions": (Reader(Chat), _chat, _parts.chat),
    "chat/completions/render": (Reader(Chat), _chat, _parts.chat),
    "completions": (Reader(Completion), _completion, _parts.completions),
    "completions/render": (Reader(Completion), _completion, _parts.completions),
    "embeddings": (Reader(Embedding), _embedding, _parts.embeddings),
    "responses": (Reader(Responses), _responses, _parts.responses),
    "conversations": (Reader(Conversation), _conversation, _parts.conversations),
    "images/generations": (Reader(Image), _image, _parts.images),
}
_crowd_reader: Final = Reader(Crowd)
_LONGEST_FIRST: Final = sorted(API, key=len, reverse=True)
_REACH: Final = len(_LONGEST_FIRST[0])


def api_of(path: str) -> Api:
    """Returns the API whose suffix matches the end of the path; the longest suffix wins. An unknown path is taken as completions."""
    # only the end of a path goes into the cache: paths come from clients and may be long
    return _api_of(path.rstrip("/")[-_REACH:])


@functools.lru_cache(maxsize=1024)
def _api_of(end: str) -> Api:
    return next((API[suffix] for suffix in _LONGEST_FIRST if end.endswith(suffix)), API["completions"])


def read(request: Request, api: Api, body: bytes | memoryview) -> Any:
    """Sets prompt, streaming, max_tokens and cache_salt of `request`. Returns the body's model, of any type. Raises Refused."""
    reader, fill, parts = api
    if fill is _chat and _canonical.crowded(body):
        reader, fill = _crowd_reader, _crowd
    fields = decoded(reader, body)
    request.streaming = fields.stream is True
    salt(request, fields.cache_salt)
    fill(fields, request)
    prompt = request.prompt
    prompt.body, prompt.read = body, parts
    return fields.model
