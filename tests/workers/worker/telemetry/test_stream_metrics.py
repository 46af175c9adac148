"""Streams are counted by their endings."""

from typing import Any

import pytest

from tests.pair import FakeStream, areas
from workers.worker.telemetry.stream_metrics import StreamMetrics


class Recorder:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.heard: list[Any] = []

    def message(self, message: bytes) -> None:
        self.heard.append(message)

    def half_closed(self) -> None:
        self.heard.append("half closed")

    def closed(self) -> None:
        self.heard.append("closed")


class Counted:
    def __init__(self) -> None:
        self.time = 5.0
        self.areas = areas()
        self.area = self.areas.area(1)
        made = StreamMetrics(self.area, lambda: self.time)
        self.open = made.around(lambda path, metadata, stream: Recorder(stream) if path == "/known" else None)

    def state(self) -> tuple[int, dict[str, int], int]:
        counters = self.areas.counters()
        codes = {name[16:]: n for name, n in counters.items() if name.startswith("extproc_streams_") and n}
        buckets, _ = self.areas.histograms()["extproc_stream_duration_seconds"]
        return self.areas.scalars("extproc_streams_inflight")[1], codes, sum(buckets)


@pytest.mark.parametrize(("status", "code"), [(0, "OK"), (3, "InvalidArgument"), (13, "Internal"), (99, "Unknown")])
def test_a_stream_that_its_handler_ends_is_counted_by_its_code(status: int, code: str) -> None:
    counted, stream = Counted(), FakeStream()
    handler: Any = counted.open("/known", (), stream)
    handler.message(b"x")
    handler.half_closed()
    assert counted.state() == (1, {}, 0)
    handler.handler.stream.end(status, "why")
    assert counted.state() == (0, {code: 1}, 1)
    assert stream.ended == (status, "why") and handler.handler.heard == [b"x", "half closed"]


def test_a_lost_stream_counts_as_canceled() -> None:
    counted = Counted()
    handler: Any = counted.open("/known", (), FakeStream())
    handler.closed()
    assert counted.state() == (0, {"Canceled": 1}, 1) and handler.handler.heard == ["closed"]


def test_a_stream_of_an_unknown_method_is_not_counted() -> None:
    counted = Counted()
    assert counted.open("/unknown", (), FakeStream()) is None
    assert counted.state() == (0, {}, 0)


def test_a_counted_stream_says_what_its_peer_has_called() -> None:
    handler: Any = Counted().open("/known", (), FakeStream("pool.svc:9002", 9102))
    assert (handler.handler.stream.authority, handler.handler.stream.port()) == ("pool.svc:9002", 9102)
