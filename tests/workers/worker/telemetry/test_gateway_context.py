"""The trace context in the metadata of a stream: the gateway is the parent of a request that brings no context itself."""

import pytest

from tests.pair import Response
from tests.workers.worker.telemetry.traces import BODY, PARENT_ID, SAMPLED, TRACE_ID, UNSAMPLED, Site
from workers.transport.interface import Metadata
from workers.worker.telemetry.trace_context import gateway_context

GATEWAY_TRACE, GATEWAY_SPAN = "11112222333344445555666677778888", "aaaabbbbccccdddd"
GATEWAY = f"00-{GATEWAY_TRACE}-{GATEWAY_SPAN}-01"
GATEWAY_UNSAMPLED = f"00-{GATEWAY_TRACE}-{GATEWAY_SPAN}-00"
OTHERS = ((b"content-type", b"application/grpc"), (b"x-request-id", b"1"))


def metadata(traceparent: str = GATEWAY, *states: str) -> Metadata:
    more = [(b"tracestate", state.encode()) for state in states]
    return (*OTHERS, (b"traceparent", traceparent.encode()), *more)


def routed(site: Site, given: Metadata, **headers: str) -> Response:
    """Sends one request. Returns the answer to its headers."""
    envoy = site.pair.open(given)
    envoy.headers(**headers)
    answer = envoy.body(BODY)[0]
    envoy.handler.closed()
    return answer


def test_the_gateways_span_is_the_parent_of_a_request_without_context() -> None:
    site = Site(ratio=0.0)
    sent = site.answered(metadata=metadata(GATEWAY, "vendor=1", "other=2"))
    root = site.span("gateway.request")
    assert (root.trace_id, root.parent, root.remote) == (int(GATEWAY_TRACE, 16), int(GATEWAY_SPAN, 16), True)
    assert sent["traceparent"] == f"00-{GATEWAY_TRACE}-{root.span_id:016x}-01"
    assert sent["tracestate"] == "vendor=1,other=2"


def test_a_request_without_a_body_has_the_gateway_as_parent_too() -> None:
    site = Site(ratio=0.0)
    envoy = site.pair.open(metadata())
    (answer, *_) = envoy.headers("/v1/models", last=True)
    envoy.handler.closed()
    assert site.span("gateway.request").parent == int(GATEWAY_SPAN, 16)
    names = [o.header.key for o in answer.request_headers.response.header_mutation.set_headers]
    assert names.count("traceparent") == 1


def test_a_gateway_that_says_unsampled_is_believed_and_the_model_server_is_told() -> None:
    site = Site(ratio=1.0)
    sent = site.answered(metadata=metadata(GATEWAY_UNSAMPLED, "vendor=1"))
    assert site.spans == []
    assert (sent["traceparent"], sent["tracestate"]) == (GATEWAY_UNSAMPLED, "vendor=1")


@pytest.mark.parametrize(("own", "spans"), [(SAMPLED, True), (UNSAMPLED, False)])
@pytest.mark.parametrize("gateway", [GATEWAY, GATEWAY_UNSAMPLED])
def test_the_requests_own_context_wins(own: str, spans: bool, gateway: str) -> None:
    site = Site(ratio=1.0 - spans)
    sent = site.answered(metadata=metadata(gateway, "vendor=1"), traceparent=own, tracestate="mine=1")
    assert bool(site.spans) is spans
    assert "tracestate" not in sent, "that of the request passes unchanged"
    if spans:
        root = site.span("gateway.request")
        assert (root.trace_id, root.parent) == (int(TRACE_ID, 16), int(PARENT_ID, 16))
        assert sent["traceparent"] == f"00-{TRACE_ID}-{root.span_id:016x}-01"
    else:
        assert "traceparent" not in sent, "that of the request passes unchanged"


@pytest.mark.parametrize("gateway", [GATEWAY, GATEWAY_UNSAMPLED])
def test_a_malformed_context_of_the_request_gives_way_and_its_state_is_removed(gateway: str) -> None:
    answer = routed(Site(), metadata(gateway), traceparent=SAMPLED[:-1], tracestate="mine=1")
    mutation = answer.request_headers.response.header_mutation
    sent = [o.header for o in mutation.set_headers if o.header.key == "traceparent"]
    assert len(sent) == 1 and sent[0].raw_value.decode().startswith(f"00-{GATEWAY_TRACE}-")
    assert not sent[0].raw_value.decode().startswith(SAMPLED[:10])
    assert "tracestate" in mutation.remove_headers


@pytest.mark.parametrize("text", ["", "00", SAMPLED.upper(), GATEWAY[:-1], f"00-{'0' * 32}-{GATEWAY_SPAN}-01"])
def test_a_malformed_context_of_the_gateway_counts_as_none(text: str) -> None:
    assert gateway_context(metadata(text, "vendor=1")) is None
    site = Site(ratio=1.0)
    sent = site.answered(metadata=metadata(text, "vendor=1"))
    assert site.span("gateway.request").parent == 0
    assert "tracestate" not in sent
    site = Site(ratio=0.0)
    assert "traceparent" not in site.answered(metadata=metadata(text, "vendor=1"))


def test_the_first_of_several_contexts_of_the_gateway_counts() -> None:
    given = (*metadata(GATEWAY), (b"traceparent", SAMPLED.encode()))
    found = gateway_context(given)
    assert found is not None and found.traceparent == GATEWAY


def test_without_traces_the_metadata_are_not_read() -> None:
    site = Site(ratio=1.0)
    site.pair.app.pipelines.tracer = None
    assert "traceparent" not in site.answered(metadata=metadata(GATEWAY, "vendor=1"))


def test_a_sampler_that_follows_no_parent_keeps_the_gateways_trace_id() -> None:
    site = Site(ratio=1.0)
    tracer = site.pair.app.pipelines.tracer
    assert tracer is not None
    tracer._parent_based = False
    site.answered(metadata=metadata(GATEWAY_UNSAMPLED))
    root = site.span("gateway.request")
    assert (root.trace_id, root.parent) == (int(GATEWAY_TRACE, 16), int(GATEWAY_SPAN, 16))
