"""Receipts on the response: for those who ask, where the operator trusts the header, and never in the way of the answer."""

from typing import Any

import pytest

from epp.decision.decision import Decision
from epp.decision.pipeline import Pipeline
from epp.decision.receipt import HEADER
from epp.request import Request
from tests.pair import Pair
from tests.workers.worker.extproc.streams import BODY, pair

ASKS = {"x-llm-d-debug": "receipt"}


def sealed(_pipeline: Pipeline, request: Request, decision: Decision) -> str:
    return f"{request.id}-{decision.targets[0].slot}"


def failing(_pipeline: Pipeline, _request: Request, _decision: Decision) -> str:
    raise ZeroDivisionError


def answered(p: Pair, **headers: str) -> dict[str, str]:
    """The headers that a response to a request with these headers gets."""
    envoy = p.open()
    envoy.headers(**{"x-request-id": "one", **headers})
    envoy.body(BODY)
    (answer,) = envoy.response_headers()
    mutation: Any = answer.response_headers.response.header_mutation
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


@pytest.mark.parametrize("value", ["receipt", " receipt ", "trace,receipt"])
def test_a_request_that_asks_gets_the_receipt_of_its_decision(value: str) -> None:
    p = pair()
    p.app.receipts = sealed
    assert answered(p, **{"x-llm-d-debug": value}) == {HEADER: "one-1"}


@pytest.mark.parametrize("headers", [{}, {"x-llm-d-debug": "receipts"}, {"x-llm-d-request-ttl-ms": "5"}])
def test_a_request_that_does_not_ask_gets_none(headers: dict[str, str]) -> None:
    p = pair()
    p.app.receipts = sealed
    assert answered(p, **headers) == {}


def test_without_receipts_a_request_that_asks_gets_none() -> None:
    assert answered(pair(), **ASKS) == {}


def test_a_fault_of_a_receipt_does_not_disturb_the_answer() -> None:
    p = pair()
    p.app.receipts = failing
    assert answered(p, **ASKS) == {}
