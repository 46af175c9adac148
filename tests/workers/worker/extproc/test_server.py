"""One ext_proc stream, from Envoy's first message to its end."""

import codecs
import itertools
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Usage
from epp.plugin import NoParams
from tests.examples import examples
from tests.pair import bodies, set_headers
from tests.workers.worker.extproc.streams import BODY, USAGE, Broken, Remembers, pair, refusal
from workers.worker.extproc.request_phase import SMALL_PIECE, SMALL_PIECES_MAX


def test_a_request_goes_to_the_shortest_queue_and_its_body_passes_byte_for_byte() -> None:
    p = pair()
    envoy = p.open()
    assert envoy.headers() == []
    answers = envoy.body(BODY)
    assert set_headers(answers[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
    assert set_headers(answers[0])["content-length"] == str(len(BODY))
    assert answers[0].dynamic_metadata["envoy.lb"]["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
    assert bodies(answers[1:]) == (BODY, [True])
    assert p.inflight[:3] == [0, 1, 0]
    assert [r.WhichOneof("response") for r in envoy.response_headers()] == ["response_headers"]
    assert bodies(envoy.response_body(USAGE), "response_body") == (USAGE, [True])
    assert p.inflight[:3] == [0, 0, 0]
    envoy.handler.half_closed()
    assert envoy.stream.ended == (0, "")


@given(st.lists(st.integers(0, 400_000), max_size=6), st.integers(0, 200_000))
@examples(40)
def test_a_body_passes_byte_for_byte_for_any_division_into_pieces(cuts: list[int], size: int) -> None:
    body = b'{"model":"m","prompt":"' + b"p" * (size + 1) + b'"}'
    envoy = pair().open()
    envoy.headers()
    borders = [0, *sorted(c % len(body) for c in cuts), len(body)]
    answers = []
    for a, b in itertools.pairwise(borders):
        answers = envoy.body(body[a:b], last=b == len(body) and b is borders[-1])
    assert bodies(answers[1:])[0] == body
    assert bodies(answers[1:])[1][-1] is True and not any(bodies(answers[1:])[1][:-1])


@pytest.mark.parametrize("large", [None, 100, 2000, 2999])
def test_very_many_small_pieces_are_joined_and_pass_byte_for_byte(large: int | None) -> None:
    pieces = [bytes([byte]) for byte in b'{"model":"m","prompt":"' + b"p" * 3000 + b'"}']
    if large is not None:
        pieces[large] = b"P" * SMALL_PIECE
    envoy = pair().open()
    envoy.headers()
    for piece in pieces[:-1]:
        assert envoy.body(piece, last=False) == []
    answers = envoy.body(pieces[-1])[1:]
    assert bodies(answers)[0] == b"".join(pieces)
    assert bodies(answers)[1] == [False] * (len(answers) - 1) + [True]
    assert len(answers) < 2 * SMALL_PIECES_MAX


def test_request_trailers_end_a_body() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY, last=False)
    answers = envoy.trailers()
    assert [r.WhichOneof("response") for r in answers] == ["request_headers", "request_body", "request_trailers"]
    assert bodies(answers)[1] == [False]


def test_a_repeated_last_body_piece_is_harmless() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    assert envoy.body(BODY) == []
    assert p.inflight[:3] == [0, 1, 0]
    envoy.response_headers()
    assert bodies(envoy.response_body(USAGE), "response_body")[0] == USAGE


def test_usage_of_the_model_server_reaches_plugins_and_counters() -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(USAGE[:30], last=False)
    envoy.response_body(USAGE[30:])
    assert remembers.usages == [Usage(9, 4, 5)]
    assert [p.counter(n) for n in ("prompt_tokens_total", "cached_prompt_tokens_total", "completion_tokens_total")] == [9, 5, 4]


@pytest.mark.parametrize("status", ["5" * 6_000, "20", "2x0", "٢٠٠"])
def test_a_status_that_is_not_three_digits_is_0(status: str) -> None:
    remembers = Remembers()
    envoy = pair(remembers).open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers(status)
    envoy.response_body(USAGE)
    assert remembers.statuses == [0]


@pytest.mark.parametrize("body", [rb'{"model":"m","prompt":"cut \ud83d"}', codecs.BOM_UTF8 + b'{"model":"m","prompt":"x"}'])
def test_a_body_with_half_a_surrogate_pair_or_a_byte_order_mark_is_routed_and_passes_unchanged(body: bytes) -> None:
    envoy = pair().open()
    envoy.headers()
    assert bodies(envoy.body(body)[1:]) == (body, [True])


def test_response_trailers_end_the_response() -> None:
    remembers = Remembers()
    envoy = pair(remembers).open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.response_body(USAGE, last=False)
    assert [r.WhichOneof("response") for r in envoy.response_trailers()] == ["response_trailers"]
    envoy.handler.half_closed()
    assert len(remembers.usages) == 1


def test_a_routed_request_is_complete() -> None:
    envoy = pair().open()
    envoy.headers()
    envoy.body(BODY)
    assert envoy.handler.awaited() == -1


def test_a_request_without_a_body_is_routed_at_once_within_its_subset() -> None:
    p = pair()
    envoy = p.open()
    (answer,) = envoy.headers("/v1/models", last=True, subset=["10.0.0.3"])
    assert set_headers(answer)["x-gateway-destination-endpoint"] == "10.0.0.3:8000"
    assert p.inflight[:3] == [0, 0, 1]
    envoy.response_headers(last=True)
    assert sum(p.inflight) == 0


def test_a_request_without_a_body_is_503_without_endpoints() -> None:
    code, _, headers = refusal(pair(waiting=()).open().headers("/v1/models", last=True))
    assert (code, headers["x-llm-d-request-dropped-reason"]) == (503, "rejected-no-endpoints")


def test_a_request_without_an_id_gets_one_and_an_existing_id_is_kept() -> None:
    envoy = pair().open()
    envoy.headers()
    assert len(set_headers(envoy.body(BODY)[0])["x-request-id"]) == 36
    envoy = pair().open()
    envoy.headers(**{"x-request-id": "mine"})
    assert "x-request-id" not in set_headers(envoy.body(BODY)[0])


def test_a_message_out_of_order_closes_the_stream_and_names_the_state() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.response_body(b"x")
    assert envoy.stream.ended is not None
    status, text = envoy.stream.ended
    assert status == 3 and "response_body in state await_body" in text
    assert p.counter("violations_total") == 1


def test_garbage_closes_the_stream() -> None:
    envoy = pair().open()
    envoy.handler.message(b"\xff\xff\xff")
    assert envoy.stream.ended is not None and envoy.stream.ended[0] == 3


def test_a_broken_plugin_is_500_for_this_request_only() -> None:
    p = pair(Broken("broken", NoParams()))
    envoy = p.open()
    envoy.headers()
    code, error, _ = refusal(envoy.body(BODY))
    assert (code, error["type"]) == (500, "Internal")
    assert isinstance(p.faults[0], ZeroDivisionError) and sum(p.inflight) == 0


def test_a_path_goes_to_the_parser_with_the_longest_matching_suffix_or_to_the_fallback() -> None:
    app = pair().app
    types = {path: app.pipelines.parser(path)[0].type_name for path in ("/v1/chat/completions/", "/p/v1/completions", "/whatever")}
    assert list(types.values()) == ["openai-parser", "openai-parser", "passthrough-parser"]


def test_very_long_paths_match_by_their_ends_and_are_not_cached() -> None:
    p = pair()
    tracemalloc.start()
    try:
        for number in range(100):
            path = f"/{number}{'/p' * 25_000}/v1/chat/completions/"
            assert p.app.pipelines.parser(path)[0].type_name == "openai-parser"
            envoy = p.open()
            envoy.headers(path)
            (answer, _) = envoy.body(b'{"model":"m","messages":[{"content":"hello"}]}')
            assert answer.WhichOneof("response") == "request_headers"
            del envoy
        p.recent._pools.clear()
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_passthrough_body_may_be_anything() -> None:
    envoy = pair().open()
    envoy.headers("/v2/infer")
    answers = envoy.body(b"\x00\xff not json")
    assert set_headers(answers[0])["x-gateway-destination-endpoint"] == "10.0.0.2:8000"
