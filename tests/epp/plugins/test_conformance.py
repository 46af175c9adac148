"""The plugins for conformance tests: the test names the endpoint, and learns which endpoint served."""

from typing import Any

import numpy as np
import pytest

from epp.candidates import Candidates, Endpoint, EndpointList, Snapshot
from epp.decision.decision import SERVED, Decision, Response
from epp.plugin import NoParams
from epp.plugins.conformance import RESULT, SELECTION, HeaderSelection, ServedVerifier
from tests.cases import cases
from tests.fakes import request

ADDRESSES = [("10.0.0.1", 8000), ("10.0.0.2", 8000), ("10.0.0.1", 8001), ("fd00::7", 8000)]


def pool() -> Candidates:
    endpoints = [
        Endpoint(name=f"p{i}", namespace="d", host=host, port=port, labels=None, slot=i, owner=i + 1)
        for i, (host, port) in enumerate(ADDRESSES)
    ]
    count = len(endpoints)
    yes, none = np.ones(count, dtype=bool), np.zeros(count)
    made = Snapshot(EndpointList(endpoints), {}, fresh=yes, known=yes, down=~yes, inflight_at_scrape=none, names=None)
    return Candidates(made, none, none)


def selected(header: str | None) -> list[str]:
    """The addresses of the endpoints that are kept, best first."""
    plugin, candidates, profile = HeaderSelection("s", NoParams()), pool(), Any
    tested = request(headers={} if header is None else {SELECTION: header})
    left = candidates.keep(plugin.keep(tested, candidates, profile))  # type: ignore[arg-type]
    scores = plugin.score(tested, left, profile)  # type: ignore[arg-type]
    assert scores is not None
    return [left.endpoint(int(row)).address for row in np.argsort(-scores)]


@cases(
    ("header", "expected"),
    [
        ("10.0.0.2", ["10.0.0.2:8000"]),
        ("10.0.0.2:8000", ["10.0.0.2:8000"]),
        ("10.0.0.2:9", []),
        ("10.0.0.1:8000", ["10.0.0.1:8000"]),
        ("10.0.0.1", ["10.0.0.1:8001"]),
        ("10.0.0.2, 10.0.0.1:8000 ,", ["10.0.0.2:8000", "10.0.0.1:8000"]),
        ("10.0.0.1:8000,10.0.0.1:8001", ["10.0.0.1:8000"]),
        ("10.0.0.2,10.0.0.2", ["10.0.0.2:8000"]),
        ("fd00::7", ["[fd00::7]:8000"]),
        ("[fd00::7]", ["[fd00::7]:8000"]),
        ("[fd00::7]:8000", ["[fd00::7]:8000"]),
        ("10.9.9.9", []),
        ("", []),
        ("  ", []),
        (None, []),
        ("10.0.0.2:" + "9" * 5000, []),
    ],
)
def test_the_endpoints_that_the_header_lists_are_kept_in_its_order(header: str | None, expected: list[str]) -> None:
    assert selected(header) == expected


@pytest.mark.parametrize(
    ("gateway", "reported"),
    [
        ({SERVED: "10.0.0.1:8000"}, "10.0.0.1:8000"),
        ({}, "fail: missing destination endpoint served metadata"),
        ({SERVED: 5.0}, "fail: missing destination endpoint served metadata"),
        (None, "fail: missing envoy lb metadata"),
    ],
)
def test_the_client_learns_which_endpoint_served_or_which_metadata_is_missing(gateway: Any, reported: str) -> None:
    response = Response(200)
    response.gateway = gateway
    candidates = pool()
    ServedVerifier("v", NoParams()).response_received(request(), Decision(candidates.endpoints[:1], {}, ""), response)
    assert response.set_headers == {RESULT: reported}
