from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.decision import Decision, ProfileRun
from epp.prefix.match import APPROXIMATE, PrefixMatch, prefix_match
from epp.request import Request
from tests.epp.plugins.calls import PROFILE, made, only, permuted, profile, score
from tests.fakes import candidates, request

NEUTRAL = 0.5


def someone(size: int = 4) -> Candidates:
    return candidates(count=size)


def hitting(*blocks: float) -> Request:
    made = request()
    made[prefix_match(APPROXIMATE)] = PrefixMatch(np.array(blocks), np.zeros(9, np.uint64), 64)
    return made


def sent(scorer: Any, c: Candidates, row: int, r: Request | None = None, **others: int) -> None:
    """Scored, then sent to the candidate at `row`; `others` are further profiles and their targets."""
    r = r or request()
    score(scorer, c, r)
    runs: dict[str, ProfileRun | None] = {"default": ProfileRun(c, c.zeros(), (row,))}
    runs |= {name: ProfileRun(c, c.zeros(), (at,)) for name, at in others.items()}
    primary = runs["default"]
    assert primary is not None
    scorer.before_send(r, Decision(primary.targets, runs, "default"))


def test_never_used_endpoints_come_first_in_their_order_then_the_oldest() -> None:
    scorer, c = made("no-hit-lru-scorer"), someone()
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
    # oldest first: 0, 1, 3, 2
    assert score(scorer, c) == pytest.approx([1, 2 / 3, 0, 1 / 3])


def test_cold_requests_go_around() -> None:
    scorer, c, turns = made("no-hit-lru-scorer"), someone(3), []
    for _ in range(6):
        best = int(np.argmax(score(scorer, c)))
        turns.append(best)
        sent(scorer, c, best)
    assert turns == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("r", [request(), hitting(0, 0, 0, 0)])
def test_a_single_candidate_scores_one(r: Request) -> None:
    assert score(made("no-hit-lru-scorer"), only(someone(), 2), r) == [1.0]


def test_a_hit_at_any_candidate_makes_all_alike_and_leaves_the_order() -> None:
    scorer, c = made("no-hit-lru-scorer"), someone(3)
    before = score(scorer, c)
    assert score(scorer, c, hitting(0, 2, 0)) == [NEUTRAL] * 3
    sent(scorer, c, 0, hitting(0, 2, 0))
    assert score(scorer, c) == before


def test_a_hit_at_an_endpoint_that_was_filtered_out_does_not_count() -> None:
    assert score(made("no-hit-lru-scorer"), only(someone(3), 0, 2), hitting(0, 2, 0)) == [1.0, 0.0]


def test_the_target_of_the_prefill_profile_is_used_too_and_no_other() -> None:
    scorer, c = made("no-hit-lru-scorer"), someone(4)
    sent(scorer, c, 1, prefill=3, encode=0)
    # never used: 0, 2; then 1, 3
    assert score(scorer, c) == pytest.approx([1, 1 / 3, 2 / 3, 0])


def test_what_a_shadow_profile_saw_does_not_count() -> None:
    scorer, c, r = made("no-hit-lru-scorer"), someone(3), request()
    score(scorer, c, r)
    r[prefix_match(APPROXIMATE)] = hitting(1, 0, 0)[prefix_match(APPROXIMATE)]
    score(scorer, c, r, profile("shadow"))
    run = ProfileRun(c, c.zeros(), (0,))
    scorer.before_send(r, Decision(run.targets, {"default": run}, "default"))
    assert score(scorer, c) == [0.0, 1.0, 0.5]


def test_a_profile_without_a_target_and_a_request_that_was_not_scored_use_nobody() -> None:
    scorer, c = made("no-hit-lru-scorer"), someone(2)
    run = ProfileRun(c, c.zeros(), (0,))
    scorer.before_send(request(), Decision(run.targets, {"default": run}, "default"))
    assert score(scorer, c) == [1.0, 0.0]
    r = request()
    score(scorer, c, r)
    scorer.before_send(r, Decision(run.targets, {"default": run, "prefill": None}, "default"))
    assert score(scorer, c) == [0.0, 1.0]


def test_the_order_survives_a_new_roster_and_an_endpoint_that_is_gone() -> None:
    scorer = made("no-hit-lru-scorer")
    for row in (2, 0, 1):
        sent(scorer, someone(3), row)
    # oldest first: 2, 0, 1; endpoint 3 is new
    assert score(scorer, someone(4)) == pytest.approx([1 / 3, 0, 2 / 3, 1])
    assert score(scorer, someone(2)) == [1.0, 0.0]
    assert score(scorer, someone(3)) == [0.5, 0.0, 1.0]


def test_the_endpoint_used_longest_ago_is_forgotten_at_the_limit() -> None:
    scorer, c = made("no-hit-lru-scorer", lruSize=2), someone(3)
    for row in (0, 1, 2):
        sent(scorer, c, row)
    # 0 counts as never used; the rest oldest first
    assert score(scorer, c) == [1.0, 0.5, 0.0]
    for row in (2, 0, 2, 1):
        sent(scorer, c, row)
    assert score(scorer, c) == [1.0, 0.0, 0.5]
    assert len(scorer._used) == 2


@pytest.mark.parametrize("size", [0, -4])
def test_no_size_is_the_default_size(size: int) -> None:
    assert made("no-hit-lru-scorer", lruSize=size)._size == 1024


def test_whose_matches_are_read_is_configured_and_the_older_words_have_no_effect() -> None:
    assert made("no-hit-lru-scorer").consumes == (prefix_match(APPROXIMATE),)
    assert made("no-hit-lru-scorer", prefixMatchInfoProducerName="").consumes == (prefix_match(APPROXIMATE),)
    assert made("no-hit-lru-scorer", prefixMatchInfoProducerName="p").consumes == (prefix_match("p"),)
    said = made("no-hit-lru-scorer", prefixPluginType="a", prefixPluginName="b").without_effect
    assert [text.partition(":")[0] for text in said] == ["prefixPluginType", "prefixPluginName"]


@given(st.lists(st.integers(0, 7), max_size=30), st.sets(st.integers(0, 7), min_size=1), st.randoms())
def test_used_endpoints_score_by_age_alone_and_all_scores_differ(
    history: Sequence[int], left: set[int], rng: Any
) -> None:
    scorer, c = made("no-hit-lru-scorer"), someone(8)
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
