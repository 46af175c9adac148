"""A small recording keeps some requests per second, and beside them those that failed or were slow."""

import math
import random

from epp.recording.sample import PER_S, Sample

PLENTY = int(20 * PER_S)


def test_all_requests_are_kept_below_the_limit_and_the_limit_above_it() -> None:
    sample = Sample()
    assert all(sample.decided(1000.0 + number / (PER_S / 2)) for number in range(PLENTY))
    busy = Sample()
    kept = sum(busy.decided(1000.0 + 10 * number / PLENTY) for number in range(PLENTY))
    assert 10 * PER_S <= kept <= 11 * PER_S + 1


def test_a_failed_answer_is_kept_though_the_limit_of_usual_ones_is_reached() -> None:
    sample = Sample()
    while sample.decided(1000.0):
        pass
    assert sample.ended(503, 0.1, 1000.0)
    assert sample.ended(0, math.nan, 1000.0)
    assert sample.refused(1000.0)


def test_slow_answers_are_kept_and_usual_ones_are_not() -> None:
    rng = random.Random(1)
    sample = Sample()
    usual = [rng.lognormvariate(-2.0, 0.5) for _ in range(PLENTY)]
    kept = [first_s for number, first_s in enumerate(usual) if sample.ended(200, first_s, 1000.0 + number)]
    assert 0.03 < len(kept) / len(usual) < 0.07
    assert min(kept[20:]) > sorted(usual)[len(usual) // 2]
    assert sample.ended(200, 10.0, 5000.0)


def test_a_flood_of_failures_is_bounded() -> None:
    sample = Sample()
    assert sum(sample.ended(503, 0.1, 1000.0) for _ in range(PLENTY)) <= PER_S
