"""Embeddings of conversations, which vLLM takes for models with a chat template, such as those of images."""

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
