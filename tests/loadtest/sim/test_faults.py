"""Orders for faults."""

import json
from typing import Any

import pytest

from loadtest.sim.faults import DELAY_DEFAULT_S, BadFault, FaultOrder, RequestFault, ServerFault, parse_header, parse_order
from tests.cases import cases


@cases("kind", list(ServerFault))
def test_every_kind_can_be_ordered(kind: ServerFault) -> None:
    order = parse_order(json.dumps({"kind": kind.value, "seconds": 1.5, "server": 3}).encode())
    assert order == FaultOrder(kind, 1.5, DELAY_DEFAULT_S, 3)


@pytest.mark.parametrize(
    "body",
    [
        {"kind": "explode"},
        {},
        {"kind": "hang", "second": 1},
        {"kind": "hang", "seconds": -1},
        {"kind": "slow", "delay": 1e9},
        {"kind": "error", "status": 302},
        [],
    ],
)
def test_an_invalid_order_is_refused_with_a_list_of_the_kinds(body: Any) -> None:
    with pytest.raises(BadFault, match="garbage-metrics"):
        parse_order(json.dumps(body).encode())


def test_an_order_that_is_not_json_is_refused() -> None:
    with pytest.raises(BadFault):
        parse_order(b"{")


def test_a_header_names_a_kind_and_optionally_a_delay() -> None:
    assert parse_header(b"hang") == (RequestFault.HANG, DELAY_DEFAULT_S)
    assert parse_header(b"slow; delay=0.25") == (RequestFault.SLOW, 0.25)


@pytest.mark.parametrize("value", [b"", b"vanish", b"slow;delay=x", b"slow;speed=1", b"slow;delay=-1", b"\xff"])
def test_an_invalid_header_is_refused_with_a_list_of_the_kinds(value: bytes) -> None:
    with pytest.raises(BadFault, match="none, hang, error, slow, cut"):
        parse_header(value)
