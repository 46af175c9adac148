"""The longest time that one request keeps the event loop busy: `python -m tests.bench.busy [--sizes 65536,1048576] [--smoke] [--json]`.

    body ─▶ ext_proc messages ─▶ DATA frames ─▶ reads of READ_BYTES ─▶ engine ─▶ stream ─▶ default pipeline, real index ─▶ output

The benchmark times each call that the event loop would make for one request. A call is a read with all work up to the bytes for the
socket, or work that was postponed to a later turn of the loop. The figure is the longest call, in CPU time: every other stream waits while
it runs. The limit of a call is MS_MAX for up to a MiB of body, plus MS_PER_MIB_MAX for each further MiB. For a compressed body the
uncompressed size counts.
"""

import argparse
import gzip
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from epp.config.load import DEFAULT_TEXT
from epp.plugins.parsers.vllm_grpc import GENERATE
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.bench.micro import pipeline, pool
from tests.epp.plugins.parser_bodies import field, packed
from tests.epp.plugins.parser_bodies import frame as grpc_frame
from tests.fakes import FakeServices
from tests.pair import Pair
from tests.workers.transport.helpers import block, frame, framed, word
from workers.shared.bus import BusWriter
from workers.transport.frames import PREFACE
from workers.transport.http2 import Connection
from workers.transport.limits import Limits
from workers.worker.extproc.stream import PATH, open_stream

MIB = 1 << 20
SIZES = (64 << 10, 256 << 10, MIB, 4 * MIB, 32 * MIB)
READ_BYTES = 256_000  # the most that the loop reads at once
PIECE = 65_536  # bytes per message of a body that is sent in several messages
MS_MAX = 5.0
MS_PER_MIB_MAX = 4.0
ROUNDS = 3

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = 'the quick brown fox jumps over a lazy dog and 12 more of its friends, who \\"sleep\\"\\n '


class Body(NamedTuple):
    """A kind of body: its path, and a function that builds a body of about the given size."""

    path: str
    build: Callable[[int], bytes]
    coding: str = ""
    pieces: bool = False


def text(size: int) -> str:
    return WORDS * (size // len(WORDS) + 1)


def listed(item: str, size: int) -> str:
    return ",".join([item] * max(1, size // (len(item) + 1)))


def chat(messages: str, more: str = "") -> bytes:
    return f'{{"model":"m",{more}"messages":[{messages}]}}'.encode()


def user(content: str) -> str:
    return '{"role":"user","content":' + content + "}"


def parts(item: str, size: int) -> bytes:
    return chat(user("[" + listed(item, size) + "]"))


def unread(items: str) -> bytes:
    return chat(user('"hi"'), '"x":[' + items + "],")


def numbers(count: int) -> str:
    rng = random.Random(1)
    return ",".join(map(str, [rng.randrange(150_000) for _ in range(count)]))


def tokens(size: int) -> str:
    return numbers(size // 7)


def many_keys(size: int) -> str:
    return ",".join([f'"k{n}":{n}' for n in range(size // 15)])


def generate(size: int) -> bytes:
    rng = random.Random(1)
    ids = [rng.randrange(150_000) for _ in range(size // 3)]
    return grpc_frame(field(2, packed(2, ids)))


def sampling(before: bytes, size: int) -> bytes:
    return b'{%b,"sampling_params":{"x":[%b]}}' % (before, listed("[]", size).encode())


def media(size: int) -> bytes:
    hashes, places = listed('"a"', size // 2), listed("{}", size // 2)
    features = f'{{"mm_hashes":{{"image":[{hashes}]}},"mm_placeholders":{{"image":[{places}]}}}}'
    return b'{"model":"m","token_ids":[1],"features":%b}' % features.encode()


def escaped(size: int) -> str:
    return '"' + "\\u4f60\\u597d \\/ " * (size // 16) + '"'


IMAGE = '{"type":"image_url","image_url":{"url":"' + "A" * 100_000 + '"}}'
TOOL = '{"type":"function","function":{"name":"f"}}'
CALL = '{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"f","arguments":"{}"}}]}'
RESULT = '{"type":"tool_result","tool_use_id":"t","content":"r"}'
BILLED = '{"type":"text","text":"x-anthropic-billing-header: 1"}'
ITEM = '{"role":"user","content":"x"}'
BODIES: Mapping[str, Body] = {
    "completion, one text": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":"%b"}' % text(n).encode()),
    "completion, in pieces": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":"%b"}' % text(n).encode(), pieces=True),
    "completion, escapes": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":%b}' % escaped(n).encode()),
    "completion, gzip": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":"%b"}' % noise(n), coding="gzip"),
    "completion, texts": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":[%b]}' % listed('"a short prompt"', n).encode()),
    "completion, short texts": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":[%b]}' % listed('"a"', n).encode()),
    "completion, token ids": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":[%b]}' % tokens(n).encode()),
    "completion, digits": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":[%b]}' % listed("7", n).encode()),
    "completion, lists of ids": Body(COMPLETIONS, lambda n: b'{"model":"m","prompt":[%b]}' % listed("[1,2,3]", n).encode()),
    "chat, one message": Body(CHAT, lambda n: chat(user('"' + text(n) + '"'))),
    "chat, messages": Body(CHAT, lambda n: chat(listed(user('"' + text(200) + '"'), n))),
    "chat, tiny messages": Body(CHAT, lambda n: chat(listed(user('"hi"'), n))),
    "chat, empty messages": Body(CHAT, lambda n: chat(listed("{}", n))),
    "chat, texts in parts": Body(CHAT, lambda n: parts('{"type":"text","text":"some words"}', n)),
    "chat, empty parts": Body(CHAT, lambda n: parts("{}", n)),
    "chat, unknown parts": Body(CHAT, lambda n: parts('{"type":"x","y":[1,2]}', n)),
    "chat, images": Body(CHAT, lambda n: parts(IMAGE, n)),
    "chat, tiny images": Body(CHAT, lambda n: parts('{"type":"image_url","image_url":{"url":"A"}}', n)),
    "chat, tool calls": Body(CHAT, lambda n: chat(listed(CALL, n))),
    "chat, escapes": Body(CHAT, lambda n: chat(user(escaped(n)))),
    "chat, tools": Body(CHAT, lambda n: chat(user('"hi"'), '"tools":[' + listed(TOOL, n) + "],")),
    "chat, content is an object": Body(CHAT, lambda n: chat(user("{" + many_keys(n) + "}"))),
    "chat, unread keys": Body(CHAT, lambda n: chat(user('"hi"'), many_keys(n) + ",")),
    "chat, unread nesting": Body(CHAT, lambda n: unread(listed("[" * 60 + "]" * 60, n))),
    "chat, unread numbers": Body(CHAT, lambda n: unread(listed("1.5e3", n))),
    "chat, model is a list": Body(CHAT, lambda n: b'{"messages":[%b],"model":[%b]}' % (ITEM.encode(), listed("[]", n).encode())),
    "chat, image is an object": Body(CHAT, lambda n: chat(user('[{"type":"image_url","image_url":{"x":[' + listed("[]", n) + "]}}]"))),
    "chat, unknown part with a mark": Body(CHAT, lambda n: chat(user('[{"type":"x","cache_control":{},"y":[' + listed("[]", n) + "]}]"))),
    "chat, image is numbers": Body(CHAT, lambda n: chat(user('[{"type":"image_url","image_url":{"x":[' + listed("1", n) + "]}}]"))),
    "chat, unknown part of texts": Body(CHAT, lambda n: chat(user('[{"type":"x","cache_control":{},"y":[' + listed('""', n) + "]}]"))),
    "anthropic, system": Body("/v1/messages", lambda n: chat(user('"hi"'), f'"max_tokens":1,"system":[{BILLED},' + listed("{}", n) + "],")),
    "anthropic, parts": Body("/v1/messages", lambda n: parts('{"type":"text","text":"some words"}', n)),
    "anthropic, tool results": Body("/v1/messages", lambda n: parts(RESULT, n)),
    "responses, items": Body("/v1/responses", lambda n: b'{"model":"m","input":[%b]}' % listed(ITEM, n).encode()),
    "responses, numbers": Body("/v1/responses", lambda n: b'{"model":"m","input":[%b]}' % listed("1", n).encode()),
    "responses, instructions": Body("/v1/responses", lambda n: b'{"model":"m","input":"x","instructions":[%b]}' % listed("{}", n).encode()),
    "embeddings, texts": Body("/v1/embeddings", lambda n: b'{"model":"m","input":[%b]}' % listed('"a short text"', n).encode()),
    "vllm, token ids": Body("/inference/v1/generate", lambda n: b'{"model":"m","token_ids":[%b]}' % tokens(n).encode()),
    "vllm, sampling parameters": Body("/inference/v1/generate", lambda n: sampling(b'"model":"m","token_ids":[1]', n)),
    "sglang, sampling parameters": Body("/generate", lambda n: sampling(b'"input_ids":[1]', n)),
    "sglang, token ids": Body("/generate", lambda n: b'{"input_ids":[%b]}' % tokens(n).encode()),
    "vllm gRPC, token ids": Body("/" + GENERATE, generate),
    "vllm, media": Body("/inference/v1/generate", media),
    "vllm gRPC, ids one by one": Body("/" + GENERATE, lambda n: grpc_frame(field(2, b"\x10\x07" * (n // 2)))),
    "vllm gRPC, unknown fields": Body("/" + GENERATE, lambda n: grpc_frame(b"\x30\x01" * (n // 2) + field(2, packed(2, [1])))),
    "vllm gRPC, media": Body("/" + GENERATE, lambda n: grpc_frame(field(7, field(5, field(1, 1)) * (n // 4)) + field(2, packed(2, [1])))),
    "vllm gRPC, sampling parameters": Body("/" + GENERATE, lambda n: grpc_frame(field(4, field(8, 1) * 100) * (n // 202))),
    "vllm gRPC, control characters": Body("/" + GENERATE, lambda n: grpc_frame(field(3, b"\1" * n))),
    "no JSON": Body(CHAT, lambda n: b"[" * n),
    "unknown path": Body("/other", lambda n: b"x" * n),
}  # fmt: skip


def noise(size: int) -> bytes:
    """Returns words in random order. They compress to about a third."""
    rng = random.Random(1)
    known = [f"{rng.getrandbits(rng.randrange(8, 40)):x}".encode() for _ in range(4000)]
    data = b" ".join(rng.choices(known, k=size // 6))
    return data[:size]


class Services(FakeServices):
    """Has a real index for look-ups, and a real bus that no process reads."""

    def __init__(self) -> None:
        super().__init__()
        schema = IndexSchema(1 << 16)
        region = Region(memoryview(bytearray(schema.bytes)))
        self.index = IndexReader(schema, region)
        writer = IndexWriter(schema, region)
        writer.insert(np.arange(1, 30_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15), np.ones(29_999, np.uint16), 1)
        self.bus = BusWriter(os.open(os.devnull, os.O_WRONLY), lambda: None)
        self.bus._loop = Later()  # type: ignore[assignment]

    def match(self, hashes: Any) -> Mapping[int, int]:
        return self.index.match(hashes)

    def learn(self, hashes: Any, owner: int) -> None:
        self.bus.learn(hashes, owner)

    def forget(self, hashes: Any, owner: int) -> None:
        self.bus.forget(hashes, owner)


class Later:
    def time(self) -> float:
        return 0.0

    def call_later(self, _seconds: float, _call: object) -> None: ...

    def call_soon(self, _call: object) -> None: ...


PARSERS = (
    "openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser", "vllmgrpc-parser", "passthrough-parser",
)  # fmt: skip


class Served:
    """Runs the parts of a worker without sockets: engine, streams, the default pipeline."""

    def __init__(self) -> None:
        plugins = "".join(f"- type: {parser}\n" for parser in PARSERS)
        document = DEFAULT_TEXT.replace("plugins:\n", "plugins:\n" + plugins, 1)
        refs = ", ".join(f"{{pluginRef: {parser}}}" for parser in PARSERS)
        self.services = Services()
        compiled = pipeline(self.services, f"{document}requestHandler: {{parsers: [{refs}]}}\n")
        self.pair = Pair(compiled, pool(8), body_bytes_max=64 * MIB)

    def longest(self, body: Body, size: int) -> float:
        """Returns the duration of the longest call for one request, in seconds."""
        reads = self._reads(body, size)
        app = self.pair.app
        calls: deque[Callable[[], object]] = deque()
        connection = Connection(
            lambda path, metadata, stream: open_stream(app, path, metadata, stream),
            0.0,
            lambda: calls.append(connection.output),
            Limits(message=64 * MIB),
        )
        connection.receive(PREFACE + frame(4, 0, 0, b"\0\4" + word(1 << 30)) + frame(8, 0, 0, word(1 << 30)))
        connection.receive(frame(1, 4, 1, block(path=PATH)))
        connection.output()
        longest = 0.0
        calls.extend(partial(_read, connection, read) for read in reads)
        while calls:
            call = calls.popleft()
            begun = time.thread_time()
            call()
            longest = max(longest, time.thread_time() - begun)
            calls.extend(self.pair.turns)
            self.pair.turns.clear()
        connection.lost()
        assert not self.pair.faults, self.pair.faults
        flushed = time.thread_time()
        self.services.bus.flush()
        return max(longest, time.thread_time() - flushed)

    def _reads(self, body: Body, size: int) -> list[bytes]:
        """Returns the bytes of one request, divided into the reads of the event loop."""
        data = body.build(size)
        headers = pb.ProcessingRequest()
        for name, value in {":method": "POST", ":path": body.path, "x-request-id": "1", "content-encoding": body.coding}.items():
            if value:
                headers.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        if body.coding:
            data = gzip.compress(data, 6)
        cut = PIECE if body.pieces else max(1, len(data))
        messages = [headers.SerializeToString()]
        for at in range(0, len(data), cut):
            piece = pb.HttpBody(body=data[at : at + cut], end_of_stream=at + cut >= len(data))
            messages.append(pb.ProcessingRequest(request_body=piece).SerializeToString())
        stream = b"".join(map(framed, messages))
        wire = b"".join([frame(0, 0, 1, stream[at : at + 16384]) for at in range(0, len(stream), 16384)])
        return [wire[at : at + READ_BYTES] for at in range(0, len(wire), READ_BYTES)]


def _read(connection: Connection, data: bytes) -> None:
    connection.receive(data)
    connection.output()


def allowed_ms(size: int) -> float:
    """Returns the longest allowed call for a body of this size, in milliseconds."""
    return MS_MAX + max(0.0, size / MIB - 1) * MS_PER_MIB_MAX


class Figure(NamedTuple):
    name: str
    size: int
    ms: float

    @property
    def within(self) -> bool:
        return self.ms <= allowed_ms(self.size)


def figures(sizes: tuple[int, ...], *, rounds: int = ROUNDS, only: str = "") -> Iterator[Figure]:
    """Yields the best figure of `rounds` for each kind of body and each size."""
    served = Served()
    for name, body in BODIES.items():
        if only in name:
            for size in sizes:
                yield Figure(name, size, 1e3 * min(served.longest(body, size) for _ in range(rounds)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.busy", description=__doc__)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--only", default="", help="only kinds of bodies with this text in their name")
    parser.add_argument("--smoke", action="store_true", help="run the two smallest sizes once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = SIZES[:2] if options.smoke else tuple(int(size) for size in options.sizes.split(","))
    results = list(figures(sizes, rounds=1 if options.smoke else ROUNDS, only=options.only))
    if options.json:
        print(json.dumps([figure._asdict() | {"allowed_ms": allowed_ms(figure.size)} for figure in results]))
        return 0
    print(f"{'longest call of one request, ms':32}" + "".join(f"{_size(size):>12}" for size in sizes))
    print(f"{'at most':32}" + "".join(f"{allowed_ms(size):12.1f}" for size in sizes))
    for name in dict.fromkeys(figure.name for figure in results):
        row = [figure for figure in results if figure.name == name]
        print(f"{name:32}" + "".join(f"{figure.ms:11.2f}{' ' if figure.within else '!'}" for figure in row))
    return 0


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size >> 10} KiB"


if __name__ == "__main__":
    sys.exit(main())
