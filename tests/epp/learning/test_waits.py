"""Tests of the costs of waiting for a prefix, and of computing it twice."""

import numpy as np
import pytest

from compiled.outlook import AHEAD, CELLS, COSTS, TIMES, UNCACHED
from epp.candidates import Floats
from epp.learning.choice import careful_costs
from epp.learning.model import LatencyModel
from epp.learning.waits import LONG_TOKENS, SIBLINGS_S, TWICE, Wait, add_waits, without_waits

PROMPT, QUESTION = 8_000.0, 100.0
NOW = 50.0
SLOTS = np.arange(2)
NONE = np.zeros(2)


def outlook(ahead: float = 0.0, load: float = 1.0) -> Floats:
    """Endpoint 0 computes the prompt of a sibling, and endpoint 1 is idle."""
    held = np.array([PROMPT - QUESTION, 0.0])
    return LatencyModel().outlook(
        SLOTS, np.zeros((1, CELLS, 2)), NOW, PROMPT, held, 1.0, np.array([ahead, 0.0]), np.array([load, 0.0]), NONE, NONE, NONE, NONE, NONE
    )


def sibling(ago: float = 0.005, shared: float = PROMPT - QUESTION, tokens: float = PROMPT) -> Wait:
    return Wait(0, shared, NOW - ago, tokens)


def weighed(before: Floats, *waits: Wait) -> Floats:
    found = before.copy()
    add_waits(LatencyModel(), [0, 1], PROMPT, found, waits, NOW)
    return found


@pytest.mark.parametrize("shared", [PROMPT - QUESTION, 500.0], ids=["long", "short"])
def test_the_first_token_comes_after_the_prefill_that_is_waited_for(shared: float) -> None:
    model, wait = LatencyModel(), sibling(ago=0.09, shared=shared)
    expected = model.alone_s(0, PROMPT, NOW) - 0.09 + model.alone_s(0, QUESTION, NOW)
    assert weighed(outlook(), wait)[TIMES, 0] == pytest.approx(expected)
    assert weighed(outlook(), wait)[COSTS, 0] > outlook()[COSTS, 0]


def test_a_prefill_that_should_have_ended_is_not_waited_for() -> None:
    assert weighed(outlook(), sibling(ago=100.0))[TIMES, 0] == outlook()[TIMES, 0]


def test_where_prompts_wait_for_each_other_the_wait_for_a_prefix_does_not_count_twice() -> None:
    before = outlook(ahead=3 * PROMPT)
    assert weighed(before, sibling())[TIMES, 0] == before[TIMES, 0]


def test_siblings_wait_where_their_prefix_is_computed() -> None:
    before = outlook(ahead=1.5 * PROMPT)
    found = weighed(before, sibling())
    assert before[COSTS, 0] > before[COSTS, 1]
    assert found[COSTS, 0] < found[COSTS, 1]
    assert found[COSTS, 1] - before[COSTS, 1] == pytest.approx(TWICE * 0.1 * (PROMPT - QUESTION) / 1_000)


def test_they_do_not_wait_if_that_is_predicted_to_take_longer() -> None:
    found = weighed(outlook(ahead=3 * PROMPT), sibling())
    assert found[COSTS, 1] < found[COSTS, 0]


@pytest.mark.parametrize("wait", [sibling(ago=2 * SIBLINGS_S), sibling(shared=LONG_TOKENS - 1.0)])
def test_later_requests_and_short_prefixes_get_a_second_copy_at_no_extra_cost(wait: Wait) -> None:
    before = outlook(ahead=PROMPT)
    assert weighed(before, wait)[COSTS, 1] == before[COSTS, 1]
    assert without_waits(before, [wait], NOW) is before


def test_without_a_model_siblings_wait_as_well() -> None:
    before = outlook(ahead=PROMPT, load=5.0)
    done = without_waits(before, [sibling()], NOW)
    assert before[AHEAD, 0] == PROMPT
    assert (done[AHEAD, 0], done[UNCACHED, 0]) == (0.0, QUESTION)
    costs = careful_costs(PROMPT, done, (NONE, NONE, NONE), NONE, NONE)
    assert costs[0] < costs[1]
