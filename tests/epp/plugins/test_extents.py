"""What parsers find out about the cost of a request: choices, prompts, media and stored text, and tokens that an answer leaves out."""

from typing import Any

import pytest

from epp.plugin import Parser
from epp.plugins.parsers._extents import CHOICES_MAX, CONTEXT_TOKENS, MEDIUM_TOKENS, SEARCHED_BYTES
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.request import Extent
from tests.epp.plugins.parser_bodies import field, frame, packed, parsed

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": list(content)}], **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x"}),
        (COMPLETIONS, {"prompt": ["x"], "n": 1}),
        (COMPLETIONS, {"prompt": [1, 2, 3]}),
        (CHAT, {"messages": HELLO, "n": None, "include_reasoning": True}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}),
        (RESPONSES, {"input": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ],
)
def test_one_answer_to_one_prompt_of_text_is_the_usual_extent(path: str, body: dict[str, Any]) -> None:
    assert parsed(OpenAI, path, {"model": "m", **body}).extent is None


SAMPLING = field(4, field(8, 5) + field(15, 3))


@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        (OpenAI, COMPLETIONS, {"model": "m", "prompt": "x", "n": 3}),
        (OpenAI, COMPLETIONS, {"model": "m", "prompt": "x", "n": 1, "best_of": 3}),
        (OpenAI, CHAT, {"model": "m", "messages": HELLO, "n": 3}),
        (VllmHttp, "/inference/v1/generate", {"model": "m", "token_ids": [1], "sampling_params": {"n": 3}}),
        (SglangHttp, "/generate", {"input_ids": [1], "sampling_params": {"n": 3}}),
        (VllmGrpc, "/vllm.grpc.engine.VllmEngine/Generate", frame(field(2, packed(2, [1])) + SAMPLING)),
    ],
)
def test_the_number_of_choices_is_read(parser: type[Parser], path: str, body: Any) -> None:
    assert parsed(parser, path, body).extent == Extent(choices=3)


@pytest.mark.parametrize(("value", "choices"), [(10**9, CHOICES_MAX), (0, 1), (-3, 1), ("8", 1), (2.5, 1), (True, 1), (2**70, CHOICES_MAX)])
def test_the_number_of_choices_is_within_bounds(value: Any, choices: int) -> None:
    extent = parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt": "x", "n": value}).extent
    assert (extent or Extent()).choices == choices


@pytest.mark.parametrize("prompts", [["a", "b", "c"], [[1, 2], [3], [4, 5]]])
def test_the_number_of_prompts_is_read(prompts: list[Any]) -> None:
    assert parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt": prompts}).extent == Extent(prompts=3)
    assert parsed(OpenAI, "/v1/embeddings", {"model": "m", "input": prompts}).extent == Extent(prompts=3)


def test_a_list_with_too_many_prompts_to_read_has_at_most_as_many_as_it_has_commas() -> None:
    extent = parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt": ["some text"] * 5000}).extent
    assert extent is not None
    assert extent.prompts == 5000


@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        (OpenAI, CHAT, chat({"type": "text", "text": "what is this?"}, IMAGE)),
        (OpenAI, CHAT, chat({"type": "video_url", "video_url": {"url": "https://example.com/cat.mp4"}})),
        (OpenAI, RESPONSES, {"model": "m", "input": [{"type": "input_image", "image_url": "https://example.com/a"}]}),
        (Anthropic, "/v1/messages", chat({"type": "image", "source": {"type": "url", "url": "https://example.com"}})),
    ],
)
def test_a_medium_by_url_may_have_many_tokens(parser: type[Parser], path: str, body: dict[str, Any]) -> None:
    extent = parsed(parser, path, body).extent
    assert extent is not None
    assert MEDIUM_TOKENS <= extent.unseen_tokens <= 3 * MEDIUM_TOKENS


def test_long_content_is_not_searched_for_media() -> None:
    text = {"type": "text", "text": "x" * SEARCHED_BYTES}
    assert parsed(OpenAI, CHAT, chat(text, IMAGE)).extent is None
    assert parsed(OpenAI, RESPONSES, {"model": "m", "input": [text, IMAGE]}).extent is None


@pytest.mark.parametrize(
    ("parser", "path", "body"),
    [
        (OpenAI, RESPONSES, {"model": "m", "input": "x", "previous_response_id": "resp_1"}),
        (OpenAI, RESPONSES, {"model": "m", "input": [{"type": "input_file", "file_id": "f"}]}),
        (SglangHttp, "/generate", {"input_ids": [1], "image_data": "https://example.com/cat.png"}),
    ],
)
def test_what_the_server_stores_may_fill_a_context(parser: type[Parser], path: str, body: dict[str, Any]) -> None:
    assert parsed(parser, path, body).extent == Extent(unseen_tokens=CONTEXT_TOKENS)


def test_an_answer_may_leave_out_what_was_generated() -> None:
    body = {"model": "m", "messages": HELLO, "include_reasoning": False}
    assert parsed(OpenAI, CHAT, body).extent == Extent(hidden=True)
    assert parsed(OpenAI, "/v1/images/generations", {"model": "m", "prompt": "x", "n": 2}).extent == Extent(2, hidden=True)


def test_a_chat_with_very_many_messages_is_read_for_choices_and_reasoning() -> None:
    body = {"model": "m", "messages": HELLO * 3000, "n": 2, "include_reasoning": False}
    assert parsed(OpenAI, CHAT, body).extent == Extent(2, hidden=True)
