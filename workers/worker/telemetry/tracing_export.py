"""Exports the spans of a worker with OpenTelemetry's exporters. Use it only after the fork, because it imports OpenTelemetry.

Spans wait in a queue of `SPANS_MAX`. A thread of the SDK sends them in batches of `BATCH_SPANS`. While the collector is down, the oldest
spans are dropped silently. The exporter logs failed batches, but an equal log line appears only once per `REPEAT_S`. Requests never wait
for the export. When the worker ends, it sends the queue for at most `FLUSH_S`. The rest is lost.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from workers.host.log import LineWriter
from workers.host.options import TracingOptions
from workers.worker.telemetry.tracing import REQUEST, Span

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE_NAME = "llm-d-epp"
SCOPE = "endpoint-picker"
SPANS_MAX = 2048
BATCH_SPANS = 64  # encoding a batch holds the interpreter lock for 1.6 ms
BATCH_DELAY_MS = 1000
FLUSH_S = 0.8  # shorter than the time that the parent gives a worker after its drain
REPEAT_S = 60.0
REPEATS_MAX = 64

log = structlog.get_logger()


def open_exporter(options: TracingOptions) -> "SpanExporter":
    """Creates OpenTelemetry's exporter. Call this only after the fork, because it imports OpenTelemetry."""
    log_errors_to(log)
    if options.exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=_Lines(LineWriter(1)), formatter=lambda span: span.to_json(indent=None))  # type: ignore[arg-type]
    import grpc  # type: ignore[import-untyped]
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    compression = grpc.Compression.Gzip if options.compression == "gzip" else grpc.Compression.NoCompression
    return OTLPSpanExporter(timeout=options.timeout_s, compression=compression)


class Exporter:
    """Takes spans from the event loop without blocking it. Create it only after the fork."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = exporter
        resource = Resource.create({"process.pid": os.getpid()})
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": SERVICE_NAME}))
        self._readable = converter(resource)
        self._processor = BatchSpanProcessor(exporter, SPANS_MAX, BATCH_DELAY_MS, BATCH_SPANS)

    def emit(self, span: Span) -> None:
        """Queues a span that has ended. A full queue drops its oldest span."""
        self._processor.on_end(self._readable(span))

    async def close(self, seconds: float = FLUSH_S) -> None:
        """Sends the queued spans for at most `seconds`. The rest is lost."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # raised if the loop is closed already
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=flush, name="flush-traces", daemon=True).start()
        try:
            await asyncio.wait_for(sent.wait(), seconds)
        except TimeoutError:
            self._exporter.shutdown()  # ends the hanging call, and refuses later ones


def converter(resource: Any) -> "Callable[[Span], ReadableSpan]":
    """Returns a function that converts our spans to spans of the SDK. All get the same resource."""
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    scope, flags, unset = InstrumentationScope(SCOPE), TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)

    def readable(span: Span) -> ReadableSpan:
        events: tuple[Event, ...] = ()
        if span.problem:
            event = {"exception.type": span.problem, "exception.message": span.error}
            events = (Event("exception", event, span.end),)
        return ReadableSpan(
            span.name,
            SpanContext(span.trace_id, span.span_id, is_remote=False, trace_flags=flags),
            SpanContext(span.trace_id, span.parent, is_remote=span.remote, trace_flags=flags) if span.parent else None,
            resource,
            span.attributes,
            events,
            kind=SpanKind.SERVER if span.name == REQUEST else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else unset,
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=scope,
        )

    return readable


class _Lines:
    """A text stream that never blocks. Each write must be a whole line."""

    def __init__(self, lines: LineWriter) -> None:
        self.write = lines.msg

    def flush(self) -> None:
        """Does nothing, because nothing is buffered."""


class _LogHandler(logging.Handler):
    """Writes OpenTelemetry's log lines into our log. Equal lines appear once per `REPEAT_S`."""

    def __init__(self, to: Any, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.ERROR)
        self._to = to
        self._now = now
        self._logged_at: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._now()
        if now - self._logged_at.get(record.msg, -REPEAT_S) < REPEAT_S:
            return
        if len(self._logged_at) >= REPEATS_MAX:
            self._logged_at.clear()
        self._logged_at[record.msg] = now
        self._to.error("traces", problem=record.getMessage())


def log_errors_to(to: Any) -> None:
    """Sends OpenTelemetry's errors to our log. Drops its warnings, such as one per dropped span."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_LogHandler(to)]
    logger.propagate = False
    logger.setLevel(logging.ERROR)
