"""Tests of what is said of a model: its coefficients in words, and the likely cause of poor predictions."""

from epp.learning.doubt import LONG_S, Doubt, cause
from epp.learning.model import FULL_SCRAPES, FirstToken, LatencyModel
from epp.learning.words import in_words, terms

NOW = 100.0


def slow_at(slot: int) -> LatencyModel:
    """Returns a model of three servers of which one is three times slower."""
    model = LatencyModel()
    for step in range(600):
        at, tokens = step % 3, 500.0 + 37.0 * (step % 50)
        seconds = (0.04 + 1e-4 * tokens) * (3.0 if at == slot else 1.0)
        model.learn_first(FirstToken(NOW, at, 0, tokens, 0.0, 0.0, 1.0, seconds, seconds))
    return model


def test_coefficients_are_words_of_the_field() -> None:
    model = LatencyModel()
    assert in_words(model, 0, NOW) == (
        "30 ms + 0.1 ms per uncached token + 0.1 ms per token ahead + 1 ms per running request (the pool's mean: no answer yet)"
    )


def test_the_cost_of_waiting_and_the_batch_limit_are_said_once_they_are_known() -> None:
    model = LatencyModel()
    for _ in range(FULL_SCRAPES + 1):
        model.scraped(0, 0, 8, 1)
    assert "+ 125 ms per waiting request +" in in_words(model, 0, NOW)
    assert ", at most 8 running" in in_words(model, 0, NOW)


def test_a_slow_endpoint_says_so() -> None:
    model = slow_at(1)
    assert "times the pool's mean" in in_words(model, 1, NOW)
    assert terms(model, 1, NOW)["per_uncached_token"] > 2.0 * terms(model, 0, NOW)["per_uncached_token"]


def poor() -> LatencyModel:
    model = slow_at(0)
    for step in range(300):
        model.learn_first(FirstToken(NOW, step % 3, 0, 500.0, 0.0, 0.0, 1.0, 10.0, 0.1))
    return model


def test_poor_predictions_are_reported_once_after_five_minutes() -> None:
    doubt, model = Doubt(), poor()
    said = [doubt.look(model, at, 5.0, 5.0) for at in (0.0, LONG_S - 1.0, LONG_S, LONG_S + 1.0, 3 * LONG_S)]
    assert [bool(text) for text in said] == [False, False, True, False, False]


def test_an_error_that_recovers_begins_the_five_minutes_anew() -> None:
    doubt, model = Doubt(), poor()
    assert not doubt.look(model, 0.0, 5.0, 5.0)
    assert not doubt.look(slow_at(0), 200.0, 5.0, 5.0)
    assert not doubt.look(model, LONG_S, 5.0, 5.0)
    assert doubt.look(model, 2 * LONG_S, 5.0, 5.0)


def test_few_observations_are_no_reason_to_warn() -> None:
    doubt, model = Doubt(), LatencyModel()
    for _ in range(100):
        model.learn_first(FirstToken(NOW, 0, 0, 500.0, 0.0, 0.0, 1.0, 10.0, 0.1))
    assert not any(doubt.look(model, at, 5.0, 5.0) for at in (0.0, LONG_S, 2 * LONG_S))


def test_the_likely_cause_is_named() -> None:
    model = poor()
    assert "other clients" in cause(model, 40.0, 5.0)
    assert "does not see" in cause(model, 5.0, 5.0)
    model.endpoints[1].error = 4 * model.error
    assert "one endpoint answers unlike the others" in cause(model, 5.0, 5.0)
