"""Traces behind a real Envoy: picker, gateway and model server are in one trace, and the model server sees one context."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from loadtest.demo.stack import LOOPBACK
from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, completion, eventually, write_endpoints
from tests.e2e.echo import Json, Server, gateway, got, servers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLOSED = 1  # a port without a collector
TYPES = "type.googleapis.com/envoy."


def tracing_picker(cluster: Cluster, server: Server, ratio: str) -> Picker:
    """Starts a picker that prints its spans. `ratio`: the share of requests that it traces without a parent."""
    file = write_endpoints(cluster.directory / "servers.yaml", [(LOOPBACK, server.server_port)])
    under = ("env", "OTEL_TRACES_EXPORTER=console", f"OTEL_TRACES_SAMPLER_ARG={ratio}")
    return cluster.picker(file, workers=1, under=under)


def roots(picker: Picker) -> list[Json]:
    """Returns the spans of whole requests that the picker has printed."""
    lines = [json.loads(line) for line in picker.child.text().splitlines() if line.startswith('{"name": ')]
    return [span for span in lines if span["name"] == "gateway.request"]


def traced(share: float) -> Callable[[Json, Json], None]:
    """Returns a change that makes Envoy trace this share of requests, in per cent."""

    def change(manager: Json, resources: Json) -> None:
        collector = {"envoy_grpc": {"cluster_name": "collector"}, "timeout": "0.25s"}
        kind = TYPES + "config.trace.v3.OpenTelemetryConfig"
        provider = {"@type": kind, "grpc_service": collector, "service_name": "gateway"}
        manager["tracing"] = {
            "provider": {"name": "envoy.tracers.opentelemetry", "typed_config": provider},
            "random_sampling": {"value": share},
        }
        address = {"socket_address": {"address": LOOPBACK, "port_value": CLOSED}}
        resources["clusters"].append(
            {
                "name": "collector",
                "type": "STATIC",
                "load_assignment": {"cluster_name": "collector", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]},
            }
        )

    return change


def told(**metadata: str) -> Callable[[Json, Json], None]:
    """Returns a change that makes Envoy send these metadata with each ext_proc stream, and add nothing to the request itself."""

    def change(manager: Json, _resources: Json) -> None:
        service = manager["http_filters"][0]["typed_config"]["grpc_service"]
        service["initial_metadata"] = [{"key": name, "value": value} for name, value in metadata.items()]

    return change


def contexts(headers: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns all values of the trace context that the model server received."""
    return {name: [v for n, v in headers if n == name] for name in ("traceparent", "tracestate")}


def test_a_gateway_that_traces_is_the_parent_and_all_are_in_one_trace(cluster: Cluster) -> None:
    with servers(1) as (server,):
        picker = tracing_picker(cluster, server, "0")
        received = contexts(got(ask(gateway(cluster, picker.grpc, traced(100.0)), COMPLETIONS, completion("hello"))))
        assert len(received["traceparent"]) == 1
        trace = received["traceparent"][0].split("-")[1]
        assert eventually(lambda: len(roots(picker)) == 1)
        (span,) = roots(picker)
        assert span["context"]["trace_id"] == f"0x{trace}"
        assert span["parent_id"] is not None


def test_a_gateway_that_does_not_sample_a_request_is_believed(cluster: Cluster) -> None:
    with servers(1) as (server,):
        picker = tracing_picker(cluster, server, "1")
        port = gateway(cluster, picker.grpc, traced(0.0))
        received = contexts(got(ask(port, COMPLETIONS, completion("hello"))))
        assert len(received["traceparent"]) == 1 and received["traceparent"][0].endswith("-00")
        without = gateway(cluster, picker.grpc)
        assert ask(without, COMPLETIONS, completion("another")).status == 200
        assert eventually(lambda: len(roots(picker)) >= 1)
        assert [span["parent_id"] for span in roots(picker)] == [None], "only the request without a gateway's context"


@pytest.mark.parametrize("flags", ["01", "00"])
@pytest.mark.parametrize("own", [{}, {"traceparent": "broken", "tracestate": "lost=1"}])
def test_the_model_server_gets_the_gateways_context_if_only_the_stream_has_it(cluster: Cluster, flags: str, own: Mapping[str, str]) -> None:
    with servers(1) as (server,):
        picker = tracing_picker(cluster, server, "0")
        given: dict[str, Any] = {"traceparent": f"00-{TRACE}-{SPAN}-{flags}", "tracestate": "vendor=1"}
        port = gateway(cluster, picker.grpc, told(**given))
        received = contexts(got(ask(port, COMPLETIONS, completion("hello"), own)))
        assert received["tracestate"] == ["vendor=1"]
        if flags == "00":
            assert received["traceparent"] == [given["traceparent"]]
            return
        assert eventually(lambda: len(roots(picker)) == 1)
        (span,) = roots(picker)
        assert span["parent_id"] == f"0x{SPAN}"
        assert received["traceparent"] == [f"00-{TRACE}-{span['context']['span_id'][2:]}-01"]


def test_a_clients_context_wins_and_arrives_once(cluster: Cluster) -> None:
    with servers(1) as (server,):
        picker = tracing_picker(cluster, server, "0")
        port = gateway(cluster, picker.grpc, told(traceparent=f"00-{'9' * 32}-{SPAN}-01", tracestate="vendor=1"))
        own = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "mine=1"}
        received = contexts(got(ask(port, COMPLETIONS, completion("hello"), own)))
        assert received["tracestate"] == ["mine=1"]
        assert len(received["traceparent"]) == 1
        assert received["traceparent"][0].startswith(f"00-{TRACE}-") and SPAN not in received["traceparent"][0]
