"""What a worker counts for the ejection of endpoints, and how it takes part in trials."""

from typing import Any

import pytest

from epp.protocol.proto import ext_proc_pb2 as pb
from shm.table import EJECTED, trial
from tests.workers.extproc.streams import BODY, pair
from tests.workers.extproc.test_pool import World
from workers.endpoints.ejection import CONNECTION_POINTS


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
    return p.lane.served.tolist()[:3], p.lane.failed.tolist()[:3]


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
def test_a_status_counts_for_the_endpoint_as_a_success_or_by_its_points(
    status: str, dated: bool, served: int, points: int
) -> None:
    assert answered(status, dated=dated) == ([0, served, 0], [0, points, 0])


def test_an_endpoint_that_the_gateway_passed_over_failed_and_the_other_one_served() -> None:
    assert answered("200", dated=True, served="10.0.0.1:8000") == ([1, 0, 0], [0, CONNECTION_POINTS, 0])
    assert answered("500", dated=True, served="10.0.0.1:8000") == ([0, 0, 0], [1, CONNECTION_POINTS, 0])


def names(w: Any) -> list[str]:
    w.time += 0.01
    return [e.name for e in w.pool.candidates(None).without_down().endpoints]


def test_an_ejected_endpoint_gets_no_request_and_one_on_trial_gets_one_from_its_worker() -> None:
    w = World(lane=1)
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
