"""Reads vLLM's gRPC API: Generate and Embed of `vllm.grpc.engine.VllmEngine`.

The field numbers are those of vLLM's vllm_engine.proto. Fields that routing does not need are skipped.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _extents, _parts, _plain_prompts, _tokens
from epp.plugins.parsers._structs import Raw
from epp.protocol import grpc_frames, wire
from epp.protocol.usage import ANSWER, UNSEEN, AnswerHandling, VllmEmbedScanner, VllmGenerateScanner
from epp.request import Feature, Prompt, Request

SERVICE: Final = "vllm.grpc.engine.VllmEngine/"
GENERATE: Final = SERVICE + "Generate"
EMBED: Final = SERVICE + "Embed"
GENERATED: Final = AnswerHandling(VllmGenerateScanner)
EMBEDDED: Final = AnswerHandling(VllmEmbedScanner)
LONG_IN_JSON: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))  # characters that take six bytes each in JSON
# A text with at most this many of these characters is hashed as its JSON, as prompts in JSON bodies are; any other text unchanged.
LONG_IN_JSON_MAX: Final = 1 << 14

Value = int | memoryview


def _refused(problem: str) -> Refused:
    return Refused(Cause.INVALID_BODY, problem)


@plugin("vllmgrpc-parser")
class VllmGrpc(Parser):
    """Reads texts and token ids of vLLM's gRPC API. Requests of other methods pass unread. The server determines the model."""

    paths = (GENERATE, EMBED)
    app_protocols = ("h2c",)
    reads_usage = True
    keeps = (ANSWER,)

    def parse(self, request: Request, path: str, body: bytes | memoryview) -> None:
        try:
            message = grpc_frames.only(body)
        except ValueError:
            raise _refused("invalid or unsupported gRPC payload") from None
        path = path.removesuffix("/")
        if path.endswith(EMBED):
            request[ANSWER] = EMBEDDED
            read, name = _embed, "EmbedRequest"
        elif path.endswith(GENERATE):
            request[ANSWER] = GENERATED
            read, name = _generate, "GenerateRequest"
        else:
            request[ANSWER] = UNSEEN
            return
        try:
            read(request, message)
        except ValueError as problem:
            raise _refused(f"unmarshaling {name}: {problem}") from None


def _generate(request: Request, message: bytes | memoryview) -> None:
    """Reads a GenerateRequest with these fields: tokenized 2, text 3, sampling_params 4, stream 5, mm_inputs 7.

    The last occurrence of field 2 or 3 is the prompt.
    """
    walk = wire.Walk()
    prompt: tuple[int, Value] | None = None
    media: list[Feature] = []
    for number, value in walk.fields(message):
        if number in (2, 3):
            prompt = number, value
        elif number == 4:
            request.max_tokens, choices = _sampling(walk, wire.submessage(value))
            _extents.describe(request, choices=_extents.choices_of(choices))
        elif number == 5:
            request.streaming = bool(wire.number(value))
        elif number == 7:
            media = _media(walk, wire.submessage(value))
    if prompt is None:
        raise _refused("not supported request inputType")
    if prompt[0] == 3:
        request.prompt = _text_prompt(wire.text(prompt[1]).encode())
    else:
        request.prompt = _prompt(walk, wire.submessage(prompt[1]), media)


def _embed(request: Request, message: bytes | memoryview) -> None:
    """Reads an EmbedRequest: field tokenized 2."""
    walk = wire.Walk()
    values = [value for number, value in walk.fields(message) if number == 2]
    if not values:
        raise _refused("missing tokenized input in EmbedRequest")
    request.prompt = _prompt(walk, wire.submessage(values[-1]), ())


def _text_prompt(data: bytes) -> Prompt:
    if len(data) - len(data.translate(None, LONG_IN_JSON)) > LONG_IN_JSON_MAX:
        return Prompt(lambda: data)
    raw = Raw(msgspec.json.encode(data.decode()))
    prompt = Prompt(lambda: _plain_prompts.texts((raw,))[0])
    prompt.body, prompt.read = b'{"prompt":%b}' % raw, _parts.completions
    return prompt


def _prompt(walk: wire.Walk, message: memoryview, media: Sequence[Feature]) -> Prompt:
    """Reads a TokenizedInput: field input_ids 2."""
    values = [value for number, value in walk.fields(message) if number == 2]
    ids, rest = wire.first_uint32s(values, _plain_prompts.IDS_MAX)
    if rest is None:
        return _tokens.prompt(ids, media)
    return _tokens.prompt(ids, media, rest, lambda: wire.uint32s(values).tolist())


def _sampling(walk: wire.Walk, message: memoryview) -> tuple[int | None, int]:
    """Reads SamplingParams: fields max_tokens 8, which may be 0 or missing (None), and n 15."""
    most, choices = None, 1
    for number, value in walk.fields(message):
        if number == 8:
            most = wire.number(value)
        elif number == 15:
            choices = wire.number(value)
    return most, choices


def _media(walk: wire.Walk, message: memoryview) -> list[Feature]:
    """Reads MultimodalInputs: fields placeholders 5 (offset 1, length 2) and hashes 6, one per placeholder in the same order."""
    places: list[tuple[int, int]] = []
    hashes: list[str] = []
    for number, value in walk.fields(message):
        if number == 5:
            place = dict(walk.fields(wire.submessage(value)))
            places.append((wire.number(place.get(1, 0)), wire.number(place.get(2, 0))))
        elif number == 6:
            hashes.append(wire.text(value))
    return [Feature("image", known, *place) for known, place in zip(hashes, places, strict=False) if known]
