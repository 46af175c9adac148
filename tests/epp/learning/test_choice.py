"""Tests of costs and of the rule without a model."""

import pytest

from epp.learning.choice import Situation, careful_costs, predicted_costs, scores
from epp.learning.model import REST, UNCACHED, FirstToken, LatencyModel

NOW = 100.0


def situation(**columns: list[float]) -> Situation:
    """Returns three candidates for a prompt of 1000 tokens; columns that are not given: idle endpoints that hold nothing."""
    column = lambda name, default: columns.get(name, [default] * 3)  # noqa: E731
    return Situation(
        [0, 1, 2],
        1000.0,
        column("tokens", 1000.0),
        column("ahead", 0.0),
        column("elapsed", 0.0),
        column("load", 0.0),
        column("waiting", 0.0),
    )


def best(costs: list[float]) -> int:
    return costs.index(min(costs))


def careful(at: Situation, limits: tuple[float, ...] = (0.0, 0.0, 0.0)) -> list[float]:
    return careful_costs(at, limits)


def test_predictions_equal_those_of_the_model() -> None:
    model = LatencyModel()
    for slot in range(3):
        for _ in range(20):
            model.scraped(slot, 0, 4, 1)
        model.learn_first(FirstToken(NOW, slot, 0, 1000.0, 500.0, 0.01, 3.0, 0.1, 0.1 * (1 + slot)))
    at = situation(
        tokens=[1000.0, 200.0, 0.0], ahead=[0.0, 3000.0, 100.0], elapsed=[0.0, 0.1, 9.0], load=[0.0, 9.0, 4.0]
    )
    times, costs = predicted_costs(model, at, NOW)
    for i in range(3):
        assert times[i] == model.first_token_s(i, at.tokens[i], at.ahead[i], at.elapsed[i], at.load[i], NOW)
        assert costs[i] >= times[i]


def test_the_wait_for_prompts_ahead_counts_twice_where_prompts_are_computed_in_turn() -> None:
    model = LatencyModel()
    at = situation(ahead=[0.0, 5000.0, 5000.0], elapsed=[0.0, 0.0, 0.2])
    times, costs = predicted_costs(model, at, NOW)
    extra = [cost - time for cost, time in zip(costs, times, strict=True)]
    assert extra[0] == 0.0
    assert extra[1] == pytest.approx(times[1] - times[0])
    assert extra[2] == pytest.approx(times[2] - times[0])
    model.first.theta[REST] = 0.2 * model.first.theta[UNCACHED]
    times, costs = predicted_costs(model, at, NOW)
    assert costs == pytest.approx(times, rel=0.01), "prompts are computed side by side"


def test_the_cost_of_a_place_in_a_full_batch_grows_with_the_own_prompt() -> None:
    model = LatencyModel()
    for slot in range(3):
        for _ in range(20):
            model.scraped(slot, 0, 8, 1)
    times, costs = predicted_costs(model, situation(tokens=[1000.0, 1000.0, 0.0], load=[3.0, 8.0, 8.0]), NOW)
    extra = [cost - time for cost, time in zip(costs, times, strict=True)]
    assert extra[1] > 100.0 * extra[0] > 0.0
    assert extra[2] == 0.0


def test_without_a_model_an_idle_endpoint_is_preferred_to_a_busy_one() -> None:
    assert best(careful(situation(load=[2.0, 0.0, 1.0]))) == 1
    assert best(careful(situation(ahead=[500.0, 900.0, 0.0]))) == 2


def test_without_a_model_no_request_goes_where_others_wait() -> None:
    assert best(careful(situation(waiting=[1.0, 0.0, 1.0], load=[0.0, 9.0, 0.0]))) == 1
    assert best(careful(situation(load=[8.0, 9.0, 8.0]), (8.0, 0.0, 8.0))) == 1


def test_without_a_model_the_holder_of_a_prefix_keeps_it_unless_the_tokens_ahead_outweigh_it() -> None:
    holds = [1000.0, 100.0, 1000.0]
    assert best(careful(situation(tokens=holds, load=[0.0, 5.0, 0.0], ahead=[0.0, 800.0, 0.0]))) == 1
    assert best(careful(situation(tokens=holds, load=[0.0, 5.0, 0.0], ahead=[0.0, 1800.0, 0.0]))) != 1


def test_candidates_within_the_error_of_the_model_are_told_apart_by_their_load() -> None:
    few, busy, other = scores([1.0, 1.05, 2.0], [9.0, 3.0, 0.0], 0.2)
    assert 0.99 < few < busy <= 1.0
    assert other < 0.51
    assert scores([1.0, 1.05, 2.0], [9.0, 3.0, 0.0], 0.0) == [1.0, 1.0 / 1.05, 0.5], (
        "without a model, costs count as they are"
    )
    assert scores([1.0, 1.5], [9.0, 0.0], 100.0)[1] < 0.9, "however large the error is, the part is bounded"


def test_milliseconds_decide_nothing() -> None:
    one, two, three = scores([0.001, 0.005, 0.02], [2.0, 2.0, 0.0], 0.1)
    assert one == two > three
