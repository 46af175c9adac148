"""Tests of the time that a server works on one prompt."""

import pytest

from epp.learning.model import REST, UNCACHED, LatencyModel
from epp.learning.prompt_time import ANSWERS, PromptTime


def taught(ahead_s: float) -> LatencyModel:
    """Returns a model of servers that take 0.1 s per 1,000 tokens, and others wait `ahead_s` for 1,000 tokens."""
    model = LatencyModel()
    model.first.theta[UNCACHED], model.first.theta[REST] = 0.1, ahead_s
    return model


def test_nothing_is_known_before_the_first_answer() -> None:
    assert PromptTime().seconds(taught(0.1)) == 0.0


def test_it_is_the_mean_of_tokens_times_what_others_wait_for_a_token() -> None:
    prompts = PromptTime()
    for tokens in (1_000.0, 3_000.0):
        prompts.add(tokens)
    assert prompts.seconds(taught(0.1)) == pytest.approx(0.2)
    assert prompts.seconds(taught(0.3)) == pytest.approx(0.2), "a prompt does not delay others longer than itself"


def test_prompts_that_do_not_delay_each_other_cost_no_replica() -> None:
    prompts = PromptTime()
    prompts.add(8_000.0)
    assert prompts.seconds(taught(0.0)) == 0.0


def test_the_mean_follows_prompts_that_become_longer() -> None:
    prompts = PromptTime()
    for _ in range(ANSWERS):
        prompts.add(1_000.0)
    for _ in range(3 * ANSWERS):
        prompts.add(2_000.0)
    assert 1_900.0 < prompts.tokens < 2_000.0
