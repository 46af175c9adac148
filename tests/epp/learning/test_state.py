"""Tests of models as bytes."""

import random
from typing import Any

import msgspec
import pytest

from epp.learning.model import FirstToken, LatencyModel
from epp.learning.state import UnusableModel, decode, encode


def learned() -> LatencyModel:
    model, rng = LatencyModel(), random.Random(1)
    for step in range(300):
        slot, tokens = rng.randrange(4), rng.uniform(0.0, 9000.0)
        model.learn_first(FirstToken(step * 0.1, slot, 2, tokens, 100.0, 0.0, 3.0, 0.1, 0.05 + tokens * 1e-4 * (1 + slot)))
        model.learn_token(slot, 2, 3.0, 0.02, 1.0)
        model.scraped(slot, 2, 8.0, 1.0)
    return model


def test_a_decoded_model_predicts_and_learns_as_the_encoded_one() -> None:
    before = learned()
    after = decode(encode(before))
    for model in (before, after):
        for step in range(50):
            model.learn_first(FirstToken(40.0 + step, step % 4, 2, 500.0, 0.0, 0.0, 1.0, 0.1, 0.2))
        model.count_speeds()
    for slot in range(5):
        expected = before.first_token_s(slot, 2000.0, 3000.0, 0.1, 12.0, 100.0)
        assert after.first_token_s(slot, 2000.0, 3000.0, 0.1, 12.0, 100.0) == pytest.approx(expected, rel=1e-9)
        assert after.per_token_s(slot, 4.0) == pytest.approx(before.per_token_s(slot, 4.0), rel=1e-9)
    assert encode(decode(encode(after))) == encode(after)


def impossible(fit: list[Any]) -> list[list[Any]]:
    """Returns sums that no observations have: they could make a later division fail."""
    sums, count = fit
    first_product = 12  # after six coefficients and six moments
    return [
        [[*sums[:first_product], -0.003, *sums[first_product + 1 :]], count],
        [[-1.0, *sums[1:]], count],
        [sums, -5.0],
        [sums, float("nan")],
    ]


def test_bytes_that_are_no_model_are_refused() -> None:
    whole = encode(learned())
    fields = msgspec.msgpack.decode(whole)
    odd = [
        b"",
        whole[:-1],
        b"\x90",
        msgspec.msgpack.encode([99, *fields[1:]]),
        msgspec.msgpack.encode([fields[0], [[1.0], 3.0], *fields[2:]]),
        msgspec.msgpack.encode([*fields[:3], [float("nan")] * 4, *fields[4:]]),
        msgspec.msgpack.encode([*fields[:3], [1.0], *fields[4:]]),
    ]
    first, endpoint = fields[1], fields[5][0]
    odd += [b"\x91" * 100_000, b"\x91\xa1\xff"]  # nested too deeply; a text that is not UTF-8
    odd += [msgspec.msgpack.encode([fields[0], bad, *fields[2:]]) for bad in impossible(first)]
    slot, generation, speed, token_speed, full, numbers, errors = endpoint
    for wrong in (
        [slot, generation, [-3, speed[1]], token_speed, full, numbers, errors],
        [slot, generation, speed, [token_speed[0], [40.0, *token_speed[1][1:]]], full, numbers, errors],
        [slot, generation, [speed[0], [*speed[1][:2], -1.0]], token_speed, full, numbers, errors],
        [slot, generation, speed, token_speed, -1, numbers, errors],
        [slot, generation, speed, token_speed, full, [numbers[0], -1.0, *numbers[2:]], errors],
    ):
        odd.append(msgspec.msgpack.encode([*fields[:5], [wrong]]))
    for data in odd:
        with pytest.raises(UnusableModel):
            decode(data)


def test_a_model_that_has_seen_overdue_first_tokens_can_be_read() -> None:
    model = LatencyModel()
    for step in range(50):
        model.learn_first(FirstToken(1.0 + step, 0, 0, 500.0, 100.0, 5.0, 1.0, 0.2, 0.2))
    assert model.first.sums.min() < 0.0
    assert decode(encode(model)).first.theta == pytest.approx(model.first.theta)


def test_a_model_of_an_earlier_version_lacks_what_that_version_did_not_know() -> None:
    before = learned()
    fields = msgspec.msgpack.decode(encode(before))
    for _, _, _, _, _, numbers, _ in fields[5]:
        del numbers[4:]
    after = decode(msgspec.msgpack.encode(fields))
    for slot, known in after.endpoints.items():
        assert known.learned_at == before.endpoints[slot].learned_at
        assert (known.drift_at, known.computed) == (0.0, 0.0)
    assert decode(encode(before)).endpoints[3].computed == before.endpoints[3].computed > 0.0
