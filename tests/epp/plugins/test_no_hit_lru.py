from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import PROFILE, made, only, permuted, profile, score
from tests.fakes import candidates, request

NEUTRAL = 0.5


def endpoints(size: int = 4) -> Candidates:
    return candidates(count=size)


def hitting(*blocks: float) -> Request:
    made = request()
    made[prefix_match(APPROXIMATE)] = PrefixMatch(np.array(blocks), np.zeros(9, np.uint64), 64)
    return made


def sent(scorer: Any, c: Candidates, row: int, r: Request | None = None, **others: int) -> None:
    """Scores a request, then sends it to the candidate at `row`. `others` are further profiles with their targets."""
    r = r or request()
    score(scorer, c, r)
    runs: dict[str, ProfileRun | None] = {"default": ProfileRun(c, c.zeros(), (row,))}
    runs |= {name: ProfileRun(c, c.zeros(), (at,)) for name, at in others.items()}
    primary = runs["default"]
    assert primary is not None
    scorer.before_send(r, Decision(primary.targets, runs, "default"))


def test_endpoints_never_used_come_first_in_candidate_order_then_the_least_recently_used() -> None:
    scorer, c = made("no-hit-lru-scorer"), endpoints()
    # ranks 0, 1, 2, 3 of n - 1 = 3
    assert score(scorer, c) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    sent(scorer, c, 2)
    # never used: 0, 1, 3; then 2
    assert score(scorer, c) == pytest.approx([1, 2 / 3, 0, 1 / 3])
    sent(scorer, c, 0)
    # never used: 1, 3; then 2, 0
    assert score(scorer, c) == pytest.approx([0, 1, 1 / 3, 2 / 3])
    for row in (1, 3, 2):
        sent(scorer, c, row)
    # least recently used first: 0, 1, 3, 2
    assert score(scorer, c) == pytest.approx([1, 2 / 3, 0, 1 / 3])


def test_cold_requests_rotate_over_the_endpoints() -> None:
    scorer, c, turns = made("no-hit-lru-scorer"), endpoints(3), []
    for _ in range(6):
        best = int(np.argmax(score(scorer, c)))
        turns.append(best)
        sent(scorer, c, best)
    assert turns == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("r", [request(), hitting(0, 0, 0, 0)])
def test_a_single_candidate_scores_one(r: Request) -> None:
    assert score(made("no-hit-lru-scorer"), only(endpoints(), 2), r) == [1.0]


def test_a_hit_at_any_candidate_scores_all_the_same_and_keeps_the_order() -> None:
    scorer, c = made("no-hit-lru-scorer"), endpoints(3)
    before = score(scorer, c)
    assert score(scorer, c, hitting(0, 2, 0)) == [NEUTRAL] * 3
    sent(scorer, c, 0, hitting(0, 2, 0))
    assert score(scorer, c) == before


def test_a_hit_at_an_endpoint_that_was_filtered_out_is_ignored() -> None:
    assert score(made("no-hit-lru-scorer"), only(endpoints(3), 0, 2), hitting(0, 2, 0)) == [1.0, 0.0]


def test_only_the_targets_of_the_primary_and_the_prefill_profile_count_as_used() -> None:
    scorer, c = made("no-hit-lru-scorer"), endpoints(4)
    sent(scorer, c, 1, prefill=3, encode=0)
    # never used: 0, 2; then 1, 3
    assert score(scorer, c) == pytest.approx([1, 1 / 3, 2 / 3, 0])


def test_the_match_that_a_shadow_profile_saw_is_ignored() -> None:
    scorer, c, r = made("no-hit-lru-scorer"), endpoints(3), request()
    score(scorer, c, r)
    r[prefix_match(APPROXIMATE)] = hitting(1, 0, 0)[prefix_match(APPROXIMATE)]
    score(scorer, c, r, profile("shadow"))
    run = ProfileRun(c, c.zeros(), (0,))
    scorer.before_send(r, Decision(run.targets, {"default": run}, "default"))
    assert score(scorer, c) == [0.0, 1.0, 0.5]


def test_a_request_without_a_score_and_a_profile_without_a_target_use_no_endpoint() -> None:
    scorer, c = made("no-hit-lru-scorer"), endpoints(2)
    run = ProfileRun(c, c.zeros(), (0,))
    scorer.before_send(request(), Decision(run.targets, {"default": run}, "default"))
    assert score(scorer, c) == [1.0, 0.0]
    r = request()
    score(scorer, c, r)
    scorer.before_send(r, Decision(run.targets, {"default": run, "prefill": None}, "default"))
    assert score(scorer, c) == [0.0, 1.0]


def test_the_order_survives_a_new_endpoint_list_and_a_removed_endpoint() -> None:
    scorer = made("no-hit-lru-scorer")
    for row in (2, 0, 1):
        sent(scorer, endpoints(3), row)
    # least recently used first: 2, 0, 1; endpoint 3 is new
    assert score(scorer, endpoints(4)) == pytest.approx([1 / 3, 0, 2 / 3, 1])
    assert score(scorer, endpoints(2)) == [1.0, 0.0]
    assert score(scorer, endpoints(3)) == [0.5, 0.0, 1.0]


def test_at_the_limit_the_least_recently_used_endpoint_is_forgotten() -> None:
    scorer, c = made("no-hit-lru-scorer", lruSize=2), endpoints(3)
    for row in (0, 1, 2):
        sent(scorer, c, row)
    # 0 counts as never used; then the least recently used
    assert score(scorer, c) == [1.0, 0.5, 0.0]
    for row in (2, 0, 2, 1):
        sent(scorer, c, row)
    assert score(scorer, c) == [1.0, 0.0, 0.5]
    assert len(scorer._used) == 2


@pytest.mark.parametrize("size", [0, -4])
def test_a_size_of_0_or_less_means_the_default(size: int) -> None:
    assert made("no-hit-lru-scorer", lruSize=size)._size == 1024


def test_the_producer_of_the_matches_is_configurable() -> None:
    assert made("no-hit-lru-scorer").consumes == (prefix_match(APPROXIMATE),)
    assert made("no-hit-lru-scorer", prefixMatchInfoProducerName="").consumes == (prefix_match(APPROXIMATE),)
    assert made("no-hit-lru-scorer", prefixMatchInfoProducerName="p").consumes == (prefix_match("p"),)


@given(st.lists(st.integers(0, 7), max_size=30), st.sets(st.integers(0, 7), min_size=1), st.randoms())
def test_used_endpoints_score_by_age_alone_and_all_scores_differ(history: Sequence[int], left: set[int], rng: Any) -> None:
    scorer, c = made("no-hit-lru-scorer"), endpoints(8)
    for row in (*range(8), *history):
        sent(scorer, c, row)
    scores = score(scorer, only(c, *left))
    assert all(0 <= s <= 1 for s in scores)
    used = [*range(8), *history]
    age = {row: used[::-1].index(row) for row in left}
    rows = sorted(left)
    by_score = [rows[index] for index in np.argsort(scores)[::-1]]
    assert by_score == sorted(left, key=lambda row: -age[row])
    assert len(set(scores)) == len(scores)
    assert permuted(scores, range(len(scores))) == score(scorer, only(c, *left), profile=PROFILE)
