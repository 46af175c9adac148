"""Figures of a replay, and the conditions of --fail-if."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.replay.figures import NAMES, Figures, NoAnswer, condition, figures, median
from loadtest.replay.run import Run, empty
from tests.cases import cases


def run(targets: list[int], first_s: float) -> Run:
    made = empty(len(targets))
    made.target[:] = targets
    made.first_s[:] = np.where(made.target >= 0, first_s, np.nan)
    made.lasted_s[:] = 2 * first_s
    made.prompt[:], made.cached[:] = 100, 50
    return made


def of(targets: list[int], first_s: float) -> Figures:
    return figures(run(targets, first_s), np.array([0, 1] * 5), 2)


@dataclass
class Sides:
    slower = of([0, 0] * 5, 0.2)
    base = of([0, 1] * 5, 0.1)


@cases(
    ("text", "holds"),
    [
        ("ttft_p95 > 1.1 * base", True),
        ("ttft_p95 > 2.1 * base", False),
        ("ttft_p95>base", True),
        ("ttft_p95 > base + 0.05", True),
        ("ttft_p95 > 1 * base + 0.15", False),
        ("hit_rate < base - 0.1", False),
        ("hit_rate <= base", True),
        ("load >= 2", True),
        ("moved > 0.5", False),
        ("latency_p95 > 0.3", True),
    ],
)
def test_a_condition_compares_a_figure_with_a_number_or_the_base(text: str, holds: bool) -> None:
    assert condition(text).holds(Sides.slower, Sides.base) is holds


def test_requests_that_were_refused_or_failed_count_as_errors() -> None:
    found = of([0, 1, -1, -2, 0, 1, 0, 1, 0, 1], 0.1)
    assert (found.errors, found.refused) == (2, 1)
    assert found.moved == pytest.approx(0.2)


def test_an_unknown_figure_is_refused_with_the_names_that_are_allowed() -> None:
    with pytest.raises(ValueError, match="'ttft' is no figure; allowed: requests, errors, refused, ttft_mean"):
        condition("ttft > base")


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    try:
        assert condition(text).name in NAMES
    except ValueError as refused:
        assert "figure" in str(refused) or "condition" in str(refused)


def test_a_run_without_answers_has_no_figures() -> None:
    with pytest.raises(NoAnswer, match="no request got an answer"):
        figures(run([-1], 0.1), np.array([-1]), 1)


def test_the_figures_of_several_runs_are_the_median_of_each() -> None:
    slow, fast = of([0, 0] * 5, 0.3), of([0, 1] * 5, 0.1)
    typical = median([slow, fast, of([0, 1] * 5, 0.2)])
    assert (typical.ttft_p95, typical.load, typical.requests) == (pytest.approx(0.2), 1.0, 10)
