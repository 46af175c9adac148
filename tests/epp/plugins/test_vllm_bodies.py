"""What vLLM takes beyond OpenAI's API: embeddings of conversations, for models with a chat template, and embeddings as prompts."""

import json
from typing import Any

import pytest

from epp.plugins.parsers.openai import OpenAI
from tests.epp.plugins.parser_bodies import parsed, refusal

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "conversation",
    [HELLO, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}, {"type": "text", "text": "x"}]}]],
)
def test_an_embedding_of_a_conversation_has_the_prompt_of_the_chat(conversation: list[dict[str, Any]]) -> None:
    chat = parsed(OpenAI, "/v1/chat/completions", {"model": "m", "messages": conversation}).prompt
    for name in ("messages", "input"):
        prompt = parsed(OpenAI, "/v1/embeddings", {"model": "m", name: conversation}).prompt
        assert prompt.canonical == chat.canonical
        assert [json.loads(text) for text in prompt.parts().prompts[0]] == [conversation] and not prompt.parts().token_ids


def test_several_conversations_can_be_embedded_at_once() -> None:
    prompt = parsed(OpenAI, "/v1/embeddings", {"model": "m", "input": [HELLO, HELLO]}).prompt
    assert prompt.canonical and not prompt.parts().token_ids
    assert [json.loads(text) for text in prompt.parts().prompts[0]] == [[HELLO, HELLO]]


def test_a_template_of_an_embedding_is_a_part_of_its_prompt() -> None:
    bodies = [{"model": "m", "messages": HELLO, "chat_template_kwargs": {"instruction": text}} for text in ("a", "b")]
    one, other = (parsed(OpenAI, "/v1/embeddings", body).prompt.canonical for body in bodies)
    assert one != other


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"messages": None}, {"messages": "x"}, {"input": [], "messages": []}, {"input": {}}]
)
def test_an_embedding_of_nothing_is_refused(body: dict[str, object]) -> None:
    assert refusal(OpenAI, "/v1/embeddings", {"model": "m"} | body)


COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("prompt", [{}, {"prompt": ""}, {"prompt": None}, {"prompt": []}])
@pytest.mark.parametrize("embeds", ["UEsDBAAACAgA", ["UEsDBAAACAgA", "UEsD"]])
def test_a_completion_of_embeddings_has_a_short_prompt_that_is_the_same_for_the_same_embeddings(prompt: Any, embeds: Any) -> None:
    one = parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt_embeds": embeds} | prompt)
    again = parsed(OpenAI, COMPLETIONS, {"model": "m", "max_tokens": 3, "prompt_embeds": embeds} | prompt)
    other = parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt_embeds": "AAAA"} | prompt)
    assert one.prompt.canonical == again.prompt.canonical != other.prompt.canonical
    assert 0 < one.prompt.tokens < 8 and again.max_tokens == 3


def test_a_text_beside_embeddings_is_the_prompt() -> None:
    text = parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt": "hello"}).prompt
    assert parsed(OpenAI, COMPLETIONS, {"model": "m", "prompt": "hello", "prompt_embeds": "UEsD"}).prompt.canonical == text.canonical


@pytest.mark.parametrize("embeds", ["", None, [], {}])
def test_a_completion_of_nothing_is_refused(embeds: object) -> None:
    text = "invalid completions request: must have prompt field"
    assert refusal(OpenAI, COMPLETIONS, {"model": "m", "prompt": "", "prompt_embeds": embeds}) == text
