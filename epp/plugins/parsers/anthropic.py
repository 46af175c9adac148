"""Reads Anthropic's API: messages, and requests to count their tokens.

Servers convert Anthropic's messages to a chat whose first message is the system text. A prompt has the bytes of this chat. Some clients put
a billing note into the system text, which changes with every request. Servers remove the note before they tokenise, so it is not hashed.
"""

from typing import Final

import msgspec

from epp.errors import UNREADABLE, Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _canonical, _extents, _openai, _parts
from epp.plugins.parsers._canonical import BRACKET, first, present
from epp.plugins.parsers._reader import Reader
from epp.plugins.parsers._structs import ABSENT, EMPTY, Message, Raw, Scalar
from epp.protocol.usage import ANSWER, UNSEEN, AnswerHandling, AnthropicScanner
from epp.request import Prompt, Request

MESSAGES: Final = "messages"
COUNT_TOKENS: Final = "messages/count_tokens"
BILLING: Final = b'"' + _parts.BILLING.encode()
SCANNED: Final = AnswerHandling(AnthropicScanner)


class _Body(msgspec.Struct):
    model: Scalar = None
    stream: Scalar = None
    max_tokens: Scalar = None
    cache_salt: Scalar = ABSENT
    system: Raw = EMPTY
    tools: Raw = EMPTY
    messages: list[Message] | None = None


class _Crowd(_Body):
    messages: Raw = EMPTY  # type: ignore[assignment]  # undecoded, if there are too many to decode one by one


class _SystemPart(msgspec.Struct):
    text: Raw = EMPTY


_body = Reader(_Body)
_crowd = Reader(_Crowd)
_parts_of = msgspec.json.Decoder(list[Raw])
_system_part = msgspec.json.Decoder(_SystemPart)


@plugin("anthropic-parser")
class Anthropic(Parser):
    """Reads Anthropic's messages API. Requests that only count tokens, and the answers to them, pass unread."""

    paths = (MESSAGES, COUNT_TOKENS)
    app_protocols = ("h2c", "http")
    reads_usage = True
    names_model = True
    salt_member = "cache_salt"
    keeps = (ANSWER,)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        api = path.removesuffix("/")
        if api.endswith("/" + COUNT_TOKENS):
            request[ANSWER] = UNSEEN
            return
        if not api.endswith("/" + MESSAGES):
            raise Refused(Cause.INVALID_BODY, f"unsupported API endpoint: {path}")
        fields: _Body
        if _canonical.crowded(body):
            fields = crowd = _openai.decoded(_crowd, body)
            empty = first(crowd.messages) != BRACKET or _openai.blank(crowd.messages)
        else:
            fields = _openai.decoded(_body, body)
            empty = not fields.messages
        if empty:
            raise Refused(Cause.INVALID_BODY, "invalid messages request: must have at least one message")
        request[ANSWER] = SCANNED
        request.streaming = fields.stream is True
        request.max_tokens = _openai.whole(fields.max_tokens)
        if not isinstance(fields, _Crowd):
            _extents.describe(request, unseen=_extents.media_tokens(fields.messages or ()))
        _openai.salt(request, fields.cache_salt)
        prompt = request.prompt = Prompt(lambda: _canonical_bytes(fields))
        prompt.body, prompt.read = body, _parts.messages
        _openai.named(request, fields.model)


def _canonical_bytes(body: _Body) -> bytes:
    front, before = _canonical.system(((b"tools", body.tools),), _system(body.system))
    if isinstance(body, _Crowd):
        return _canonical.conversation(front, before) + _canonical.as_json((), body.messages)
    return _canonical.conversation(front, before + (body.messages or []))


def _system(raw: Raw) -> Raw:
    """Returns the system text without billing notes; EMPTY without a system text."""
    if not present(raw):
        return EMPTY
    if first(raw) != BRACKET or BILLING not in bytes(raw) or _canonical.crowded(memoryview(raw)):
        return raw
    try:
        parts = _parts_of.decode(raw)
        kept = [part for part in parts if not bytes(_system_part.decode(part).text).startswith(BILLING)]
    except UNREADABLE:
        return raw
    return Raw(b"[" + b",".join(kept) + b"]") if kept else EMPTY
