"""The margin follows late answers, and counts each answer once."""

from epp.learning.margin import FIRST, RATIO_MAX, Margin


def test_an_overdue_answer_raises_the_margin_before_it_comes() -> None:
    margin = Margin()
    expected = margin.sent(0.0, 1.0, 2.0)
    assert expected is not None
    margin.look(1.2)
    assert abs(margin.ratio - FIRST) < 1e-9
    margin.look(1.4)
    raised = margin.ratio
    assert raised > FIRST
    margin.came(expected, 5.0)
    assert margin.ratio == raised


def test_answers_in_time_lower_the_margin_slowly_and_it_stays_in_bounds() -> None:
    margin = Margin()
    for _ in range(20_000):
        expected = margin.sent(0.0, 1.0, 2.0)
        assert expected is not None
        margin.came(expected, 0.5)
    assert margin.ratio == 1.0
    for _ in range(500):
        margin.sent(0.0, 1.0, 2.0)
    margin.look(100.0)
    assert abs(margin.ratio - RATIO_MAX) < 1e-9


def test_answers_without_risk_and_failed_ones_say_nothing() -> None:
    margin = Margin()
    assert margin.sent(0.0, 0.1, 2.0) is None
    assert margin.sent(0.0, float("inf"), 2.0) is None
    failed = margin.sent(0.0, 1.0, 2.0)
    assert failed is not None
    failed.over = True
    margin.look(10.0)
    assert abs(margin.ratio - FIRST) < 1e-9
