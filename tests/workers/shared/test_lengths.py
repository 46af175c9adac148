"""Answers without usage get an estimated length, and the estimate says how good it is."""

import random

import pytest

from epp.recording.records import Ended
from workers.shared.recording.lengths import KNOWN_MIN, Lengths

EVENT = 180  # bytes of an event of the engine


def streamed(tokens: int, *, reports: bool, together: int = 1) -> Ended:
    """An answer of an event per token, `together` of them in a message, and two further events."""
    events = tokens + 2
    completion = tokens if reports else None
    return Ended(1, 200, 0, 0.1, 1.0, True, True, EVENT * events, None, None, completion, -(-events // together))


def estimated(answers: list[tuple[str, Ended]]) -> tuple[Lengths, str]:
    lengths = Lengths()
    for model, ended in answers:
        lengths.add(model, ended)
    return lengths, str(lengths.told())


def test_without_any_usage_a_message_of_the_answers_with_the_smallest_ones_is_a_token() -> None:
    rng = random.Random(1)
    answers = [("m", streamed(rng.randint(20, 400), reports=False, together=rng.choice((1, 2, 5)))) for _ in range(200)]
    lengths, said = estimated(answers)
    assert lengths.output("m", EVENT * 102) == pytest.approx(100, rel=0.05)
    assert said.startswith("200 of 200 streamed answers report no usage: their output tokens are estimated from their bytes")
    assert "is not known" in said


def test_answers_of_the_same_model_with_usage_say_how_many_bytes_a_token_has() -> None:
    reported = [("two tokens an event", replaced) for replaced in (doubled(streamed(100, reports=True)) for _ in range(KNOWN_MIN))]
    lengths, said = estimated([*reported, ("two tokens an event", streamed(100, reports=False)), ("m", streamed(50, reports=False))])
    assert lengths.output("two tokens an event", EVENT * 102) == 200
    assert lengths.output("m", EVENT * 52) == pytest.approx(50, rel=0.05)
    assert said.startswith("2 of 22 streamed answers report no usage")
    assert "off by 0% (median) where usage tells" in said


def doubled(ended: Ended) -> Ended:
    return Ended(1, 200, 0, 0.1, 1.0, True, True, ended.answer_bytes, None, None, 2 * (ended.completion or 0), ended.pieces)


def test_a_recording_of_an_earlier_version_has_no_numbers_of_messages() -> None:
    old = Ended(1, 200, 0, 0.1, 1.0, True, True, 22_000, None, None, None)
    assert estimated([("m", old)])[0].output("m", 22_000) == 100
