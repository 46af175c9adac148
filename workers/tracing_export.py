"""Spans on their way out of a worker, by OpenTelemetry's exporters. After the fork only: it imports them when they are opened.

Spans wait in a queue of `SPANS_MAX`, which a thread of the SDK empties in batches of `BATCH_SPANS`. While the collector is down
the oldest are dropped, without a word per span: the exporter tells of failed batches, and what repeats itself is told once per
`REPEAT_S`. Requests never wait for it. At the end what is queued is sent for at most `FLUSH_S`; the rest is lost.
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

from workers.log import LineWriter
from workers.tracing import REQUEST, Span
from workers.tracing_settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE_NAME = "llm-d-epp"
SCOPE = "endpoint-picker"
SPANS_MAX = 2048
BATCH_SPANS = 64  # encoding them holds the interpreter for 1.6 ms
BATCH_DELAY_MS = 1000
FLUSH_S = 0.8  # within the grace that the parent gives a worker after its drain
REPEAT_S = 60.0
REPEATS_MAX = 64

log = structlog.get_logger()


def open_exporter(asked: Settings) -> "SpanExporter":
    """OpenTelemetry's exporter. Imports it: only after the fork."""
    speak_through(log)
    if asked.exporter == "console":
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=_Lines(LineWriter(1)), formatter=lambda span: span.to_json(indent=None))  # type: ignore[arg-type]
    import grpc  # type: ignore[import-untyped]
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    compression = grpc.Compression.Gzip if asked.compression == "gzip" else grpc.Compression.NoCompression
    return OTLPSpanExporter(timeout=asked.timeout_s, compression=compression)


class Exporter:
    """Takes spans from the event loop and never waits. After the fork only."""

    def __init__(self, exporter: "SpanExporter") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._exporter = exporter
        found = Resource.create({"process.pid": os.getpid()})
        if str(found.attributes["service.name"]).startswith("unknown_service"):
            found = found.merge(Resource({"service.name": SERVICE_NAME}))
        self._readable = converter(found)
        self._processor = BatchSpanProcessor(exporter, SPANS_MAX, BATCH_DELAY_MS, BATCH_SPANS)

    def emit(self, span: Span) -> None:
        """Queues a span that has ended; when the queue is full the oldest goes."""
        self._processor.on_end(self._readable(span))

    async def close(self, seconds: float = FLUSH_S) -> None:
        """Sends what is queued, for so long; the rest is lost."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def flush() -> None:
            self._processor.shutdown()  # type: ignore[no-untyped-call]
            with contextlib.suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=flush, name="flush-traces", daemon=True).start()
        try:
            await asyncio.wait_for(sent.wait(), seconds)
        except TimeoutError:
            self._exporter.shutdown()  # ends the call that hangs, and refuses those that would follow


def converter(resource: Any) -> "Callable[[Span], ReadableSpan]":
    """Our spans as the SDK's, all of one resource."""
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
    """A text stream of whole lines that never waits: each write is one."""

    def __init__(self, lines: LineWriter) -> None:
        self.write = lines.msg

    def flush(self) -> None:
        """Nothing is held back."""


class _Told(logging.Handler):
    """What OpenTelemetry logs, in our log; what repeats itself once per `REPEAT_S`."""

    def __init__(self, to: Any, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.ERROR)
        self._to = to
        self._now = now
        self._told: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        now = self._now()
        if now - self._told.get(record.msg, -REPEAT_S) < REPEAT_S:
            return
        if len(self._told) >= REPEATS_MAX:
            self._told.clear()
        self._told[record.msg] = now
        self._to.error("traces", problem=record.getMessage())


def speak_through(to: Any) -> None:
    """OpenTelemetry's errors go to our log; its warnings, such as one per dropped span, nowhere."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Told(to)]
    logger.propagate = False
    logger.setLevel(logging.ERROR)
