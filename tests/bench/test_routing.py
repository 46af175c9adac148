import pytest

from epp.config.load import DEFAULT_TEXT
from tests.bench.routing import FIELD_TEXT, POLICIES, Outcome, configured, measure
from tests.bench.routing_traffic import WORKLOADS

BY_NAME = {workload.name: workload for workload in WORKLOADS}


def outcomes(workload: str, *policies: str, seconds: float = 10.0) -> list[Outcome]:
    results = measure(BY_NAME[workload], {name: POLICIES[name] for name in policies}, 1, seconds)
    return [results[name] for name in policies]


def test_equal_seeds_give_equal_figures() -> None:
    assert outcomes("bursts", "default", seconds=3.0) == outcomes("bursts", "default", seconds=3.0)


def test_a_hot_prefix_pins_the_fields_weights_to_one_server_but_not_the_built_in_default() -> None:
    default, field = outcomes("hot prefix", "default", "field's weights")
    (even,) = outcomes("no hot prefix", "default")
    assert default.load < 1.5 < field.load
    assert default.ttft_mean < 1.2 * even.ttft_mean
    assert default.goodput > 0.99


def test_the_built_in_default_finds_cached_prefixes_and_has_a_shorter_ttft_than_round_robin() -> None:
    default, round_robin, exact = outcomes("chats", "default", "round-robin", "default, exact index")
    assert default.ttft_mean < 0.6 * round_robin.ttft_mean
    assert default.cached > exact.cached - 0.02


def test_without_shared_prefixes_and_in_bursts_the_built_in_default_beats_round_robin() -> None:
    for workload in ("no sharing", "bursts"):
        default, round_robin = outcomes(workload, "default", "round-robin", seconds=20.0)
        assert default.ttft_mean < round_robin.ttft_mean


def test_requests_in_flight_count_between_scrapes() -> None:
    counted, scraped = outcomes("bursts", "field's weights", "the same, scrapes alone")
    assert counted.ttft_mean < scraped.ttft_mean


def test_every_policy_answers_every_request() -> None:
    results = measure(
        BY_NAME["documents"], {**POLICIES, "again": configured(DEFAULT_TEXT), "f": configured(FIELD_TEXT)}, 1, 4.0
    )
    assert results["again"] == results["default"]
    assert len({outcome.requests for outcome in results.values()}) == 1


@pytest.mark.parametrize("workload", ["documents", "chats"])
def test_replicas_that_share_nothing_agree_on_new_prefixes_by_rendezvous(workload: str) -> None:
    one, apart, agreed = outcomes(workload, "default", "default, 3 replicas", "rendezvous, 3 replicas", seconds=20.0)
    assert agreed.cached > 0.9 * one.cached > apart.cached
    assert agreed.ttft_mean < apart.ttft_mean


def test_rendezvous_does_not_pin_a_hot_prefix_to_the_endpoints_named_for_it() -> None:
    apart, agreed = outcomes("hot prefix", "default, 3 replicas", "rendezvous, 3 replicas")
    assert agreed.ttft_mean < 1.1 * apart.ttft_mean
    assert agreed.load < 2.0


def test_where_caches_evict_events_save_hits_and_time() -> None:
    approximate, precise, round_robin, oracle, most = outcomes(
        "library, evicting", "default", "default, precise", "round-robin", "oracle", "most hits", seconds=30.0
    )
    assert precise.cached > 1.02 * approximate.cached
    assert precise.cached > 0.94 * oracle.cached
    assert precise.cached > 1.5 * round_robin.cached
    assert precise.ttft_mean < approximate.ttft_mean
    assert most.cached > oracle.cached  # hits are not all that counts
    assert most.ttft_mean > oracle.ttft_mean
