"""The page that ranks the candidates of a decision with other weights."""

import json
from http import HTTPStatus
from urllib.parse import urlencode

import pytest

from epp.decision.explain import Candidate, Explanation, Profiled, Scored
from workers.supervisor.pages.decisions import KEPT, WhatIfPage
from workers.supervisor.pages.page import PageAnswer, Request


def candidate(name: str, *raw: float, picked: bool = False) -> Candidate:
    weights = (3.0, 1.0)
    scores = [Scored(f"scorer-{at}", value, weight, value * weight) for at, (value, weight) in enumerate(zip(raw, weights, strict=True))]
    return Candidate(name, f"{name}:80", "fresh", picked, sum(s.weighted for s in scores), scores, {})


def decision(request_id: str, *candidates: Candidate) -> Explanation:
    profile = Profiled("main", False, "max-score-picker", 2, [], list(candidates), 0, ["a"], 1, "b", 1.0)
    return Explanation(
        request_id=request_id,
        model="m",
        target_model="m",
        flow="f",
        priority=0,
        body_bytes=1,
        targets=["a:80"],
        primary="main",
        headers={},
        profiles=[profile],
    )


@pytest.fixture
def page() -> WhatIfPage:
    page = WhatIfPage()
    page.remember([decision("one", candidate("a", 0.5, 0.1, picked=True), candidate("b", 0.2, 0.9))])
    return page


def ask(page: WhatIfPage, **query: object) -> PageAnswer:
    return page(Request("GET", "/debug/decisions/what-if", query=urlencode(query)))


def test_the_weights_of_the_decision_give_its_order(page: WhatIfPage) -> None:
    found = json.loads(ask(page, request_id="one", profile="main").body)  # type: ignore[arg-type]
    assert [(each["endpoint"], each["total"]) for each in found["ranked"]] == [("a", 1.6), ("b", 1.5)]
    assert (found["same"], found["margin"], found["weights"]) == (True, 0.1, {"scorer-0": 3.0, "scorer-1": 1.0})


def test_other_weights_give_another_order_with_the_same_scores(page: WhatIfPage) -> None:
    query = {"request_id": "one", "profile": "main", "scorer-0": 0.5}
    found = json.loads(ask(page, **query).body)  # type: ignore[arg-type]
    assert [(each["endpoint"], each["total"]) for each in found["ranked"]] == [("b", 1.0), ("a", 0.35)]
    assert found["ranked"][0]["parts"] == {"scorer-0": 0.1, "scorer-1": 0.9}
    assert found["same"] is False


@pytest.mark.parametrize("weight", ["nan", "inf", "-1", "much", "1e9"])
def test_a_weight_that_is_no_weight_is_refused(page: WhatIfPage, weight: str) -> None:
    answer = ask(page, **{"request_id": "one", "profile": "main", "scorer-0": weight})
    assert answer.status is HTTPStatus.BAD_REQUEST
    assert b"a weight is a number" in answer.body  # type: ignore[operator]


def test_an_unknown_decision_or_profile_is_not_found(page: WhatIfPage) -> None:
    assert ask(page, request_id="two", profile="main").status is HTTPStatus.NOT_FOUND
    assert ask(page, request_id="one", profile="other").status is HTTPStatus.NOT_FOUND


def test_only_the_newest_decisions_are_remembered(page: WhatIfPage) -> None:
    page.remember([decision(f"later-{number}", candidate("a", 0.5, 0.1)) for number in reversed(range(KEPT))])
    assert ask(page, request_id="one", profile="main").status is HTTPStatus.NOT_FOUND
    assert ask(page, request_id=f"later-{KEPT - 1}", profile="main").status is HTTPStatus.OK
