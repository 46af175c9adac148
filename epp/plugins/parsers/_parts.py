"""Reads the parts of a body that a token producer needs: texts and media in order, or token ids, and the API that can render it.

A parser's first reading skips most of the body. So when a plugin needs the parts, this module reads the body a second time. It skips
values of an unexpected shape. It writes JSON with sorted keys and without blanks, so that equal content has equal bytes.

Here each value of the body becomes an object, which takes up to a microsecond, and the event loop waits meanwhile. So a body with very many
values raises ValueError: such a request has no parts. Characters of texts count, too, but only megabytes of code have so many brackets.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from epp.request import Media, Parts

Body = bytes | memoryview
SURE_BYTES: Final = 32_768  # a shorter body cannot have too many values
OPENED_MAX: Final = 1 << 17  # lists and objects of one body
SEPARATED_MAX: Final = 1 << 19  # commas of one body
SEPARATED_IDS_MAX: Final = 1 << 20  # commas of a body that may have token ids
BILLING: Final = "x-anthropic-billing-header"  # a client's note that changes with every request; servers remove it


class _Chat(msgspec.Struct):
    messages: list[Any] = []
    tools: Any = None


class _Messages(msgspec.Struct):
    system: Any = None
    messages: list[Any] = []
    tools: list[Any] | None = None


class _Responses(msgspec.Struct):
    input: Any = None
    instructions: Any = None
    tools: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


class _Prompt(msgspec.Struct):
    prompt: Any = None


class _Input(msgspec.Struct):
    input: Any = None
    messages: Any = None


class _Items(msgspec.Struct):
    items: Any = None


_chat: Final = msgspec.json.Decoder(_Chat)
_messages: Final = msgspec.json.Decoder(_Messages)
_responses: Final = msgspec.json.Decoder(_Responses)
_prompt: Final = msgspec.json.Decoder(_Prompt)
_input: Final = msgspec.json.Decoder(_Input)
_items: Final = msgspec.json.Decoder(_Items)
_encoder: Final = msgspec.json.Encoder(order="sorted")


def _decoded(decoder: Any, body: Body, separated: int = SEPARATED_MAX) -> Any:
    """Decodes a body. Raises ValueError if it has too many values."""
    if len(body) > SURE_BYTES:
        text = bytes(body)
        if text.count(b"[") + text.count(b"{") > OPENED_MAX or text.count(b",") > separated:
            raise ValueError(f"it has more than {OPENED_MAX} lists and objects, or more than {separated} values")
    return decoder.decode(body)


def chat(body: Body) -> Parts:
    """Returns a chat as one prompt: the tools as JSON, then role and content of each message, without separators."""
    decoded = _decoded(_chat, body)
    parts: list[bytes | Media] = [_encoder.encode(decoded.tools)] if decoded.tools else []
    structured = False
    for message in decoded.messages:
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        parts.append(_utf8(message.get("role")))
        if isinstance(content, list):
            structured = structured or bool(content)
            parts += _blocks(content)
        else:
            parts.append(_utf8(content))
    return Parts(prompts=(parts,), render="chat", body=body, structured=structured)


def messages(body: Body) -> Parts:
    """Reads Anthropic's messages as the chat to which servers convert them."""
    decoded = _decoded(_messages, body)
    members: dict[str, Any] = {"messages": list(_chat_messages(decoded))}
    if decoded.tools:
        members["tools"] = [_tool(tool) for tool in decoded.tools if isinstance(tool, dict)]
    return chat(_encoder.encode(members))._replace(messages=body)


def completions(body: Body) -> Parts:
    """Returns the prompt, or the prompts, of a completion."""
    return _texts(_decoded(_prompt, body, SEPARATED_IDS_MAX).prompt, body, render="completions")


def embeddings(body: Body) -> Parts:
    """Returns the input's token ids, or the input as JSON if it has no token ids: texts, or conversations."""
    decoded = _decoded(_input, body, SEPARATED_IDS_MAX)
    value = decoded.input or decoded.messages
    parts = Parts() if _has_messages(value) else _texts(value, body)
    return parts if parts.token_ids else Parts(prompts=((_encoder.encode(value),),))


def _has_messages(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, dict)


def responses(body: Body) -> Parts:
    """Returns instructions, tools and input as a JSON array. Leaves out instructions or tools that are missing.

    A request that continues a stored response cannot be rendered, because the body does not have the whole prompt.
    """
    decoded = _decoded(_responses, body)
    optional = {"instructions": decoded.instructions, "tools": decoded.tools}
    array = [{name: value} for name, value in optional.items() if value is not None]
    prompts = ((_encoder.encode([*array, {"input": decoded.input}]),),)
    if decoded.previous_response_id or decoded.conversation or decoded.prompt:
        return Parts(prompts=prompts)
    return Parts(prompts=prompts, render="responses", body=body, structured=isinstance(decoded.input, list))


def conversations(body: Body) -> Parts:
    """Returns the items as JSON."""
    return Parts(prompts=((_encoder.encode(_decoded(_items, body).items),),))


def images(body: Body) -> Parts:
    """Returns the prompt's text."""
    return _texts(_decoded(_prompt, body, SEPARATED_IDS_MAX).prompt, body)


def _chat_messages(body: _Messages) -> Iterator[dict[str, Any]]:
    system = body.system
    if isinstance(system, list):
        texts = [block.get("text") for block in system if isinstance(block, dict)]
        system = "".join(text for text in texts if isinstance(text, str) and not text.startswith(BILLING))
    if isinstance(system, str) and system:
        yield {"role": "system", "content": system}
    for message in body.messages:
        if isinstance(message, dict):
            content = message.get("content")
            if isinstance(content, list):
                yield from _turn(message.get("role"), [block for block in content if isinstance(block, dict)])
            else:
                yield {"role": message.get("role"), "content": content}


def _turn(role: Any, blocks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the chat messages for one message of Anthropic's API. Results of tools come first, each as a separate message."""
    content, calls = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            content.append({"type": "text", "text": block.get("text")})
        elif kind == "image":
            content.append({"type": "image_url", "image_url": {"url": _url(block.get("source"))}})
        elif kind == "tool_use":
            arguments = _encoder.encode(block.get("input")).decode()
            called = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": called})
        elif kind == "tool_result":
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block.get("content"))}
    if calls:
        yield {"role": role, "content": content or None, "tool_calls": calls}
    elif content:
        yield {"role": role, "content": content}


def _result(content: Any) -> str:
    """Returns a tool's result as text."""
    if isinstance(content, list):
        texts = [block.get("text") for block in content if isinstance(block, dict)]
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _url(source: Any) -> str:
    """Returns the URL of an image; if the request has the image's data, returns them as a data URL."""
    if not isinstance(source, dict):
        return ""
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    url = source.get("url")
    return url if isinstance(url, str) else ""


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _texts(value: Any, body: Body, *, render: str = "") -> Parts:
    """Reads a prompt that is a text, a list of texts, a list of token ids, or a list of such lists."""
    if isinstance(value, str):
        return Parts(prompts=((_utf8(value),),), render=render, body=body)
    items: Sequence[Any] = value if isinstance(value, list) else ()
    if items and isinstance(items[0], int):
        return Parts(token_ids=(items,))
    if items and isinstance(items[0], list):
        return Parts(token_ids=items)
    return Parts(prompts=[(_utf8(item),) for item in items], render=render, body=body)


def _blocks(content: Sequence[Any]) -> Iterator[bytes | Media]:
    """Yields the texts and media of a message's content parts."""
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            yield _utf8(block.get("text"))
        elif kind in ("image_url", "video_url"):
            yield Media(kind.removesuffix("_url"), _member(block, kind, "url"))
        elif kind == "audio_url":
            yield Media("audio", _member(block, kind, "url"))
        elif kind == "input_audio":
            yield Media("audio", _member(block, kind, "data") + _member(block, kind, "format"))


def _member(block: dict[str, Any], name: str, field: str) -> str:
    """Returns the text `block[name][field]`. If `block[name]` is a text itself, it is treated as the field `url`."""
    value = block.get(name)
    text = value.get(field) if isinstance(value, dict) else value if field == "url" else None
    return text if isinstance(text, str) else ""


def _utf8(value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else b""
