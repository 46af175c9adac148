"""Single rules of canonical prompt bytes, by example, and any JSON."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import Refused
from epp.plugins.parsers import _canonical
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from tests.cases import cases
from tests.epp.plugins.conversations import CHAT, WRITERS, dumped
from tests.epp.plugins.parser_bodies import parsed
from tests.examples import examples


def of_chat(messages: list[dict[str, Any]], **more: object) -> bytes:
    return parsed(OpenAI, CHAT, {"model": "m", "messages": messages, **more}).prompt.canonical


def of_claude(messages: list[dict[str, Any]], **more: object) -> bytes:
    return parsed(Anthropic, "/v1/messages", {"model": "m", "messages": messages, **more}).prompt.canonical


HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@cases("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@cases("text", ["", "plain", 'a "quoted" word', "a\\", '"', '"}]', "caf\u00e9/\n"])
def test_a_list_with_one_text_equals_the_text_with_any_spacing(text: str, separators: tuple[str, str]) -> None:
    def spaced(content: object) -> bytes:
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return parsed(OpenAI, CHAT, json.dumps(body, separators=separators).encode()).prompt.canonical

    assert spaced([{"type": "text", "text": text}]) == spaced(text)
    assert spaced([{"type": "text", "text": text}, {"type": "text", "text": "x"}]) != spaced(text)


@pytest.mark.parametrize("name", ["tools", "documents", "chat_template", "chat_template_kwargs"])
def test_values_that_a_template_puts_first_come_first(name: str) -> None:
    plain = of_chat(HELLO)
    longer = of_chat(HELLO, **{name: TOOLS})
    assert longer.endswith(plain) and len(longer) > len(plain)
    assert longer != of_chat(HELLO, **{name: [*TOOLS, *TOOLS]})
    assert of_chat(HELLO, **{name: []}) == of_chat(HELLO, **{name: None}) == plain


def test_role_boundaries_matter() -> None:
    one = of_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert one != of_chat([{"role": "user", "content": "ab"}])
    assert one != of_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert of_chat([{"role": "user", "content": 'a"\\"user'}]) != of_chat(
        [{"role": "user", "content": 'a"'}, {"role": "user", "content": ""}]
    )


def test_a_list_with_one_marked_text_equals_the_text() -> None:
    parts = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    assert of_chat([{"role": "user", "content": parts}]) == of_chat(HELLO)
    assert of_claude([{"role": "user", "content": parts}]) == of_claude(HELLO)


def test_the_same_chat_is_the_same_in_every_api() -> None:
    turns = [{"role": "system", "content": "be brief"}, *HELLO]
    chat_ = of_chat(turns)
    assert of_claude(HELLO, system="be brief") == chat_
    assert of_claude(HELLO, system=[{"type": "text", "text": "be brief"}]) == chat_
    body = {"model": "m", "input": "hello", "instructions": "be brief"}
    assert parsed(OpenAI, "/v1/responses", body).prompt.canonical == chat_
    body = {"model": "m", "input": HELLO, "instructions": "be brief"}
    assert parsed(OpenAI, "/v1/responses", body).prompt.canonical == chat_


def test_moving_a_cache_mark_does_not_change_the_prompt() -> None:
    marked = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    odd = {"type": "search_result", "title": "t", "content": []}
    for part in (marked, call, odd):
        bare = {name: value for name, value in part.items() if name != "cache_control"}
        first = of_claude([{"role": "user", "content": [bare | {"cache_control": {"type": "ephemeral"}}]}])
        later = of_claude([{"role": "user", "content": [bare]}, {"role": "assistant", "content": [marked]}])
        assert later.startswith(first)


def test_a_billing_note_in_the_system_text_is_not_part_of_the_prompt() -> None:
    def system(note: str) -> bytes:
        texts = [f"x-anthropic-billing-header: cc_version=2; cch={note};", "You help."]
        return of_claude(HELLO, system=[{"type": "text", "text": text} for text in texts])

    assert system("eb6c6") == system("fa690") == of_claude(HELLO, system="You help.")
    only_note = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]
    assert of_claude(HELLO, system=only_note) == of_claude(HELLO)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "X"}},
        {"type": "image_url", "image_url": "X"},
        {"type": "input_image", "image_url": "X"},
        {"type": "input_audio", "input_audio": {"data": "X", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "X"}},
        {"type": "image", "source": {"type": "url", "url": "X"}},
        {"type": "image_url", "image_url": None, "uuid": "X"},
        {"type": "file", "file": {"file_id": "X"}},
    ],
)
def test_media_count_by_their_content_with_the_length_of_their_tokens(part: dict[str, Any]) -> None:
    def prompt(content: str) -> bytes:
        made = json.loads(json.dumps(part).replace("X", content))
        return of_chat([{"role": "user", "content": [made, {"type": "text", "text": "what is it?"}]}])

    cat, dog = prompt("cat" * 1000), prompt("dog" * 1000)
    assert cat == prompt("cat" * 1000) != dog
    assert len(cat) == len(dog) and 700 < len(cat) < 20_000
    assert cat.endswith(b'"what is it?"')


def test_a_prompt_of_many_media_has_bounded_length() -> None:
    parts = [{"type": "video_url", "video_url": str(n)} for n in range(20_000)]
    assert len(of_chat([{"role": "user", "content": parts}])) < 64 * 18_100 + 20_000 * 40


def test_several_prompts_differ_from_one_and_from_other_divisions() -> None:
    def prompts(*values: object) -> bytes:
        return parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": list(values)}).prompt.canonical

    single = parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": "ab"}).prompt.canonical
    assert prompts("ab") == single == b"ab"
    assert len({prompts("a", "b"), prompts("ab"), prompts("ab", ""), prompts("", "ab"), prompts("b", "a")}) == 5
    assert prompts("a", "b").startswith(prompts("a"))
    assert prompts(1, 2) == prompts([1, 2]) == np.array([1, 2], "<u4").tobytes()
    assert prompts([1, 2], [3]) != prompts([1], [2, 3]) != prompts([1, 2, 3])


def test_a_response_that_continues_a_stored_one_has_another_beginning() -> None:
    def stored(**more: object) -> bytes:
        return parsed(OpenAI, "/v1/responses", {"model": "m", "input": "hi", **more}).prompt.canonical

    assert len({stored(), stored(previous_response_id="1"), stored(previous_response_id="2"), stored(conversation="1")}) == 4


ODD = [
    5, True, {"a": 1}, [[1]], [5], [None], [{"type": 5}], [{}], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "image"}],
    [{"type": "image_url", "image_url": 5}], [{"type": "image_url", "image_url": {"url": 5}}], [{"type": "tool_result", "content": 5}],
]  # fmt: skip


@cases("content", ODD)
def test_content_of_an_unexpected_shape_counts_as_its_json(content: object) -> None:
    made = {of_chat([{"role": "user", "content": content}]), of_chat([{"role": "user", "content": content}, *HELLO])}
    assert len(made | {of_chat(HELLO), of_chat([{"role": "user"}])}) == 4
    assert of_claude([{"role": "user", "content": content}])
    for items in (content, [content]):
        assert parsed(OpenAI, "/v1/responses", {"model": "m", "input": items}).prompt.canonical


def test_deeply_nested_parts_are_read() -> None:
    content: Any = "x"
    for _ in range(200):
        content = [{"type": "tool_result", "tool_use_id": "1", "content": content}]
    assert of_claude([{"role": "user", "content": content}])


@pytest.mark.parametrize("tail", ["\\u00e9", "\\/", "\\\\u0041", "\\n", '\\"', "é"])
def test_long_prompts_have_the_same_form_as_short_ones(tail: str) -> None:
    def both(size: int) -> tuple[bytes, bytes]:
        body = '{"model":"m","prompt":"%s"}' % ("x" * size + tail)
        prompt: str = json.loads(body)["prompt"]
        want = json.dumps(prompt, ensure_ascii=False)[1:-1]
        return parsed(OpenAI, "/v1/completions", body.encode()).prompt.canonical, want.encode()

    for size in (0, 100, _canonical.SHORT_BYTES + 1):
        found, want = both(size)
        assert found == want


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**40) | st.sampled_from(["", "text", "image_url", "é/\\u", "tool_result"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "content", "role", "image_url", "url", "source", "uuid", "input", "tool_calls", "cache_control", "id"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(content=JSON, calls=JSON, tools=JSON, instructions=JSON, bad=st.integers(0, 10_000))
@examples(400)
def test_any_json_with_any_invalid_byte_is_read_or_refused(content: Any, calls: Any, tools: Any, instructions: Any, bad: int) -> None:
    message = {"role": "user", "content": content, "tool_calls": calls}
    members = {"messages": [message], "tools": tools, "input": content, "instructions": instructions, "system": content}
    body = dumped({"model": "m", "prompt": content, "items": content, "token_ids": content, "input_ids": content, **members})
    at = bad % len(body)
    for text in (body, body[:at] + b"\xff" + body[at + 1 :], body[:at] + b"\\" + body[at:]):
        for parser, path, _ in WRITERS.values():
            try:
                prompt = parsed(parser, path, text).prompt
            except Refused:
                continue
            assert isinstance(prompt.canonical, bytes)


@pytest.mark.parametrize("part", [{"type": "new"}, {"type": "image_url", "image_url": "x"}, {"type": "text", "text": "x"}])
def test_the_cost_of_many_parts_is_linear_in_their_length(part: dict[str, Any]) -> None:
    """Quadratic work would take minutes."""
    of_chat([{"role": "user", "content": [part] * 50_000}])
