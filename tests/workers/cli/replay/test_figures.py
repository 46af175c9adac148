"""Figures of a replay, and the condition of --fail-if."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.cli.replay.figures import NAMES, condition, figures

BASE = figures([0.1] * 10, 50, 100, [0, 1] * 5, [0, 1] * 5, 2)
SLOWER = figures([0.2] * 10, 50, 100, [0, 0] * 5, [0, 1] * 5, 2)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("ttft_p95 > 1.1 * base", True),
        ("ttft_p95 > 2.1 * base", False),
        ("ttft_p95>base", True),
        ("hit_rate < base", False),
        ("hit_rate <= base", True),
        ("load >= 2", True),
        ("moved > 0.5", False),
    ],
)
def test_a_condition_compares_a_figure_with_a_number_or_the_base(text: str, holds: bool) -> None:
    assert condition(text).holds(SLOWER, BASE) is holds


def test_an_unknown_figure_is_refused_with_the_names_that_are_allowed() -> None:
    with pytest.raises(ValueError, match="'ttft' is no figure; allowed: requests, errors, ttft_mean"):
        condition("ttft > base")


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    try:
        assert condition(text).name in NAMES
    except ValueError as refused:
        assert "figure" in str(refused) or "condition" in str(refused)


def test_a_run_without_answers_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no request got an answer"):
        figures([], 0, 0, [-1], [-1], 1)
