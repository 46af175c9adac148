"""Labelled request metrics that streams produce."""

from typing import Any

import pytest

from epp.metrics import OTHER, Group
from epp.metrics.request_series import (
    ATTEMPTS,
    BETWEEN_CHUNKS,
    CACHED_TOKENS,
    DURATION,
    ERROR,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    PER_OUTPUT_TOKEN,
    REQUEST,
    REQUEST_BYTES,
    REQUEST_FIGURES,
    RESPONSE_BYTES,
    STREAMING_PER_TOKEN,
    TTFT_STREAMING,
    TTFT_WHOLE,
)
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY, pair

USAGE = b'{"usage":{"prompt_tokens":10,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":4}}}'
LABELS = ("m", "m", "default-flow", "0")


def rows(p: Pair) -> Any:
    return p.series.rows(REQUEST)


def observed(p: Pair, index: int, labels: tuple[str, ...] = LABELS) -> tuple[int, float]:
    """The number of values of a histogram, and their sum."""
    counts, total = p.series.rows(REQUEST_FIGURES)[labels].histograms[index]
    return sum(counts), total


def known() -> Pair:
    """A pair that knows the names of its requests, because one was served before."""
    p = pair()
    p.series.caps.served("m", "m", "t")
    return p


def test_a_request_is_counted_when_it_has_an_endpoint_and_runs_until_its_stream_ends() -> None:
    p = known()
    envoy = p.open()
    envoy.headers()
    assert rows(p) == {}
    envoy.body(BODY)
    values = rows(p)[LABELS]
    assert (values.counters, values.gauges) == ((1,), (1,))
    envoy.response_headers()
    envoy.response_body(USAGE)
    assert rows(p)[LABELS].gauges == (0,)
    assert observed(p, REQUEST_BYTES) == (1, len(BODY))
    envoy.handler.half_closed()
    envoy.handler.closed()
    assert rows(p)[LABELS].gauges == (0,)


NEW = b'{"model":"new", "prompt":"hello"}'
ALL_OTHER = (OTHER, OTHER, "default-flow", "0")


def totals(p: Pair, group: Group = REQUEST) -> dict[tuple[str, ...], int]:
    return {labels: values.counters[0] for labels, values in p.series.rows(group).items() if values.counters[0]}


def running(p: Pair) -> dict[tuple[str, ...], int]:
    return {labels: values.gauges[0] for labels, values in rows(p).items() if values.gauges[0]}


def test_a_new_model_runs_as_other_until_a_server_serves_it_and_counts_once_under_its_name() -> None:
    p = known()
    envoy = p.open()
    envoy.headers()
    envoy.body(NEW)
    assert (totals(p), totals(p, ATTEMPTS), running(p)) == ({}, {}, {ALL_OTHER: 1})
    envoy.response_headers()
    named = ("new", "new", "default-flow", "0")
    assert (totals(p), running(p)) == ({named: 1}, {named: 1})
    assert totals(p, ATTEMPTS) == {("success", "new", "pod-1", "default", "8000"): 1}
    envoy.response_body(USAGE)
    assert (running(p), observed(p, DURATION, named)[0]) == ({}, 1)
    again = p.open()
    again.headers()
    again.body(NEW)
    assert (totals(p), running(p)) == ({named: 2}, {named: 1})


@pytest.mark.parametrize("ending", ["404", "500", "no answer", "refused"])
def test_a_new_model_that_no_server_serves_counts_as_other(ending: str) -> None:
    p = known()
    envoy = p.open()
    envoy.headers(subset=["10.9.9.9"] if ending == "refused" else None)
    envoy.body(NEW, subset=["10.9.9.9"] if ending == "refused" else None)
    if ending.isdigit():
        envoy.response_headers(ending)
        envoy.response_body(b"{}")
    envoy.handler.closed()
    assert running(p) == {}
    assert totals(p) == ({} if ending == "refused" else {ALL_OTHER: 1})
    assert {labels[1] for labels in totals(p, ATTEMPTS)} == {OTHER}
    assert {labels[:2] for labels in totals(p, ERROR)} <= {(OTHER, OTHER)}


def test_a_fairness_id_of_requests_that_are_not_served_counts_as_other() -> None:
    p = known()
    for number, status in enumerate(("400", "429", "200")):
        envoy = p.open()
        envoy.headers(**{"x-llm-d-inference-fairness-id": f"tenant-{number}"})
        envoy.body(BODY)
        envoy.response_headers(status)
        envoy.response_body(b"{}")
    assert totals(p) == {("m", "m", OTHER, "0"): 2, ("m", "m", "tenant-2", "0"): 1}


def test_a_request_whose_answer_the_picker_does_not_see_counts_under_its_name() -> None:
    p = known()
    p.app.request_phase_only = True
    envoy = p.open()
    envoy.headers()
    envoy.body(NEW)
    assert (totals(p), running(p)) == ({("new", "new", "default-flow", "0"): 1}, {})


def test_requests_under_way_keep_their_blocks_when_others_are_freed() -> None:
    p = known()
    metrics = p.series.metrics
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    (block,) = metrics.held()
    assert block == metrics.figures.block(LABELS)
    metrics.forget()
    assert metrics.held() == {block}
    envoy.response_headers()
    envoy.response_body(USAGE)
    assert metrics.held() == frozenset()
    assert observed(p, DURATION)[0] == 1


def test_a_complete_answer_gives_duration_time_to_first_piece_sizes_and_tokens() -> None:
    p = pair()
    envoy = p.open()
    p.time = 100.0
    envoy.headers()
    p.time = 101.0
    envoy.body(BODY)
    p.time = 102.0
    envoy.response_headers()
    envoy.response_body(b"", last=False)
    p.time = 103.0
    envoy.response_body(b"ab", last=False)
    p.time = 110.0
    envoy.response_body(USAGE)
    assert observed(p, DURATION) == (1, 10.0)
    assert observed(p, TTFT_WHOLE) == (1, 3.0), "an empty piece does not count as the first piece"
    assert observed(p, TTFT_STREAMING) == (0, 0.0)
    assert observed(p, RESPONSE_BYTES) == (1, 2 + len(USAGE))
    assert [observed(p, i) for i in (INPUT_TOKENS, OUTPUT_TOKENS, CACHED_TOKENS)] == [(1, 10), (1, 5), (1, 4)]
    assert observed(p, PER_OUTPUT_TOKEN) == (1, 2.0)
    assert [observed(p, i)[0] for i in (BETWEEN_CHUNKS, STREAMING_PER_TOKEN)] == [0, 0]


def test_a_streamed_answer_gives_the_time_between_chunks_and_per_token_after_the_first() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers(kind="text/event-stream")
    for second in (104.0, 105.0, 107.0):
        p.time = second
        envoy.response_body(b"data: {}\n\n", last=False)
    p.time = 112.0
    envoy.response_body(b"data: " + USAGE + b"\n\n")
    assert observed(p, TTFT_STREAMING) == (1, 4.0)
    assert observed(p, BETWEEN_CHUNKS) == (3, 8.0)
    assert observed(p, STREAMING_PER_TOKEN) == (1, 2.0), "(12 s - 4 s) / (5 tokens - 1)"


def test_an_answer_that_is_cut_off_has_no_duration() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers()
    envoy.handler.closed()
    assert observed(p, DURATION) == (0, 0.0)
    assert p.series.rows(ERROR) == {}


@pytest.mark.parametrize(
    ("headers", "flow"),
    [
        ({"x-llm-d-inference-fairness-id": "a"}, "a"),
        ({"x-gateway-inference-fairness-id": "b"}, "b"),
        ({"x-llm-d-inference-fairness-id": "a", "x-gateway-inference-fairness-id": "b"}, "a"),
        ({"x-llm-d-inference-fairness-id": "", "x-gateway-inference-fairness-id": "b"}, "default-flow"),
        ({"x-llm-d-inference-fairness-id": "x" * 65}, "default-flow"),
        ({"x-llm-d-inference-fairness-id": "a\x00"}, "default-flow"),
    ],
)
def test_the_fairness_id_is_that_of_the_header_or_the_default(headers: dict[str, str], flow: str) -> None:
    p = known()
    envoy = p.open()
    envoy.headers(**headers)
    envoy.body(BODY)
    envoy.response_headers()
    assert [labels for labels, values in rows(p).items() if values.counters[0]] == [("m", "m", flow, "0")]


def test_every_decision_is_counted_with_its_endpoint() -> None:
    p = known()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    found = {labels: values.counters for labels, values in p.series.rows(ATTEMPTS).items()}
    assert found == {("success", "m", "pod-1", "default", "8000"): (1,)}


def test_a_request_without_a_remaining_endpoint_is_a_failed_attempt_and_an_error() -> None:
    p = known()
    envoy = p.open()
    envoy.headers(subset=["10.9.9.9"])
    envoy.body(BODY, subset=["10.9.9.9"])
    assert list(p.series.rows(ATTEMPTS)) == [("failure", "m", "", "", "")]
    assert list(p.series.rows(ERROR)) == [("m", "m", "default-flow", "0", "ServiceUnavailable")]
    assert rows(p) == {}


@pytest.mark.parametrize(("status", "errors"), [("200", 0), ("302", 0), ("404", 1), ("500", 1)])
def test_an_error_of_the_model_server_is_counted_once(status: str, errors: int) -> None:
    p = known()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers(status)
    envoy.response_body(b"{}")
    envoy.handler.half_closed()
    found = p.series.rows(ERROR)
    assert sum(values.counters[0] for values in found.values()) == errors
    assert not errors or list(found) == [(*LABELS, "ModelServerError")]


def test_a_body_that_cannot_be_read_is_an_error_without_a_model() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(b"{")
    assert list(p.series.rows(ERROR)) == [("", "", "default-flow", "0", "BadRequest")]
