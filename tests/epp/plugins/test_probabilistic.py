"""Sheddable requests are refused with a probability that grows with the saturation of the pool."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.errors import Cause, Refused
from epp.plugins.admitters.probabilistic import Probabilistic
from epp.protocol.refusals import answer
from tests.contract.test_every_plugin import situations
from tests.epp.plugins.calls import made as detector
from tests.fakes import FakeServices, candidates, request


def made(**params: float) -> Probabilistic:
    plugin = Probabilistic("p", msgspec.convert(params, Probabilistic.Params))
    plugin.start(FakeServices())
    return plugin


def pool(waiting: list[float], kv: list[float]) -> Candidates:
    return candidates({"waiting_requests": waiting, "kv_cache_usage": kv})


def refusals(plugin: Probabilistic, c: Candidates, priority: int, tries: int = 1000) -> int:
    count = 0
    for _ in range(tries):
        try:
            plugin.admit(request(priority=priority), c)
        except Refused as refused:
            assert refused.cause is Cause.NOT_ADMITTED
            count += 1
    return count


def test_saturation_is_the_mean_of_each_endpoints_worse_figure() -> None:
    # max(5/5, .4/.8) = 1; max(1/5, .6/.8) = .75; max(0, 0) = 0: mean 0.58333
    assert made().saturation(pool([5, 1, 0], [0.4, 0.6, 0.0])) == pytest.approx(1.75 / 3)


@given(situation=situations())
def test_saturation_equals_that_of_the_utilization_detector(situation: Candidates) -> None:
    assert made().saturation(situation) == detector("utilization-detector").saturation(situation)


def test_a_request_that_is_not_admitted_gets_status_429() -> None:
    with pytest.raises(Refused) as refused:
        made().admit(request(priority=-1), pool([100], [1]))
    response = answer(refused.value)
    assert (response.status, response.headers["x-llm-d-request-dropped-reason"]) == (429, "rejected-saturated")


@pytest.mark.parametrize(
    ("params", "saturation", "probability"),
    [
        ({}, 0.0, 0.0),
        ({}, 0.25, 300 * 0.25**5),  # 0.293
        ({}, 0.5, 1.0),  # 300 / 32 is more than 1
        ({"k": 2, "power": 2}, 0.5, 0.5),
        ({"k": 1, "power": 10_000}, 1e9, 1.0),
        ({"k": 1, "power": 10_000}, 1e-9, 0.0),
    ],
)
def test_the_probability_is_a_power_of_saturation(params: dict[str, float], saturation: float, probability: float) -> None:
    assert made(**params).probability(saturation) == pytest.approx(probability)


def test_sheddable_requests_are_refused_with_the_computed_probability_and_others_never() -> None:
    c = pool([1.25], [0.0])  # saturation .25: probability .293
    assert 235 < refusals(made(), c, priority=-1) < 351  # 4 deviations are 58
    assert refusals(made(), c, priority=0) == 0
    assert refusals(made(), pool([100], [1]), priority=-1, tries=100) == 100
    assert refusals(made(), pool([0], [0]), priority=-1, tries=100) == 0


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_probability_is_in_0_to_1_and_grows_with_saturation(a: float, b: float) -> None:
    low, high = (made().probability(s) for s in sorted((a, b)))
    assert 0 <= low <= high <= 1


@pytest.mark.parametrize("name", ["queueDepthThreshold", "kvCacheUtilThreshold", "power", "k"])
def test_all_parameters_are_above_0(name: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=r"> 0|>= 1"):
        made(**{name: 0})
