"""Tests of the speed of one endpoint."""

import math
import random

import pytest

from epp.learning.speed import LOG_MAX, Speed


def followed(speed: Speed, factor: float, count: int, noise: float = 0.2, seed: int = 1) -> None:
    """Lets `speed` learn from `count` answers of an endpoint that takes `factor` times the pool's mean."""
    rng = random.Random(seed)
    for _ in range(count):
        speed.learn(math.log(factor) + rng.gauss(0.0, noise) - speed.log)


def test_an_endpoint_that_becomes_three_times_slower_is_followed_within_twenty_answers() -> None:
    speed = Speed()
    followed(speed, 1.0, 500)
    followed(speed, 3.0, 20)
    assert math.exp(speed.log) == pytest.approx(3.0, rel=0.3)


@pytest.mark.parametrize("factor", [3.0, 1.0 / 3.0])
def test_where_times_vary_little_two_answers_show_a_change_and_few_more_its_size(factor: float) -> None:
    speed = Speed()
    followed(speed, 1.0, 200, noise=0.1)
    logs = []
    for seed in range(6):
        followed(speed, factor, 1, noise=0.1, seed=seed)
        logs.append(speed.log / math.log(factor))
    assert logs[0] < 0.1
    assert logs[1] > 0.4
    assert logs[5] == pytest.approx(1.0, abs=0.2)
    followed(speed, factor, 30, noise=0.1)
    assert speed.log == pytest.approx(math.log(factor), abs=0.1)


def test_a_single_answer_among_usual_ones_is_no_change() -> None:
    speed = Speed()
    followed(speed, 1.0, 200, noise=0.1)
    for seed in range(40):
        speed.learn(2.0)
        followed(speed, 1.0, 2, noise=0.1, seed=seed)
    assert abs(speed.log) < 0.5


def test_noise_hardly_moves_the_speed() -> None:
    speed, logs = Speed(), []
    followed(speed, 1.0, 200)
    for seed in range(300):
        followed(speed, 1.0, 1, seed=seed)
        logs.append(speed.log)
    assert math.sqrt(sum(log * log for log in logs) / len(logs)) < 0.12


def test_equal_endpoints_whose_times_vary_much_stay_nearly_equal() -> None:
    logs = []
    for seed in range(20):
        speed = Speed()
        for n in range(300):
            followed(speed, 1.0, 1, noise=0.5, seed=1000 * seed + n)
            logs.append(speed.log)
    late = logs[100:]
    assert math.sqrt(sum(log * log for log in late) / len(late)) < 0.14


def test_one_strange_answer_moves_the_speed_little() -> None:
    speed = Speed()
    followed(speed, 1.0, 200)
    before = speed.log
    speed.learn(20.0)
    assert abs(speed.log - before) < 0.4


def test_the_speed_is_bounded_whatever_was_observed() -> None:
    speed = Speed()
    for surprise in [50.0] * 200 + [-50.0] * 400:
        moved = speed.learn(surprise)
        assert abs(moved) <= 2 * LOG_MAX
        assert abs(speed.log) <= LOG_MAX
    assert speed.log == -LOG_MAX
