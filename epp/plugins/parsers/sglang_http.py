"""Reads SGLang's native API, for clients that send token ids."""

from typing import Final

import msgspec

from epp.errors import UNREADABLE, Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _extents, _openai, _plain_prompts, _tokens
from epp.plugins.parsers._canonical import present
from epp.plugins.parsers._structs import EMPTY, Raw, Scalar, TokenId
from epp.protocol.usage import ANSWER, AnswerHandling, SglangScanner
from epp.request import Request

GENERATE: Final = "generate"
SCANNED: Final = AnswerHandling(SglangScanner)


class _Sampling(msgspec.Struct):
    max_new_tokens: Scalar = None
    n: Scalar = None


class _Body(msgspec.Struct):
    input_ids: Raw = EMPTY
    extra_key: Raw = EMPTY
    image_data: Raw = EMPTY
    video_data: Raw = EMPTY
    audio_data: Raw = EMPTY
    sampling_params: _Sampling | None = None
    stream: Scalar = None


_body = msgspec.json.Decoder(_Body)
_ids = msgspec.json.Decoder(list[TokenId])
_text = msgspec.json.Decoder(str)


@plugin("sglanghttp-parser")
class SglangHttp(Parser):
    """Reads SGLang's generate API. Requests must have token ids. Bodies pass unchanged, and no model is read from them."""

    paths = (GENERATE,)
    app_protocols = ("h2c", "http")
    reads_usage = True
    salt_member = "extra_key"
    keeps = (ANSWER,)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        name = path.strip().removesuffix("/")
        if name not in (GENERATE, "/" + GENERATE):
            raise Refused(Cause.INVALID_BODY, f"unsupported path: {name}")
        try:
            fields = _body.decode(body)
        except UNREADABLE as error:
            raise Refused(Cause.INVALID_BODY, f"invalid generate request: {error}") from None
        if not present(fields.input_ids):
            raise Refused(Cause.INVALID_BODY, "invalid generate request: input_ids must be provided")
        request.salted = fields.extra_key is not EMPTY
        request.cache_salt = _salt(fields.extra_key)
        raw = fields.input_ids
        head, rest = _plain_prompts.first_ids(raw)
        ids = _input_ids(head)
        request[ANSWER] = SCANNED
        request.streaming = fields.stream is True
        sampling = fields.sampling_params
        if sampling is not None:
            request.max_tokens = _openai.whole(sampling.max_new_tokens)
        media = any(present(raw) for raw in (fields.image_data, fields.video_data, fields.audio_data))
        choices = _extents.choices_of(sampling.n) if sampling is not None else 1
        _extents.describe(request, choices=choices, unseen=_extents.CONTEXT_TOKENS if media else 0)
        request.prompt = _tokens.prompt(_tokens.words(ids), (), rest, (lambda: _ids.decode(raw)) if rest else None)


def _salt(raw: Raw) -> str:
    if not present(raw):
        return ""
    try:
        return _text.decode(raw)
    except UNREADABLE:
        raise Refused(Cause.INVALID_BODY, "unsupported generate request: extra_key must be a string") from None


def _input_ids(raw: bytes) -> list[int]:
    try:
        ids = _ids.decode(raw)
    except UNREADABLE:
        problem = "invalid generate request: input_ids must be an array of uint32 integers"
        raise Refused(Cause.INVALID_BODY, problem) from None
    if not ids:
        raise Refused(Cause.INVALID_BODY, "invalid generate request: input_ids cannot be empty")
    return ids
