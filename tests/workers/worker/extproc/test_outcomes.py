"""What a worker counts for the ejection of endpoints, and how it takes part in trials."""

from typing import Any

import pytest

from epp.decision.decision import Decision
from epp.plugin import NoParams, ResponseStreaming
from epp.request import Request
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.answers import FAILED, SENT
from shm.table import EJECTED, trial
from tests.workers.worker.extproc.streams import BODY, Remembers, pair
from tests.workers.worker.extproc.test_pool import World
from workers.shared.ejection import CONNECTION_POINTS
from workers.shared.outliers import OUTCOMES


class Chunks(ResponseStreaming):
    seen = 0

    def response_streaming(self, request: Request, decision: Decision) -> None:
        self.seen += 1


def answered(status: str, *, dated: bool, served: str = "") -> tuple[list[int], list[int]]:
    """Requests served and points of failures per slot, after one request whose target is slot 1."""
    p = pair()
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    slot = p.inflight.index(1)
    assert slot == 1
    message = pb.ProcessingRequest()
    for name, value in {":status": status, **({"date": "now"} if dated else {})}.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode())
    if served:
        message.metadata_context.filter_metadata["envoy.lb"]["x-gateway-destination-endpoint-served"] = served
    envoy.say(message)
    return p.area.served.tolist()[:3], p.area.failed.tolist()[:3]


@pytest.mark.parametrize(
    ("status", "dated", "served", "points"),
    [
        ("200", True, 1, 0),
        ("200", False, 1, 0),
        ("404", True, 1, 0),
        ("429", True, 1, 0),
        ("501", True, 1, 0),
        ("500", True, 0, 1),
        ("503", True, 0, 1),
        ("503", False, 0, CONNECTION_POINTS),
        ("502", False, 0, CONNECTION_POINTS),
    ],
)
def test_a_status_counts_for_the_endpoint_as_a_success_or_by_its_points(status: str, dated: bool, served: int, points: int) -> None:
    assert answered(status, dated=dated) == ([0, served, 0], [0, points, 0])


def test_an_endpoint_that_the_gateway_passed_over_failed_and_the_other_one_served() -> None:
    assert answered("200", dated=True, served="10.0.0.1:8000") == ([1, 0, 0], [0, CONNECTION_POINTS, 0])
    assert answered("500", dated=True, served="10.0.0.1:8000") == ([0, 0, 0], [1, CONNECTION_POINTS, 0])


def names(w: Any) -> list[str]:
    w.time += 0.01
    return [e.name for e in w.pool.candidates(None).without_down().endpoints]


def test_an_ejected_endpoint_gets_no_request_and_one_on_trial_gets_one_from_its_worker() -> None:
    w = World(area=1)
    for index in range(3):
        w.scrape(index, index, 0)
    everyone = names(w)
    w.flag(1, EJECTED)
    others = names(w)
    assert len(everyone) == 3 and len(others) == 2
    w.flag(1, trial(2, 7))
    assert names(w) == others and w.pool.trials == {}, "the trial of another worker"
    w.flag(1, trial(1, 8))
    assert names(w) == everyone
    slot = w.handles[1].slot
    assert w.pool.trials == {slot: 8}
    w.pool.tried(slot)
    assert names(w) == others and w.pool.trials == {}
    w.flag(1, trial(1, 9))
    assert names(w) == everyone
    snapshot = w.pool.candidates(None).snapshot
    assert snapshot.ejected is not None and not snapshot.ejected.any()
    w.flag(1, 0)
    assert names(w) == everyone and w.pool.candidates(None).snapshot.ejected is None


def test_if_all_endpoints_are_ejected_they_all_stay() -> None:
    w = World(2)
    for index in range(2):
        w.scrape(index, index, 0)
        w.flag(index, EJECTED)
    assert len(names(w)) == 2


def counted(p: Any, kinds: int = 1) -> tuple[list[int], list[int], dict[str, int]]:
    """Requests and failed answers of the first kinds per slot, and failed answers of slot 1 by outcome."""
    counts = p.answers.counts()
    sent, failed = (counts.answers[0, which, :kinds].sum(axis=0)[:3].tolist() for which in (SENT, FAILED))
    return sent, failed, {name: n for name, n in zip(OUTCOMES, counts.outcomes[:, 1].tolist(), strict=True) if n}


@pytest.mark.parametrize(
    ("status", "outcome"), [("400", "400"), ("404", "404"), ("422", "other 4xx"), ("429", "429"), ("500", "5xx"), ("501", "5xx")]
)
def test_an_answer_with_an_error_status_is_compared_with_those_of_the_other_endpoints(status: str, outcome: str) -> None:
    p = pair()
    answered_by(p, status, b"sorry")
    assert counted(p) == ([0, 1, 0], [0, 1, 0], {"sent": 1, outcome: 1})


def answered_by(p: Any, status: str, body: bytes | None, *, path: str = "/v1/completions", last: bool = True) -> None:
    """One request and its answer. `body`: None: the headers end the answer."""
    envoy = p.open()
    envoy.headers(path)
    envoy.body(BODY)
    envoy.response_headers(status, last=body is None)
    if body is not None:
        envoy.response_body(body, last=last)


@pytest.mark.parametrize("body", [None, b""], ids=["headers alone", "an empty last piece"])
def test_an_answer_200_without_a_body_has_failed_where_tokens_were_due(body: bytes | None) -> None:
    remembers = Remembers()
    p = pair(remembers)
    answered_by(p, "200", body)
    assert counted(p) == ([0, 1, 0], [0, 1, 0], {"sent": 1, "empty answers": 1})
    assert remembers.failed == [True]
    assert p.area.served.tolist()[:3] == [0, 1, 0], "the server itself is alive"


def test_an_answer_with_a_body_another_status_without_one_or_another_api_has_not_failed() -> None:
    remembers = Remembers()
    p = pair(remembers)
    answered_by(p, "200", b"{}")
    answered_by(p, "204", None)
    answered_by(p, "304", None)
    answered_by(p, "200", None, path="/health/of/something")
    assert not any(p.answers.changes())
    assert remembers.failed == [False] * 4


def test_an_answer_that_the_client_breaks_off_before_its_first_piece_has_not_failed() -> None:
    remembers = Remembers()
    p = pair(remembers)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers("200", "text/event-stream")
    envoy.handler.closed()
    answered_by(p, "200", b"", last=False)
    assert not any(p.answers.changes())
    assert remembers.failed == [False]


def test_a_request_without_a_body_is_not_compared() -> None:
    p = pair()
    envoy = p.open()
    envoy.headers("/v1/models", last=True)
    envoy.response_headers("404", last=True)
    assert not any(p.answers.changes())


def test_requests_are_counted_when_they_are_sent_while_the_supervisor_watches() -> None:
    p = pair()
    answered_by(p, "200", b"{}")
    assert not any(p.answers.changes())
    p.answers.watch(True)
    answered_by(p, "200", b"{}")
    assert counted(p) == ([0, 0, 0], [0, 0, 0], {"sent": 1}), "no answer of this kind has failed"
    answered_by(p, "404", b"no")
    answered_by(p, "200", b"{}")
    assert counted(p) == ([0, 2, 0], [0, 1, 0], {"sent": 3, "404": 1})


def test_a_request_that_an_endpoint_fails_again_does_not_count_again_until_it_succeeds_somewhere() -> None:
    p = pair()
    p.answers.watch(True)
    for _ in range(3):
        answered_by(p, "404", b"no")
    assert counted(p)[1] == [0, 1, 0]
    answered_by(p, "200", b"{}")
    answered_by(p, "404", b"no")
    answered_by(p, "404", b"no")
    assert counted(p)[1] == [0, 3, 0]
    assert counted(p)[2]["404"] == 5, "its outcome counts each time"


def test_plugins_see_no_chunks_of_an_answer_with_an_error_status() -> None:
    chunks = Chunks("chunks", NoParams())
    p = pair(chunks)
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers("404")
    envoy.response_body(b"no such ", last=False)
    envoy.response_body(b"model")
    assert chunks.seen == 0
    envoy = p.open()
    envoy.headers()
    envoy.body(BODY)
    envoy.response_headers("200")
    envoy.response_body(b"{", last=False)
    envoy.response_body(b"}")
    assert chunks.seen == 1
