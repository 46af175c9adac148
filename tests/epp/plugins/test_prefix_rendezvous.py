"""Which endpoints `prefix-rendezvous-scorer` names. The picker's replicas are two instances of it with one secret."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.prefix.match import PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import PROFILE, made, only, score
from tests.fakes import candidates, request

RENDEZVOUS = "prefix-rendezvous-scorer"
MATCH = prefix_match("approx-prefix-cache-producer")
BLOCKS = 6
TOKENS = 64
ENDPOINTS = 8


def pool(count: int = ENDPOINTS, **running: float) -> Candidates:
    """Candidates. `running`: requests of the endpoints that have any, by name, as in `pod_1=3.0`."""
    loads = [running.get(f"pod_{row}", 0.0) for row in range(count)]
    return candidates({"running_requests": loads, "waiting_requests": [0.0] * count})


def prompt(seed: int, held: list[float] | None = None, *, tokens: int = BLOCKS * TOKENS) -> Request:
    """A request with random blocks. `held`: leading blocks per endpoint."""
    r = request()
    hashes = np.random.default_rng(seed).integers(0, 1 << 64, BLOCKS, dtype=np.uint64)
    r[MATCH] = PrefixMatch(None if held is None else np.array(held), hashes, TOKENS, tokens)
    return r


def short_prompts() -> Request:
    """A request with several prompts, each shorter than a block: no hashes, but tokens of several blocks."""
    r = request()
    r[MATCH] = PrefixMatch(None, np.empty(0, np.uint64), TOKENS, 3 * TOKENS)
    return r


def named(c: Candidates, r: Request) -> list[str]:
    scores = score(made(RENDEZVOUS), c, r)
    return [endpoint.address for endpoint, value in zip(c.endpoints, scores, strict=True) if value == 1.0]


def test_two_pickers_name_the_same_two_endpoints_in_whatever_order_they_know_them() -> None:
    for seed in range(20):
        there, here = pool(), only(pool(), *reversed(range(ENDPOINTS)))
        assert named(there, prompt(seed)) == named(here, prompt(seed))
        assert len(named(here, prompt(seed))) == 2


def test_new_prefixes_spread_evenly() -> None:
    counts = np.zeros(ENDPOINTS)
    for seed in range(2000):
        counts += score(made(RENDEZVOUS), pool(), prompt(seed))
    assert counts.sum() == 4000
    assert counts.min() > 400
    assert counts.max() < 600


@given(st.integers(0, 1 << 32), st.integers(0, ENDPOINTS - 1))
def test_an_endpoint_that_leaves_changes_only_what_it_was_named_for(seed: int, gone: int) -> None:
    before = named(pool(), prompt(seed))
    after = named(only(pool(), *(row for row in range(ENDPOINTS) if row != gone)), prompt(seed))
    left = pool().endpoint(gone).address
    if left in before:
        assert set(before) - {left} < set(after)
    else:
        assert before == after


def test_what_two_endpoints_hold_changes_nothing_because_both_may_have_been_named_for_it() -> None:
    assert named(pool(), prompt(1, [6, 3, 0, 0, 0, 0, 0, 0])) == named(pool(), prompt(1))


def test_a_prefix_that_three_endpoints_hold_leaves_the_choice_to_the_block_behind_it() -> None:
    r = prompt(1, [6, 3, 2, 0, 0, 0, 0, 0])
    r[MATCH].hashes[:2] = 0  # other texts before, the same block behind
    first = named(pool(), r)
    assert first == named(pool(), prompt(1, [2, 2, 2, 2, 2, 2, 2, 2]))


@pytest.mark.parametrize(
    "r",
    [
        request(),
        prompt(1, tokens=TOKENS - 1),  # the only block is not whole
        prompt(1, [6.0] * ENDPOINTS),
        prompt(1, [6.0] * ENDPOINTS, tokens=100 * BLOCKS * TOKENS),
        short_prompts(),
    ],
    ids=["no prompt", "less than a block", "held everywhere", "held as far as it is hashed", "several short prompts"],
)
def test_without_a_block_to_name_endpoints_for_there_are_no_scores(r: Request) -> None:
    assert made(RENDEZVOUS).score(r, pool(), PROFILE) is None


def test_two_candidates_get_no_scores_because_both_would_be_named() -> None:
    assert made(RENDEZVOUS).score(prompt(1), pool(2), PROFILE) is None


def test_an_endpoint_that_is_clearly_busier_than_the_others_is_not_named() -> None:
    first, second = np.flatnonzero(score(made(RENDEZVOUS), pool(), prompt(1))).tolist()
    loads = {f"pod_{row}": 4.0 for row in range(ENDPOINTS)}
    busy = pool(**loads | {f"pod_{first}": 9.0})
    assert np.flatnonzero(score(made(RENDEZVOUS), busy, prompt(1))).tolist() == [second]
    even = pool(**loads | {f"pod_{first}": 7.0})
    assert np.flatnonzero(score(made(RENDEZVOUS), even, prompt(1))).tolist() == [first, second]
