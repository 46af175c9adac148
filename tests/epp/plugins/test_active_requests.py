from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.config.load import ConfigErrors, load
from tests.cases import cases
from tests.epp.plugins.calls import PROFILE, made, only, permuted, score
from tests.fakes import candidates, request

ANY: dict[str, list[float]] = {}


def in_flight(*counts: float) -> Any:
    return candidates(ANY, count=len(counts), inflight=counts)


@cases(
    ("parameters", "counts", "expected"),
    [
        # (most - count) / most with most = 4
        ({}, [0, 1, 2, 4], [1.0, 0.75, 0.5, 0.0]),
        # the same times 0.5, except for the idle one
        ({"maxBusyScore": 0.5}, [0, 1, 2, 4], [1.0, 0.375, 0.25, 0.0]),
        # an endpoint with at most 2 is idle; (8 - 4) / 8
        ({"idleThreshold": 2}, [0, 2, 4, 8], [1.0, 1.0, 0.5, 0.0]),
        ({"idleThreshold": 2, "maxBusyScore": 0}, [2, 4, 8], [1.0, 0.0, 0.0]),
        ({"idleThreshold": -1}, [0, 4], [1.0, 0.0]),
        ({}, [0, 0], [1.0, 1.0]),
        ({}, [3, 3], [0.0, 0.0]),
        ({"idleThreshold": 3}, [3, 1], [1.0, 1.0]),
        # a value out of range means 1
        ({"maxBusyScore": 7}, [2, 4], [0.5, 0.0]),
        ({"maxBusyScore": -0.1}, [2, 4], [0.5, 0.0]),
    ],
)
def test_idle_endpoints_score_one_and_busy_ones_by_their_share_of_the_largest_count(
    parameters: dict[str, float], counts: list[float], expected: list[float]
) -> None:
    assert score(made("active-request-scorer", **parameters), in_flight(*counts)) == expected


def test_only_the_remaining_candidates_determine_the_largest_count() -> None:
    assert score(made("active-request-scorer"), only(in_flight(100, 2, 4), 1, 2)) == [0.5, 0.0]


def test_integer_counts_from_the_areas_give_float_scores() -> None:
    c = in_flight(0, 0, 0)
    counted = Candidates(c.snapshot, np.array([0, 1, 4]))  # type: ignore[arg-type]
    scores = made("active-request-scorer").score(request(), counted, PROFILE)
    assert scores.dtype == np.float64
    assert scores.tolist() == [1.0, 0.75, 0.0]


def test_a_highest_score_out_of_range_is_reported() -> None:
    assert made("active-request-scorer", maxBusyScore=1.5).without_effect == ["maxBusyScore: 1.5 is not in 0 to 1; 1 is used"]
    assert not made("active-request-scorer", maxBusyScore=0.5).without_effect


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40), st.integers(0, 20), st.floats(0, 1), st.randoms())
def test_scores_are_in_range_and_move_with_their_endpoints(counts: list[int], idle: int, busy: float, rng: Any) -> None:
    scorer = made("active-request-scorer", idleThreshold=idle, maxBusyScore=busy)
    order = list(range(len(counts)))
    rng.shuffle(order)
    straight = score(scorer, in_flight(*counts))
    assert all(0 <= s <= 1 for s in straight)
    assert score(scorer, in_flight(*permuted(counts, order))) == permuted(straight, order)


CONFIG = """\
plugins:
- type: {scorer}
  parameters: {{inFlightLoadProducerName: mine}}
{more}
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: {scorer}}}]}}]
"""


@pytest.mark.parametrize("scorer", ["active-request-scorer", "token-load-scorer"])
def test_a_named_load_producer_must_exist(scorer: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load(CONFIG.format(scorer=scorer, more=""), "c.yaml")
    (error,) = caught.value.errors
    assert str(error).startswith("c.yaml:3:16: error[unknown-ref]: parameters.inFlightLoadProducerName of plugin")
    load(CONFIG.format(scorer=scorer, more="- {type: inflight-load-producer, name: mine}"), "c.yaml")


@pytest.mark.parametrize("name", ["", "inflight-load-producer"])
def test_the_default_load_producer_needs_no_entry(name: str) -> None:
    assert not made("active-request-scorer", inFlightLoadProducerName=name).needs
