"""Targets for bodies from clients: those of every API, compressed ones, and models that are replaced and restored.

A body is accepted, or refused as a client error. An accepted body can be hashed and tokenised.
"""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.errors import Cause, Refused
from epp.plugin import NoParams, Parser
from epp.plugins.parsers import _openai
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vertexai import METHODS, VertexAi
from epp.plugins.parsers.vllm_grpc import EMBED, GENERATE, VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.prefix.blocks import block_hashes, root
from epp.protocol import surrogates
from epp.protocol.inflate import at_once, body_slices, gunzip
from epp.protocol.rewrite import Member, ModelRestorer, with_model
from epp.request import Request
from tests.epp.plugins.parser_bodies import field, packed
from tests.epp.plugins.parser_bodies import frame as grpc_frame
from tests.fuzz.target import Target, borders

PARSERS: Sequence[tuple[Parser, str]] = tuple(
    (kind("p", NoParams()), "/" + path)
    for kind, paths in (
        (OpenAI, (*_openai.API, "other")),
        (Anthropic, ("v1/messages", "v1/messages/count_tokens")),
        (VllmHttp, ("inference/v1/generate",)),
        (SglangHttp, ("generate",)),
        (VllmGrpc, (GENERATE, EMBED, "vllm.grpc.engine.VllmEngine/Other")),
        (VertexAi, (*METHODS, "PredictionService/Predict")),
    )
    for path in paths
)
NUMBER_OF = {path: number for number, (_, path) in enumerate(PARSERS)}
CLIENT_FAULTS = (Cause.INVALID_BODY, Cause.MODEL_MISSING)


def bodies(data: bytes) -> None:
    """Parses a body. The first byte chooses parser and path."""
    if not data:
        return
    parser, path = PARSERS[data[0] % len(PARSERS)]
    request = Request(id="r", path=path, headers={}, now=0.0)
    try:
        parser.parse(request, path, memoryview(data)[1:])
    except Refused as refused:
        assert refused.cause in CLIENT_FAULTS
        assert len(refused.detail) < 1000, "the refusal repeats too much of the body"
        return
    assert type(request.model) is str and type(request.cache_salt) is str and type(request.streaming) is bool
    assert request.max_tokens is None or (type(request.max_tokens) is int and request.max_tokens >= 0)
    canonical = request.prompt.canonical
    assert request.prompt.tokens == -(-len(canonical) // 4)
    block_hashes(canonical, 256, root(request.target_model, request.cache_salt, 1), 1)
    try:
        parts = request.prompt.parts()
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return  # plugins that tokenise treat these errors as an unreadable body
    assert len(parts.prompts) <= len(data) and len(parts.token_ids) <= len(data)


TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}:,]|[^\s\[\]{}:,"]+|\s+', re.DOTALL)


def json_parts(data: bytes) -> list[bytes]:
    """The first byte, then the tokens of JSON."""
    return [data[:1], *TOKEN.findall(data[1:])]


CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "be brief \\u00e9"},
        {"role": "user", "content": [{"type": "text", "text": "a\n"}, {"type": "image_url", "image_url": {"url": "data:x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "stream": True,
    "max_completion_tokens": 5,
    "cache_salt": "s",
}
ANTHROPIC = {
    "model": "m",
    "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "s", "cache_control": {}}],
    "messages": [
        {"role": "user", "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ"}}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {"b": 1, "a": [1.5, None]}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}]},
    ],
    "max_tokens": 9,
}
VLLM = {
    "model": "m",
    "token_ids": [1, 2, 3, 4294967295],
    "features": {"mm_hashes": {"image": ["h", None]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}},
    "sampling_params": {"max_tokens": 4},
}


def body_seeds() -> Mapping[str, bytes]:
    examples: dict[str, tuple[str, Any]] = {
        "chat": ("/chat/completions", CHAT),
        "chat-audio": ("/chat/completions/render", {"model": "m", "messages": [{"content": [{"type": "input_audio",
        "input_audio": {"data": "A", "format": "wav"}}]}]}),
        "completions": ("/completions", {"model": "m", "prompt": "hello \\/ \\u0041 \\ud800", "max_tokens": 7.0, "stream": False}),
        "prompts": ("/completions", {"model": "m", "prompt": ["a", "", "b"]}),
        "token-ids": ("/completions/render", {"model": "m", "prompt": [[1, 2], [], [3]]}),
        "embeddings": ("/embeddings", {"model": "m", "input": [1, 2, 3]}),
        "responses": ("/responses", {"model": "m", "instructions": "i", "input": [{"role": "user",
        "content": [{"type": "input_text", "text": "t"}]}, {"type": "reasoning", "id": "1"}], "max_output_tokens": 3}),
        "conversations": ("/conversations", {"model": "m", "items": [{"role": "user", "content": "c"}]}),
        "images": ("/images/generations", {"model": "m", "prompt": "cat"}),
        "messages": ("/v1/messages", ANTHROPIC),
        "count": ("/v1/messages/count_tokens", ANTHROPIC),
        "vllm": ("/inference/v1/generate", VLLM),
        "sglang": ("/generate", {"input_ids": [1, 2], "extra_key": "s", "sampling_params": {"max_new_tokens": 3}, "stream": True}),
    }  # fmt: skip
    seeds = {name: bytes((NUMBER_OF[path],)) + json.dumps(body).encode() for name, (path, body) in examples.items()}
    tokenized = field(2, packed(2, [1, 300, 70000]))
    media = field(7, field(5, field(1, 0) + field(2, 3)) + field(6, "hash"))
    generate = tokenized + field(4, field(8, 16)) + field(5, 1) + media
    seeds["grpc-generate"] = bytes((NUMBER_OF["/" + GENERATE],)) + grpc_frame(generate)
    seeds["grpc-text"] = bytes((NUMBER_OF["/" + GENERATE],)) + grpc_frame(gzip.compress(field(3, "hello")), 1)
    seeds["grpc-embed"] = bytes((NUMBER_OF["/" + EMBED],)) + grpc_frame(tokenized)
    for name, (path, (_, number, api)) in zip(("vertex-chat", "vertex-stream", "vertex-raw"), METHODS.items(), strict=True):
        inner = json.dumps(CHAT if "chat" in api else {"model": "m", "input": "x"})
        seeds[name] = bytes((NUMBER_OF["/" + path],)) + grpc_frame(field(number, field(1, "json") + field(2, inner)))
    return seeds


JSON_WORDS = (
    b"null", b"true", b"0", b"-1", b"1e999", b"1.0", b"4294967296", b"99999999999999999999", b'""', b'"text"', b'"\\ud800"', b'"\\u0000"',
    b"[]", b"{}", b"[[]]", b'{"role":1}', b'{"type":"text","text":1}', b'{"type":"image_url","image_url":"x"}', b'"cache_control":{},',
    b'{"type":"file","file":{"file_id":"1"}}', b"[" * 40, b'{"a":' * 40, b"\xff", b"\xed\xa0\x80", b'"messages":[',
    b'"input":', b'"prompt":',
    b'"content":[', b'{"type":"tool_result","content":[', b'"stream":true,', b'"model":"', b"\\", b'"', b",", b":", b"\xf0\x9f\x98\x80",
)  # fmt: skip


BODIES = Target(
    "bodies",
    bodies,
    body_seeds,
    json_parts,
    words=JSON_WORDS,
    modules=(
        "epp.plugins.parsers._openai", "epp.plugins.parsers._canonical", "epp.plugins.parsers._parts", "epp.plugins.parsers.anthropic",
        "epp.plugins.parsers.vllm_grpc", "epp.plugins.parsers.sglang_http", "epp.plugins.parsers.vertexai", "epp.protocol.wire",
    ),
)  # fmt: skip
UNPACKED_MAX = 1 << 20


def compressed(data: bytes) -> None:
    """Unpacks a body. First byte 0 to 3: the rest is gzip. Above: the rest is packed here, in two members, and may be cut."""
    if not data:
        return
    mode, body = data[0], data[1:]
    if mode > 3:
        half = len(body) // 2
        members = gzip.compress(body[:half], mtime=0) + gzip.compress(body[half:] * (mode % 50), mtime=0)
        body = members[: len(members) - (mode & 1) * (mode >> 4)]
    try:
        unpacked = gunzip(body, UNPACKED_MAX)
    except ValueError:
        unpacked = None
    else:
        assert len(unpacked) <= UNPACKED_MAX
        assert unpacked == gzip.decompress(body)
    try:
        steps = body_slices(body, " GZip", UNPACKED_MAX)
        assert steps is not None
        assert at_once(steps) == unpacked
    except Refused as refused:
        assert unpacked is None and refused.cause in (Cause.INVALID_BODY, Cause.BODY_TOO_LARGE)


def compressed_seeds() -> Mapping[str, bytes]:
    text = b'{"model":"m","prompt":"' + b"hello " * 20 + b'"}'
    packed_ = gzip.compress(text, mtime=0)
    stored = gzip.compress(text, 0, mtime=0)
    return {
        "one": b"\0" + packed_,
        "stored": b"\0" + stored,
        "members": b"\1" + packed_ + gzip.compress(b"", mtime=0) + stored,
        "named": b"\2\x1f\x8b\x08\x08\0\0\0\0\0\3name\0" + packed_[10:],
        "trailing": b"\3" + packed_ + b"rest",
        "bomb": b"\0" + gzip.compress(bytes(UNPACKED_MAX + 9), mtime=0),
        "near-bomb": b"\0" + gzip.compress(bytes(UNPACKED_MAX - 9), mtime=0),
        "zlib": b"\0" + zlib.compress(text),
        "made": b"\x2a" + text,
        "cut": b"\x2b" + text,
    }


GZIP = Target(
    "gzip",
    compressed,
    compressed_seeds,
    words=(b"\x1f\x8b\x08\0\0\0\0\0\0\3", b"\x1f\x8b\x08\x1f", gzip.compress(b"", mtime=0), gzip.compress(bytes(9), mtime=0)),
    modules=("epp.protocol.inflate",),
    allowance=4 * UNPACKED_MAX,
)  # fmt: skip


def renamed(data: bytes) -> None:
    """Replaces and restores the model in a body. Only the model's value changes; the result does not depend on how an answer is cut."""
    asked_bytes, target_bytes, text = [*data.split(BETWEEN, 2), b"", b""][:3]
    asked, target = asked_bytes.decode("utf-8", "replace")[:100], target_bytes.decode("utf-8", "replace")[:100]
    try:
        replaced = with_model(text, target)
    except Refused as refused:
        assert refused.cause is Cause.INVALID_BODY
    else:
        spans = Member("model").spans(surrogates.replaced(text) or text)  # half surrogate pairs have their places, too
        assert [bytes(text[a:b]) for a, b in spans] == [bytes(text[a:b]) for a, b in sorted(spans)]
        name = msgspec.json.encode(target)
        assert len(replaced) == len(text) + sum(len(name) - (b - a) for a, b in spans) or not spans
        check_renamed(text, replaced, target)
    if msgspec.json.encode(target) + b'model"' in text:
        return  # two of the searched texts share a quote, which is impossible in JSON
    whole, cut = ModelRestorer(target, asked), ModelRestorer(target, asked)
    at_once = whole.feed(text) + whole.rest()
    assert b"".join(cut.feed(chunk) for chunk in borders(text)) + cut.rest() == at_once


def check_renamed(text: bytes, replaced: bytes, target: str) -> None:
    """The texts are equal for Python's JSON parser, except for the model. Skips texts that it cannot read (nesting, lone surrogates)."""
    try:
        before, after = json.loads(text, object_pairs_hook=list), json.loads(replaced, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return
    assert [pair for pair in before if pair[0] != "model"] == [pair for pair in after if pair[0] != "model"]
    assert {value for name, value in after if name == "model"} == {target}


BETWEEN = b"\0|\0"


def renamed_seeds() -> Mapping[str, bytes]:
    def seed(text: bytes, asked: bytes = b"food-review", target: bytes = b"base/m:1") -> bytes:
        return asked + BETWEEN + target + BETWEEN + text

    return {
        "plain": seed(b'{"model":"food-review","prompt":"x \\"model\\": 1","n":12345678901234567890.10}'),
        "spaced": seed(b'{ "a" : {"model" : "inner"}, "model" :\n "food-review" , "z": [{"model":"y"}] }'),
        "twice": seed(b'{"model":"a","model":null,"x":1}'),
        "escaped": seed(b'{"mod\\u0065l":"a","b":"\\ud83d\\ude00"}'),
        "halves": seed(b'{"mod\\u0065l":"a","b":"\\ud8d8d83d\\ude00"}'),
        "missing": seed(b'{"prompt":"x"}'),
        "empty": seed(b" {} "),
        "answer": seed(b'{"id":1,"model":"base/m:1","choices":[{"model": "base/m:1"}]}'),
        "sse": seed(b'data: {"model":"base/m:1","c":"\\"model\\":\\"base/m:1\\""}\n\ndata: {"model": "base/m:1"}\n\n'),
        "unicode": seed(b'{"model":"\xc3\xa9","m":"model"}', "é".encode(), "ü\"\\".encode()),
    }  # fmt: skip


REWRITE = Target(
    "rewrite",
    renamed,
    renamed_seeds,
    TOKEN.findall,
    words=(
        b'"model"', b'"model":"base/m:1"', b'"model": "base/m:1"', b'"model":', b'"mod\\u0065l":1,', b"{", b"}", b"[",
        b"]", b",", b'"', b"\\", b" ", b"null",
        b"\\u", b'{"model":{"model":1}}', BETWEEN, b'\\"model\\":',
    ),
    modules=("epp.protocol.rewrite",),
)  # fmt: skip
