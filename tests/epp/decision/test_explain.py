"""Why an endpoint was chosen, in plain values."""

from typing import Any

import msgspec
import numpy as np

from epp.candidates import Candidates, Mask, Scores
from epp.data import KV_USAGE, WAITING
from epp.decision.decide import choose
from epp.decision.explain import CANDIDATES_MAX, Explanation, Filtered, explain
from epp.decision.pipeline import Pipeline, WiredProfile, Wiring, compile_pipeline
from epp.errors import Cause, Refused
from epp.plugin import Filter, NoParams, Plugin, Profile, Scorer
from epp.plugins.pickers.max_score import MaxScore
from epp.plugins.profiles import SingleProfile
from epp.plugins.scorers.reported import KvUtilization, QueueDepth
from epp.request import Request
from tests.fakes import FakePool, FakeServices, candidates, request


class Drops(Filter):
    """Keeps all but the endpoint at one index."""

    def __init__(self, index: int) -> None:
        super().__init__(f"drops-{index}", NoParams())
        self.index = index

    def keep(self, request: Request, candidates: Candidates, profile: Profile) -> Mask:
        return np.arange(len(candidates)) != self.index


class Constant(Scorer):
    """The same score for each candidate, or None."""

    def __init__(self, score: float | None) -> None:
        super().__init__("constant", NoParams())
        self._score = score

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores | None:
        return None if self._score is None else np.full(len(candidates), self._score)


def pipeline(*members: tuple[Plugin, float], shadow: tuple[tuple[Plugin, float], ...] = ()) -> Pipeline:
    picker = MaxScore("pick", MaxScore.Params())
    profiles = [WiredProfile("default", (*members, (picker, 1.0)))]
    if shadow:
        profiles.append(WiredProfile("other", (*shadow, (picker, 1.0)), shadow=True))
    plugins = {p.name: p for p, _ in (*members, *shadow)}
    compiled = compile_pipeline(
        Wiring((*plugins.values(), picker), (), SingleProfile("h", NoParams()), tuple(profiles), (), (KV_USAGE, WAITING))
    )
    compiled.start(FakeServices())
    return compiled


def explained(compiled: Pipeline, pool: FakePool) -> Explanation:
    r = request(b"a secret prompt", fairness_id="team-a", body_bytes=31)
    try:
        choose(compiled, r, pool).send(None)
    except StopIteration as done:
        return explain(compiled, r, done.value)
    except Refused as refused:
        return explain(compiled, r, None, refused)
    raise AssertionError("no plugin here waits")


QUEUE, KV = QueueDepth("queue", NoParams()), KvUtilization("kv", NoParams())


def three() -> FakePool:
    return FakePool(candidates({"waiting_requests": [4, 0, 2], "kv_cache_usage": [0.1, 0.9, 0.3]}, inflight=[0, 0, 0]))


def test_candidates_are_best_first_with_each_score_and_weight() -> None:
    # queue: (4 - x) / 4 of [4, 0, 2] = [0, 1, 0.5], times 2; kv: 1 - [0.1, 0.9, 0.3], times 3.
    (profile,) = explained(pipeline((QUEUE, 2.0), (KV, 3.0)), three()).profiles
    rows = {c.endpoint: (c.total, [(s.scorer, s.raw, s.weight, s.weighted) for s in c.scores]) for c in profile.candidates}
    assert rows == {
        "pod-0": (2.7, [("queue", 0.0, 2.0, 0.0), ("kv", 0.9, 3.0, 2.7)]),
        "pod-1": (2.3, [("queue", 1.0, 2.0, 2.0), ("kv", 0.1, 3.0, 0.3)]),
        "pod-2": (3.1, [("queue", 0.5, 2.0, 1.0), ("kv", 0.7, 3.0, 2.1)]),
    }
    totals = [c.total for c in profile.candidates]
    assert totals == sorted(totals, reverse=True)
    assert (profile.picked, profile.runner_up, profile.margin) == (["pod-2"], "pod-0", 0.4)


def test_a_static_scorer_is_explained_even_if_it_was_not_called_for_this_decision() -> None:
    compiled = pipeline((KV, 1.0))
    pool = three()
    first, second = explained(compiled, pool), explained(compiled, pool)
    assert first.profiles[0].candidates == second.profiles[0].candidates
    assert [s.raw for c in second.profiles[0].candidates for s in c.scores] == [0.9, 0.7, 0.1]


def test_the_values_are_those_that_the_decision_used() -> None:
    (profile,) = explained(pipeline((QUEUE, 1.0)), three()).profiles
    values = {c.endpoint: c.values for c in profile.candidates}
    assert values["pod-1"] == {"inflight_requests": 0.0, "kv_cache_usage": 0.9, "waiting_requests": 0.0}
    assert {c.state for c in profile.candidates} == {"fresh"}


def test_each_filter_is_listed_with_the_candidates_that_it_dropped() -> None:
    (profile,) = explained(pipeline((Drops(0), 1.0), (Drops(1), 1.0), (QUEUE, 1.0)), three()).profiles
    assert [(f.filter, f.kept, f.dropped, f.names) for f in profile.filters] == [("drops-0", 2, 1, ["pod-0"]), ("drops-1", 1, 1, ["pod-2"])]
    assert (profile.picked, profile.runner_up, profile.margin, profile.tied) == (["pod-1"], "", None, 1)


def test_a_refusal_shows_the_filter_that_kept_no_candidate() -> None:
    refusal = explained(pipeline((Drops(9), 1.0), (Drops(0), 1.0), (Drops(1), 1.0), (Drops(0), 1.0)), three())
    assert refusal.refused.startswith(Cause.NO_ENDPOINT_LEFT.value)
    (profile,) = refusal.profiles
    assert [(f.filter, f.kept) for f in profile.filters] == [("drops-9", 3), ("drops-0", 2), ("drops-1", 1), ("drops-0", 0)]
    assert profile.candidates == [] and refusal.targets == []


def test_equal_totals_count_as_tied() -> None:
    (profile,) = explained(pipeline((Constant(0.5), 2.0)), three()).profiles
    assert (profile.tied, profile.margin) == (3, 0.0)
    (profile,) = explained(pipeline((Constant(None), 2.0)), three()).profiles
    assert {s.raw for c in profile.candidates for s in c.scores} == {0.0}


def test_endpoints_that_are_down_appear_as_dropped_by_a_filter() -> None:
    down = FakePool(candidates({"waiting_requests": [4, 0, 2], "kv_cache_usage": [0, 0, 0]}, down=[False, True, False]))
    (profile,) = explained(pipeline((QUEUE, 1.0)), down).profiles
    assert profile.filters == [Filtered("(not down or ejected)", kept=2, dropped=1, names=["pod-1"])]
    (profile,) = explained(pipeline((Drops(0), 1.0), (QUEUE, 1.0)), down).profiles
    assert [(step.filter, step.kept, step.names) for step in profile.filters] == [
        ("drops-0", 2, ["pod-0"]),
        ("(not down or ejected)", 1, ["pod-1"]),
    ]


def test_a_shadow_profile_is_marked_as_shadow() -> None:
    explanation = explained(pipeline((QUEUE, 1.0), shadow=((KV, 1.0),)), three())
    assert [(p.profile, p.shadow, p.picked) for p in explanation.profiles] == [("default", False, ["pod-1"]), ("other", True, ["pod-0"])]
    assert explanation.targets == ["10.0.0.2:8000"]


def test_the_best_candidates_are_shown_and_the_rest_are_counted() -> None:
    many = FakePool(candidates({"waiting_requests": [float(i) for i in range(1000)]}))
    (profile,) = explained(pipeline((QUEUE, 1.0)), many).profiles
    assert len(profile.candidates) == CANDIDATES_MAX and profile.more == 1000 - CANDIDATES_MAX
    assert profile.candidates[0].endpoint == "pod-0"


def test_an_explanation_contains_no_prompt_and_survives_both_encodings() -> None:
    explanation = explained(pipeline((QUEUE, 1.0)), three())
    for codec in (msgspec.json, msgspec.msgpack):
        data: Any = codec.encode(explanation)
        assert b"prompt" not in data
        assert codec.decode(data, type=Explanation) == explanation
    assert (explanation.flow, explanation.body_bytes) == ("team-a", 31)
