"""Connects both ends of an ext_proc stream without a network: tests send Envoy's messages and get the picker's answers, decoded."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from epp.decision.pipeline import Pipeline
from epp.metrics import Group
from epp.metrics.areas import STREAM_COUNTERS, STREAM_DURATION, STREAMS_INFLIGHT, WORKER_COUNTERS, WORKER_GAUGES, WORKER_HISTOGRAMS
from epp.metrics.label_caps import LabelCaps
from epp.metrics.request_series import ATTEMPTS, ERROR, REQUEST, REQUEST_FIGURES
from epp.protocol.codec import SUBSET_KEY, SUBSET_NAMESPACE
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.answers import AnswersReader, AnswersSchema, AnswersWriter
from shm.areas import Area, Areas, AreaSchema
from shm.segment import Region
from shm.series import SeriesWriter
from shm.series_reader import SeriesReader
from workers.process.layout import series_schema_of
from workers.shared.decisions import Recent
from workers.shared.outliers import KINDS, OUTCOMES
from workers.shared.query_of_death import PLACES, WORDS, Deciding
from workers.transport.interface import Buffer, Clock, Metadata
from workers.worker.extproc.answer_counts import AnswerCounts
from workers.worker.extproc.app import App, Guards, Times
from workers.worker.extproc.pipelines import Pipelines
from workers.worker.extproc.stream import PATH, open_stream
from workers.worker.telemetry.request_metrics import RequestMetrics
from workers.worker.telemetry.request_telemetry import Telemetry

Response = pb.ProcessingResponse


class FakeStream:
    """A `workers.transport.interface.Stream` that records the bytes that the picker sends."""

    def __init__(self, authority: str = "", port: int = 0) -> None:
        self.authority = authority
        self.local_port = port
        self.sent = b""
        self.ended: tuple[int, str] | None = None
        self.held = 0
        self.held_max = 1 << 62

    def hold(self, count: int) -> bool:
        self.held += count
        return self.held <= self.held_max

    def peer(self) -> str:
        return "10.9.8.7"

    def port(self) -> int:
        return self.local_port

    def gathered(self) -> int:
        return 0

    def release(self) -> None:
        self.held = 0

    def send(self, message: bytes) -> None:
        self.send_raw(b"\0" + len(message).to_bytes(4, "big") + message)

    def send_raw(self, framed: bytes) -> None:
        assert self.ended is None, "nothing can be sent after the end"
        self.sent += framed

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        self.send_raw(b"".join(parts))

    def end(self, status: int = 0, text: str = "") -> None:
        assert self.ended is None, "a stream ends once"
        self.ended = (status, text)


def areas(slots: int = 16, workers: int = 1) -> Areas:
    """Makes the areas of workers in plain memory. All workers serve."""
    schema = AreaSchema(
        slots,
        tuple(m.name for m in (*WORKER_GAUGES, STREAMS_INFLIGHT)),
        (*(m.name for m in WORKER_COUNTERS), *STREAM_COUNTERS),
        tuple((m.name, m.buckets) for m in (*WORKER_HISTOGRAMS, STREAM_DURATION)),
        areas=workers + 1,
    )
    all_areas = Areas(schema, Region(memoryview(bytearray(schema.bytes))))
    for index in range(1, workers + 1):
        all_areas.set_serving(index, True)
    return all_areas


class Series:
    """Holds the labelled metrics of one worker in plain memory."""

    def __init__(self, clock: Clock) -> None:
        groups = (REQUEST, REQUEST_FIGURES, ERROR, ATTEMPTS)
        self._schemas = {group.name: series_schema_of(group, areas=1) for group in groups}
        self._regions = {n: Region(memoryview(bytearray(s.bytes))) for n, s in self._schemas.items()}
        self.caps = LabelCaps()
        requests, figures, errors, attempts = map(self._writer, groups)
        self.metrics = RequestMetrics(clock, requests, figures, errors, attempts, self.caps)

    def _writer(self, group: Group) -> SeriesWriter:
        schema = self._schemas[group.name]
        return SeriesWriter(schema, schema.area(self._regions[group.name], 0), names=self.caps.names(group.labels))

    def rows(self, group: Group) -> Any:
        """Returns label tuple -> values, as the next scrape would find them."""
        return SeriesReader(self._schemas[group.name], self._regions[group.name], serving=lambda _: True).rows()


class Pair:
    """Runs one App. Tests open any number of streams to it."""

    def __init__(self, pipeline: Pipeline, pool: Any, *, body_bytes_max: int = 1 << 20) -> None:
        self.areas = areas()
        self.area: Area = self.areas.area(1)
        self.clock = Clock(100.0)
        schema = AnswersSchema(self.area.schema.slots, 1, KINDS, len(OUTCOMES))
        region = Region(memoryview(bytearray(schema.bytes)))
        self.answers = AnswersReader(schema, region)
        self.series = Series(self.clock)
        self.deciding = memoryview(bytearray(8)).cast("q")
        self.deadly = memoryview(bytearray(8 * WORDS)).cast("q")
        self.tried = memoryview(bytearray(8 * PLACES)).cast("q")
        reads = [name for plugin in pipeline.wiring.plugins for name in plugin.reads_headers]
        self.faults: list[BaseException] = []
        self.turns: deque[Callable[[], object]] = deque()  # the calls that the loop would make in its next turns
        self.recent = Recent(0, lambda: self.clock.now)
        self.app = App(
            Pipelines(pipeline),
            pool,
            self.area,
            AnswerCounts(AnswersWriter(schema, region, 0), lambda: self.clock.now),
            Telemetry(self.area, self.series.metrics, self.recent, now=lambda: self.clock.now),
            Guards(
                body_bytes_max=body_bytes_max,
                deciding=Deciding(self.deciding, self.deadly, self.tried, headers=reads),
                on_fault=self.faults.append,
            ),
            Times(self.clock, lambda: self.clock.now, lambda call, *args: self.turns.append(partial(call, *args))),
            random.Random(1),
        )

    @property
    def time(self) -> float:
        return self.clock.now

    @time.setter
    def time(self, now: float) -> None:
        self.clock.now = now

    def open(self, metadata: Metadata = ()) -> "Envoy":
        stream = FakeStream()
        handler = open_stream(self.app, PATH, metadata, stream)
        assert handler is not None
        return Envoy(handler, stream)

    def counter(self, name: str) -> int:
        return self.area.counters[self.area.schema.counter[name]]

    @property
    def inflight(self) -> list[int]:
        return self.area.inflight.tolist()


class Envoy:
    """Plays Envoy's side of one stream. Every call returns the answers that it caused."""

    def __init__(self, handler: Any, stream: FakeStream) -> None:
        self.handler = handler
        self.stream = stream

    def say(self, request: pb.ProcessingRequest) -> list[Response]:
        self.handler.message(request.SerializeToString())
        return self.answers()

    def answers(self) -> list[Response]:
        """Returns the messages that the picker has sent since the last call."""
        data, self.stream.sent = self.stream.sent, b""
        responses, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            responses.append(Response.FromString(data[at + 5 : at + 5 + size]))
            at += 5 + size
        return responses

    def headers(self, path: str = "/v1/completions", *, last: bool = False, subset: list[str] | None = None, **more: str) -> list[Response]:
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

    def response_headers(self, status: str = "200", kind: str = "application/json", *, last: bool = False) -> list[Response]:
        """`status`: "" for headers without one."""
        request = pb.ProcessingRequest()
        for name, value in {":status": status, "content-type": kind}.items():
            if not value:
                continue
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
    """Returns the headers that an answer to request headers sets: name -> value."""
    return {o.header.key: o.header.raw_value.decode() for o in response.request_headers.response.header_mutation.set_headers}


def bodies(responses: list[Response], which: str = "request_body") -> tuple[bytes, list[bool]]:
    """Returns the joined bytes of all body pieces in the answers, and for each piece whether it is the last one of the body."""
    pieces = [getattr(r, which).response.body_mutation.streamed_response for r in responses if r.WhichOneof("response") == which]
    return b"".join(p.body for p in pieces), [p.end_of_stream for p in pieces]
