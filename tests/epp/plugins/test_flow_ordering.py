"""Which request of a flow goes first."""

from typing import Any

import pytest

from epp.plugin import OrderingPolicy
from epp.plugins.ordering import EarliestDeadline, FirstCome, SloDeadline
from tests.cases import cases
from tests.contract.waiting import Waits, asking, made


def order(policy: OrderingPolicy, *items: Any) -> list[int]:
    """Indices of the items in the order in which they leave."""
    return sorted(range(len(items)), key=lambda index: policy.key(items[index]))


def slo(arrival: float, **headers: str) -> Waits:
    return asking("a", arrival=arrival, headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_first_come_first_served() -> None:
    assert order(made(FirstCome), Waits(arrival=2), Waits(arrival=1), Waits(arrival=3)) == [1, 0, 2]


def test_the_earliest_deadline_goes_first_and_ties_go_by_arrival() -> None:
    policy = made(EarliestDeadline)
    assert order(policy, Waits(arrival=1, ttl_s=9), Waits(arrival=5, ttl_s=2), Waits(arrival=3, ttl_s=4)) == [2, 1, 0]


@pytest.mark.parametrize("none", [float("inf"), 0.0, -1.0])
def test_without_a_ttl_there_is_no_deadline(none: float) -> None:
    policy = made(EarliestDeadline)
    assert order(policy, Waits(arrival=1, ttl_s=none), Waits(arrival=0, ttl_s=none), Waits(arrival=9, ttl_s=1e6)) == [2, 1, 0]


def test_the_request_with_the_earliest_due_first_token_goes_first() -> None:
    policy = made(SloDeadline)
    items = (
        slo(1.0, x_llm_d_slo_ttft_ms="500"),
        slo(1.2, x_llm_d_slo_ttft_ms=" 200 "),
        slo(0.0),
        slo(1.1, x_slo_ttft_ms="100"),  # the older name
        slo(0.9, x_llm_d_slo_ttft_ms="+600"),
    )
    assert order(policy, *items) == [3, 1, 4, 0, 2]


@cases("value", ["", "soon", "-1", "1.5", "1e3", "1_000", "٣", "9223372036855", "9223372036854775807", "9" * 19, "9" * 5000, "0x10"])
def test_a_request_with_an_invalid_objective_goes_behind_all_with_a_valid_one(value: str) -> None:
    policy = made(SloDeadline)
    far = slo(1.0, x_llm_d_slo_ttft_ms="9223372036854")  # the largest that counts
    assert order(policy, slo(0.0, x_llm_d_slo_ttft_ms=value), far, slo(0.5)) == [1, 0, 2]


def test_the_current_header_hides_the_older_one() -> None:
    policy = made(SloDeadline)
    assert order(policy, slo(0.0, x_llm_d_slo_ttft_ms="no", x_slo_ttft_ms="1"), slo(1.0, x_llm_d_slo_ttft_ms="100")) == [1, 0]


def test_the_request_is_found_through_one_more_object() -> None:
    class Handed:
        request = slo(1.0, x_llm_d_slo_ttft_ms="5").request

    policy = made(SloDeadline)
    assert order(policy, Waits(arrival=0.0, request=object()), Waits(arrival=1.0, request=Handed())) == [1, 0]
