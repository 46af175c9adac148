"""Intake: what a request's headers say, in any case of their names."""

import pytest

from epp.protocol import codec
from epp.request import Request
from epp.request.intake import Intake
from loadtest.load.proto import ext_proc_pb2 as pb

HEADERS = {
    ":path": "/v1/completions?a=B",
    "x-request-id": "Mine",
    "x-llm-d-inference-fairness-id": "Tenant-A",
    "x-llm-d-request-ttl-ms": "1500",
}


def begun(headers: dict[str, str]) -> Request:
    message = pb.HttpHeaders()
    for name, value in headers.items():
        message.headers.headers.add(key=name, raw_value=value.encode())
    encoded = message.SerializeToString()
    return Intake().begin(codec.Headers(encoded, 0, len(encoded)), 1.0, 0, None)


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title, str.swapcase])
def test_header_names_are_matched_in_any_case(change: type[str]) -> None:
    request = begun({change(name): value for name, value in HEADERS.items()})
    assert (request.path, request.id) == ("/v1/completions", "Mine")
    assert (request.fairness_id, request.ttl_s) == ("Tenant-A", 1.5)


@pytest.mark.parametrize("older", ["x-gateway-inference-fairness-id", "X-Gateway-Inference-Fairness-ID"])
def test_older_names_are_matched_in_any_case_too(older: str) -> None:
    assert begun({older: "Tenant-A"}).fairness_id == "Tenant-A"
