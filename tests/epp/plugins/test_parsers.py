"""What each parser reads from a request, and which requests it refuses with which text."""

import gzip
import json
from typing import Any

import numpy as np
import pytest

from epp.config import registry
from epp.config.defaults import DEFAULT_PARSERS
from epp.errors import Cause, Refused
from epp.plugin import NoParams, Parser
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI, Passthrough
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vertexai import VertexAi
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.protocol.usage import ANSWER, AnthropicScanner, HttpBodyScanner, SglangScanner, VllmEmbedScanner, VllmGenerateScanner
from epp.protocol.usage_structs import TOKENS_MAX
from epp.request import Feature, Media, Request
from epp.request.model_rewrite import MODEL_CHARS_MAX
from tests.cases import cases
from tests.epp.plugins.parser_bodies import field, frame, packed, parsed, refusal

MESSAGES = "/v1/messages"
VLLM = "/inference/v1/generate"
GENERATE, EMBED = "/vllm.grpc.engine.VllmEngine/Generate", "/vllm.grpc.engine.VllmEngine/Embed"
VERTEX = "/google.cloud.aiplatform.v1beta1.PredictionService/"
HELLO = [{"role": "user", "content": "hello"}]
IDS = [1, 2, 70000, 2**32 - 1]
WORDS = np.array(IDS, "<u4").tobytes()


def scanner(request: Request) -> type[Any] | None:
    answer = request[ANSWER]
    return None if answer is None else answer.scanner


# All parsers.


def test_every_parser_of_the_default_list_is_registered() -> None:
    assert set(DEFAULT_PARSERS) <= set(registry.known())


@pytest.mark.parametrize("value", [[], {}])
@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        (OpenAI, "/v1/chat/completions", {"model": "m", "messages": HELLO}),
        (OpenAI, "/v1/completions", {"model": "m", "prompt": "x"}),
        (Anthropic, MESSAGES, {"model": "m", "messages": HELLO}),
        (VllmHttp, VLLM, {"model": "m", "token_ids": IDS}),
    ],
)
def test_a_list_or_an_object_instead_of_a_single_value_is_refused(parser: type[Parser], path: str, body: Any, value: Any) -> None:
    for name in ("model", "stream"):
        assert "got `" in refusal(parser, path, body | {name: value})


def test_the_features_of_too_many_media_are_ignored() -> None:
    places = [{"offset": n, "length": 1} for n in range(3000)]
    features = {"mm_hashes": {"image": ["a"] * 3000}, "mm_placeholders": {"image": places}}
    prompt = parsed(VllmHttp, VLLM, {"model": "m", "token_ids": IDS, "features": features}).prompt
    assert prompt.canonical == WORDS and not prompt.parts().features


@pytest.mark.parametrize(
    ("parser", "paths", "protocols"),
    [
        (Anthropic, {"messages", "messages/count_tokens"}, ("h2c", "http")),
        (VllmHttp, {"inference/v1/generate"}, ("h2c", "http")),
        (SglangHttp, {"generate"}, ("h2c", "http")),
        (VllmGrpc, {GENERATE[1:], EMBED[1:]}, ("h2c",)),
        (VertexAi, {f"PredictionService/{m}" for m in ("ChatCompletions", "StreamRawPredict", "RawPredict")}, ("h2c",)),
        (Passthrough, set(), ()),
    ],
)
def test_each_parser_claims_its_paths_and_protocols(parser: type[Parser], paths: set[str], protocols: tuple[str, ...]) -> None:
    assert set(parser.paths) == paths and parser.app_protocols == protocols


BAD_JSON = [b"", b"{", b"[]", b"null", b'{"a":}', b"\xff", b"[" * 5000, b'{"messages":"x","prompt":3}']


@cases("body", BAD_JSON)
@cases(("parser", "path"), [(OpenAI, "/v1/completions"), (Anthropic, MESSAGES), (VllmHttp, VLLM), (SglangHttp, "/generate")])
def test_a_body_that_is_not_a_request_in_json_is_refused(parser: type[Parser], path: str, body: bytes) -> None:
    assert refusal(parser, path, body)


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (7, 7), (0, 0), (7.0, 7), (-1, None), (1.5, None), ("7", None), (True, None),
        (TOKENS_MAX, TOKENS_MAX), (TOKENS_MAX + 1, TOKENS_MAX), (1e308, TOKENS_MAX), (10**400, TOKENS_MAX),
    ],
)  # fmt: skip
def test_the_limit_of_output_tokens_is_a_whole_number_of_0_or_more(value: object, read: int | None) -> None:
    bodies: list[tuple[type[Parser], str, dict[str, Any]]] = [
        (OpenAI, "/v1/completions", {"model": "m", "prompt": "x", "max_tokens": value}),
        (OpenAI, "/v1/responses", {"model": "m", "input": "x", "max_output_tokens": value}),
        (Anthropic, MESSAGES, {"model": "m", "messages": HELLO, "max_tokens": value}),
        (VllmHttp, VLLM, {"model": "m", "token_ids": [1], "sampling_params": {"max_tokens": value}}),
        (SglangHttp, "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": value}}),
    ]
    for parser, path, body in bodies:
        assert parsed(parser, path, body).max_tokens == read


def test_max_completion_tokens_of_a_chat_precedes_max_tokens() -> None:
    body = {"model": "m", "messages": HELLO, "max_tokens": 5, "max_completion_tokens": 3}
    assert parsed(OpenAI, "/v1/chat/completions", body).max_tokens == 3
    assert parsed(OpenAI, "/v1/chat/completions", body | {"max_completion_tokens": -3}).max_tokens == 5


@pytest.mark.parametrize("value", [1, 0, 1.0, "true", "no", None, False])
def test_only_true_announces_a_stream_and_no_other_single_value_is_refused(value: object) -> None:
    bodies: list[tuple[type[Parser], str, dict[str, Any]]] = [
        (OpenAI, "/v1/completions", {"model": "m", "prompt": "x"}),
        (OpenAI, "/v1/chat/completions", {"model": "m", "messages": HELLO}),
        (OpenAI, "/v1/responses", {"model": "m", "input": "x"}),
        (Anthropic, MESSAGES, {"model": "m", "messages": HELLO}),
        (VllmHttp, VLLM, {"model": "m", "token_ids": [1]}),
        (SglangHttp, "/generate", {"input_ids": [1]}),
    ]
    for parser, path, body in bodies:
        assert not parsed(parser, path, body | {"stream": value}).streaming
        assert parsed(parser, path, body | {"stream": True}).streaming


# OpenAI.


@cases(
    ("path", "body", "text"),
    [
        ("/v1/chat/completions", {"messages": []}, "invalid chat completions request: must have valid messages field"),
        ("/v1/chat/completions", {}, "invalid chat completions request: must have valid messages field"),
        ("/v1/completions", {"prompt": ""}, "invalid completions request: must have prompt field"),
        ("/v1/completions", {"prompt": [""]}, "invalid completions request: must have prompt field"),
        ("/v1/completions", {"prompt": [[]]}, "invalid completions request: must have prompt field"),
        ("/elsewhere", {}, "invalid completions request: must have prompt field"),
        ("/v1/embeddings", {"input": None}, "invalid embeddings request: must have input field"),
        ("/v1/responses", {}, "invalid responses request: must have input field"),
        ("/v1/conversations", {"items": []}, "invalid conversations request: must have items field"),
        ("/v1/images/generations", {"prompt": ""}, "invalid images generations request: must have prompt field"),
    ],
)
def test_openai_names_the_missing_field(path: str, body: dict[str, object], text: str) -> None:
    assert refusal(OpenAI, path, {"model": "m", **body}) == text
    assert refusal(OpenAI, path, body) == text  # this check comes before the check of the model


@cases("prompt", [["a", 1], [1, "a"], [[1], 2], [1, [2]], [["a"]], [-1], [2**32], [1.5], {"a": 1}, 7])
def test_openai_refuses_mixed_prompts_and_prompts_of_other_types(prompt: object) -> None:
    text = refusal(OpenAI, "/v1/completions", {"model": "m", "prompt": prompt})
    assert text.startswith("invalid completions request: prompt: ")


@pytest.mark.parametrize("parser_path", [(OpenAI, "/v1/completions"), (Anthropic, MESSAGES), (VllmHttp, VLLM)])
@pytest.mark.parametrize("model", [None, "", 5])
def test_parsers_that_forward_by_the_models_name_require_it(parser_path: tuple[type[Parser], str], model: object) -> None:
    with pytest.raises(Refused) as refused:
        parsed(*parser_path, {"prompt": "x", "messages": HELLO, "token_ids": [1], "model": model})
    assert refused.value.cause is Cause.MODEL_MISSING


@pytest.mark.parametrize(
    ("parser", "path"), [(OpenAI, "/v1/completions"), (Anthropic, MESSAGES), (VllmHttp, VLLM), (VertexAi, VERTEX + "ChatCompletions")]
)
def test_the_length_of_a_models_name_is_bounded(parser: type[Parser], path: str) -> None:
    def body(model: str) -> Any:
        members = {"prompt": "x", "messages": HELLO, "token_ids": [1], "model": model}
        return vertex(members) if parser is VertexAi else members

    assert len(parsed(parser, path, body("m" * MODEL_CHARS_MAX)).model) == MODEL_CHARS_MAX
    text = refusal(parser, path, body("m" * (MODEL_CHARS_MAX + 1)))
    assert text == f"invalid request body: a model's name has at most {MODEL_CHARS_MAX} characters"


# Anthropic.


def test_anthropic_messages_are_read() -> None:
    request = parsed(Anthropic, MESSAGES, {"model": "claude", "messages": HELLO, "max_tokens": 9, "stream": True, "cache_salt": "s"})
    assert (request.model, request.target_model, request.max_tokens) == ("claude", "claude", 9)
    assert request.streaming and request.cache_salt == "s"
    assert scanner(request) is AnthropicScanner


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/proxy/v1/messages/count_tokens/"])
def test_anthropic_requests_that_count_tokens_pass_unread_and_so_do_their_answers(path: str) -> None:
    request = parsed(Anthropic, path, b"\0 whatever")
    answer = request[ANSWER]
    assert answer is not None and answer.skip and request.model == "" and request.prompt.canonical == b""


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (MESSAGES, {"model": "m"}, "invalid messages request: must have at least one message"),
        (MESSAGES, {"model": "m", "messages": []}, "invalid messages request: must have at least one message"),
        ("/v1/xmessages", {"model": "m", "messages": HELLO}, "unsupported API endpoint: /v1/xmessages"),
    ],
)
def test_anthropic_refuses(path: str, body: dict[str, object], text: str) -> None:
    assert refusal(Anthropic, path, body) == text


def test_anthropic_messages_become_a_chat_in_the_parts() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "be brief"}],
        "tools": [{"name": "look", "description": "looks", "input_schema": {"type": "object"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {"at": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a cat"}]}]},
        ],
    }  # fmt: skip
    parts = parsed(Anthropic, MESSAGES, body).prompt.parts()
    chat = json.loads(bytes(parts.body))
    assert parts.render == "chat" and parts.structured
    assert chat["tools"] == [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": {"type": "object"}}}]
    called = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    assert chat["messages"] == [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "a cat"},
    ]
    assert Media("image", "data:image/png;base64,AAAA") in parts.prompts[0]


# vLLM and SGLang over HTTP.


def test_vllm_generate_is_read() -> None:
    body = {"model": "m", "token_ids": IDS, "stream": True, "cache_salt": "s", "sampling_params": {"max_tokens": 4}}
    request = parsed(VllmHttp, VLLM, body)
    assert (request.model, request.max_tokens, request.streaming, request.cache_salt) == ("m", 4, True, "s")
    assert request.prompt.canonical == WORDS
    assert [list(ids) for ids in request.prompt.parts().token_ids] == [IDS]
    assert scanner(request) is None  # answers have OpenAI's format


@pytest.mark.parametrize("token_ids", [None, []])
def test_vllm_generate_needs_token_ids(token_ids: object) -> None:
    text = "invalid generate request: must have non-empty token_ids field"
    assert refusal(VllmHttp, VLLM, {"model": "m", "token_ids": token_ids}) == text


@pytest.mark.parametrize(
    "more",
    [{"token_ids": [-1]}, {"token_ids": [2**32]}, {"token_ids": ["a"]}, {"token_ids": [1.5]}, {"token_ids": [[1]]}, {"cache_salt": 5},
     {"features": {"mm_hashes": ["a"]}}, {"features": {"mm_placeholders": {"image": [{"offset": -1}]}}}],
)  # fmt: skip
def test_vllm_generate_refuses_values_of_another_shape(more: dict[str, object]) -> None:
    assert refusal(VllmHttp, VLLM, {"model": "m", "token_ids": [1], **more}).startswith("invalid generate request: ")


def test_media_are_hashed_by_their_content_in_place_of_their_tokens() -> None:
    def canonical(known: str) -> bytes:
        features = {"mm_hashes": {"image": [known]}, "mm_placeholders": {"image": [{"offset": 2, "length": 3}]}}
        body = {"model": "m", "token_ids": [1, 2, 9, 9, 9, 3], "features": features}
        return parsed(VllmHttp, VLLM, body).prompt.canonical

    one, other = canonical("cat"), canonical("dog")
    assert one == canonical("cat") != other
    assert one[:8] == other[:8] == np.array([1, 2], "<u4").tobytes() and one[20:] == other[20:]
    assert len(one) == 24


def test_media_among_token_ids_are_features_of_the_parts() -> None:
    features = {"mm_hashes": {"image": ["cat", None]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}, {}]}}
    parts = parsed(VllmHttp, VLLM, {"model": "m", "token_ids": IDS, "features": features}).prompt.parts()
    assert list(parts.token_ids[0]) == IDS and parts.features == [Feature("image", "cat", 1, 2)]
    media = field(5, field(1, 1) + field(2, 2)) + field(6, "cat")
    assert parsed(VllmGrpc, GENERATE, frame(tokenized(IDS) + field(7, media))).prompt.parts() == parts


def test_overlapping_placeholders_do_not_make_the_hashed_bytes_longer() -> None:
    features = {"mm_hashes": {"image": [str(n) for n in range(9)]}, "mm_placeholders": {"image": [{"offset": 0, "length": 10**6}] * 9}}
    made, one = (
        parsed(VllmHttp, VLLM, {"model": "m", "token_ids": IDS, "features": several}).prompt.canonical
        for several in (features, {name: {"image": many["image"][:1]} for name, many in features.items()})  # type: ignore[index]
    )
    assert made == one != WORDS


def test_a_placeholder_beyond_the_prompt_is_harmless() -> None:
    features = {"mm_hashes": {"image": ["x", None]}, "mm_placeholders": {"image": [{"offset": 9, "length": 10**12}, {}]}}
    assert parsed(VllmHttp, VLLM, {"model": "m", "token_ids": IDS, "features": features}).prompt.canonical == WORDS


@pytest.mark.parametrize("path", ["/generate", "generate", "/generate/", " /generate"])
def test_sglang_generate_is_read(path: str) -> None:
    body = {"input_ids": IDS, "stream": True, "extra_key": "s", "sampling_params": {"max_new_tokens": 4}}
    request = parsed(SglangHttp, path, body)
    assert (request.model, request.max_tokens, request.streaming, request.cache_salt) == ("", 4, True, "s")
    assert request.prompt.canonical == WORDS
    assert scanner(request) is SglangScanner


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/v1/generate", {"input_ids": [1]}, "unsupported path: /v1/generate"),
        ("/generate", {"text": "hello"}, "invalid generate request: input_ids must be provided"),
        ("/generate", {"input_ids": None}, "invalid generate request: input_ids must be provided"),
        ("/generate", {"input_ids": []}, "invalid generate request: input_ids cannot be empty"),
        ("/generate", {"input_ids": [[1]]}, "invalid generate request: input_ids must be an array of uint32 integers"),
        ("/generate", {"input_ids": [-1]}, "invalid generate request: input_ids must be an array of uint32 integers"),
        ("/generate", {"input_ids": [2**32]}, "invalid generate request: input_ids must be an array of uint32 integers"),
        ("/generate", {"input_ids": [1], "extra_key": 5}, "unsupported generate request: extra_key must be a string"),
    ],
)  # fmt: skip
def test_sglang_refuses(path: str, body: dict[str, object], text: str) -> None:
    assert refusal(SglangHttp, path, body) == text


# gRPC.


def tokenized(ids: list[int]) -> bytes:
    return field(2, field(1, "original text") + packed(2, ids))


def test_vllm_grpc_token_ids_are_read() -> None:
    message = field(1, "id") + tokenized(IDS) + field(4, field(8, 0)) + field(5, 1)
    request = parsed(VllmGrpc, GENERATE, frame(message))
    assert request.prompt.canonical == WORDS
    assert (request.max_tokens, request.streaming, request.model) == (0, True, "")
    assert scanner(request) is VllmGenerateScanner


def test_vllm_grpc_texts_give_the_same_prompt_as_over_http() -> None:
    request = parsed(VllmGrpc, GENERATE, frame(field(3, 'say "hé"\n')))
    assert request.prompt.canonical == parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": 'say "hé"\n'}).prompt.canonical
    assert list(request.prompt.parts().prompts[0]) == ['say "hé"\n'.encode()]
    assert request.max_tokens is None and not request.streaming


def test_a_vllm_grpc_text_of_control_characters_does_not_grow() -> None:
    text = "\1" * 20_000
    prompt = parsed(VllmGrpc, GENERATE, frame(field(3, text))).prompt
    assert prompt.canonical == text.encode() and prompt.parts().prompts == ((text.encode(),),)


def test_vllm_grpc_embeddings_are_read() -> None:
    request = parsed(VllmGrpc, EMBED, frame(field(1, "id") + tokenized(IDS)))
    assert request.prompt.canonical == WORDS and scanner(request) is VllmEmbedScanner


def test_vllm_grpc_media_are_hashed_by_their_hashes() -> None:
    def canonical(known: str) -> bytes:
        media = field(5, field(1, 1) + field(2, 2)) + field(6, known)
        return parsed(VllmGrpc, GENERATE, frame(tokenized([1, 9, 9, 2]) + field(7, media))).prompt.canonical

    assert canonical("a") == canonical("a") != canonical("b") and len(canonical("a")) == 16


def test_compressed_grpc_messages_are_read() -> None:
    message = gzip.compress(tokenized(IDS))
    assert parsed(VllmGrpc, GENERATE, frame(message, flag=1)).prompt.canonical == WORDS


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (GENERATE, b"\0\0\0", "invalid or unsupported gRPC payload"),
        (GENERATE, b"\0\0\0\0\7abc", "invalid or unsupported gRPC payload"),
        (GENERATE, frame(b"no gzip", flag=1), "invalid or unsupported gRPC payload"),
        (GENERATE, frame(b"x", flag=3), "invalid or unsupported gRPC payload"),
        (GENERATE, frame(field(1, "id")), "not supported request inputType"),
        (EMBED, frame(field(1, "id")), "missing tokenized input in EmbedRequest"),
        (EMBED, frame(b"\x0a\x05ab"), "unmarshaling EmbedRequest: field 1 is cut off"),
        (GENERATE, frame(field(2, 7)), "unmarshaling GenerateRequest: a number where a message belongs"),
        (GENERATE, frame(field(2, field(2, b"\x80"))), "unmarshaling GenerateRequest: a number is cut off"),
    ],
)  # fmt: skip
def test_vllm_grpc_refuses(path: str, body: bytes, text: str) -> None:
    assert refusal(VllmGrpc, path, body) == text


def test_other_grpc_methods_pass_unread_and_so_do_their_answers() -> None:
    for parser in (VllmGrpc, VertexAi):
        answer = parsed(parser, "/vllm.grpc.engine.VllmEngine/Abort", frame(b"\xff"))[ANSWER]
        assert answer is not None and answer.skip


def vertex(body: dict[str, object]) -> bytes:
    return frame(field(1, "projects/p/endpoints/e") + field(2, field(1, "application/json") + field(2, json.dumps(body))))


@pytest.mark.parametrize("method", ["StreamRawPredict", "RawPredict"])
def test_vertex_raw_predictions_are_openai_responses(method: str) -> None:
    request = parsed(VertexAi, VERTEX + method, vertex({"model": "m", "input": "hello", "max_output_tokens": 3}))
    expected = parsed(OpenAI, "/responses", {"model": "m", "input": "hello"})
    assert request.prompt.canonical == expected.prompt.canonical
    assert (request.model, request.max_tokens) == ("m", 3) and scanner(request) is HttpBodyScanner


def test_vertex_chats_do_not_need_a_model() -> None:
    request = parsed(VertexAi, VERTEX + "ChatCompletions", vertex({"messages": HELLO, "stream": True}))
    expected = parsed(OpenAI, "/chat/completions", {"model": "m", "messages": HELLO})
    assert request.prompt.canonical == expected.prompt.canonical
    assert request.model == "" and request.streaming


@pytest.mark.parametrize(
    ("method", "body", "text"),
    [
        ("ChatCompletions", b"", "invalid or unsupported gRPC payload: 0 bytes are too few for a gRPC message"),
        ("ChatCompletions", frame(field(1, "e")), "ChatCompletionsRequest has no HttpBody"),
        ("RawPredict", frame(field(2, 5)), "unmarshaling RawPredictRequest: a number where a message belongs"),
        ("RawPredict", vertex({}), "parsing RawPredictRequest: invalid responses request: must have input field"),
        ("ChatCompletions", vertex({}), "parsing ChatCompletionsRequest: invalid chat completions request: must have valid messages field"),
    ],
)  # fmt: skip
def test_vertex_refuses(method: str, body: bytes, text: str) -> None:
    assert refusal(VertexAi, VERTEX + method, body) == text


def test_passthrough_reads_nothing() -> None:
    request = Request(id="r", path="/x", headers={}, now=0.0)
    Passthrough("p", NoParams()).parse(request, "/x", b"\0\xff")
    assert request.model == "" and request.prompt.canonical == b"" and request[ANSWER] is None
