"""Tests of models as bytes."""

import random

import msgspec
import pytest

from epp.learning.model import FirstToken, LatencyModel
from epp.learning.state import UnusableModel, decode, encode


def learned() -> LatencyModel:
    model, rng = LatencyModel(), random.Random(1)
    for step in range(300):
        slot, tokens = rng.randrange(4), rng.uniform(0.0, 9000.0)
        model.learn_first(
            FirstToken(step * 0.1, slot, 2, tokens, 100.0, 0.0, 3.0, 0.1, 0.05 + tokens * 1e-4 * (1 + slot))
        )
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


def test_bytes_that_are_no_model_are_refused() -> None:
    whole = encode(learned())
    fields = msgspec.msgpack.decode(whole)
    odd = [
        b"",
        whole[:-1],
        b"\x90",
        msgspec.msgpack.encode([99, *fields[1:]]),
        msgspec.msgpack.encode([fields[0], [[1.0], [1.0], [1.0], 3.0], *fields[2:]]),
        msgspec.msgpack.encode([*fields[:3], [float("nan")] * 4, *fields[4:]]),
        msgspec.msgpack.encode([*fields[:3], [1.0], *fields[4:]]),
    ]
    for data in odd:
        with pytest.raises(UnusableModel):
            decode(data)
