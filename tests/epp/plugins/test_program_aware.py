"""Programs by service and wait: which goes next, and what the metrics page says of them."""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.decision.decision import Usage
from epp.plugins.fairness.program_aware import AVERAGE_WAIT, EXACT_MAX, REFRESH_S, SHOWN_MAX, ProgramAware, Scores
from epp.plugins.fairness.program_aware import jain as index_of
from epp.plugins.ordering import FirstCome
from tests.contract.waiting import Band, Waits, asking, made
from tests.epp.plugins.fairness import answer, decision
from tests.examples import examples
from tests.fakes import FakeServices, request


def naive(flows: Mapping[str, tuple[float, float]], now: float, by_service: float, by_wait: float) -> dict[str, float]:
    """Name -> score, from (service, arrival), computed directly from the formula."""

    def normal(value: float, values: list[float]) -> float:
        low, high = min(values), max(values)
        return 0.5 if high - low <= 1e-9 * high else (value - low) / (high - low)  # a difference by rounding is none

    services = [service for service, _ in flows.values()]
    ages = [now - arrival for _, arrival in flows.values()]
    return {
        name: by_service * (1 - normal(service, services)) + by_wait * normal(now - arrival, ages)
        for name, (service, arrival) in flows.items()
    }


@given(
    services=st.lists(st.integers(0, 10_000), min_size=1, max_size=20),
    data=st.data(),
    weights=st.sampled_from([(0.8, 0.2), (0.0, 1.0), (1.0, 0.0), (0.3, 0.9)]),
    half_life=st.sampled_from([0.0, 1.0, 60.0]),
)
@examples(80)
def test_the_highest_score_goes_next(services: list[int], data: st.DataObject, weights: tuple[float, float], half_life: float) -> None:
    policy = made(ProgramAware, lasWeightService=weights[0], lasWeightHeadWait=weights[1], lasHalfLifeSeconds=half_life)
    b = Band(policy, made(FirstCome))
    attained = {f"u{number}": float(service) for number, service in enumerate(services)}
    at = {}
    for name, service in attained.items():
        at[name] = data.draw(st.integers(0, 30))
        answer(policy, asking(name), float(at[name]), Usage(int(service), 0))
    arrivals = {name: float(data.draw(st.integers(31, 60))) for name in attained}
    for name, arrival in arrivals.items():
        b.offer(asking(name, arrival=arrival))

    def faded(name: str, now: float) -> float:
        return attained[name] * (2 ** (-(now - at[name]) / half_life) if half_life else 1.0)

    for now in (61.0, 62.5, 200.0):
        scores = naive({name: (faded(name, now), arrivals[name]) for name in arrivals}, now, *weights)
        picked = b.share.pick(now)
        assert picked is not None
        name = picked.key.fairness_id
        assert scores[name] == pytest.approx(max(scores.values()), abs=1e-6)
        more = data.draw(st.integers(0, 5000))
        answered = int(now) + 1  # when its answer ends; its service fades until then
        attained[name], at[name] = faded(name, answered) + 2 * more, answered
        answer(policy, asking(name), float(at[name]), Usage(0, more))


def test_the_scores_of_many_flows_are_recomputed_every_few_milliseconds() -> None:
    policy = made(ProgramAware)
    b = Band(policy, made(FirstCome))
    for number in range(200):
        answer(policy, asking(f"u{number}"), 0.0, Usage(1000 + number, 0))
        b.offer(asking(f"u{number}", arrival=1.0))
    first = b.share.pick(2.0)
    assert first is not None and first.key.fairness_id == "u0"
    b.offer(asking("newcomer", arrival=1.0))
    for now in (2.001, 2.02):
        newest = b.share.pick(now)
        assert newest is not None and newest.key.fairness_id == "newcomer"


def test_the_least_served_goes_next_while_the_number_of_flows_grows_and_shrinks() -> None:
    policy = made(ProgramAware, lasWeightHeadWait=0.0)
    b = Band(policy, made(FirstCome))
    services = random.Random(3).sample(range(2, 10_000), 2 * EXACT_MAX)
    services[EXACT_MAX - 2] = 1  # between two picks
    now = 2.0
    for flows, service in enumerate(services, 1):
        answer(policy, asking(f"u{service}"), 0.0, Usage(service, 0))
        b.offer(asking(f"u{service}", arrival=1.0))
        now += 1e-5
        if flows in (EXACT_MAX // 2, EXACT_MAX + 1):
            picked = b.share.pick(now)
            assert picked is not None and picked.key.fairness_id == f"u{min(services[:flows])}"
    now += REFRESH_S
    for service in sorted(services):
        picked = b.share.pick(now)
        assert picked is not None and picked.key.fairness_id == f"u{service}"
        b.dispatch(now)
        now += 1e-5


def test_idle_programs_with_nothing_in_flight_are_dropped() -> None:
    services = FakeServices()
    policy = ProgramAware("p", ProgramAware.Params(eviction_ttl_seconds=100.0, eviction_sweep_seconds=7.0))
    policy.start(services)
    every, sweep = services.periodic[0]
    assert every == 7.0
    b = Band(policy, made(FirstCome))
    idle, flying, waiting = asking("idle"), asking("flying"), b.offer(asking("waiting"))
    for item in (idle, flying):
        policy.before_send(item.request, decision())
    answer(policy, idle, 1.0, None)
    answer(policy, asking("clock"), 102.0, None)
    sweep()
    assert set(policy._programs) == {"flying", "waiting", "clock"}
    answer(policy, flying, 103.0, None)
    assert b.dispatch(103.0) is waiting
    answer(policy, asking("clock"), 300.0, None)
    sweep()
    assert set(policy._programs) == {"clock"}


def test_a_ttl_of_0_keeps_all_programs() -> None:
    services = FakeServices()
    ProgramAware("p", ProgramAware.Params(eviction_ttl_seconds=0.0)).start(services)
    assert [seconds for seconds, _ in services.periodic] == [5.0], "only the gauges are set regularly"


def test_programs_that_share_a_flow_are_counted_as_one() -> None:
    """Beyond a worker's limit of flows, all further ids wait in one flow. Using new ids gives no advantage."""
    policy = made(ProgramAware)
    share = policy.share(lambda item: item.arrival)
    assert isinstance(share, Scores)
    b = Band(policy, made(FirstCome))
    crowd = b.offer(Waits("other", request=request(fairness_id="one-of-a-million")))
    assert b.dispatch(0.0) is crowd
    policy.before_send(crowd.request, decision())
    answer(policy, crowd, 1.0, Usage(500, 0))
    assert list(policy._programs) == ["other"]
    assert policy._programs["other"].service == 500


@pytest.mark.parametrize(
    "parameters",
    [
        {"lasDecayFactor": 0.9},
        {"strategy": "fifo"},
        {"lasWeightService": -1},
        {"lasWeightHeadWait": -1},
        {"lasHalfLifeSeconds": -1},
        {"evictionTtlSeconds": -1},
        {"evictionSweepSeconds": 0},
    ],
)
def test_removed_and_invalid_parameters_are_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(ProgramAware, **parameters)


def test_an_empty_strategy_means_the_default() -> None:
    assert made(ProgramAware, strategy="").params.las_weight_service == 0.8


def test_the_page_has_the_mean_wait_and_the_service_of_each_program_and_the_fairness_of_the_waits() -> None:
    policy = made(ProgramAware, lasHalfLifeSeconds=10)
    services = FakeServices()
    policy.start(services)
    (show,) = (act for seconds, act in services.periodic if seconds == 5.0)
    line = Band(policy, made(FirstCome))
    for name, arrival in (("a", 0.0), ("a", 0.0), ("b", 1.0)):
        line.offer(asking(name, arrival=arrival))
    for now in (1.0, 3.0, 4.0):
        item = line.dispatch(now)
        assert item is not None
        item.request.now = now
        policy.before_send(item.request, decision())
        answer(policy, item, now, Usage(100, 50))
    show()
    shown = services.shown
    waits = shown["program_aware_avg_wait_time_milliseconds"]
    # At 1 s the head of a is older. At 3 s a has 200 tokens of service and b has none, so b goes; at 4 s the rest of a.
    assert waits.values == {("a",): 2500.0, ("b",): 2000.0} and waits.weights == {("a",): 2.0, ("b",): 1.0}
    index = shown["program_aware_jains_fairness_index"]
    assert math.isclose(index.values[()], 4500.0**2 / (2 * (2500.0**2 + 2000.0**2))) and index.weights[()] == 2.0
    service = shown["program_aware_attained_service_tokens"].values
    assert math.isclose(service["a",], 200.0 + 200.0 * 2**-0.3) and math.isclose(service["b",], 200.0 * 2**-0.1)


def mean_wait_ms(went: Callable[[Waits], list[Waits]]) -> float:
    """Returns the mean wait on the page, in ms, after a request of program "a" has waited 4 s. `went`: returns the requests that are then
    sent to endpoints, given the one that has waited.
    """
    policy, services = made(ProgramAware), FakeServices()
    policy.start(services)
    line = Band(policy, made(FirstCome))
    waited = line.offer(asking("a", arrival=0.0))
    assert line.dispatch(4.0) is waited
    for item in went(waited):
        policy.before_send(item.request, decision())
    next(act for seconds, act in services.periodic if seconds == 5.0)()
    return services.shown["program_aware_avg_wait_time_milliseconds"].values["a",]


def test_a_request_that_did_not_wait_counts_as_a_wait_of_0() -> None:
    assert math.isclose(mean_wait_ms(lambda waited: [waited, *(asking("a", arrival=4.0) for _ in range(3))]), 1000.0)


def test_a_request_that_waited_and_got_no_endpoint_does_not_hide_one_that_did_not_wait() -> None:
    assert math.isclose(mean_wait_ms(lambda _: [asking("a", arrival=4.0)]), 2000.0)


def test_a_program_that_was_not_active_lately_leaves_the_page_and_no_client_fills_it_with_names() -> None:
    policy = made(ProgramAware)
    services = FakeServices()
    policy.start(services)
    show = next(act for seconds, act in services.periodic if seconds == 5.0)
    waits = services.gauge(policy, AVERAGE_WAIT)
    for number in range(3 * SHOWN_MAX):
        policy.before_send(asking(f"u{number}").request, decision())
        if number % SHOWN_MAX == SHOWN_MAX - 1:
            show()
    assert waits.weights["u0",] == 0.0 and waits.weights[f"u{2 * SHOWN_MAX - 1}",] == 0.0
    assert {flow for (flow,), weight in waits.weights.items() if weight} == {f"u{number}" for number in range(2 * SHOWN_MAX, 3 * SHOWN_MAX)}


def test_jains_index_is_1_for_equal_values_and_one_nth_if_one_has_all() -> None:
    assert index_of([2.0, 2.0, 2.0]) == 1.0 and index_of([0.0, 3.0, 0.0, 0.0]) == 0.25
    assert index_of([1.0, 3.0]) == 16.0 / 20.0
    assert index_of([]) == index_of([5.0]) == index_of([0.0, 0.0]) == 1.0
