"""What the answers of a stream leave in the prefix index."""

import json
from typing import Any

import pytest

from epp.plugin import Plugin, ResponseComplete, ResponseStreaming
from epp.plugins.producers.approx_prefix import ApproximatePrefix
from epp.points.base import NoParams
from tests.cases import cases
from tests.fakes import FakeServices
from tests.pair import Envoy, Pair
from tests.workers.worker.extproc.streams import pair

BODY = json.dumps({"model": "m", "prompt": "so much to say " * 300, "stream": True}).encode()


def started() -> tuple[Pair, dict[int, set[int]]]:
    """A pair with a prefix producer, and what its index holds: hash -> owners."""
    producer = ApproximatePrefix("p", ApproximatePrefix.Params())
    p = pair(producer)
    services = FakeServices()
    producer.start(services)
    held: Any = services.held
    return p, held


def sent(p: Pair) -> Envoy:
    envoy = p.open()
    envoy.headers(**{"x-request-id": "r"})
    envoy.body(BODY)
    return envoy


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_answer_without_a_status_is_a_success(pieces: int) -> None:
    """Envoy's `forward_rules` can leave `:status` out."""
    p, held = started()
    envoy = sent(p)
    envoy.response_headers("", "text/event-stream")
    for number in range(pieces):
        envoy.response_body(b"data: {}\n\n", last=number == pieces - 1)
    assert any(held.values()) and p.faults == []


@cases("status", ["400", "404", "413", "429", "500"])
@cases("pieces", [1, 3])
def test_an_error_takes_back_what_its_request_taught_however_its_body_comes(status: str, pieces: int) -> None:
    p, held = started()
    envoy = sent(p)
    assert any(held.values())
    envoy.response_headers(status)
    for number in range(pieces):
        envoy.response_body(b'{"error": "too long"}', last=number == pieces - 1)
    assert not any(held.values()) and p.faults == []


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_an_empty_200_teaches_nothing(content_type: str) -> None:
    p, held = started()
    envoy = sent(p)
    envoy.response_headers("200", content_type)
    envoy.response_body(b"", last=True)
    assert not any(held.values()) and p.faults == []


class Watches(ResponseStreaming, ResponseComplete):
    def __init__(self) -> None:
        super().__init__("watches", NoParams())
        self.chunks, self.statuses = 0, list[int]()

    def response_streaming(self, *_: object) -> None:
        self.chunks += 1

    def response_complete(self, request: object, decision: object, response: Any) -> None:
        self.statuses.append(response.status)


@pytest.mark.parametrize(("status", "seen", "chunks"), [("", 200, 2), ("200", 200, 2), ("404", 404, 0)])
def test_the_chunks_of_an_error_are_no_tokens_and_a_missing_status_is_200(status: str, seen: int, chunks: int) -> None:
    watches = Watches()
    plugins: list[Plugin] = [watches]
    envoy = sent(pair(*plugins))
    envoy.response_headers(status)
    for last in (False, False, True):
        envoy.response_body(b"x", last=last)
    assert (watches.chunks, watches.statuses) == (chunks, [seen])
