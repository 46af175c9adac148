"""vLLM's gRPC API: Generate and Embed of `vllm.grpc.engine.VllmEngine`.

Field numbers are those of vLLM's vllm_engine.proto; what routing does not need is skipped.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import Parser, plugin
from epp.plugins.parsers import _canonical, _parts, _tokens
from epp.plugins.parsers._canonical import Raw
from epp.protocol import grpc_frames, wire
from epp.protocol.usage import ANSWER, UNSEEN, Answer, VllmEmbedScanner, VllmGenerateScanner
from epp.request import Feature, Prompt, Request

SERVICE: Final = "vllm.grpc.engine.VllmEngine/"
GENERATE: Final = SERVICE + "Generate"
EMBED: Final = SERVICE + "Embed"
GENERATED: Final = Answer(VllmGenerateScanner)
EMBEDDED: Final = Answer(VllmEmbedScanner)
LONG_IN_JSON: Final = bytes(set(range(32)) - set(b"\b\t\n\f\r"))  # six bytes each there
LONG_IN_JSON_MAX: Final = 1 << 14  # of a text that is hashed as JSON's prompts are; one with more is as it came

Value = int | memoryview


def _refused(problem: str) -> Refused:
    return Refused(Cause.INVALID_BODY, problem)


@plugin("vllmgrpc-parser")
class VllmGrpc(Parser):
    """Texts and token ids; other methods are passed on unread, and so are their answers. The model is the server's own."""

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
    """GenerateRequest: tokenized 2, text 3, sampling_params 4, stream 5, mm_inputs 7. The last of 2 and 3 counts."""
    walk = wire.Walk()
    given: tuple[int, Value] | None = None
    media: list[Feature] = []
    for number, value in walk.fields(message):
        if number in (2, 3):
            given = number, value
        elif number == 4:
            request.max_tokens = _max_tokens(walk, wire.submessage(value))
        elif number == 5:
            request.streaming = bool(wire.number(value))
        elif number == 7:
            media = _media(walk, wire.submessage(value))
    if given is None:
        raise _refused("not supported request inputType")
    if given[0] == 3:
        request.prompt = _text_prompt(wire.text(given[1]).encode())
    else:
        request.prompt = _prompt(walk, wire.submessage(given[1]), media)


def _embed(request: Request, message: bytes | memoryview) -> None:
    """EmbedRequest: tokenized 2."""
    walk = wire.Walk()
    found = [value for number, value in walk.fields(message) if number == 2]
    if not found:
        raise _refused("missing tokenized input in EmbedRequest")
    request.prompt = _prompt(walk, wire.submessage(found[-1]), ())


def _text_prompt(data: bytes) -> Prompt:
    if len(data) - len(data.translate(None, LONG_IN_JSON)) > LONG_IN_JSON_MAX:
        return Prompt(lambda: data)
    raw = Raw(msgspec.json.encode(data.decode()))
    prompt = Prompt(lambda: _canonical.texts((raw,))[0])
    prompt.body, prompt.read = b'{"prompt":%b}' % raw, _parts.completions
    return prompt


def _prompt(walk: wire.Walk, message: memoryview, media: Sequence[Feature]) -> Prompt:
    """TokenizedInput: input_ids 2."""
    values = [value for number, value in walk.fields(message) if number == 2]
    ids, rest = wire.first_uint32s(values, _canonical.IDS_MAX)
    if rest is None:
        return _tokens.prompt(ids, media)
    return _tokens.prompt(ids, media, rest, lambda: wire.uint32s(values).tolist())


def _max_tokens(walk: wire.Walk, message: memoryview) -> int | None:
    """SamplingParams: max_tokens 8, which may be 0."""
    found = None
    for number, value in walk.fields(message):
        if number == 8:
            found = wire.number(value)
    return found


def _media(walk: wire.Walk, message: memoryview) -> list[Feature]:
    """MultimodalInputs: placeholders 5 (offset 1, length 2), their hashes 6 in the same order."""
    places: list[tuple[int, int]] = []
    hashes: list[str] = []
    for number, value in walk.fields(message):
        if number == 5:
            place = dict(walk.fields(wire.submessage(value)))
            places.append((wire.number(place.get(1, 0)), wire.number(place.get(2, 0))))
        elif number == 6:
            hashes.append(wire.text(value))
    return [Feature("image", known, *place) for known, place in zip(hashes, places, strict=False) if known]
