"""What clients send through the gateway: request bodies of every API, compressed bodies, and whole ext_proc streams.

A body is either refused as the client's fault or accepted; an accepted one can be hashed and tokenised. A stream gets exactly one answer
to its request, in the protocol's order, and leaves nothing behind.
"""

import gzip
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from epp.candidates import Candidates
from epp.config import DEFAULT_TEXT, load
from epp.errors import Cause, Refused
from epp.plugin import DataProducer, NoParams, Parser
from epp.plugins.parsers import _openai
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vertexai import METHODS, VertexAi
from epp.plugins.parsers.vllm_grpc import EMBED, GENERATE, VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.prefix.blocks import block_hashes, root
from epp.protocol.codec import SUBSET_KEY, SUBSET_NAMESPACE, Kind
from epp.protocol.inflate import at_once, body_slices, gunzip
from epp.protocol.proto import ext_proc_pb2 as pb
from epp.protocol.rewrite import ModelRestorer, model_spans, with_model
from epp.request import Request
from tests.epp.plugins.parser_bodies import field, packed
from tests.epp.plugins.parser_bodies import frame as grpc_frame
from tests.fakes import FakePool, FakeServices, candidates
from tests.fuzz.target import Target, borders
from tests.pair import FakeStream, Pair
from workers.app import App
from workers.server import PATH, open_stream

# Bodies.

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
    """The first byte chooses parser and path."""
    if not data:
        return
    parser, path = PARSERS[data[0] % len(PARSERS)]
    request = Request(id="r", path=path, headers={}, now=0.0)
    try:
        parser.parse(request, path, memoryview(data)[1:])
    except Refused as refused:
        assert refused.cause in CLIENT_FAULTS
        assert len(refused.detail) < 1000, "the client's own words come back at length"
        return
    assert type(request.model) is str and type(request.cache_salt) is str and type(request.streaming) is bool
    assert request.max_tokens is None or (type(request.max_tokens) is int and request.max_tokens >= 0)
    canonical = request.prompt.canonical
    assert request.prompt.tokens == -(-len(canonical) // 4)
    block_hashes(canonical, 256, root(request.target_model, request.cache_salt, 1), 1)
    try:
        parts = request.prompt.parts()
    except (ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return  # who tokenises takes these for an unreadable body
    assert len(parts.prompts) <= len(data) and len(parts.token_ids) <= len(data)


TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{}:,]|[^\s\[\]{}:,"]+|\s+', re.DOTALL)


def json_parts(data: bytes) -> list[bytes]:
    """The first byte, then JSON's words."""
    return [data[:1], *TOKEN.findall(data[1:])]


def body_seeds() -> Mapping[str, bytes]:
    chat: dict[str, Any] = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief \\u00e9"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a\n"}, {"type": "image_url", "image_url": {"url": "data:x"}}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "stream": True,
        "max_completion_tokens": 5,
        "cache_salt": "s",
    }
    anthropic = {
        "model": "m",
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "s", "cache_control": {}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ"}}],
            },
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {"b": 1, "a": [1.5, None]}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}]}],
            },
        ],
        "max_tokens": 9,
    }
    vllm = {
        "model": "m",
        "token_ids": [1, 2, 3, 4294967295],
        "features": {"mm_hashes": {"image": ["h", None]}, "mm_placeholders": {"image": [{"offset": 1, "length": 2}]}},
        "sampling_params": {"max_tokens": 4},
    }
    found: dict[str, tuple[str, Any]] = {
        "chat": ("/chat/completions", chat),
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
        "messages": ("/v1/messages", anthropic),
        "count": ("/v1/messages/count_tokens", anthropic),
        "vllm": ("/inference/v1/generate", vllm),
        "sglang": ("/generate", {"input_ids": [1, 2], "extra_key": "s", "sampling_params": {"max_new_tokens": 3}, "stream": True}),
    }  # fmt: skip
    seeds = {name: bytes((NUMBER_OF[path],)) + json.dumps(body).encode() for name, (path, body) in found.items()}
    tokenized = field(2, packed(2, [1, 300, 70000]))
    media = field(7, field(5, field(1, 0) + field(2, 3)) + field(6, "hash"))
    generate = tokenized + field(4, field(8, 16)) + field(5, 1) + media
    seeds["grpc-generate"] = bytes((NUMBER_OF["/" + GENERATE],)) + grpc_frame(generate)
    seeds["grpc-text"] = bytes((NUMBER_OF["/" + GENERATE],)) + grpc_frame(gzip.compress(field(3, "hello")), 1)
    seeds["grpc-embed"] = bytes((NUMBER_OF["/" + EMBED],)) + grpc_frame(tokenized)
    for name, (path, (_, number, api)) in zip(
        ("vertex-chat", "vertex-stream", "vertex-raw"), METHODS.items(), strict=True
    ):
        inner = json.dumps(chat if "chat" in api else {"model": "m", "input": "x"})
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


# Compressed bodies.

UNPACKED_MAX = 1 << 20


def compressed(data: bytes) -> None:
    """The first byte: 0 to 3, the rest is gzip; above, the rest is packed here, perhaps in two members, perhaps cut."""
    if not data:
        return
    mode, given = data[0], data[1:]
    if mode > 3:
        half = len(given) // 2
        made = gzip.compress(given[:half], mtime=0) + gzip.compress(given[half:] * (mode % 50), mtime=0)
        given = made[: len(made) - (mode & 1) * (mode >> 4)]
    try:
        found = gunzip(given, UNPACKED_MAX)
    except ValueError:
        found = None
    else:
        assert len(found) <= UNPACKED_MAX
        assert found == gzip.decompress(given)
    try:
        steps = body_slices(given, " GZip", UNPACKED_MAX)
        assert steps is not None
        assert at_once(steps) == found
    except Refused as refused:
        assert found is None and refused.cause in (Cause.INVALID_BODY, Cause.BODY_TOO_LARGE)


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


# ext_proc streams.

MESSAGE_OPS = 12  # of 16; the others: half-close, loss, an answer for who waits, nothing
ENDPOINTS = tuple(f"10.0.0.{n}:8000" for n in range(1, 4))
HELD_MAX = 10_000


class Waits(DataProducer):
    """Suspends the decision of requests that ask for it, until the input says go on."""

    def __init__(self) -> None:
        super().__init__("waits", NoParams())
        self.waiting: list[Any] = []

    def produce(self, request: Request, candidates: Candidates) -> Any:
        if "x-wait" not in request.headers:
            return None
        self.waiting.append(Future())
        return self.waiting[-1]


class Future:
    def __init__(self) -> None:
        self.callback: Any = None

    def add_done_callback(self, callback: Any) -> None:
        self.callback = callback

    def __await__(self) -> Any:
        yield self


class World:
    """One App over fake endpoints, for all inputs: nothing of a stream may stay behind."""

    def __init__(self) -> None:
        config = load(DEFAULT_TEXT, "fuzz")
        self.waits = Waits()
        self.services = FakeServices()
        pipeline = config.pipeline
        pipeline.start(self.services)
        object.__setattr__(pipeline, "producers", (self.waits.produce, *pipeline.producers))
        columns = {c.name: [float(n) for n in range(1, 4)] for c in pipeline.columns}
        self.pair = Pair(pipeline, FakePool(candidates(columns, count=3)), body_bytes_max=1 << 18)

    def forget(self) -> None:
        """What grows by what requests teach."""
        if len(self.services.held) > HELD_MAX:
            self.services.held.clear()
        self.pair.series.stores.clear()


class Checked(FakeStream):
    """Keeps all answers, and what the gateway said of the request's body."""

    def __init__(self) -> None:
        super().__init__()
        self.said = bytearray()
        self.closed = False


_worlds: list[World] = []


def streams(data: bytes) -> None:
    """Records for two streams: an operation, a length, a message."""
    if not _worlds:
        _worlds.append(World())
    world = _worlds[0]
    app: App = world.pair.app
    pairs: list[tuple[Checked, Any]] = []
    for _ in range(2):
        stream = Checked()
        pairs.append((stream, open_stream(app, PATH, (), stream)))
    for record in stream_parts(data)[:64]:
        stream, handler = pairs[record[0] >> 7]
        operation = record[0] & 15
        world.pair.time += 0.001
        if operation == 14 and world.waits.waiting:
            world.waits.waiting.pop(0).callback(None)
        if stream.ended is not None or stream.closed:
            continue
        if operation < MESSAGE_OPS:
            handler.message(record[3:])
        elif operation == 12:
            handler.half_closed()
            assert stream.ended is not None
        elif operation == 13:
            stream.closed = True
            handler.closed()
    for stream, handler in pairs:
        if stream.ended is None and not stream.closed:
            stream.closed = True
            handler.closed()
        check_answers(stream)
    for waiting in world.waits.waiting:
        waiting.callback(None)  # comes late: nobody waits any more
    world.waits.waiting.clear()
    faults, world.pair.faults[:] = list(world.pair.faults), []
    assert not faults, faults
    assert not any(world.pair.inflight), "something is still counted as in flight"
    assert not any(world.services.tokens.values())
    world.forget()


ORDER = {
    "request_headers": 0, "request_body": 1, "request_trailers": 2, "response_headers": 3, "response_body": 4, "response_trailers": 5,
    "immediate_response": 9,
}  # fmt: skip


def check_answers(stream: Checked) -> None:
    """Whole messages; one answer to the request; each direction in order; nothing behind an immediate response."""
    at, sent = 0, stream.sent
    kinds: list[str] = []
    while at < len(sent):
        size = int.from_bytes(sent[at + 1 : at + 5], "big")
        assert sent[at] == 0 and at + 5 + size <= len(sent)
        answer = pb.ProcessingResponse.FromString(sent[at + 5 : at + 5 + size])
        kind = answer.WhichOneof("response")
        assert kind in ORDER
        kinds.append(kind)
        if kind == "request_headers":
            options = answer.request_headers.response.header_mutation.set_headers
            targets = [o.header.raw_value.decode() for o in options if o.header.key == "x-gateway-destination-endpoint"]
            assert targets and targets[0] in ENDPOINTS
            assert answer.dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == targets[0]
        at += 5 + size
    assert kinds.count("request_headers") + kinds.count("immediate_response") <= 1
    assert kinds.count("response_headers") <= 1
    assert "immediate_response" not in kinds[:-1]
    for direction in ("request", "response"):
        ranks = [ORDER[k] for k in kinds if k.startswith(direction)]
        behind = [rank for rank in ranks if rank not in (2, 5)]  # Envoy may say trailers twice
        assert behind == sorted(behind)
        assert "request_body" not in kinds or kinds.index("request_headers") < kinds.index("request_body")


def stream_parts(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while len(data) - at >= 3:
        end = at + 3 + int.from_bytes(data[at + 1 : at + 3], "big")
        parts.append(data[at:end])
        at = end
    return parts


def of_streams(parts: Sequence[bytes]) -> bytes:
    return b"".join(
        [part[:1] + min(65535, len(part) - 3).to_bytes(2, "big") + part[3:65538] for part in parts if len(part) >= 3]
    )


def record(message: bytes = b"", operation: int = 0, *, second: bool = False) -> bytes:
    return bytes((operation | second << 7,)) + len(message).to_bytes(2, "big") + message


def headers(
    path: str = "/v1/completions", *, last: bool = False, subset: list[str] | None = None, **more: str
) -> bytes:
    request = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path, **{n.replace("_", "-"): v for n, v in more.items()}}.items():
        request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    request.request_headers.end_of_stream = last
    if subset is not None:
        request.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: subset})
    return request.SerializeToString()


def body(data: bytes, last: bool = True) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


def answer_headers(kind: str = "application/json", status: str = "200", last: bool = False) -> bytes:
    response = pb.ProcessingRequest()
    for name, value in {":status": status, "content-type": kind}.items():
        response.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    response.response_headers.end_of_stream = last
    return response.SerializeToString()


def answer_body(data: bytes, last: bool = True) -> bytes:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=last)).SerializeToString()


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers()).SerializeToString()
ANSWER_TRAILERS = pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()
COMPLETION = b'{"model":"m","prompt":"hello","max_tokens":3}'
CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true}'
USAGE = b'{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":5}}}'
CHUNK = b'data: {"choices":[{"text":" word"}]}\n\n'


def stream_seeds() -> Mapping[str, bytes]:
    def said(*messages: bytes) -> bytes:
        return b"".join(map(record, messages))

    plain = (headers(), body(COMPLETION), answer_headers(), answer_body(USAGE))
    streamed = (
        headers("/v1/chat/completions", x_request_id="1"), body(CHAT), answer_headers("text/event-stream"),
        *[answer_body(CHUNK, False)] * 3, answer_body(b"data: " + USAGE + b"\n\n", False), answer_body(b"data: [DONE]\n\n"),
    )  # fmt: skip
    waiting = record(headers(x_wait="1")) + record(body(COMPLETION))
    foreign = headers(
        x_llm_d_inference_fairness_id="t", x_gateway_destination_endpoint="1.2.3.4:1", prefer="if-available"
    )
    return {
        "plain": said(*plain) + record(b"", 12),
        "streamed": said(*streamed),
        "two": b"".join([record(m, second=n % 2 == 1) for m in streamed for n in range(2)]),
        "pieces": said(headers(), body(COMPLETION[:9], False), body(COMPLETION[9:], False), TRAILERS, *plain[2:]),
        "get": said(headers("/v1/models", last=True, subset=["10.0.0.2"]), answer_headers(), answer_body(b"x")),
        "subset": said(headers(subset=["10.0.0.3:8000", "[::1]:1"]), *plain[1:]),
        "none": said(headers(last=True, subset=[])),
        "gzip": said(headers(content_encoding="gzip"), body(gzip.compress(COMPLETION, mtime=0))),
        "waits": waiting + record(b"", 14) + said(*plain[2:]),
        "gives-up": waiting + record(answer_headers("text/plain", "504")) + record(b"", 14),
        "lost": waiting + record(b"", 13) + record(b"", 14),
        "local-reply": said(headers(), answer_headers("text/plain", "408"), answer_body(b"late")),
        "error": said(*plain[:2], answer_headers(status="503"), answer_body(b"no"), ANSWER_TRAILERS),
        "trailers": said(*plain[:3], answer_body(USAGE, False), ANSWER_TRAILERS),
        "twice": said(plain[0], plain[1], plain[1], *plain[2:], plain[3]),
        "anthropic": said(headers("/v1/messages"), body(CHAT.replace(b"true", b"false")), *plain[2:]),
        "other": said(headers("/other"), body(b"\0\1"), *plain[2:]),
        "foreign": said(foreign, *plain[1:]),
    }


def _tagged(kind: Kind, payload: bytes) -> bytes:
    return bytes((kind << 3 | 2, len(payload))) + payload


EXT_PROC = Target(
    "ext_proc",
    streams,
    stream_seeds,
    stream_parts,
    of_streams,
    words=(
        *(_tagged(kind, b"") for kind in Kind), *(_tagged(kind, b"\x0a\x00") for kind in Kind), _tagged(Kind.REQUEST_BODY, b"\x10\x01"),
        b"\x10\x01", b"\x18\x01", b"\x0a\x80\x00", b"\x1a\xff\xff\xff\xff\x0f", b"\x0b", b"\x0c", b":path", b"x-request-id", b"\x1a\x03200",
        b"content-encoding", b"text/event-stream", b'"usage"', b"envoy.lb.subset_hint",
    ),
    modules=("epp.protocol.codec", "epp.protocol.stream", "workers.server", "epp.protocol.usage"),
    allowance=2 << 20,
)  # fmt: skip


# Model names, replaced and restored.


def renamed(data: bytes) -> None:
    """Two names and a body. All but the model's value stays, byte for byte; an answer is restored however it is cut."""
    asked_, target_, text = [*data.split(BETWEEN, 2), b"", b""][:3]
    asked, target = asked_.decode("utf-8", "replace")[:100], target_.decode("utf-8", "replace")[:100]
    try:
        made = with_model(text, target)
    except Refused as refused:
        assert refused.cause is Cause.INVALID_BODY
    else:
        spans = model_spans(text)
        assert [bytes(text[a:b]) for a, b in spans] == [bytes(text[a:b]) for a, b in sorted(spans)]
        name = msgspec.json.encode(target)
        assert len(made) == len(text) + sum(len(name) - (b - a) for a, b in spans) or not spans
        check_renamed(text, made, target)
    if msgspec.json.encode(target) + b'model"' in text:
        return  # two of the texts that are sought share a quote: in no JSON
    whole, cut = ModelRestorer(target, asked), ModelRestorer(target, asked)
    at_once = whole.feed(text) + whole.rest()
    assert b"".join(cut.feed(chunk) for chunk in borders(text)) + cut.rest() == at_once


def check_renamed(text: bytes, made: bytes, target: str) -> None:
    """Equal as Python reads them, but for the model. What Python cannot read (deep nesting, half of a surrogate pair) is not compared."""
    try:
        before, after = json.loads(text, object_pairs_hook=list), json.loads(made, object_pairs_hook=list)
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
