"""The observer and the scorer without the suffix `-hub`: predictions of the learned model, and the reference picker's formula."""

import msgspec
import pytest

from epp.candidates import Candidates
from epp.config.plugin_instances import without_effect
from epp.learning.costs import FEW, LearnedCosts, learned_costs
from epp.learning.endpoint import EndpointModel
from epp.learning.model import LatencyModel
from epp.plugins.producers.learned_latency import LearnedObserver
from epp.plugins.scorers.latency_observation import LEARNED_OBSERVER as OBSERVER
from epp.plugins.scorers.latency_observation import LearnedObservation
from tests.epp.plugins.calls import score
from tests.fakes import FakeServices, candidates, predictions, request

POOL = candidates({"waiting_requests": [0.0] * 3})
COSTS = learned_costs(OBSERVER)


def observer(name: str = OBSERVER, **params: object) -> LearnedObserver:
    return LearnedObserver(name, msgspec.convert(params, LearnedObserver.Params))


def scorer(*plugins: LearnedObserver, **params: object) -> LearnedObservation:
    made = LearnedObservation("s", msgspec.convert({"explorationRate": 0, **params}, LearnedObservation.Params))
    made.meet(plugins)
    made.start(FakeServices())
    return made


def predicted(*seconds: float, answers: tuple[int, ...] = (10, 10, 10), why_not: str = "") -> LearnedCosts:
    """Returns predictions after so many answers of each endpoint. The costs are the reverse of the times."""
    model = LatencyModel()
    for slot, count in enumerate(answers):
        known = model.endpoints[slot] = EndpointModel(slot, 1)
        known.speed.samples = count
    return predictions(seconds, costs=seconds[::-1], model=model, why_not=why_not)


def scored(made: LearnedObservation, costs: LearnedCosts | None, at: Candidates = POOL) -> list[float]:
    asked = request()
    if costs is not None:
        asked[COSTS] = costs
    return score(made, at, asked)


def test_the_soonest_first_token_scores_1_and_the_latest_0() -> None:
    assert scored(scorer(), predicted(0.1, 0.2, 0.3)) == pytest.approx([1.0, 0.5, 0.0])


def test_times_are_rounded_as_configured() -> None:
    assert scored(scorer(roundTTFTStep=0.1), predicted(0.11, 0.12, 0.3)) == pytest.approx([1.0, 1.0, 0.0])


def test_cold_endpoints_are_explored() -> None:
    costs = predicted(0.1, 0.2, 0.3, answers=(9, 10, 10))
    assert scored(scorer(explorationRate=1), costs) == [1.0, 1.0, 0.0]
    assert scored(scorer(explorationRate=1e-12), costs) == [0.0, 1.0, 0.0]


def test_without_exploration_a_cold_endpoint_counts_as_the_fastest() -> None:
    costs = predicted(0.3, 0.1, 0.2, answers=(9, 10, 10))
    assert scored(scorer(), costs) == [1.0, 1.0, 0.0]


def test_the_observer_says_how_many_answers_make_an_endpoint_known() -> None:
    costs = predicted(0.3, 0.1, 0.2, answers=(4, 10, 10))
    assert scored(scorer(observer(minRequests=4)), costs) == pytest.approx([0.0, 1.0, 0.5])
    assert scored(scorer(observer("other", minRequests=4)), costs)[0] == 1.0


def test_without_any_known_endpoint_or_prediction_all_are_equal() -> None:
    assert scored(scorer(), predicted(0.1, 0.2, 0.3, answers=(1, 1, 1))) == [1.0, 1.0, 1.0]
    assert scored(scorer(), None) == [1.0, 1.0, 1.0]


def test_while_the_model_is_not_used_the_rule_without_it_decides() -> None:
    costs = predicted(0.1, 0.2, 0.3, answers=(0, 0, 0), why_not=FEW)
    assert scored(scorer(), costs) == pytest.approx([0.0, 0.5, 1.0])


def test_parameters_without_effect_are_named() -> None:
    assert list(without_effect(observer(minRequests=5).params)) == []
    assert list(without_effect(observer(bucketDuration="2m", highPercentile=60).params)) == [
        "bucketDuration: has no effect here",
        "highPercentile: has no effect here",
    ]
    assert scorer(minInflightGap=3.0).without_effect == ["minInflightGap: has no effect here"]


def test_it_emits_what_the_learned_latency_producer_emits_under_its_own_name() -> None:
    made = observer("ttft-observer")
    made.start(FakeServices())
    assert made.produces == (learned_costs("ttft-observer"),)
    asked = request(b"x" * 400)
    pool = candidates({"waiting_requests": [0.0] * 2, "running_requests": [0.0] * 2})
    made.produce(asked, pool)
    assert asked[learned_costs("ttft-observer")].costs.shape == (2,)
