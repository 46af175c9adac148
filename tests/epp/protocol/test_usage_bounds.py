"""The bounds of reported usage: what a request can have cost, by its body, its limits and its answer."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Usage
from epp.protocol.usage_bounds import IMPLAUSIBLE, TEMPLATE_TOKENS, TOKENS_PER_S, bounded, implausible
from epp.request import Extent, Request

LIE = 10**6


def request(body_bytes: int = 400, *, max_tokens: int | None = None, **extent: Any) -> Request:
    asked = Request(id="", path="", headers={}, now=0.0, body_bytes=body_bytes)
    asked.max_tokens = max_tokens
    if extent:
        asked.extent = Extent(**extent)
    return asked


def completion(asked: Request, answer_bytes: int, seconds: float = 1.0) -> int | None:
    return bounded(Usage(1, LIE, None), asked, answer_bytes, seconds).completion


def prompt(asked: Request) -> int | None:
    return bounded(Usage(LIE * 1000, 1, None), asked, 10, 1.0).prompt


def test_an_honest_report_is_returned_as_it_is() -> None:
    usage = Usage(100, 50, 64)
    assert bounded(usage, request(max_tokens=50), 300, 1.0) is usage


def test_an_answer_has_at_most_as_many_tokens_as_bytes() -> None:
    assert completion(request(), 700) == 700


@pytest.mark.parametrize(("extent", "most"), [({}, 50), ({"choices": 3}, 150), ({"prompts": 4}, 200), ({"choices": 3, "prompts": 4}, 600)])
def test_an_answer_has_at_most_max_tokens_for_each_choice_of_each_prompt(extent: dict[str, int], most: int) -> None:
    assert completion(request(max_tokens=50, **extent), LIE) == most


def test_an_answer_that_leaves_out_reasoning_is_bounded_by_max_tokens_or_by_its_time() -> None:
    assert completion(request(max_tokens=5000, hidden=True), 300) == 5000
    assert completion(request(choices=2, hidden=True), 300, seconds=2.0) == 2 * 2 * TOKENS_PER_S
    assert completion(request(hidden=True), 300, seconds=0.0) == 300


@pytest.mark.parametrize(
    ("extent", "most"),
    [
        ({}, 400 + TEMPLATE_TOKENS),
        ({"prompts": 3}, 400 + 3 * TEMPLATE_TOKENS),
        ({"choices": 2}, 2 * (400 + TEMPLATE_TOKENS)),
        ({"unseen_tokens": 9000}, 9400 + TEMPLATE_TOKENS),
    ],
)
def test_a_prompt_has_at_most_the_tokens_of_its_body_and_of_what_the_body_refers_to(extent: dict[str, int], most: int) -> None:
    assert prompt(request(**extent)) == most


def test_cached_tokens_are_at_most_the_prompt() -> None:
    assert bounded(Usage(300, 5, LIE), request(), 100, 1.0) == Usage(300, 5, 300)
    assert bounded(Usage(None, 5, LIE), request(), 100, 1.0) == Usage(None, 5, LIE)


FIGURE = st.one_of(st.none(), st.integers(-5, 2**40))


@given(st.builds(Usage, FIGURE, FIGURE, FIGURE), st.integers(0, 10**6), st.one_of(st.none(), st.integers(0, 10**6)))
def test_no_figure_grows_appears_or_vanishes(usage: Usage, size: int, limit: int | None) -> None:
    within = bounded(usage, request(max_tokens=limit), size, 1.0)
    for name in ("prompt", "completion", "cached"):
        before, after = getattr(usage, name), getattr(within, name)
        assert (before is None) == (after is None)
        assert after is None or 0 <= after <= max(0, before)


def test_only_reports_far_above_their_bounds_are_implausible() -> None:
    asked = request(max_tokens=100)
    for reported, far in ((100, False), (IMPLAUSIBLE * 100, False), (IMPLAUSIBLE * 100 + 1, True)):
        usage = Usage(10, reported, None)
        assert implausible(usage, bounded(usage, asked, LIE, 1.0)) is far
    usage = Usage(LIE, 5, None)
    assert implausible(usage, bounded(usage, asked, LIE, 1.0))
