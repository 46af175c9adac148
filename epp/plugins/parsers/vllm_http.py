"""Reads vLLM's API for clients that send token ids, and hashes of the media among the tokens."""

from typing import Annotated, Final

import msgspec

from epp.errors import UNREADABLE, Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _extents, _openai, _plain_prompts, _tokens
from epp.plugins.parsers._canonical import present
from epp.plugins.parsers._reader import Reader
from epp.plugins.parsers._structs import ABSENT, EMPTY, Raw, Scalar, TokenId
from epp.request import Feature, Request

GENERATE: Final = "inference/v1/generate"
# enough for hundreds of media; longer JSON is ignored, because decoding it would block the event loop
FEATURES_BYTES_MAX: Final = 1 << 16
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Placeholder(msgspec.Struct):
    offset: Count = 0
    length: Count = 0


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str | None]] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None

    def media(self) -> list[Feature]:
        """Returns one feature for each placeholder that has a hash. The features of one modality are in the order of the placeholders."""
        hashes = self.mm_hashes or {}
        return [
            Feature(modality, known, place.offset, place.length)
            for modality, places in (self.mm_placeholders or {}).items()
            for known, place in zip(hashes.get(modality, ()), places, strict=False)
            if known
        ]


class _Sampling(msgspec.Struct):
    max_tokens: Scalar = None
    n: Scalar = None


class _Body(msgspec.Struct):
    model: Scalar = None
    stream: Scalar = None
    cache_salt: str | None = ABSENT
    token_ids: Raw = EMPTY
    features: Raw = EMPTY
    sampling_params: _Sampling | None = None


_body = Reader(_Body)
_features = msgspec.json.Decoder(_Features)
_ids = msgspec.json.Decoder(list[TokenId])


@plugin("vllmhttp-parser")
class VllmHttp(Parser):
    """Reads vLLM's generate API, which needs token ids. Answers report usage in OpenAI's format."""

    paths = (GENERATE,)
    app_protocols = ("h2c", "http")
    reads_usage = True
    names_model = True
    salt_member = "cache_salt"

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        try:
            fields = _body.decode(body)
            raw = fields.token_ids
            head, rest = _plain_prompts.first_ids(raw) if present(raw) else (b"[]", b"")
            ids = _ids.decode(head)
            media = _media(fields.features)
        except UNREADABLE as error:
            raise Refused(Cause.INVALID_BODY, f"invalid generate request: {error}") from None
        if not ids:
            raise Refused(Cause.INVALID_BODY, "invalid generate request: must have non-empty token_ids field")
        request.streaming = fields.stream is True
        _openai.salt(request, fields.cache_salt)
        if fields.sampling_params is not None:
            request.max_tokens = _openai.whole(fields.sampling_params.max_tokens)
            _extents.describe(request, choices=_extents.choices_of(fields.sampling_params.n))
        request.prompt = _tokens.prompt(_tokens.words(ids), media, rest, (lambda: _ids.decode(raw)) if rest else None)
        _openai.named(request, fields.model)


def _media(raw: Raw) -> list[Feature]:
    if not present(raw) or len(memoryview(raw)) > FEATURES_BYTES_MAX:
        return []
    return _features.decode(raw).media()
