"""Targets for input from model servers, workers and operators: answers, metrics pages, bus frames, configuration."""

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from struct import pack
from typing import Any, TypeVar

import numpy as np

from epp.config import pools_file, registry
from epp.config.load import DEFAULT_TEXT, ConfigErrors, load
from epp.data import ACTIVE_MODELS, WAITING_MODELS
from epp.plugins.extractors._info_metrics import ADAPTERS_MAX
from epp.plugins.extractors.core_metrics import (
    BUILT_IN,
    CORE,
    LEGACY_ENGINE_LABEL,
    CoreMetricsExtractor,
    Extracted,
    ExtractError,
    Extraction,
)
from epp.prefix.updates import CACHED, FORGET, FRAME_BYTES_MAX, LEARN, CorruptFrame, decode, frames, single
from epp.protocol.usage import (
    KEY,
    SUSPECT,
    USAGE_BYTES_MAX,
    AnthropicScanner,
    HttpBodyScanner,
    Scanner,
    SglangScanner,
    UsageScanner,
    VllmEmbedScanner,
    VllmGenerateScanner,
)
from shm.prefix_index import IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from tests.epp.plugins.parser_bodies import field
from tests.epp.plugins.parser_bodies import frame as grpc_frame
from tests.fuzz.target import Target, borders
from workers.shared.bus import BusReader
from workers.supervisor.endpoints.http_answer import HttpError, ServerAnswer

T = TypeVar("T")

# Answers of model servers, scanned for usage.

SCANNERS: Sequence[type[Any]] = (UsageScanner, AnthropicScanner, SglangScanner, VllmGenerateScanner, VllmEmbedScanner, HttpBodyScanner)
FRAMED = SCANNERS[3:]
SHORT = 512


def usage(data: bytes) -> None:
    """Scans an answer for usage. The first byte chooses the scanner. Leaving out skippable chunks does not change the usage."""
    if not data:
        return
    kind, text = SCANNERS[data[0] % len(SCANNERS)], data[1:]
    whole, cut, single_bytes = kind(), kind(), kind()
    whole.feed(text)
    for chunk in borders(text):
        _offer(cut, chunk)
    if len(text) <= SHORT:
        for at in range(len(text)):
            _offer(single_bytes, text[at : at + 1])
    if (scanned := whole.usage) is not None:
        assert all(number is None or type(number) is int for number in (scanned.prompt, scanned.completion, scanned.cached))
    if kind in FRAMED or _readable(text):  # other texts may give different results
        assert cut.usage == whole.usage
        assert len(text) > SHORT or single_bytes.usage == whole.usage


def _readable(text: bytes) -> bool:
    """Whether the text is short JSON, or a stream of JSON lines."""
    try:
        for line in text.split(b"\n") if text[:1] not in b"{[" else [text]:
            if b"{" in line or b'"' in line:
                json.loads(line.removeprefix(b"data: "))
    except (ValueError, RecursionError):
        return False
    return len(text) <= USAGE_BYTES_MAX


def _offer(scanner: Scanner, chunk: bytes) -> None:
    if scanner.pending or KEY in chunk or chunk[-1:] in SUSPECT_BYTES:
        scanner.feed(chunk)


SUSPECT_BYTES = frozenset(bytes((byte,)) for byte in SUSPECT)


def usage_seeds() -> Mapping[str, bytes]:
    openai = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}, "total_tokens": 13}
    sse = [
        'data: {"choices":[{"text":"a \\"usage\\": {"}],"usage":null}',
        "data: " + json.dumps({"type": "response.completed", "response": {"usage": {"input_tokens": 3, "output_tokens": "4"}}}),
        "data: [DONE]\r",
    ]
    anthropic = [
        'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":25,"cache_read_input_tokens":5}}}',
        'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":15}}',
    ]
    sglang = [
        'data: {"text":"a","meta_info":{"finish_reason":null,"prompt_tokens":3,"completion_tokens":1}}',
        'data: {"text":"b","meta_info":{"finish_reason":{"type":"stop"},"prompt_tokens":3,"completion_tokens":2,"cached_tokens":1}}',
    ]
    generate = grpc_frame(field(1, field(1, 7) + field(2, 5) + field(3, 2) + field(4, 1)))
    complete = grpc_frame(field(2, field(3, 5) + field(4, 9) + field(5, 1)))
    http_body = grpc_frame(field(1, "application/json") + field(2, json.dumps({"usage": openai})))

    def text(lines: Sequence[str]) -> bytes:
        return "\n\n".join(lines).encode() + b"\n\n"

    return {
        "openai": b"\0" + json.dumps({"id": 1, "usage": openai, "choices": []}).encode(),
        "openai-sse": b"\0" + text(sse),
        "anthropic-sse": b"\1" + text(anthropic),
        "sglang": b'\2{"text":"b","meta_info":{"prompt_tokens":3,"completion_tokens":2}}',
        "sglang-sse": b"\2" + text(sglang),
        "vllm-generate": b"\3" + generate + complete,
        "vllm-embed": b"\4" + grpc_frame(field(2, 8)),
        "http-body": b"\5" + http_body,
    }


USAGE = Target(
    "usage",
    usage,
    usage_seeds,
    words=(
        b'"usage"', b'"usage":{', b'\\"usage\\":{', b'"meta_info":{', b'"prompt_tokens":1', b'"output_tokens":"2"',
        b"null", b"{", b"}", b'"', b"\\",
        b"data: ", b"[DONE]", b"\n\n", b"1e9", b"-1", b"99999999999999999999", b" : ", b'"finish_reason":1,', b"\0\0\0\0\5",
    ),
    modules=("epp.protocol.usage", "epp.protocol.grpc_frames", "epp.protocol.wire"),
)  # fmt: skip


# Metrics pages.

_extractor = CoreMetricsExtractor("fuzz", CoreMetricsExtractor.Params())
ENGINES = tuple(_extractor.engine({LEGACY_ENGINE_LABEL: engine.name}) for engine in BUILT_IN)
WANTED = (*CORE, ACTIVE_MODELS, WAITING_MODELS)
BORDER = b"\0page\0"


def pages(data: bytes) -> None:
    """Extracts pages one after the other; the first byte chooses the engine. State kept from one page must not change the next result."""
    if not data:
        return
    engine = ENGINES[data[0] % len(ENGINES)]
    remembering = Extraction(engine, WANTED)
    for page in data[1:].split(BORDER)[:8]:
        results = [_extracted(extraction, page) for extraction in (remembering, Extraction(engine, WANTED))]
        assert results[0] == results[1] or not _well_formed(page), results
        if results[0] is not None:
            assert all(np.isfinite(value) and value >= 0 for value in results[0].values)
            assert all(len(names) <= ADAPTERS_MAX for names in results[0].names.values())


_LINE = re.compile(
    rb'(# (?:TYPE|HELP) )?([a-zA-Z_:][a-zA-Z0-9_:]*)(?(1)[ ].*|(?:\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\})?[ \t]*[^\s{}"]+(?:[ \t].*)?\Z)'
)


def _well_formed(page: bytes) -> bool:
    """Whether the series of each family follow each other and its comments, as the format demands, and all lines are simple."""
    seen: set[bytes] = set()
    current, begun = b"", False
    for line in page.split(b"\n"):
        match = _LINE.match(line)
        if match is None:
            if line.strip() and not line.startswith(b"# "):
                return False
            continue
        name, comment = match[2], match[1] is not None
        if name != current:
            if name in seen:
                return False
            current, begun = name, False
            seen.add(name)
        elif comment and begun:
            return False
        begun = begun or not comment
    return True


def _extracted(extraction: Extraction, page: bytes) -> Extracted | None:
    try:
        return extraction.extract(page)
    except ExtractError:
        return None


def page_parts(data: bytes) -> list[bytes]:
    return [data[:1], *data[1:].splitlines(keepends=True)]


def page_seeds() -> Mapping[str, bytes]:
    vllm = b"""\
# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 17.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="a\\"b\\\\n}"} 0.25 1700000000000
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.7e9
vllm:lora_requests_info{max_lora="4",running_lora_adapters="c",waiting_lora_adapters="d"} 1.8e9
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000",enable="True"} 1.0
# TYPE vllm:time histogram
vllm:time_bucket{le="0.1"} 5 # {trace_id="1"} 0.05
"""
    sglang = b"""\
sglang:num_queue_reqs{tp="0"} 1
sglang:num_running_reqs{tp="0"} 2
sglang:token_usage{tp="0"} 0.5
sglang:cache_config_info{page_size="1",num_pages="100"} 1
"""
    triton = b"""\
nv_trt_llm_request_metrics{model="t",request_type="waiting"} 1
nv_trt_llm_request_metrics{model="t",request_type="scheduled"} 2
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"} 0.1
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 300
"""
    ranks = vllm.replace(
        b'waiting{engine="0",model_name="m"} 17.0\n',
        b'waiting{engine="0",model_name="m"} 17.0\nvllm:num_requests_waiting{engine="1",model_name="m"} 120 9\n',
    )
    idle = b'vllm:cache_config_info{block_size="16",kv_cache_size_tokens="24950",prefix_match_unit="None"} 1.0\n# EOF'
    trtllm = b"trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5\n"
    return {
        "vllm": b"\0" + vllm,
        "vllm-twice": b"\0" + vllm + BORDER + vllm.replace(b"17.0", b"1") + BORDER + b"# new\n" + vllm,
        "vllm-ranks": b"\0" + ranks + BORDER + vllm + b'vllm:num_requests_waiting{engine="1"} 4\n' + BORDER + ranks,
        "vllm-idle": b"\0" + idle + BORDER + vllm + idle,
        "vllm-crlf": b"\0" + vllm.replace(b"\n", b"\r\n"),
        "sglang": b"\1" + sglang + BORDER + sglang,
        "trtllm": b"\2" + trtllm,
        "triton": b"\3" + triton + BORDER + triton.replace(b"scheduled", b"waiting"),
    }


PAGES = Target(
    "pages",
    pages,
    page_seeds,
    page_parts,
    words=(
        b"NaN", b"+Inf", b"-1", b"1e309", b"1_0", b"0x10", b"{", b"}", b'"', b'\\"', b"\\", b"\n", b"\r\n",
        b"# TYPE ", b"# HELP ", b" 17", BORDER,
        b"vllm:num_requests_waiting", b'max_lora="', b'running_lora_adapters="', b",", b"=", b"\xff", b"\xc2\xa0",
        b"\x0b", b"\x1c", b"\x85",
    ),
    modules=("epp.protocol.exposition", "epp.plugins.extractors.core_metrics"),
)  # fmt: skip


def answers(data: bytes) -> None:
    """Reads an HTTP answer to a scrape, in one read and in several. Both results must be equal."""
    results = []
    for chunks in ([data], borders(data)):
        answer = ServerAnswer()
        result: Any = None
        try:
            for chunk in chunks:
                if not chunk:
                    continue
                page = answer.receive(chunk)
                if page is not None:
                    result = page
                    break
            if result is None:
                result = answer.end()
        except HttpError as error:
            result = error.cause
        results.append(result)
    if isinstance(results[0], bytes) and isinstance(results[1], bytes):
        assert results[0] == results[1]


def answer_seeds() -> Mapping[str, bytes]:
    page = b"a 1\nb 2\n" * 5
    ok = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
    packed = zlib.compress(page, wbits=31)
    chunked = b"8\r\na 1\nb 2\n\r\n20;x=y\r\n" + page[8:] + b"\r\n0\r\nTrailer: x\r\n\r\n"
    return {
        "sized": ok + b"Content-Length: %d\r\n\r\n" % len(page) + page,
        "chunked": ok + b"Transfer-Encoding: chunked\r\n\r\n" + chunked,
        "gzip": ok + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed,
        "chunked-gzip": ok
        + b"Transfer-Encoding: chunked\r\nContent-Encoding: gzip\r\n\r\n%x\r\n" % len(packed)
        + packed
        + b"\r\n0\r\n\r\n",
        "until-close": b"HTTP/1.0 200 OK\r\n\r\n" + page,
        "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n",
    }


def answer_parts(data: bytes) -> list[bytes]:
    return data.split(b"\r\n")


ANSWERS = Target(
    "answers",
    answers,
    answer_seeds,
    answer_parts,
    b"\r\n".join,
    words=(
        b"\r\n",
        b"Content-Length: ",
        b"Transfer-Encoding: chunked",
        b"ffffffff",
        b"-1",
        b"0\r\n\r\n",
        b"_",
        b"+5",
        b"Connection: close",
    ),
    modules=("workers.supervisor.endpoints.http_answer",),
)


# Bus frames.


class _Bus:
    """A pipe to a bus reader with a real index."""

    def __init__(self) -> None:
        schema = IndexSchema(512)
        self.index = IndexWriter(schema, Region(memoryview(bytearray(schema.bytes))))
        self.read, self.write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
        self.reader = BusReader(NO_LOOP, [self.read], self.index, now=lambda: 100.0)


NO_LOOP: Any = None
_buses: list[_Bus] = []


def bus(data: bytes) -> None:
    """Decodes a frame with a right checksum, and the raw bytes. Decoded updates must survive another encoding."""
    if not _buses:
        _buses.append(_Bus())
    world = _buses[0]
    right = pack("=I", zlib.crc32(data)) + data
    for frame in (right, data):
        try:
            decoded = decode(frame)
        except CorruptFrame:
            continue
        at, updates = 0, []
        for owner, count in zip(decoded.owners, decoded.counts, strict=True):
            updates.append((owner, decoded.hashes[at : at + 8 * count]))
            at += 8 * count
        again = [decode(f) for f in frames(decoded.kind, updates)]
        assert b"".join(f.hashes for f in again) == decoded.hashes
        assert sum(sum(f.counts) for f in again) == sum(decoded.counts)
    if 0 < len(right) <= FRAME_BYTES_MAX:
        os.write(world.write, right)
        assert world.reader.drain() == 1
        assert world.index._size <= world.index._entries.size


def bus_seeds() -> Mapping[str, bytes]:
    few = np.arange(1, 5, dtype=np.uint64).tobytes()
    many = np.arange(1, 600, dtype=np.uint64).tobytes()
    seeds = {"single": single(3, few)[4:]}
    for name, kind in (("learn", LEARN), ("forget", FORGET), ("cached", CACHED)):
        for number, frame in enumerate(frames(kind, [(1, few), (2, many), (65535, few)])):
            seeds[f"{name}-{number}"] = frame[4:]
    return seeds


def bus_parts(data: bytes) -> list[bytes]:
    """Head, records, hashes."""
    count = int.from_bytes(data[2:4], "little")
    records = [data[4 + 4 * n : 8 + 4 * n] for n in range(min(count, 400))]
    rest = data[4 + 4 * len(records) :]
    return [data[:4], *records, *(rest[at : at + 8] for at in range(0, len(rest), 8))]


BUS = Target(
    "bus",
    bus,
    bus_seeds,
    bus_parts,
    words=(b"\1\1\1\0", b"\1\2\1\0", b"\0\0\0\0\0\0\0\0", b"\xff" * 8, b"\0\0\1\0", b"\xff\xff\1\0"),
    modules=("epp.prefix.updates", "workers.shared.bus", "shm.prefix_writer"),
)


# Configuration.

DEPLOY = Path(__file__).parents[2] / "deploy"


def documents(data: bytes) -> None:
    """Reads a pools file, and loads a configuration. Errors have valid lines; a loaded configuration can be written and loaded again."""
    text = data.decode("utf-8", "replace")
    file = _without_errors(text, pools_file.read)
    if file is not None:
        names = [pool.name for pool in file.pools]
        assert names and len(set(names)) == len(names)
        file.choice().of_stream(1, "a")
    config = _without_errors(text, partial(load, allow_experimental=True))
    if config is None:
        return
    again = load(config.as_yaml(), "effective", allow_experimental=True)
    assert again.document == config.document


def _without_errors(text: str, read: Callable[[str, str], T]) -> T | None:
    """Returns what `read` makes of a text. None: it has errors."""
    try:
        return read(text, "c.yaml")
    except ConfigErrors as errors:
        assert errors.errors
        last = len(text.splitlines()) + 2
        assert all(0 <= error.line <= last and error.message for error in errors.errors)
        return None


def document_seeds() -> Mapping[str, bytes]:
    registry.known()
    shipped = {path.stem: path.read_bytes() for path in (*sorted((DEPLOY / "config").glob("*.yaml")), DEPLOY / "pools.yaml")}
    return {"built-in": DEFAULT_TEXT.encode(), "everything": EVERYTHING, **shipped}


EVERYTHING = b"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: file-discovery, name: endpoints, parameters: {path: e.yaml, watchFile: true}}
- {type: metrics-data-source, parameters: &source {scheme: https, path: /m, port: 8000, interval: 50ms}}
- {type: core-metrics-extractor, parameters: {defaultEngine: vllm}}
- {type: approx-prefix-cache-producer, parameters: {blockSizeTokens: 64}}
- type: queue-scorer
- type: weighted-random-picker
schedulingProfiles:
- name: a
  plugins: [{pluginRef: queue-scorer, weight: 2.5}]
- {name: b, shadow: true, plugins: [{pluginRef: queue-scorer}]}
dataLayer:
  discovery: {pluginRef: endpoints}
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
requestHandler: {parsers: [{pluginRef: openai-parser}, {pluginRef: passthrough-parser}]}
"""

_WORD_TEXTS = (
    "", "\n", "\n  ", "\t", ": ", "- ", "{", "}", "[", "]", "null", "~", "true", "0", "-1", "1e999", ".inf", "0x",
    "'", '"', "&a ", "*a", "<<: *source",
    "!!int ", "!!python/object:x ", "#", "---\n", "...\n", "%YAML 1.1\n", "|", ">", "\x00", "\ufeff", "\u2028", "? ",
    "9" * 40, "[" * 80, "{a: " * 80,
    "pluginRef: ", "type: ", "shadow: true", "parameters: {a: [1, {b: 2}]}", "1h", "10Gi", "flowControl: {maxBytes: 1Gi}\n", "weight: -1",
    "pools: [{name: a, port: 1}]\n", "models: ['*', a*b, '*a']\n", "authorities: [a.svc:1]\n", "- name: b\n",
)  # fmt: skip


def document_parts(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


CONFIG = Target(
    "config",
    documents,
    document_seeds,
    document_parts,
    words=tuple(text.encode() for text in _WORD_TEXTS),
    modules=(
        "epp.config.yaml_nodes",
        "epp.config.pools_file",
        "epp.config.reader",
        "epp.config.assembler",
        "epp.config.wiring_checks",
        "epp.config.parameters",
        "epp.quantities",
    ),
    allowance=4 << 20,
    share=0.1,
    bytes_max=1 << 14,
)
