"""Conversations, written in the form of each API, and the canonical bytes that its parser makes of them."""

import base64
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from epp.plugin import Parser
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vertexai import VertexAi
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from tests.epp.plugins.parser_bodies import field, frame, packed, parsed

BLOCK = 64
CHAT = "/v1/chat/completions"


# A turn is what one side says: a list of ("text" | "image" | "call" | "result", content).
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
    """A system text, then alternating turns of user and assistant. A call is followed by its result."""
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
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        speaker = role(turns, index)
        if speaker == "tool":
            messages += [{"role": "tool", "tool_call_id": f"c{n}", "content": s} for n, (_, s) in enumerate(turn)]
        elif turn[0][0] == "call":
            calls = [{"id": f"c{n}", "type": "function", "function": {"name": "look", "arguments": s}} for n, (_, s) in enumerate(turn)]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            blocks = [
                {"type": "text", "text": s} if kind == "text" else {"type": "image_url", "image_url": {"url": as_url(s)}}
                for kind, s in turn
            ]
            messages.append({"role": speaker, "content": blocks})
    return messages


def chat(turns: Conversation, **more: object) -> bytes:
    return dumped({"model": "m", "messages": chat_messages(turns), **more})


def response_items(turns: Conversation) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        speaker = role(turns, index)
        if speaker == "tool":
            items += [{"type": "function_call_output", "call_id": f"c{n}", "output": s} for n, (_, s) in enumerate(turn)]
        elif turn[0][0] == "call":
            items += [{"type": "function_call", "call_id": f"c{n}", "name": "look", "arguments": s} for n, (_, s) in enumerate(turn)]
        else:
            text = "output_text" if speaker == "assistant" else "input_text"
            blocks = [{"type": text, "text": s} if kind == "text" else {"type": "input_image", "image_url": as_url(s)} for kind, s in turn]
            items.append({"type": "message", "role": speaker, "content": blocks})
    return items


def responses(turns: Conversation) -> bytes:
    return dumped({"model": "m", "input": response_items(turns)})


def stored_conversation(turns: Conversation) -> bytes:
    return dumped({"model": "m", "items": response_items(turns)})


def anthropic_block(kind: str, content: str, n: int) -> dict[str, Any]:
    if kind == "text":
        return {"type": "text", "text": content}
    if kind == "image":
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": as_url(content)}}
    if kind == "call":
        return {"type": "tool_use", "id": f"c{n}", "name": "look", "input": {"at": content}}
    return {"type": "tool_result", "tool_use_id": f"c{n}", "content": [{"type": "text", "text": content}]}


def anthropic_messages(turns: Conversation) -> list[dict[str, Any]]:
    return [
        {
            "role": "user" if role(turns, index) == "tool" else role(turns, index),
            "content": [anthropic_block(kind, content, n) for n, (kind, content) in enumerate(turns[index])],
        }
        for index in range(1, len(turns))
    ]


def anthropic(turns: Conversation, **more: object) -> bytes:
    messages = anthropic_messages(turns) or [{"role": "user", "content": ""}]
    return dumped({"model": "m", "system": turns[0][0][1], "messages": messages, **more})


def text(turns: Conversation) -> str:
    """For APIs without messages: a template renders the conversation into one text that grows."""
    return "".join(
        f"<{role(turns, index)}>" + "".join(f"[{kind}:{json.dumps(content)}]" for kind, content in turn) for index, turn in enumerate(turns)
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
    """Length of the longest common prefix."""
    size = min(len(one), len(other))
    return next((at for at in range(size) if one[at] != other[at]), size)
