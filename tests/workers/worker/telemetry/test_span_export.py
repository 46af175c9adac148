"""Export of spans: an exporter gets all fields, and no request waits for the collector."""

import asyncio
import json
import logging
import os

import pytest

from epp.plugin import NoParams
from epp.plugins.scorers.reported import QueueDepth
from tests.workers.worker.telemetry.traces import BODY, PARENT_ID, SAMPLED, TRACE_ID, Refuses, Site, python
from workers.worker.telemetry.tracing import Span
from workers.worker.telemetry.tracing_export import SPANS_MAX, Exporter, _LogHandler


def test_an_exporter_of_opentelemetry_gets_all_fields_of_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import SpanKind, StatusCode

    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    memory = InMemorySpanExporter()
    exporter = Exporter(memory)
    site = Site((QueueDepth("queue", NoParams()), Refuses("b", NoParams())), emit=exporter.emit)
    envoy = site.pair.open()
    envoy.headers(traceparent=SAMPLED)
    envoy.body(BODY)
    asyncio.run(exporter.close())
    spans = {span.name: span for span in memory.get_finished_spans()}
    root, orchestration = spans["gateway.request"], spans["gateway.request_orchestration"]
    assert len(spans) == 6
    assert (root.kind, orchestration.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)
    assert root.parent.is_remote
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert not orchestration.parent.is_remote
    assert orchestration.parent.span_id == root.context.span_id
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "not-admitted: no luck")
    assert dict(root.events[0].attributes) == {"exception.type": "Refused", "exception.message": "not-admitted: no luck"}
    assert spans["llm_d.epp.scorer.queue-scorer"].status.status_code is StatusCode.UNSET
    assert spans["llm_d.epp.scorer.queue-scorer"].attributes["llm_d.epp.scorer.weight"] == 2.0
    assert root.resource.attributes["service.name"] == "llm-d-epp"
    assert root.resource.attributes["process.pid"] == os.getpid()
    assert root.resource.attributes["deployment.environment"] == "test"
    assert all("trace_id" in span.to_json() for span in spans.values())


@pytest.mark.parametrize("environ", [{"OTEL_SERVICE_NAME": "mine"}, {"OTEL_RESOURCE_ATTRIBUTES": "service.name=mine"}])
def test_the_service_can_be_named(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    memory = InMemorySpanExporter()
    exporter = Exporter(memory)
    exporter.emit(Span("gateway.request", 1, 2, 0, 3, {}))
    asyncio.run(exporter.close())
    assert memory.get_finished_spans()[0].resource.attributes["service.name"] == "mine"


def test_the_console_gets_one_line_of_json_per_span() -> None:
    script = """if True:
        import asyncio
        from workers.worker.telemetry.tracing import Span
        from workers.worker.telemetry.tracing_export import Exporter, open_exporter
        from workers.host.options import TracingOptions
        exporter = Exporter(open_exporter(TracingOptions(exporter="console")))
        for name in "ab":
            exporter.emit(Span(name, 1, 2, 0, 3, {"k": ["v"]}))
        asyncio.run(exporter.close())
    """
    lines = python(script).splitlines()
    assert len(lines) == 2
    assert all(line.startswith('{"name": ') and line.endswith("}") for line in lines)


BLACK_HOLE = """if True:
    import asyncio, gc, json, os, socket, sys
    from workers.host import log
    from workers.worker.telemetry.tracing import Span
    from workers.worker.telemetry.tracing_export import Exporter, open_exporter
    from workers.worker.telemetry.tracing_settings import settings

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096

    log.configure()
    hole = socket.create_server(("127.0.0.1", 0))  # the kernel accepts; no process answers
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{hole.getsockname()[1]}"
    options, wrong = settings(os.environ)
    exporter = Exporter(open_exporter(options))

    def emit(count):
        for number in range(count):
            exporter.emit(Span("gateway.request", 1, number + 1, 0, 3, {"gen_ai.request.model": "m" * 128, "n": number}))

    emit(4_000)
    before = resident()
    emit(40_000)
    grown = resident() - before
    from opentelemetry.sdk.trace import ReadableSpan
    held = sum(isinstance(held, ReadableSpan) for held in gc.get_objects())
    asyncio.run(asyncio.wait_for(exporter.close(0.2), 20))
    print(json.dumps([held, grown]))
    sys.stdout.flush()
    os._exit(0)  # as a worker ends
"""


def test_a_collector_that_never_answers_causes_no_waiting_and_bounded_memory() -> None:
    held, grown = json.loads(python(BLACK_HOLE, OTEL_TRACES_EXPORTER="otlp"))
    assert SPANS_MAX <= held <= SPANS_MAX + 256
    assert grown < 5 << 20


def test_equal_log_lines_appear_once_a_minute() -> None:
    lines: list[str] = []

    class Log:
        def error(self, event: str, *, problem: str) -> None:
            lines.append(problem)

    now = 100.0
    handler = _LogHandler(Log(), now=lambda: now)
    for template in ("Failed to export %s", "Failed to export %s", "other %s"):
        handler.emit(logging.LogRecord("x", logging.ERROR, "", 0, template, ("traces",), None))
    now = 200.0
    handler.emit(logging.LogRecord("x", logging.ERROR, "", 0, "Failed to export %s", ("traces",), None))
    assert lines == ["Failed to export traces", "other traces", "Failed to export traces"]
