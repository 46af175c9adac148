"""Receipts: what is sealed is opened again, nothing else is, and an id tells its bearer nothing."""

import base64
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decide import choose
from epp.decision.pipeline import Pipeline
from epp.decision.receipt import ID_BYTES, ID_CHARS_MAX, SALT_BYTES, BadReceipt, Place, Reason, Receipt, Seal, hash_of, receipt_of
from epp.plugin import NoParams
from epp.plugins.scorers.reported import KvUtilization, QueueDepth
from tests.epp.decision.test_explain import pipeline
from tests.fakes import FakePool, candidates, request

SEAL = Seal(0x1234_5678_9ABC_DEF0)
WORDS = st.integers(0, 2**32 - 1)
BYTES = st.integers(0, 255)
PLACES = st.builds(Place, WORDS, WORDS)
FLOATS = st.floats(width=32, allow_nan=False)
RECEIPTS = st.builds(
    Receipt, WORDS, BYTES, WORDS, WORDS, st.sampled_from(Reason), BYTES, BYTES, PLACES, PLACES, FLOATS, st.integers(-1, 2**31 - 1), FLOATS
)
ONE = Receipt(5, 1, 2, hash_of("id"), Reason.SCORER, 0, 3, Place(1, 1), Place(2, 1), 0.25, 512, math.nan)


def sealed(receipt: Receipt) -> str:
    return SEAL.seal(receipt, bytes(SALT_BYTES))


@given(RECEIPTS)
def test_what_is_sealed_is_opened_again(receipt: Receipt) -> None:
    text = sealed(receipt)
    assert SEAL.open(text) == receipt
    assert len(text) == 92
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


@given(RECEIPTS, st.integers(0, ID_BYTES * 8 - 1))
def test_a_receipt_with_any_bit_changed_is_refused(receipt: Receipt, bit: int) -> None:
    data = bytearray(base64.urlsafe_b64decode(sealed(receipt)))
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadReceipt):
        SEAL.open(base64.urlsafe_b64encode(data).decode().rstrip("="))


@given(st.text(max_size=2 * ID_CHARS_MAX) | st.binary(max_size=90).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadReceipt):
        SEAL.open(text)


def bits(first: str, second: str) -> int:
    """The number of bits in which two ids differ."""
    one, two = (base64.urlsafe_b64decode(text) for text in (first, second))
    return sum((a ^ b).bit_count() for a, b in zip(one, two, strict=True))


@given(RECEIPTS, st.integers(0, 31))
def test_a_client_cannot_compare_predictions_of_two_receipts(receipt: Receipt, bit: int) -> None:
    """Ids of receipts that differ in one bit of a prediction differ in half of their bits, as do ids of two equal receipts."""
    other = receipt._replace(cached_tokens=receipt.cached_tokens ^ 1 << bit if bit < 31 else -1)
    assert 0.25 < bits(sealed(receipt), SEAL.seal(other, bytes(range(SALT_BYTES)))) / (8 * ID_BYTES) < 0.75
    assert 0.25 < bits(sealed(receipt), SEAL.seal(receipt, bytes(range(SALT_BYTES)))) / (8 * ID_BYTES) < 0.75


def test_no_number_of_a_receipt_can_be_read_from_its_id() -> None:
    """Ids of receipts with the same value in all fields share no byte but the version: none of them is in the clear."""
    ids = [base64.urlsafe_b64decode(SEAL.seal(ONE, n.to_bytes(SALT_BYTES, "little"))) for n in range(200)]
    assert [len(set(column)) == 1 for column in zip(*ids, strict=True)] == [True] + [False] * (ID_BYTES - 1)


def test_a_receipt_of_another_secret_is_refused_with_the_cause() -> None:
    with pytest.raises(BadReceipt, match="not made here"):
        Seal(7).open(sealed(ONE))


def test_numbers_that_are_too_large_are_cut_and_do_not_fail() -> None:
    read = SEAL.open(sealed(ONE._replace(worker=300, configuration=2**40 + 1, scorer=256)))
    assert (read.worker, read.configuration, read.scorer) == (44, 1, 0)


def test_an_unknown_prediction_stays_unknown() -> None:
    assert math.isnan(SEAL.open(sealed(ONE)).first_token_s)


def receipt(compiled: Pipeline, pool: FakePool) -> Receipt:
    asked = request(b"prompt", id="one")
    with pytest.raises(StopIteration) as done:
        choose(compiled, asked, pool).send(None)
    return receipt_of(compiled, asked, done.value.value, at=9.5, worker=1, configuration=4)


def pool(waiting: list[float], usage: list[float]) -> FakePool:
    return FakePool(candidates({"waiting_requests": waiting, "kv_cache_usage": usage}, count=len(waiting)))


def test_the_scorer_that_contributes_most_to_the_lead_is_the_reason() -> None:
    kv, queue = KvUtilization("kv", NoParams()), QueueDepth("queue", NoParams())
    found = receipt(pipeline((kv, 1.0), (queue, 2.0)), pool([0, 5, 9], [0.5, 0.4, 0.9]))
    assert (found.reason, found.scorer, found.profile) == (Reason.SCORER, 1, 0)
    assert (found.target.slot, found.runner_up.slot) == (0, 1)
    assert (found.at, found.worker, found.configuration, found.request) == (9, 1, 4, hash_of("one"))
    assert found.margin > 0
    assert found.cached_tokens == -1
    assert math.isnan(found.first_token_s)


def test_equal_totals_and_a_single_candidate_have_their_own_reasons() -> None:
    queue = QueueDepth("queue", NoParams())
    tied = receipt(pipeline((queue, 1.0)), pool([3, 3], [0, 0]))
    assert (tied.reason, tied.margin) == (Reason.TIED, 0.0)
    alone = receipt(pipeline((queue, 1.0)), pool([3], [0]))
    assert (alone.reason, alone.runner_up) == (Reason.ONLY, Place())
