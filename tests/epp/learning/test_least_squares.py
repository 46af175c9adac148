"""Tests of the least squares that the latency model fits with."""

import math
import random

import pytest

from epp.learning.least_squares import LeastSquares

PRIOR = (0.03, 0.1, 0.1)


def fitted(truth: tuple[float, ...], count: int, *, noise: float = 0.0, seed: int = 1) -> LeastSquares:
    """Fits to `count` observations with random features. `noise`: the standard deviation of the relative error."""
    rng, fit = random.Random(seed), LeastSquares(PRIOR, 500.0)
    for _ in range(count):
        features = [1.0, rng.uniform(0.0, 10.0), rng.uniform(0.0, 10.0)]
        exact = sum(t * x for t, x in zip(truth, features, strict=True))
        fit.learn(features, exact * math.exp(rng.gauss(0.0, noise)), 0.02)
    return fit


@pytest.mark.parametrize("truth", [(0.03, 0.1, 0.1), (0.3, 0.4, 0.0), (0.005, 0.02, 0.05), (0.1, 0.0, 1.0)], ids=lambda truth: str(truth))
def test_finds_the_coefficients_of_a_linear_server(truth: tuple[float, ...]) -> None:
    fit = fitted(truth, 1000)
    for features in ([1.0, 5.0, 0.0], [1.0, 0.0, 5.0], [1.0, 5.0, 5.0]):
        exact = sum(t * x for t, x in zip(truth, features, strict=True))
        assert fit.predict(features) == pytest.approx(exact, rel=0.05, abs=0.01)


def test_tolerates_noise() -> None:
    fit = fitted((0.05, 0.2, 0.1), 2000, noise=0.2)
    assert fit.predict([1.0, 5.0, 5.0]) == pytest.approx(1.55, rel=0.1)


def test_forgets_how_a_server_was() -> None:
    fit = fitted((0.03, 0.1, 0.1), 1000)
    rng = random.Random(2)
    for _ in range(2000):
        x = rng.uniform(0.0, 10.0)
        fit.learn([1.0, x, 0.0], 0.03 + 0.5 * x, 0.02)
    assert fit.predict([1.0, 4.0, 0.0]) == pytest.approx(2.03, rel=0.05)


def test_keeps_the_prior_of_a_feature_that_never_occurs() -> None:
    fit = LeastSquares(PRIOR, 500.0)
    for _ in range(500):
        fit.learn([1.0, 2.0, 0.0], 0.23, 0.02)
    assert fit.theta[2] == pytest.approx(PRIOR[2])


def test_never_has_a_negative_coefficient_and_never_grows_without_bound() -> None:
    rng, fit = random.Random(3), LeastSquares(PRIOR, 500.0)
    for _ in range(5000):
        features = [1.0, rng.choice((0.0, 1e-9, 1.0, 1e6)), rng.choice((0.0, 5.0, 1e9))]
        fit.learn(features, rng.choice((1e-6, 1e-3, 1.0, 3600.0)), 0.02)
        assert all(0.0 <= coefficient < 1e6 for coefficient in fit.theta)
        assert all(math.isfinite(value) for value in fit.sums)
