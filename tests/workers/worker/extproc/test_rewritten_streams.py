"""Requests with a renamed model: what the model server gets, and what the client gets back."""

import base64
import codecs
import gzip
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Decision
from epp.metrics.request_series import REQUEST
from epp.plugin import NoParams, PreRequest
from epp.plugins.parsers.anthropic import Anthropic
from epp.plugins.parsers.sglang_http import SglangHttp
from epp.plugins.parsers.vllm_http import VllmHttp
from epp.protocol.inflate import STEP_BYTES
from epp.request import Request
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.examples import examples
from tests.pair import Envoy, Pair, bodies, set_headers
from tests.workers.worker.extproc.streams import Remembers, Waits, pair, refusal

HEADER, ALIAS = "x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite"
BODY = b'{ "n":12345678901234567890, "model":"asked",  "prompt":"the \\"model\\":\\"asked\\"" }'
RENAMED = BODY.replace(b'"model":"asked"', b'"model":"base-v2"')
EVENT = b'data: {"id":"1","model":"base-v2","choices":[{"text":"x"}]}\n\n'
RESTORED = EVENT.replace(b"base-v2", b"asked")


class Sees(PreRequest):
    def __init__(self) -> None:
        super().__init__("sees", NoParams())
        self.models: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []

    def before_send(self, request: Request, decision: Decision) -> None:
        self.models.append((request.model, request.target_model))
        self.bodies.append(bytes(request.prompt.body))


def asked(p: Pair, body: bytes = BODY, path: str = "/v1/completions", **headers: str) -> tuple[Envoy, list[Any]]:
    envoy = p.open()
    envoy.headers(path, **headers)
    return envoy, envoy.body(body)


def removed(answer: pb.ProcessingResponse, which: str = "request_headers") -> list[str]:
    return list(getattr(answer, which).response.header_mutation.remove_headers)


def restored(envoy: Envoy, pieces: list[bytes], kind: str = "text/event-stream") -> tuple[bytes, list[bool]]:
    envoy.response_headers(kind=kind)
    answers = [a for n, piece in enumerate(pieces, 1) for a in envoy.response_body(piece, last=n == len(pieces))]
    return bodies(answers, "response_body")


def test_a_renamed_body_in_pieces_is_not_held_longer_than_others() -> None:
    envoy = pair().open()
    envoy.headers("/v1/completions", **{HEADER: "base-v2"})
    envoy.body(BODY[:20], last=False)
    assert envoy.stream.held > 0
    assert bodies(envoy.body(BODY[20:])[1:])[0] == RENAMED
    assert envoy.stream.held == 0


def test_a_renamed_body_is_sent_without_its_byte_order_mark() -> None:
    _, answers = asked(pair(), codecs.BOM_UTF8 + BODY, **{HEADER: "base-v2"})
    assert bodies(answers[1:])[0].lstrip() == RENAMED


@pytest.mark.parametrize("name", [HEADER, ALIAS])
def test_the_header_names_the_model_that_the_server_gets(name: str) -> None:
    sees = Sees()
    p = pair(sees)
    _, answers = asked(p, **{name: "base-v2"})
    assert bodies(answers[1:]) == (RENAMED, [True])
    assert set_headers(answers[0])["content-length"] == str(len(RENAMED))
    assert sees.models == [("asked", "base-v2")]
    assert sees.bodies == [RENAMED], "plugins see the body that the server gets"


def test_the_current_header_takes_precedence_over_the_older_one() -> None:
    _, answers = asked(pair(), **{HEADER: "base-v2", ALIAS: "other"})
    assert bodies(answers[1:])[0] == RENAMED


def test_an_empty_name_is_400() -> None:
    code, error, _ = refusal(asked(pair(), **{HEADER: ""})[1])
    assert (code, error["message"]) == (400, "inference error: BadRequest - model not found in request body")


@pytest.mark.parametrize("name", ["x" * 257, "a\x00b"])
def test_an_invalid_name_is_400_and_the_error_names_the_header(name: str) -> None:
    code, error, _ = refusal(asked(pair(), **{HEADER: name})[1])
    assert code == 400 and HEADER in error["message"]


def test_a_body_without_a_model_gets_the_one_of_the_header() -> None:
    _, answers = asked(pair(), b'{"prompt":"x"}', **{HEADER: "base-v2"})
    assert bodies(answers[1:])[0] == b'{"model":"base-v2","prompt":"x"}'


def test_the_same_name_leaves_every_byte_and_costs_no_response_phase() -> None:
    envoy, answers = asked(pair(), **{HEADER: "asked"})
    assert bodies(answers[1:])[0] == BODY
    assert "accept-encoding" not in removed(answers[0])
    assert restored(envoy, [EVENT])[0] == EVENT


def test_a_rule_for_the_incoming_model_wins_over_the_header() -> None:
    p = pair()
    p.app.intake.rewrites = lambda: {"asked": "base-v2"}.get
    assert bodies(asked(p, **{HEADER: "other"})[1][1:])[0] == RENAMED
    assert bodies(asked(p)[1][1:])[0] == RENAMED
    body = BODY.replace(b'"model":"asked"', b'"model":"unknown"')
    assert bodies(asked(p, body)[1][1:])[0] == body
    assert b'"model":"other"' in bodies(asked(p, body, **{HEADER: "other"})[1][1:])[0]


def test_a_header_that_is_not_trusted_changes_nothing() -> None:
    p = pair()
    p.app.guards.hidden_headers = frozenset((HEADER, ALIAS))
    assert bodies(asked(p, **{HEADER: "base-v2", ALIAS: "base-v2"})[1][1:])[0] == BODY


@given(st.lists(st.integers(0, 3 * len(EVENT)), max_size=6))
@examples(80)
def test_a_stream_gets_the_clients_model_name_back_for_any_division_into_chunks(cuts: list[int]) -> None:
    envoy, _ = asked(pair(), **{HEADER: "base-v2"})
    whole = EVENT * 3
    borders = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    data, ends = restored(envoy, [whole[a:b] for a, b in itertools.pairwise(borders)])
    assert data == RESTORED * 3
    assert ends[-1] is True and not any(ends[:-1])


def test_an_unstreamed_answer_gets_the_clients_model_name_back_and_has_no_length() -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy, _ = asked(p, **{HEADER: "base-v2"})
    answer = b'{"model": "base-v2","usage":{"prompt_tokens":9,"completion_tokens":4}}'
    (head,) = envoy.response_headers()
    assert removed(head, "response_headers") == ["content-length"]
    assert bodies(envoy.response_body(answer), "response_body") == (answer.replace(b"base-v2", b"asked"), [True])
    assert remembers.usages[0] is not None and remembers.usages[0].prompt == 9


def test_bytes_that_were_held_back_come_before_the_trailers() -> None:
    envoy, _ = asked(pair(), **{HEADER: "base-v2"})
    envoy.response_headers()
    answers = envoy.response_body(b'data: "model":"base', last=False)
    answers += envoy.response_trailers()
    assert bodies(answers, "response_body") == (b'data: "model":"base', [False, False])
    assert answers[-1].WhichOneof("response") == "response_trailers"


def test_a_long_answer_comes_in_pieces() -> None:
    envoy, _ = asked(pair(), **{HEADER: "base-v2"})
    data, ends = restored(envoy, [b'{"model":"base-v2","text":"' + b"x" * 150_000 + b'"}'], "application/json")
    assert json.loads(data)["model"] == "asked" and len(ends) == 3


def test_the_request_asks_for_a_plain_answer_and_an_encoded_one_passes_unchanged() -> None:
    envoy, answers = asked(pair(), **{HEADER: "base-v2"})
    assert {"accept-encoding", "content-encoding"} <= set(removed(answers[0]))
    message = pb.ProcessingRequest()
    for name, value in {":status": "200", "content-encoding": "gzip"}.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    (head,) = envoy.say(message)
    assert removed(head, "response_headers") == []
    packed = gzip.compress(EVENT)
    assert bodies(envoy.response_body(packed), "response_body")[0] == packed


def test_a_renamed_gzip_body_is_passed_on_uncompressed() -> None:
    _, answers = asked(pair(), gzip.compress(BODY), **{HEADER: "base-v2", "content-encoding": "gzip"})
    assert bodies(answers[1:])[0] == RENAMED
    assert "content-encoding" in removed(answers[0])


def test_a_body_that_ends_with_trailers_is_rewritten_too() -> None:
    envoy = pair().open()
    envoy.headers(**{HEADER: "base-v2"})
    envoy.body(BODY[:20], last=False)
    envoy.body(BODY[20:], last=False)
    answers = envoy.trailers()
    assert bodies(answers) == (RENAMED, [False])
    assert answers[-1].WhichOneof("response") == "request_trailers"


def test_a_long_body_is_rewritten_across_its_pieces() -> None:
    envoy = pair().open()
    envoy.headers(**{HEADER: "base-v2"})
    body = b'{"prompt":"' + b"x" * 200_000 + b'","model":"asked"}'
    envoy.body(body[:199_999], last=False)
    answers = envoy.body(body[199_999:])
    data, ends = bodies(answers[1:])
    assert data == body.replace(b"asked", b"base-v2") and ends == [False, False, False, True]


def test_metrics_have_both_names() -> None:
    p = pair()
    envoy, _ = asked(p, **{HEADER: "base-v2"})
    envoy.response_headers()
    assert any(labels[:2] == ("asked", "base-v2") for labels in p.series.rows(REQUEST))


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/messages", b'{"messages":[{"role":"user","content":"x"}],"model":"asked"}', True),
        ("/v1/messages/count_tokens", b'{"model":"asked"}', False),
        ("/inference/v1/generate", b'{"token_ids":[1,2],"model":"asked"}', True),
        ("/generate", b'{"input_ids":[1,2],"model":"asked"}', False),
        ("/v1/unknown", b'{"model":"asked"}', False),
    ],
)
def test_only_bodies_that_name_their_model_are_rewritten(path: str, body: bytes, expected: bool) -> None:
    p = pair(parsers=(Anthropic("a", NoParams()), VllmHttp("v", NoParams()), SglangHttp("s", NoParams())))
    _, answers = asked(p, body, path, **{HEADER: "base-v2"})
    assert bodies(answers[1:])[0] == (body.replace(b"asked", b"base-v2") if expected else body)


PACKED_TEXT = base64.b16encode(random.Random(1).randbytes(1 << 20))
LONG = b'{"model":"asked","prompt":"%b"}' % PACKED_TEXT


def test_a_long_compressed_body_is_decompressed_in_several_turns_and_passed_on_unchanged() -> None:
    sees = Sees()
    p = pair(sees, body_bytes_max=4 << 20)
    packed = gzip.compress(LONG, 1)
    envoy, answers = asked(p, packed, **{"content-encoding": "gzip"})
    turns = 0
    while p.turns:
        assert answers == [] and sees.models == []
        p.turns.popleft()()
        answers, turns = envoy.answers(), turns + 1
    assert turns > len(LONG) // STEP_BYTES
    assert bodies(answers[1:])[0] == packed and sees.bodies == [LONG]


def test_a_compressed_body_with_an_error_is_refused() -> None:
    p = pair(body_bytes_max=4 << 20)
    envoy, answers = asked(p, gzip.compress(LONG, 1)[:-9], **{"content-encoding": "gzip"})
    while p.turns:
        p.turns.popleft()()
    code, error, _ = refusal(answers + envoy.answers())
    assert code == 400 and "gzip is cut off" in error["message"]
    assert envoy.stream.ended == (0, "") and not p.faults


@pytest.mark.parametrize("fits", [True, False])
def test_a_half_close_behind_a_compressed_body_does_not_cost_its_answer(fits: bool) -> None:
    p = pair(Sees(), body_bytes_max=(4 if fits else 1) << 20)
    envoy, answers = asked(p, gzip.compress(LONG, 1), **{"content-encoding": "gzip"})
    assert not fits or (answers == [] and envoy.stream.ended is None)
    if envoy.stream.ended is None:
        envoy.handler.half_closed()
    while p.turns:
        p.turns.popleft()()
    first = (answers + envoy.answers())[0]
    assert first.WhichOneof("response") == ("request_headers" if fits else "immediate_response")
    assert envoy.stream.ended == (0, "") and not any(p.inflight)


def test_a_body_counts_with_what_is_unpacked_of_it_until_all_of_it_is() -> None:
    p = pair(Sees(), body_bytes_max=4 << 20)
    packed = gzip.compress(LONG, 1)
    envoy, _ = asked(p, packed, **{"content-encoding": "gzip"})
    held = []
    while envoy.handler.unfinished() > 0 or not held:
        p.turns.popleft()()
        held.append(envoy.stream.held)
    *growing, last = held
    assert growing == sorted(growing) and growing[-1] >= len(packed) + len(LONG)
    assert last == 0


def test_a_body_is_refused_while_it_is_unpacked_if_too_many_bytes_are_held() -> None:
    p = pair(Sees(), body_bytes_max=4 << 20)
    envoy, answers = asked(p, gzip.compress(LONG, 1), **{"content-encoding": "gzip"})
    assert answers == []
    envoy.stream.held_max = 0
    while p.turns:
        p.turns.popleft()()
    code, error, headers = refusal(envoy.answers())
    assert (code, error["type"], headers["retry-after"]) == (429, "ResourceExhausted", "1")
    assert envoy.stream.ended == (0, "") and not any(p.inflight)


def test_a_body_that_is_given_up_while_it_is_unpacked_gets_one_answer() -> None:
    p = pair(Sees(), body_bytes_max=4 << 20)
    envoy, _ = asked(p, gzip.compress(LONG, 1), **{"content-encoding": "gzip"})
    envoy.handler.give_up_body()
    while p.turns:
        p.turns.popleft()()
    assert refusal(envoy.answers())[0] == 429


def waiting_with_a_packed_body(waits: Waits) -> tuple[Pair, Envoy, bytes]:
    """A request whose body is unpacked and whose decision waits."""
    p, packed = pair(waits, body_bytes_max=4 << 20), gzip.compress(LONG, 1)
    envoy, _ = asked(p, packed, **{"content-encoding": "gzip"})
    while p.turns:
        p.turns.popleft()()
    assert waits.future.callback is not None
    return p, envoy, packed


def test_what_was_unpacked_of_a_body_is_held_until_its_decision() -> None:
    waits = Waits()
    _, envoy, packed = waiting_with_a_packed_body(waits)
    assert envoy.stream.held >= len(packed) + len(LONG)
    waits.future.callback(None)
    assert envoy.answers() and envoy.stream.held == 0 and envoy.handler.unfinished() <= 0


def test_flow_control_counts_what_is_unpacked_of_a_body() -> None:
    _, envoy, _ = waiting_with_a_packed_body(Waits())
    assert envoy.handler.request.body_bytes == len(LONG)


def test_a_long_body_that_waits_for_its_decision_is_given_up_before_short_ones() -> None:
    waits = Waits()
    p, envoy, packed = waiting_with_a_packed_body(waits)
    assert envoy.handler.unfinished() >= len(packed) + len(LONG)
    envoy.handler.give_up_body()
    assert refusal(envoy.answers())[0] == 429
    waits.future.callback(None)
    assert envoy.answers() == [] and not any(p.inflight)


def test_a_stream_that_ends_while_its_body_is_decompressed_is_dropped() -> None:
    sees = Sees()
    p = pair(sees, body_bytes_max=4 << 20)
    envoy, _ = asked(p, gzip.compress(LONG, 1), **{"content-encoding": "gzip"})
    envoy.handler.closed()
    while p.turns:
        p.turns.popleft()()
    assert envoy.answers() == [] and sees.models == [] and not any(p.inflight)
