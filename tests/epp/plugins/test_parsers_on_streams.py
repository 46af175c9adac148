"""Parsers on ext_proc streams: which answers are read, which pass unread, and compressed bodies."""

import gzip
import json

import pytest

from epp.decision.decision import Usage
from epp.decision.pipeline import WiredProfile, Wiring, compile_pipeline
from epp.plugin import NoParams
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.openai import OpenAI, Passthrough
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vllm_grpc import VllmGrpc
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from tests.epp.plugins.parser_bodies import field, frame, packed
from tests.epp.protocol.test_usage import ANTHROPIC_SSE, SGLANG_SSE, VLLM_GRPC_STREAM
from tests.fakes import FakePool, FakeServices, candidates
from tests.pair import Pair, bodies, set_headers
from tests.workers.worker.extproc.streams import Remembers, refusal

MESSAGES = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}).encode()
COUNT = "/v1/messages/count_tokens"
COMPLETION = b'{"model":"m","prompt":"hello"}'
PARSERS = (OpenAI, Anthropic, VllmHttp, SglangHttp, VllmGrpc, Passthrough)


def pair(remembers: Remembers, **more: int) -> Pair:
    picker, parsers = MaxScore("p", MaxScore.Params()), tuple(parser("x", NoParams()) for parser in PARSERS)
    pipeline = compile_pipeline(
        Wiring(
            plugins=(picker, *parsers, remembers),
            parsers=parsers,
            handler=SingleProfile("h", NoParams()),
            profiles=(WiredProfile("default", ((picker, 1.0),)),),
            producers=(),
        )
    )
    pipeline.start(FakeServices())
    return Pair(pipeline, FakePool(candidates({"waiting_requests": [0.0]})), **more)


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize(
    ("path", "body", "kind", "answer"),
    [
        ("/v1/messages", MESSAGES, "text/event-stream", ANTHROPIC_SSE),
        ("/generate", b'{"input_ids":[1,2]}', "text/event-stream", SGLANG_SSE),
        ("/vllm.grpc.engine.VllmEngine/Generate", frame(field(2, packed(2, [1, 2]))), "application/grpc", VLLM_GRPC_STREAM),
    ],
    ids=["anthropic", "sglang", "vllm grpc"],
)
def test_a_streamed_answer_in_pieces_of_any_size_passes_unchanged_and_its_usage_is_read(
    path: str, body: bytes, kind: str, answer: bytes, size: int
) -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers(path)
    assert bodies(envoy.body(body)[1:]) == (body, [True])
    envoy.response_headers(kind=kind)
    passed = b""
    for at in range(0, len(answer), size):
        passed += bodies(envoy.response_body(answer[at : at + size], last=at + size >= len(answer)), "response_body")[0]
    assert passed == answer
    assert remembers.usages == [Usage(11, 7, 4)]
    assert p.counter("cached_prompt_tokens_total") == 4
    assert p.inflight[0] == 0 and not p.faults


@pytest.mark.parametrize("body", [b"anything at all", gzip.compress(b"{}", mtime=0), b"\0"])
def test_an_answer_that_no_parser_reads_is_left_to_the_gateway(body: bytes) -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers(COUNT)
    answers = envoy.body(body)
    assert set_headers(answers[0])["x-gateway-destination-endpoint"]
    assert bodies(answers[1:]) == (body, [True])
    assert envoy.stream.ended == (0, "")
    assert p.inflight[0] == 0
    assert remembers.usages == [None] and not p.faults
    envoy.handler.closed()
    assert remembers.usages == [None]


def test_an_answer_that_no_parser_reads_is_left_to_the_gateway_also_after_trailers() -> None:
    p = pair(Remembers())
    envoy = p.open()
    envoy.headers(COUNT)
    envoy.body(b"x", last=False)
    answers = envoy.trailers()
    assert [a.WhichOneof("response") for a in answers] == ["request_headers", "request_body", "request_trailers"]
    assert envoy.stream.ended == (0, "")


def test_a_compressed_body_is_read_and_passes_unchanged() -> None:
    p = pair(Remembers())
    envoy = p.open()
    envoy.headers(**{"content-encoding": "gzip"})
    body = gzip.compress(COMPLETION)
    answers = envoy.body(body)
    assert set_headers(answers[0])["content-length"] == str(len(body))
    assert bodies(answers[1:]) == (body, [True])
    assert not p.faults


@pytest.mark.parametrize(
    ("coding", "body", "status", "text"),
    [
        ("gzip", gzip.compress(b"{" + b" " * 3000, mtime=0), 413, "request body exceeds 2000 bytes"),
        ("gzip", COMPLETION, 400, "invalid request body: not gzip"),
        ("br", COMPLETION, 400, "content-encoding 'br' is not supported"),
        ("gzip", gzip.compress(b"{}", mtime=0), 400, "must have prompt field"),
    ],
)
def test_a_compressed_body_that_cannot_be_read_is_refused(coding: str, body: bytes, status: int, text: str) -> None:
    envoy = pair(Remembers(), body_bytes_max=2000).open()
    envoy.headers(**{"content-encoding": coding})
    code, error, _ = refusal(envoy.body(body))
    assert code == status and text in error["message"]


def test_a_parser_that_reads_nothing_accepts_any_coding() -> None:
    envoy = pair(Remembers()).open()
    envoy.headers("/anything", **{"content-encoding": "zstd"})
    assert bodies(envoy.body(b"\x28\xb5")[1:]) == (b"\x28\xb5", [True])
