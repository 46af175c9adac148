from epp.config import DEFAULT_TEXT
from tests.bench.routing import FIELD_TEXT, POLICIES, Outcome, configured, measure
from tests.bench.routing_traffic import WORKLOADS

BY_NAME = {workload.name: workload for workload in WORKLOADS}


def outcomes(workload: str, *policies: str, seconds: float = 10.0) -> list[Outcome]:
    found = measure(BY_NAME[workload], {name: POLICIES[name] for name in policies}, 1, seconds)
    return [found[name] for name in policies]


def test_equal_seeds_give_equal_figures() -> None:
    assert outcomes("bursts", "default", seconds=3.0) == outcomes("bursts", "default", seconds=3.0)


def test_one_hot_prefix_does_not_pin_the_built_in_default_to_one_server_as_it_does_the_weights_of_the_field() -> None:
    default, field = outcomes("hot prefix", "default", "field's weights")
    (even,) = outcomes("no hot prefix", "default")
    assert default.load < 1.5 < field.load
    assert default.ttft_mean < 1.2 * even.ttft_mean
    assert default.goodput > 0.99


def test_the_built_in_default_finds_what_servers_have_cached_and_has_the_first_token_sooner_than_round_robin() -> None:
    default, round_robin, exact = outcomes("chats", "default", "round-robin", "default, exact index")
    assert default.ttft_mean < 0.6 * round_robin.ttft_mean
    assert default.cached > exact.cached - 0.02


def test_where_nothing_is_shared_and_in_bursts_between_scrapes_the_built_in_default_beats_round_robin() -> None:
    for workload in ("no sharing", "bursts"):
        default, round_robin = outcomes(workload, "default", "round-robin", seconds=20.0)
        assert default.ttft_mean < round_robin.ttft_mean


def test_what_is_in_flight_counts_between_scrapes() -> None:
    counted, scraped = outcomes("bursts", "field's weights", "the same, scrapes alone")
    assert counted.ttft_mean < scraped.ttft_mean


def test_every_policy_answers_every_request() -> None:
    found = measure(
        BY_NAME["documents"], {**POLICIES, "again": configured(DEFAULT_TEXT), "f": configured(FIELD_TEXT)}, 1, 4.0
    )
    assert found["again"] == found["default"]
    assert len({outcome.requests for outcome in found.values()}) == 1
