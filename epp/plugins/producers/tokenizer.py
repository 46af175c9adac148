"""Emits the tokens of the request's prompts, for plugins that count tokens, hash tokens or look for media.

There are two backends: an estimate from bytes, and vLLM's render endpoints, which apply the model's chat template and tokenizer. A call of
a render endpoint is an HTTP request for which the decision waits. If the call fails or takes too long, the decision goes on without
tokens, and plugins use the prompt's bytes instead. `NO_TOKENS` then says why, and a metric counts the failure.

A vLLM server that was not started with --enable-scale-out refuses to render. The producer then calls /tokenize of the same server where
/tokenize gives the same tokens: for one text, and for a chat without media.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from epp.candidates import Candidates
from epp.errors import UNREADABLE, ProducerFailed
from epp.metrics import counter
from epp.plugin import Count, DataProducer, Services, Waiting, plugin
from epp.plugins.producers import _estimate
from epp.quantities import named_duration
from epp.request import Media, Parts, Request
from epp.request.tokens import NO_TOKENS, TOKENS, Feature, PromptTokens, TokenizedPrompt

URL = "http://localhost:8000"
PATHS: Mapping[str, str] = {
    "chat": "/v1/chat/completions/render",
    "completions": "/v1/completions/render",
    "responses": "/v1/responses/render",
    "messages": "/v1/messages/render",
}
TOKENIZE: Final = "/tokenize"
# Members that /tokenize does not read.
NOT_TOKENIZED: Final = ("documents", "reasoning_effort", "truncate_prompt_tokens")
TIMEOUT_S, MEDIA_TIMEOUT_S = 5.0, 30.0
JSON: Mapping[str, str] = {"content-type": "application/json"}
WARM_UP_TRIES, WARM_UP_EVERY_S = 24, 5.0
ERROR_CHARS_MAX = 256  # characters of a server's error text that a message quotes
WITHOUT_TOKENS = counter(
    "requests_without_tokens_total",
    "Requests, and refused warm-ups, of which the token producer has no tokens, by the server that it asked and the reason.",
    "server",
    "reason",
)
SCALE_OUT: Final = "start vLLM with --enable-scale-out"
# Status with which a server refuses every request to render -> what an operator can do.
REFUSED: Final[Mapping[int, str]] = {
    401: "start the server that renders without an API key",
    403: SCALE_OUT,
    404: f"{SCALE_OUT}, and compare modelName",
    405: SCALE_OUT,
    501: SCALE_OUT,
}
OF_REQUESTS: Final = ("400 ", "413 ", "422 ")  # reasons that begin so are due to one request, not to the server
NOT_RENDERED: Final = "no server renders such a request"
ESTIMATED: Final = "they are only estimated: give token-producer modelName and vllm.url"
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"


class Vllm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """The server that renders prompts.

    url: The URL of the server.
    timeout: How long to wait for the tokens of plain texts.
    mm_timeout: How long to wait for the tokens of messages with parts, such as images.
    """

    url: str = URL
    timeout: str = ""
    mm_timeout: str = ""


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where tokens come from. Give at most one of `estimate` and `vllm`; the default is the estimate.

    estimate: Estimate the tokens from the text's length and the media.
    vllm: Ask a vLLM server; needs modelName.
    model_name: The model for which vLLM returns tokens. Without `vllm`, the default server is asked.
    uds_tokenizer_config: Not supported.
    """

    estimate: _estimate.Estimate | None = None
    vllm: Vllm | None = None
    model_name: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    uds_tokenizer_config: Any = None


class Placeholder(msgspec.Struct, gc=False):
    """Says where a media item is among the tokens: its first token, and how many tokens it has."""

    offset: int = 0
    length: int = 0


class Features(msgspec.Struct):
    """Holds the media of a rendered prompt, by modality."""

    mm_hashes: dict[str, list[str]] | None = None
    mm_placeholders: dict[str, list[Placeholder]] | None = None

    def in_order(self) -> list[Feature]:
        """Returns the features in the order of their places in the prompt."""
        places = self.mm_placeholders or {}
        features = [
            Feature(modality, hashed, place.offset, place.length)
            for modality, hashes in (self.mm_hashes or {}).items()
            for hashed, place in zip(hashes, places.get(modality, ()), strict=False)
        ]
        return sorted(features, key=lambda feature: feature.offset)


TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class Rendered(msgspec.Struct):
    """Decodes vLLM's answer for one prompt."""

    token_ids: list[TokenId]
    features: Features | None = None


class Tokenized(msgspec.Struct):
    """Decodes the answer of /tokenize."""

    tokens: list[TokenId]


class _NoTokens(ProducerFailed):
    """Says why a call gave no tokens. `reason`: one of few texts. `refused`: whether other calls will fail alike."""

    def __init__(self, text: str, reason: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.reason = reason
        self.refused = refused


_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_rendered = msgspec.json.Decoder(list[Rendered] | Rendered)
_tokenized = msgspec.json.Decoder(Tokenized)

T = TypeVar("T")


@plugin("token-producer", "tokenizer")
class Tokens(DataProducer):
    """Emits the tokens and media of the request's prompts (`TokenizedPrompt`). Token ids in the request are used as they are."""

    Params = Parameters
    metrics = (WITHOUT_TOKENS,)
    counts_with: ClassVar = {f"estimate.{path}": (f"estimate.{mode}", values) for path, (mode, values) in _estimate.COUNTS_WITH.items()}

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self.produces = (TOKENS, NO_TOKENS)
        self._renders = self.renders = params.vllm is not None or bool(params.model_name)
        self._estimate = params.estimate or _estimate.Estimate()
        vllm = params.vllm or Vllm()
        _check(params, renders=self._renders)
        self._url = vllm.url.rstrip("/") or URL
        self._server = urlsplit(self._url).netloc.rpartition("@")[2]
        self._timeout_s = _seconds("vllm.timeout", vllm.timeout, TIMEOUT_S)
        self._media_timeout_s = _seconds("vllm.mmTimeout", vllm.mm_timeout, MEDIA_TIMEOUT_S)
        # API that is tokenized -> text and reason of the refusal to render it
        self._refusals: dict[str, tuple[str, str]] = {}
        self._renders_messages = True  # False once the server says that it does not render messages
        self._cold = self._renders
        self._warm_ups = 0
        self._services: Services
        self._without: Count

    def start(self, services: Services) -> None:
        self._services = services
        self._without = services.count(self, WITHOUT_TOKENS)
        if self._renders:
            self._warm_up()
            services.every(WARM_UP_EVERY_S, self._warm_up)

    def produce(self, request: Request, candidates: Candidates) -> Waiting | None:
        try:
            parts = request.prompt.parts()
            prompts = _estimate.from_token_ids(parts.token_ids, parts.features)
        except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as problem:
            raise ProducerFailed(f"'{self.name}' cannot read the request's body: {problem}") from None
        if prompts:
            self._give(request, prompts)
        elif not self._renders:
            request[NO_TOKENS] = ESTIMATED
            self._give(request, self._estimate.prompts(parts, request.headers))
        elif parts.render:
            timeout_s = self._media_timeout_s if parts.structured else self._timeout_s
            return self._services.spawn(self._render(request, parts, timeout_s), timeout_s + 1.0)
        else:
            request[NO_TOKENS] = NOT_RENDERED
            self._without.add("", NOT_RENDERED)
        return None

    def _give(self, request: Request, prompts: list[PromptTokens]) -> None:
        if prompts:
            request[TOKENS] = TokenizedPrompt(prompts, request.cache_salt)

    async def _render(self, request: Request, parts: Parts, timeout_s: float) -> None:
        try:
            prompts = await self._messages(parts, timeout_s) if parts.messages and self._renders_messages else None
            if prompts is None:
                members = self._members(parts.body)
                prompts = await self._tokens_of(parts.render, members, timeout_s, plain=_is_plain(parts, members))
        except _NoTokens as failure:
            request[NO_TOKENS] = failure.reason
            self._without.add(self._server, failure.reason)
            raise
        self._give(request, prompts)

    def _members(self, body: bytes | memoryview) -> dict[str, Any]:
        try:
            return _members.decode(body)
        except UNREADABLE as problem:
            raise ProducerFailed(f"'{self.name}' cannot read the request's body: {problem}") from None

    async def _messages(self, parts: Parts, timeout_s: float) -> list[PromptTokens] | None:
        """Renders Anthropic's messages. Returns None if the server cannot: vLLM before 0.29, or without --enable-scale-out."""
        try:
            return await self._rendered("messages", self._members(parts.messages), timeout_s)
        except _NoTokens as failure:
            if not failure.refused:
                raise
            self._renders_messages = False
            return None

    async def _tokens_of(
        self, kind: str, members: dict[str, Any], timeout_s: float, *, plain: bool, ours: bool = False
    ) -> list[PromptTokens]:
        """Lets vLLM render a body, or tokenize the body if vLLM refuses to render. Returns the prompts' tokens. Raises _NoTokens.

        `plain`: whether /tokenize gives the same tokens. `kind`, `members`, `ours`: as in `_rendered` and `_asked`.
        """
        refusal = self._refusals.get(kind) if plain else None
        if refusal is None:
            try:
                return await self._rendered(kind, members, timeout_s, ours=ours)
            except _NoTokens as failure:
                if not (plain and failure.refused):
                    raise
                refusal = str(failure), failure.reason
        try:
            tokenized = await self._asked(TOKENIZE, members, timeout_s, _tokenized.decode)
        except _NoTokens:
            self._refusals.pop(kind, None)
            raise _NoTokens(*refusal, refused=True) from None
        self._refusals[kind] = refusal
        return [PromptTokens(np.array(tokenized.tokens, dtype=np.uint32))] if tokenized.tokens else []

    async def _rendered(self, kind: str, members: dict[str, Any], timeout_s: float, *, ours: bool = False) -> list[PromptTokens]:
        """Lets vLLM render a body. Returns the prompts' tokens. Raises _NoTokens. `kind`: which render endpoint."""
        rendered = await self._asked(PATHS[kind], members, timeout_s, _rendered.decode, ours=ours)
        prompts = rendered if isinstance(rendered, list) else [rendered]
        return [
            PromptTokens(np.array(one.token_ids, dtype=np.uint32), one.features.in_order() if one.features else ())
            for one in prompts
            if one.token_ids
        ]

    async def _asked(self, path: str, members: dict[str, Any], timeout_s: float, decode: Callable[[bytes], T], *, ours: bool = False) -> T:
        """Sends a body to the server, with its model replaced by `modelName`. Returns the decoded answer. Raises _NoTokens.

        `members`: the fields of the body. `ours`: whether the body is a warm-up. For a client's body, the exception does not have the
        server's error text, because that may quote the prompt.
        """
        members["model"] = self.params.model_name
        url = self._url + path
        body = msgspec.json.encode(members)
        try:
            answer = await self._services.http("POST", url, JSON, body, timeout_s=timeout_s)
        except TimeoutError as problem:
            raise _NoTokens(f"'{self.name}': {problem}", f"no answer in time from {path}: raise vllm.timeout") from None
        except OSError as problem:
            raise _NoTokens(f"'{self.name}': {problem}", f"no answer from {path}: compare vllm.url") from None
        if not 200 <= answer.status < 300:
            text = f": {answer.body[:ERROR_CHARS_MAX].decode(errors='replace')}" if ours else ""
            fix = REFUSED.get(answer.status, "the log of the server may say why")
            raise _NoTokens(
                f"'{self.name}': {url} answered {answer.status}{text}",
                f"{answer.status} from {path}: {fix}",
                refused=answer.status in REFUSED,
            )
        try:
            return decode(answer.body)
        except UNREADABLE as problem:
            text = f"'{self.name}': the answer of {url} is not a rendered prompt: {problem}"
            raise _NoTokens(text, f"no token ids from {path}: compare vllm.url") from None

    def _warm_up(self) -> None:
        """Starts a warm-up if no warm-up has succeeded yet: the first requests are slow while the server loads templates and processors."""
        if self._cold and self._warm_ups < WARM_UP_TRIES:
            self._warm_ups += 1
            self._services.spawn(self._try_to_warm_up(), self._timeout_s + self._media_timeout_s)

    async def _try_to_warm_up(self) -> None:
        try:
            text = _hello([{"type": "text", "text": "warmup"}])
            await self._tokens_of("chat", text, self._timeout_s, plain=True, ours=True)
        except _NoTokens as failure:
            if failure.refused:
                self._without.add(self._server, failure.reason)
            if self._warm_ups == WARM_UP_TRIES:
                self._services.warn(self, "the tokenizer answers no warm-up", tries=WARM_UP_TRIES, reason=str(failure))
            return
        if not self._cold:
            return  # another warm-up succeeded first
        self._cold = False
        image: list[dict[str, Any]] = [{"type": "text", "text": "warmup"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
        with contextlib.suppress(ProducerFailed):  # the model may not accept images
            await self._rendered("chat", _hello(image), self._media_timeout_s)


def _is_plain(parts: Parts, members: Mapping[str, Any]) -> bool:
    """Returns whether /tokenize gives the tokens of a body that a render endpoint would give."""
    if any(name in members for name in NOT_TOKENIZED):
        return False
    if parts.render == "completions":
        return bytes(memoryview(members.get("prompt", b""))[:1]) == b'"'  # one text
    return parts.render == "chat" and not any(isinstance(piece, Media) for piece in parts.prompts[0])


def _hello(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def _check(params: Parameters, *, renders: bool) -> None:
    if params.uds_tokenizer_config:
        raise ValueError(
            "udsTokenizerConfig: a tokenizer behind a Unix socket is not supported; run 'vllm launch render' and set its URL in 'vllm'"
        )
    if params.estimate is not None and renders:
        raise ValueError("estimate: cannot be combined with 'vllm' or 'modelName'; keep one of them")
    if renders and not params.model_name:
        raise ValueError("vllm: 'modelName' must name the model that the tokenizer belongs to")
    if params.vllm is not None and params.vllm.url and not params.vllm.url.startswith(("http://", "https://")):
        raise ValueError(f"vllm.url: '{params.vllm.url[:128]}' is not a URL; write for example {URL}")


def _seconds(path: str, text: str, default: float) -> float:
    return named_duration(path, text, "write for example 5s") if text else default
