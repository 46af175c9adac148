"""Anthropic's API: messages, and the count of their tokens.

Prompts have the bytes of the chat that servers make of them: the system text is the first message. A part of the system text that
is a client's billing note changes with every request; servers leave it out before they tokenise, and so does hashing.
"""

from typing import Final

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _canonical, _openai, _parts
from epp.plugins.parsers._canonical import BRACKET, EMPTY, Message, Raw, first, present
from epp.protocol.usage import ANSWER, UNSEEN, Answer, AnthropicScanner
from epp.request import Prompt, Request

MESSAGES: Final = "messages"
COUNT_TOKENS: Final = "messages/count_tokens"
BILLING: Final = b'"' + _parts.BILLING.encode()
SCANNED: Final = Answer(AnthropicScanner)


class _Body(msgspec.Struct):
    model: _openai.Scalar = None
    stream: _openai.Scalar = None
    max_tokens: _openai.Scalar = None
    cache_salt: _openai.Scalar = None
    system: Raw = EMPTY
    tools: Raw = EMPTY
    messages: list[Message] | None = None


class _Crowd(_Body):
    messages: Raw = EMPTY  # type: ignore[assignment]  # of a body with more of them than are looked at one by one


class _SystemPart(msgspec.Struct):
    text: Raw = EMPTY


_body = msgspec.json.Decoder(_Body)
_crowd = msgspec.json.Decoder(_Crowd)
_parts_of = msgspec.json.Decoder(list[Raw])
_system_part = msgspec.json.Decoder(_SystemPart)


@plugin("anthropic-parser")
class Anthropic(Parser):
    """Messages; requests that count tokens are passed on unread, and so are their answers."""

    paths = (MESSAGES, COUNT_TOKENS)
    app_protocols = ("h2c", "http")
    reads_usage = True
    names_model = True
    keeps = (ANSWER,)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        asked = path.removesuffix("/")
        if asked.endswith("/" + COUNT_TOKENS):
            request[ANSWER] = UNSEEN
            return
        if not asked.endswith("/" + MESSAGES):
            raise Refused(Cause.INVALID_BODY, f"unsupported API endpoint: {path}")
        found: _Body
        if _canonical.crowded(body):
            found = crowd = _openai.decoded(_crowd, body)
            wanting = first(crowd.messages) != BRACKET or _openai.blank(crowd.messages)
        else:
            found = _openai.decoded(_body, body)
            wanting = not found.messages
        if wanting:
            raise Refused(Cause.INVALID_BODY, "invalid messages request: must have at least one message")
        request[ANSWER] = SCANNED
        request.streaming = found.stream is True
        request.max_tokens = _openai.whole(found.max_tokens)
        if isinstance(found.cache_salt, str):
            request.cache_salt = found.cache_salt
        prompt = request.prompt = Prompt(lambda: _canonical_bytes(found))
        prompt.body, prompt.read = body, _parts.messages
        _openai.named(request, found.model)


def _canonical_bytes(body: _Body) -> bytes:
    front, before = _canonical.system(((b"tools", body.tools),), _system(body.system))
    if isinstance(body, _Crowd):
        return _canonical.conversation(front, before) + _canonical.as_json((), body.messages)
    return _canonical.conversation(front, before + (body.messages or []))


def _system(raw: Raw) -> Raw:
    """The system text without billing notes; EMPTY: there is none."""
    if not present(raw):
        return EMPTY
    if first(raw) != BRACKET or BILLING not in bytes(raw) or _canonical.crowded(memoryview(raw)):
        return raw
    try:
        parts = _parts_of.decode(raw)
        kept = [part for part in parts if not bytes(_system_part.decode(part).text).startswith(BILLING)]
    except _canonical.UNREADABLE:
        return raw
    return Raw(b"[" + b",".join(kept) + b"]") if kept else EMPTY
