"""Both ends of one ext_proc stream without a network: what Envoy says in, what the picker answers out, both decoded."""

import random
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from epp.metrics import (
    ATTEMPTS,
    ERROR,
    REQUEST,
    STREAM_COUNTERS,
    STREAM_DURATION,
    STREAMS_INFLIGHT,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    WORKER_HISTOGRAMS,
    Group,
)
from epp.pipeline import Pipeline
from epp.protocol.codec import SUBSET_KEY, SUBSET_NAMESPACE
from epp.protocol.proto import ext_proc_pb2 as pb
from shm.lanes import Lane, Lanes, LaneSchema
from shm.segment import Region
from shm.series import SeriesReader, SeriesWriter
from workers.app import App
from workers.decisions import Recent
from workers.instance import series_schema_of
from workers.query_of_death import WORDS, Deciding
from workers.request_metrics import RequestMetrics
from workers.server import PATH, open_stream
from workers.transport.interface import Clock

Response = pb.ProcessingResponse


class FakeStream:
    """`workers.transport.interface.Stream` that keeps what it was given."""

    def __init__(self) -> None:
        self.sent = b""
        self.ended: tuple[int, str] | None = None
        self.held = 0
        self.held_max = 1 << 62

    def hold(self, count: int) -> bool:
        self.held += count
        return self.held <= self.held_max

    def release(self) -> None:
        self.held = 0

    def send(self, message: bytes) -> None:
        self.send_raw(b"\0" + len(message).to_bytes(4, "big") + message)

    def send_raw(self, framed: bytes) -> None:
        assert self.ended is None, "nothing can be sent after the end"
        self.sent += framed

    def end(self, status: int = 0, text: str = "") -> None:
        assert self.ended is None, "a stream ends once"
        self.ended = (status, text)


def lanes(slots: int = 16, workers: int = 1) -> Lanes:
    """Lanes as a worker has them, in plain memory; all workers serve."""
    schema = LaneSchema(
        slots,
        tuple(m.name for m in (*WORKER_GAUGES, STREAMS_INFLIGHT)),
        (*(m.name for m in WORKER_COUNTERS), *STREAM_COUNTERS),
        tuple((m.name, m.buckets) for m in (*WORKER_HISTOGRAMS, STREAM_DURATION)),
        lanes=workers + 1,
    )
    made = Lanes(schema, Region(memoryview(bytearray(schema.bytes))))
    for index in range(1, workers + 1):
        made.set_serving(index, True)
    return made


class Series:
    """The labelled metrics of one worker, in plain memory."""

    def __init__(self, clock: Clock) -> None:
        self.stores: list[Callable[[], None]] = []  # what the loop would call later
        self._schemas = {group.name: series_schema_of(group, lanes=1) for group in (REQUEST, ERROR, ATTEMPTS)}
        self._regions = {n: Region(memoryview(bytearray(s.bytes))) for n, s in self._schemas.items()}
        self.metrics = RequestMetrics(
            clock,
            lambda _, store: self.stores.append(store),
            *(self._writer(group) for group in (REQUEST, ERROR, ATTEMPTS)),
        )

    def _writer(self, group: Group) -> SeriesWriter:
        schema = self._schemas[group.name]
        return SeriesWriter(schema, schema.lane(self._regions[group.name], 0))

    def rows(self, group: Group) -> Any:
        """Label tuple -> values, as a scrape would find them a moment later."""
        for store in self.stores:
            store()
        return SeriesReader(self._schemas[group.name], self._regions[group.name], serving=lambda _: True).rows()


class Pair:
    """One App and any number of streams over it."""

    def __init__(self, pipeline: Pipeline, pool: Any, *, body_bytes_max: int = 1 << 20) -> None:
        self.lanes = lanes()
        self.lane: Lane = self.lanes.lane(1)
        self.clock = Clock(100.0)
        self.series = Series(self.clock)
        self.deciding = memoryview(bytearray(8)).cast("q")
        self.deadly = memoryview(bytearray(8 * WORDS)).cast("q")
        self.faults: list[BaseException] = []
        self.turns: deque[Callable[[], object]] = deque()  # what the loop would call in its next turns
        self.recent = Recent(pipeline, 0, lambda: self.clock.now)
        self.app = App(
            pipeline,
            pool,
            self.lane,
            self.series.metrics,
            body_bytes_max=body_bytes_max,
            deciding=Deciding(self.deciding, self.deadly),
            clock=self.clock,
            now=lambda: self.clock.now,
            soon=lambda call, *args: self.turns.append(partial(call, *args)),
            rng=random.Random(1),
            on_fault=self.faults.append,
            recent=self.recent,
        )

    @property
    def time(self) -> float:
        return self.clock.now

    @time.setter
    def time(self, now: float) -> None:
        self.clock.now = now

    def open(self) -> "Envoy":
        stream = FakeStream()
        handler = open_stream(self.app, PATH, (), stream)
        assert handler is not None
        return Envoy(handler, stream)

    def counter(self, name: str) -> int:
        return self.lane.counters[self.lane.schema.counter[name]]

    @property
    def inflight(self) -> list[int]:
        return self.lane.inflight.tolist()


class Envoy:
    """What Envoy says on one stream; every call returns the answers that it caused."""

    def __init__(self, handler: Any, stream: FakeStream) -> None:
        self.handler = handler
        self.stream = stream

    def say(self, request: pb.ProcessingRequest) -> list[Response]:
        self.handler.message(request.SerializeToString())
        return self.answers()

    def answers(self) -> list[Response]:
        """What was sent since the last time."""
        data, self.stream.sent = self.stream.sent, b""
        found, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            found.append(Response.FromString(data[at + 5 : at + 5 + size]))
            at += 5 + size
        return found

    def headers(
        self, path: str = "/v1/completions", *, last: bool = False, subset: list[str] | None = None, **more: str
    ) -> list[Response]:
        request = pb.ProcessingRequest()
        for name, value in {":method": "POST", ":path": path, **more}.items():
            request.request_headers.headers.headers.add(key=name, raw_value=value.encode())
        request.request_headers.end_of_stream = last
        _hint(request, subset)
        return self.say(request)

    def body(self, data: bytes, *, last: bool = True, subset: list[str] | None = None) -> list[Response]:
        request = pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=last))
        _hint(request, subset)
        return self.say(request)

    def trailers(self) -> list[Response]:
        return self.say(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))

    def response_headers(
        self, status: str = "200", kind: str = "application/json", *, last: bool = False
    ) -> list[Response]:
        request = pb.ProcessingRequest()
        for name, value in {":status": status, "content-type": kind}.items():
            request.response_headers.headers.headers.add(key=name, raw_value=value.encode())
        request.response_headers.end_of_stream = last
        return self.say(request)

    def response_body(self, data: bytes, *, last: bool = True) -> list[Response]:
        return self.say(pb.ProcessingRequest(response_body=pb.HttpBody(body=data, end_of_stream=last)))

    def response_trailers(self) -> list[Response]:
        return self.say(pb.ProcessingRequest(response_trailers=pb.HttpTrailers()))


def _hint(request: pb.ProcessingRequest, subset: list[str] | None) -> None:
    if subset is not None:
        request.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET_KEY: subset})


def set_headers(response: Response) -> Mapping[str, str]:
    """The header mutation of an answer to request headers."""
    return {
        o.header.key: o.header.raw_value.decode() for o in response.request_headers.response.header_mutation.set_headers
    }


def bodies(responses: list[Response], which: str = "request_body") -> tuple[bytes, list[bool]]:
    """All body pieces among the answers: their bytes joined, and which of them end the stream."""
    pieces = [
        getattr(r, which).response.body_mutation.streamed_response
        for r in responses
        if r.WhichOneof("response") == which
    ]
    return b"".join(p.body for p in pieces), [p.end_of_stream for p in pieces]
