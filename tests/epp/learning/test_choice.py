"""Tests of costs and of the rule without a model."""

import numpy as np
import pytest

from compiled.outlook import CELLS
from epp.learning.choice import careful_costs, scores
from epp.learning.model import REST, UNCACHED, FirstToken, Floats, LatencyModel

NOW = 100.0
TIMES, COSTS = range(2)


class Situation:
    """Three candidates for a prompt of 1000 tokens; columns that are not given: idle endpoints that hold nothing."""

    def __init__(self, **columns: list[float]) -> None:
        column = lambda name, default: np.array(columns.get(name, [default] * 3))  # noqa: E731
        self.tokens, self.ahead, self.elapsed = column("tokens", 1000.0), column("ahead", 0.0), column("elapsed", 0.0)
        self.load, self.waiting = column("load", 0.0), column("waiting", 0.0)
        self.running, self.kv_usage = column("running", 0.0), column("kv_usage", 0.0)
        self.prompt = max(1000.0, float(self.tokens.max()))

    def outlook(self, model: LatencyModel) -> Floats:
        starts = np.zeros((1, CELLS, 3))
        starts[0, 0] = np.where(self.elapsed > 0.0, NOW - self.elapsed, 0.0)
        none = np.zeros(3)
        held = self.prompt - self.tokens
        return model.outlook(np.arange(3), starts, NOW, self.prompt, held, 1.0, self.ahead, self.load, self.load, none, none, none, none)


def predicted(model: LatencyModel, **columns: list[float]) -> tuple[list[float], list[float]]:
    """Returns the predicted times, and by how much the costs exceed them."""
    found = Situation(**columns).outlook(model)
    return found[TIMES].tolist(), (found[COSTS] - found[TIMES]).tolist()


def best(costs: list[float]) -> int:
    return costs.index(min(costs))


def careful(**columns: list[float]) -> list[float]:
    at = Situation(**columns)
    waiting = (at.waiting, np.zeros(3), np.zeros(3))
    costs = careful_costs(at.prompt, at.outlook(LatencyModel()), waiting, at.running, at.kv_usage)
    return costs.tolist()


def test_predictions_equal_those_of_the_model() -> None:
    model = LatencyModel()
    for slot in range(3):
        for _ in range(20):
            model.scraped(slot, 0, 4, 1)
        model.learn_first(FirstToken(NOW, slot, 0, 1000.0, 500.0, 0.01, 3.0, 0.1, 0.1 * (1 + slot)))
    at = Situation(tokens=[1000.0, 200.0, 0.0], ahead=[0.0, 3000.0, 100.0], elapsed=[0.0, 0.1, 9.0], load=[0.0, 9.0, 4.0])
    times, costs = at.outlook(model)[:2].tolist()
    for i in range(3):
        one = model.first_token_s(i, at.tokens[i], at.ahead[i], at.elapsed[i], at.load[i], NOW)
        assert times[i] == pytest.approx(one)
        assert costs[i] >= times[i]


def test_the_wait_for_prompts_ahead_counts_twice_where_prompts_are_computed_in_turn() -> None:
    model = LatencyModel()
    at = {"ahead": [0.0, 5000.0, 5000.0], "elapsed": [0.0, 0.0, 0.2]}
    times, extra = predicted(model, **at)
    assert extra[0] == 0.0
    assert extra[1:] == pytest.approx([times[1] - times[0], times[2] - times[0]])
    model.first.theta[REST] = 0.2 * model.first.theta[UNCACHED]
    model.changes += 1
    times, extra = predicted(model, **at)
    assert max(extra) < 0.01 * max(times), "prompts are computed side by side"


def test_the_cost_of_a_place_in_a_full_batch_grows_with_the_own_prompt() -> None:
    model = LatencyModel()
    for slot in range(3):
        for _ in range(20):
            model.scraped(slot, 0, 8, 1)
    _, extra = predicted(model, tokens=[1000.0, 1000.0, 0.0], load=[3.0, 8.0, 8.0])
    assert extra[1] > 100.0 * extra[0] > 0.0
    assert extra[2] == 0.0


def test_without_a_model_the_fewest_tokens_to_compute_decide() -> None:
    assert best(careful(ahead=[500.0, 900.0, 0.0])) == 2
    assert best(careful(ahead=[0.0, 5000.0, 0.0], tokens=[9000.0, 0.0, 9000.0])) == 1


def test_without_a_model_requests_memory_and_prefixes_decide_where_tokens_are_about_equal() -> None:
    assert best(careful(waiting=[1.0, 0.0, 1.0], ahead=[0.0, 900.0, 0.0])) == 1
    assert best(careful(running=[4.0, 4.0, 1.0])) == 2
    assert best(careful(kv_usage=[0.9, 0.1, 0.9])) == 1
    assert best(careful(tokens=[1000.0, 1000.0, 0.0])) == 2


def test_without_a_model_a_long_queue_costs_more_than_a_cached_prefix_saves() -> None:
    tokens = [0.0, 3000.0, 3000.0]
    assert best(careful(waiting=[16.0, 0.0, 1.0], tokens=tokens)) == 0
    assert best(careful(waiting=[32.0, 0.0, 1.0], tokens=tokens)) == 1


def test_costs_without_a_model_are_above_0() -> None:
    assert min(careful(tokens=[0.0] * 3)) > 0.0


def scored(costs: list[float], load: list[float], error: float) -> list[float]:
    return scores(np.array(costs), np.array(load), error).tolist()


def test_candidates_within_the_error_of_the_model_are_told_apart_by_their_load() -> None:
    few, busy, other = scored([1.0, 1.05, 2.0], [9.0, 3.0, 0.0], 0.2)
    assert 0.99 < few < busy <= 1.0
    assert other < 0.51
    assert scored([1.0, 1.05, 2.0], [9.0, 3.0, 0.0], 0.0) == [1.0, 1.0 / 1.05, 0.5], "without a model, costs count as they are"
    assert scored([1.0, 1.5], [9.0, 0.0], 100.0)[1] < 0.9, "however large the error is, the part is bounded"


def test_milliseconds_decide_nothing() -> None:
    one, two, three = scored([0.001, 0.005, 0.02], [2.0, 2.0, 0.0], 0.1)
    assert one == two > three
