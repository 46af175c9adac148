"""Tests of the frames in which workers report what they observed."""

import pytest

from epp.learning import samples
from epp.learning.model import FirstToken, LatencyModel
from epp.prefix import updates

FIRST = samples.first_token(FirstToken(5.0, 3, 1 << 40, 1000.0, 0.0, 0.0, 2.0, 0.2, 0.1))
TOKEN = samples.per_token(4, 7, 2.0, 0.03, 1.5)


def test_a_model_learns_what_a_frame_says() -> None:
    model, expected = LatencyModel(), LatencyModel()
    assert samples.learn(model, samples.frame([FIRST, TOKEN])) == 2
    expected.learn_first(FirstToken(5.0, 3, 1 << 40, 1000.0, 0.0, 0.0, 2.0, 0.2, 0.1))
    expected.learn_token(4, 7, 2.0, 0.03, 1.5)
    assert model.first_token_s(3, 1000.0, 0.0, 0.0, 2.0, 5.0) == expected.first_token_s(3, 1000.0, 0.0, 0.0, 2.0, 5.0)
    assert model.per_token_s(4, 2.0) == expected.per_token_s(4, 2.0)
    assert model.endpoints[3].generation == 1 << 40


def test_a_full_frame_fits_into_one_message_of_the_bus() -> None:
    assert len(samples.frame([FIRST] * samples.SAMPLES_MAX)) <= samples.FRAME_BYTES_MAX


def test_frames_of_the_prefix_index_are_told_apart() -> None:
    assert samples.is_samples(samples.frame([FIRST]))
    for frame in (updates.single(2, b"12345678"), *updates.frames(updates.FORGET, [(2, b"12345678")]), b"", b"123"):
        assert not samples.is_samples(frame)


@pytest.mark.parametrize(
    "data",
    [
        samples.frame([FIRST])[:-1],
        samples.frame([FIRST]) + b"\0",
        samples.frame([FIRST])[:20] + b"\xff" + samples.frame([FIRST])[21:],
        b"\0" * samples.HEADER.size,
        b"",
        samples.frame([FIRST] * (samples.SAMPLES_MAX + 1)),
    ],
    ids=["truncated", "longer", "altered", "zeros", "empty", "too large"],
)
def test_a_bad_frame_is_refused_and_changes_nothing(data: bytes) -> None:
    model = LatencyModel()
    with pytest.raises(samples.CorruptSamples):
        samples.learn(model, data)
    assert model.changes == 0
