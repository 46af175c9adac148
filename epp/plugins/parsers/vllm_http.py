"""vLLM's API for callers that have tokenised: token ids in, and the hashes of media among them."""

from typing import Annotated, Final

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _canonical, _openai, _tokens
from epp.plugins.parsers._canonical import EMPTY, UNREADABLE, Raw, present
from epp.request import Feature, Request

GENERATE: Final = "inference/v1/generate"
FEATURES_BYTES_MAX: Final = 1 << 16  # of hundreds of media; more are not looked at, since the loop waits
Count = Annotated[int, msgspec.Meta(ge=0)]


class _Placeholder(msgspec.Struct):
    offset: Count = 0
    length: Count = 0


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str | None]] | None = None
    mm_placeholders: dict[str, list[_Placeholder]] | None = None

    def media(self) -> list[Feature]:
        """A hash for each placeholder, in their order within a modality."""
        hashes = self.mm_hashes or {}
        return [
            Feature(modality, known, place.offset, place.length)
            for modality, places in (self.mm_placeholders or {}).items()
            for known, place in zip(hashes.get(modality, ()), places, strict=False)
            if known
        ]


class _Sampling(msgspec.Struct):
    max_tokens: _openai.Scalar = None


class _Body(msgspec.Struct):
    model: _openai.Scalar = None
    stream: _openai.Scalar = None
    cache_salt: str | None = None
    token_ids: Raw = EMPTY
    features: Raw = EMPTY
    sampling_params: _Sampling | None = None


_body = msgspec.json.Decoder(_Body)
_features = msgspec.json.Decoder(_Features)
_ids = msgspec.json.Decoder(list[_openai.TokenId])


@plugin("vllmhttp-parser")
class VllmHttp(Parser):
    """Token ids are required; answers report usage as OpenAI's do."""

    paths = (GENERATE,)
    app_protocols = ("h2c", "http")
    reads_usage = True
    names_model = True

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        try:
            found = _body.decode(body)
            raw = found.token_ids
            head, rest = _canonical.first_ids(raw) if present(raw) else (b"[]", b"")
            ids = _ids.decode(head)
            media = _media(found.features)
        except UNREADABLE as error:
            raise Refused(Cause.INVALID_BODY, f"invalid generate request: {error}") from None
        if not ids:
            raise Refused(Cause.INVALID_BODY, "invalid generate request: must have non-empty token_ids field")
        request.streaming = found.stream is True
        request.cache_salt = found.cache_salt or ""
        if found.sampling_params is not None:
            request.max_tokens = _openai.whole(found.sampling_params.max_tokens)
        request.prompt = _tokens.prompt(_tokens.words(ids), media, rest, (lambda: _ids.decode(raw)) if rest else None)
        _openai.named(request, found.model)


def _media(raw: Raw) -> list[Feature]:
    if not present(raw) or len(memoryview(raw)) > FEATURES_BYTES_MAX:
        return []
    return _features.decode(raw).media()
