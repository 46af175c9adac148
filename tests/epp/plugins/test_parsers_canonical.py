"""Canonical prompt bytes follow what an engine caches: equal beginnings of prompts are equal beginnings of bytes, and no others.

Conversations are drawn once and written as each API's clients write them; the properties hold for every parser.
"""

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.errors import Refused
from epp.plugin import Parser
from epp.plugins.parsers import _canonical
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vertexai import VertexAi
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.prefix.blocks import block_hashes
from tests.epp.plugins.parser_bodies import field, frame, packed, parsed

BLOCK = 64
CHAT = "/v1/chat/completions"

# A turn is what one side says: a list of ("text" | "image" | "call" | "result", what).
Turn = list[tuple[str, str]]
Conversation = list[Turn]
Build = Callable[[Conversation], bytes]

SAYINGS = st.one_of(
    st.sampled_from(["", "a", "b", '"', "\\", "\n", '","role":"user', "\\u0041", "é", "/", "😀", "\0", "[]"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=120),
    st.integers(1, 400).map(lambda n: "word " * n),
)
USER = st.lists(st.tuples(st.sampled_from(["text", "text", "image"]), SAYINGS), min_size=1, max_size=3)
ASSISTANT = st.one_of(
    st.lists(st.tuples(st.just("text"), SAYINGS), min_size=1, max_size=2),
    st.lists(st.tuples(st.just("call"), SAYINGS), min_size=1, max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """System, then user and assistant in turn; a call is followed by its result."""
    turns: Conversation = [[("text", draw(SAYINGS))]]
    for index in range(draw(st.integers(1, 6))):
        previous = turns[-1]
        if previous[0][0] == "call":
            turns.append([("result", draw(SAYINGS)) for _ in previous])
        else:
            turns.append(draw(ASSISTANT if index % 2 else USER))
    return turns


def role(turns: Conversation, index: int) -> str:
    kinds = {kind for kind, _ in turns[index]}
    if index == 0:
        return "system"
    if "call" in kinds:
        return "assistant"
    return "tool" if "result" in kinds else "user" if index % 2 else "assistant"


def as_url(content: str) -> str:
    return "data:image/png;base64," + base64.b64encode(content.encode("utf-8", "surrogatepass")).decode()


def dumped(value: object) -> bytes:
    return json.dumps(value).encode()


def chat_messages(turns: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        speaker = role(turns, index)
        if speaker == "tool":
            found += [{"role": "tool", "tool_call_id": f"c{n}", "content": said} for n, (_, said) in enumerate(turn)]
        elif turn[0][0] == "call":
            calls = [
                {"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": said}}
                for n, (_, said) in enumerate(turn)
            ]
            found.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            blocks = [
                {"type": "text", "text": said}
                if kind == "text"
                else {"type": "image_url", "image_url": {"url": as_url(said)}}
                for kind, said in turn
            ]
            found.append({"role": speaker, "content": blocks})
    return found


def chat(turns: Conversation, **more: object) -> bytes:
    return dumped({"model": "m", "messages": chat_messages(turns), **more})


def response_items(turns: Conversation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        speaker = role(turns, index)
        if speaker == "tool":
            found += [
                {"type": "function_call_output", "call_id": f"c{n}", "output": s} for n, (_, s) in enumerate(turn)
            ]
        elif turn[0][0] == "call":
            found += [
                {"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": s}
                for n, (_, s) in enumerate(turn)
            ]
        else:
            text = "output_text" if speaker == "assistant" else "input_text"
            blocks = [
                {"type": text, "text": s} if kind == "text" else {"type": "input_image", "image_url": as_url(s)}
                for kind, s in turn
            ]
            found.append({"type": "message", "role": speaker, "content": blocks})
    return found


def responses(turns: Conversation) -> bytes:
    return dumped({"model": "m", "input": response_items(turns)})


def stored_conversation(turns: Conversation) -> bytes:
    return dumped({"model": "m", "items": response_items(turns)})


def anthropic_block(kind: str, said: str, n: int) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": said}
    if kind == "image":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_url(said)}}
    if kind == "call":
        return {"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"at": said}}
    return {"type": "tool_result", "tool_use_id": f"c{n}", "content": [{"type": "text", "text": said}]}


def anthropic_messages(turns: Conversation) -> list[dict[str, Any]]:
    return [
        {
            "role": "user" if role(turns, index) == "tool" else role(turns, index),
            "content": [anthropic_block(kind, said, n) for n, (kind, said) in enumerate(turns[index])],
        }
        for index in range(1, len(turns))
    ]


def anthropic(turns: Conversation, **more: object) -> bytes:
    messages = anthropic_messages(turns) or [{"role": "user", "content": ""}]
    return dumped({"model": "m", "system": turns[0][0][1], "messages": messages, **more})


def text(turns: Conversation) -> str:
    """For APIs without messages: a template renders them into one text that grows."""
    return "".join(
        f"<{role(turns, index)}>" + "".join(f"[{kind}:{json.dumps(said)}]" for kind, said in turn)
        for index, turn in enumerate(turns)
    )


def token_ids(turns: Conversation) -> list[int]:
    return [ord(letter) * 37 for letter in text(turns)]


WRITERS: dict[str, tuple[type[Parser], str, Build]] = {
    "chat": (OpenAI, CHAT, chat),
    "responses": (OpenAI, "/v1/responses", responses),
    "conversations": (OpenAI, "/v1/conversations", stored_conversation),
    "completions": (OpenAI, "/v1/completions", lambda turns: dumped({"model": "m", "prompt": text(turns)})),
    "completions by tokens": (
        OpenAI,
        "/v1/completions",
        lambda turns: dumped({"model": "m", "prompt": token_ids(turns)}),
    ),
    "embeddings": (OpenAI, "/v1/embeddings", lambda turns: dumped({"model": "m", "input": text(turns)})),
    "images": (OpenAI, "/v1/images/generations", lambda turns: dumped({"model": "m", "prompt": text(turns)})),
    "anthropic": (Anthropic, "/v1/messages", anthropic),
    "vllm": (
        VllmHttp,
        "/inference/v1/generate",
        lambda turns: dumped({"model": "m", "token_ids": token_ids(turns)}),
    ),
    "sglang": (SglangHttp, "/generate", lambda turns: dumped({"input_ids": token_ids(turns)})),
    "vllm grpc": (
        VllmGrpc,
        "/vllm.grpc.engine.VllmEngine/Generate",
        lambda turns: frame(field(2, packed(2, token_ids(turns)))),
    ),
    "vllm grpc text": (
        VllmGrpc,
        "/vllm.grpc.engine.VllmEngine/Generate",
        lambda turns: frame(field(3, text(turns))),
    ),
    "vllm grpc embed": (
        VllmGrpc,
        "/vllm.grpc.engine.VllmEngine/Embed",
        lambda turns: frame(field(2, packed(2, token_ids(turns)))),
    ),
    "vertex chat": (VertexAi, "/PredictionService/ChatCompletions", lambda turns: frame(field(2, field(2, chat(turns))))),
    "vertex responses": (VertexAi, "/PredictionService/RawPredict", lambda turns: frame(field(2, field(2, responses(turns))))),
}  # fmt: skip


def canonical(api: str, turns: Conversation) -> bytes:
    parser, path, build = WRITERS[api]
    return parsed(parser, path, build(turns)).prompt.canonical


def common(one: bytes, other: bytes) -> int:
    """Length of the longest common beginning."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)


@pytest.mark.parametrize("api", WRITERS)
@given(turns=conversations())
@settings(max_examples=60, deadline=None)
def test_a_conversation_that_grows_by_a_turn_keeps_its_blocks(api: str, turns: Conversation) -> None:
    chains = [block_hashes(canonical(api, turns[:end]), BLOCK, 5, 7).tolist() for end in range(2, len(turns) + 1)]
    sizes = [len(canonical(api, turns[:end])) for end in range(2, len(turns) + 1)]
    for shorter, longer, size in zip(chains, chains[1:], sizes, strict=False):
        whole = size // BLOCK
        assert longer[:whole] == shorter[:whole]
        assert len(longer) >= len(shorter)


@pytest.mark.parametrize("api", WRITERS)
@given(turns=conversations(), data=st.data())
@settings(max_examples=60, deadline=None)
def test_conversations_that_differ_anywhere_differ_from_that_block_on(
    api: str, turns: Conversation, data: st.DataObject
) -> None:
    other = data.draw(conversations())
    keep = data.draw(st.integers(0, len(turns)))
    changed = [*turns[:keep], *other[keep:]]
    one, two = canonical(api, turns), canonical(api, changed)
    same = turns == changed
    assert (one == two) == same
    if not same:
        first = common(one, two) // BLOCK
        a, b = (block_hashes(made, BLOCK, 5, 7).tolist() for made in (one, two))
        assert a[:first] == b[:first]
        assert not set(a[first:]) & set(b[first:])


def shuffled(value: Any, rng: Any) -> Any:
    """The same JSON with its keys in another order."""
    if isinstance(value, dict):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def slashed(text: str) -> str:
    return text.replace("/", "\\/")


@pytest.mark.parametrize("api", ["chat", "responses", "conversations", "anthropic", "completions", "vllm", "sglang"])
@given(turns=conversations(), rng=st.randoms(use_true_random=False), indent=st.sampled_from([None, 1]))
@settings(max_examples=40, deadline=None)
def test_how_json_is_written_does_not_matter(api: str, turns: Conversation, rng: Any, indent: int | None) -> None:
    parser, path, build = WRITERS[api]
    body = json.loads(build(turns))
    plain = parsed(parser, path, build(turns)).prompt.canonical
    other = json.dumps(shuffled(body, rng), ensure_ascii=False, indent=indent)
    assert parsed(parser, path, other.encode()).prompt.canonical == plain
    assert parsed(parser, path, slashed(other).encode()).prompt.canonical == plain


# Single rules, by example.


def of_chat(messages: list[dict[str, Any]], **more: object) -> bytes:
    return parsed(OpenAI, CHAT, {"model": "m", "messages": messages, **more}).prompt.canonical


def of_claude(messages: list[dict[str, Any]], **more: object) -> bytes:
    return parsed(Anthropic, "/v1/messages", {"model": "m", "messages": messages, **more}).prompt.canonical


HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (" , ", " : ")])
@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" word', "a\\", '"', '"}]', "caf\u00e9/\n"])
def test_a_text_alone_in_a_list_of_parts_is_that_text_however_it_is_spaced(
    text: str, separators: tuple[str, str]
) -> None:
    def spaced(content: object) -> bytes:
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        return parsed(OpenAI, CHAT, json.dumps(body, separators=separators).encode()).prompt.canonical

    assert spaced([{"type": "text", "text": text}]) == spaced(text)
    assert spaced([{"type": "text", "text": text}, {"type": "text", "text": "x"}]) != spaced(text)


@pytest.mark.parametrize("name", ["tools", "documents", "chat_template", "chat_template_kwargs"])
def test_what_a_template_puts_first_comes_first(name: str) -> None:
    plain = of_chat(HELLO)
    given = of_chat(HELLO, **{name: TOOLS})
    assert given.endswith(plain) and len(given) > len(plain)
    assert given != of_chat(HELLO, **{name: [*TOOLS, *TOOLS]})
    assert of_chat(HELLO, **{name: []}) == of_chat(HELLO, **{name: None}) == plain


def test_role_boundaries_matter() -> None:
    one = of_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert one != of_chat([{"role": "user", "content": "ab"}])
    assert one != of_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert of_chat([{"role": "user", "content": 'a"\\"user'}]) != of_chat(
        [{"role": "user", "content": 'a"'}, {"role": "user", "content": ""}]
    )


def test_a_text_alone_in_a_list_of_parts_is_that_text() -> None:
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


def test_a_cache_mark_that_moves_on_leaves_the_prompt_as_it_was() -> None:
    marked = {"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    odd = {"type": "search_result", "title": "t", "content": []}
    for part in (marked, call, odd):
        bare = {name: value for name, value in part.items() if name != "cache_control"}
        first = of_claude([{"role": "user", "content": [bare | {"cache_control": {"type": "ephemeral"}}]}])
        later = of_claude([{"role": "user", "content": [bare]}, {"role": "assistant", "content": [marked]}])
        assert later.startswith(first)


def test_a_billing_note_in_the_system_text_is_not_the_prompt() -> None:
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
def test_media_count_by_their_content_at_the_length_of_their_tokens(part: dict[str, Any]) -> None:
    def prompt(content: str) -> bytes:
        made = json.loads(json.dumps(part).replace("X", content))
        return of_chat([{"role": "user", "content": [made, {"type": "text", "text": "what is it?"}]}])

    cat, dog = prompt("cat" * 1000), prompt("dog" * 1000)
    assert cat == prompt("cat" * 1000) != dog
    assert len(cat) == len(dog) and 700 < len(cat) < 20_000
    assert cat.endswith(b'"what is it?"')


def test_a_prompt_of_many_media_does_not_grow_without_bounds() -> None:
    parts = [{"type": "video_url", "video_url": str(n)} for n in range(20_000)]
    assert len(of_chat([{"role": "user", "content": parts}])) < 64 * 18_100 + 20_000 * 40


def test_several_prompts_are_told_apart() -> None:
    def prompts(*given: object) -> bytes:
        return parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": list(given)}).prompt.canonical

    single = parsed(OpenAI, "/v1/completions", {"model": "m", "prompt": "ab"}).prompt.canonical
    assert prompts("ab") == single == b"ab"
    assert len({prompts("a", "b"), prompts("ab"), prompts("ab", ""), prompts("", "ab"), prompts("b", "a")}) == 5
    assert prompts("a", "b").startswith(prompts("a"))
    assert prompts(1, 2) == prompts([1, 2]) == np.array([1, 2], "<u4").tobytes()
    assert prompts([1, 2], [3]) != prompts([1], [2, 3]) != prompts([1, 2, 3])


def test_a_response_that_goes_on_from_a_stored_one_starts_elsewhere() -> None:
    def stored(**more: object) -> bytes:
        return parsed(OpenAI, "/v1/responses", {"model": "m", "input": "hi", **more}).prompt.canonical

    assert (
        len({stored(), stored(previous_response_id="1"), stored(previous_response_id="2"), stored(conversation="1")})
        == 4
    )


ODD = [
    5, True, {"a": 1}, [[1]], [5], [None], [{"type": 5}], [{}], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "image"}],
    [{"type": "image_url", "image_url": 5}], [{"type": "image_url", "image_url": {"url": 5}}], [{"type": "tool_result", "content": 5}],
]  # fmt: skip


@pytest.mark.parametrize("content", ODD)
def test_content_of_another_shape_counts_as_what_it_is(content: object) -> None:
    made = {of_chat([{"role": "user", "content": content}]), of_chat([{"role": "user", "content": content}, *HELLO])}
    assert len(made | {of_chat(HELLO), of_chat([{"role": "user"}])}) == 4
    assert of_claude([{"role": "user", "content": content}])
    for items in (content, [content]):
        assert parsed(OpenAI, "/v1/responses", {"model": "m", "input": items}).prompt.canonical


def test_parts_in_parts_in_parts_end() -> None:
    content: Any = "x"
    for _ in range(200):
        content = [{"type": "tool_result", "tool_use_id": "1", "content": content}]
    assert of_claude([{"role": "user", "content": content}])


@pytest.mark.parametrize("tail", ["\\u00e9", "\\/", "\\\\u0041", "\\n", '\\"', "é"])
def test_long_prompts_are_written_as_short_ones(tail: str) -> None:
    def both(size: int) -> tuple[bytes, bytes]:
        body = '{"model":"m","prompt":"%s"}' % ("x" * size + tail)
        prompt: str = json.loads(body)["prompt"]
        want = json.dumps(prompt, ensure_ascii=False)[1:-1]
        return parsed(OpenAI, "/v1/completions", body.encode()).prompt.canonical, want.encode()

    for size in (0, 100, _canonical.SHORT_BYTES + 1):
        found, want = both(size)
        assert found == want


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 2**40)
    | st.sampled_from(["", "text", "image_url", "é/\\u", "tool_result"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "text",
                    "content",
                    "role",
                    "image_url",
                    "url",
                    "source",
                    "uuid",
                    "input",
                    "tool_calls",
                    "cache_control",
                    "id",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(content=JSON, calls=JSON, tools=JSON, instructions=JSON, bad=st.integers(0, 10_000))
@settings(max_examples=400, deadline=None)
def test_any_json_and_any_bytes_in_it_are_read_or_refused(
    content: Any, calls: Any, tools: Any, instructions: Any, bad: int
) -> None:
    message = {"role": "user", "content": content, "tool_calls": calls}
    members = {"messages": [message], "tools": tools, "input": content, "instructions": instructions, "system": content}
    body = dumped(
        {"model": "m", "prompt": content, "items": content, "token_ids": content, "input_ids": content, **members}
    )
    at = bad % len(body)
    for text in (body, body[:at] + b"\xff" + body[at + 1 :], body[:at] + b"\\" + body[at:]):
        for parser, path, _ in WRITERS.values():
            try:
                prompt = parsed(parser, path, text).prompt
            except Refused:
                continue
            assert isinstance(prompt.canonical, bytes)


@pytest.mark.parametrize(
    "part", [{"type": "new"}, {"type": "image_url", "image_url": "x"}, {"type": "text", "text": "x"}]
)
def test_many_parts_cost_as_much_as_they_are_long(part: dict[str, Any]) -> None:
    """Quadratic work would take minutes."""
    of_chat([{"role": "user", "content": [part] * 50_000}])
