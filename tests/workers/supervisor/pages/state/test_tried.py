"""A candidate that is tried, as `epp top` shows it."""

import json
from dataclasses import replace

import msgspec
import pytest

from epp.decision.tryout import BY_FLOW, WHOLE, Share, Side
from epp.metrics.buckets import TRYOUT_FIRST_TOKEN_S
from tests.workers.cli.top.test_view import printed
from tests.workers.supervisor.pages.state.looks import area, look, of
from workers.shared.reload_status import TryoutStatus
from workers.supervisor.pages.state.figures import Figures
from workers.supervisor.pages.state.look import Configuration, tryout_figures

BUCKETS = (0,) * 20 + (50,) + (0,) * (len(TRYOUT_FIRST_TOKEN_S) - 20)
USUAL = Side(50, 1, 1000, 250, 50, 0.05, BUCKETS)
TRIED = TryoutStatus(3, "abc", "c.yaml", Share(WHOLE // 20, BY_FLOW), 1.0, USUAL, Side(), 8, 1, 1)


def shown(tried: TryoutStatus | None) -> Figures:
    configuration = Configuration(generation=2, hash="def", workers=1, tryout=tryout_figures(tried))
    return of(replace(look(areas=(area(), area())), configuration=configuration))


def test_both_sides_are_shown_with_their_figures() -> None:
    text = printed(shown(TRIED), 120)
    assert "candidate 3 (abc) of c.yaml  decides 5% of the requests, by flow" in text
    usual = next(line.split() for line in text.splitlines() if line.startswith("in force"))
    assert usual[2:4] == ["50", "2%"]
    assert "25%" in usual
    candidate = next(line.split() for line in text.splitlines() if line.startswith("candidate  "))
    assert candidate[1:] == ["0", *"–" * 6]


def test_a_shadow_shows_how_often_it_agrees() -> None:
    text = printed(shown(msgspec.structs.replace(TRIED, share=Share())), 120)
    assert "a shadow  10 decisions compared, 80% agreed, 1 failed" in text


def test_without_a_candidate_nothing_is_shown() -> None:
    assert "candidate" not in printed(shown(None), 120)


def test_the_figures_in_json_have_names() -> None:
    found = json.loads(msgspec.json.encode(shown(TRIED)))["configuration"]["tryout"]
    assert (found["generation"], found["share"], found["by"], found["agreed"]) == (3, 0.05, "flow", 8)
    usual, candidate = found["sides"]
    assert (usual["configuration"], usual["requests"], usual["error_share"]) == ("in_force", 50, 0.02)
    assert usual["first_token_p95_s"] == pytest.approx(TRYOUT_FIRST_TOKEN_S[20])
    assert (usual["computed_tokens"], usual["decision_s"], candidate["cached_share"]) == (15.0, 0.001, None)
