import random
from dataclasses import replace

import pytest

from tests.bench.routing_fleet import LEAVES_S, Call, Fleet
from tests.bench.routing_run import Outcome, measure
from tests.bench.routing_servers import KINDS
from tests.bench.routing_simple import Informed, RoundRobin
from tests.bench.routing_traffic import FAILURES, WORKLOADS, Session, Turn, Workload
from tests.bench.routing_zoo import LINE, POLICIES

ASTRAY_MAX = 0.3
BY_NAME = {workload.name: workload for workload in WORKLOADS}
KIND = {kind.name: kind for kind in KINDS}


def outcomes(workload: str, *policies: str, kind: str = "shared", seconds: float = 10.0) -> list[Outcome]:
    results = measure(KIND[kind], BY_NAME[workload], {name: POLICIES[name] for name in policies}, 1, seconds)
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
    for workload in ("nothing shared", "bursts"):
        default, round_robin = outcomes(workload, "default", "round-robin", seconds=20.0)
        assert default.ttft_mean < round_robin.ttft_mean


def test_requests_in_flight_count_between_scrapes() -> None:
    counted, scraped = outcomes("bursts", "field's, own load", "field's weights")
    assert counted.ttft_mean < scraped.ttft_mean


@pytest.mark.parametrize("kind", KIND)
def test_every_policy_answers_every_request(kind: str) -> None:
    results = measure(KIND[kind], BY_NAME["documents"], LINE, 1, 3.0)
    assert len({outcome.requests for outcome in results.values()}) == 1
    assert not any(outcome.errors for outcome in results.values())


def test_a_server_that_dies_costs_the_default_the_requests_that_it_had_and_round_robin_those_sent_to_it_afterwards() -> None:
    default, round_robin, oracle = outcomes("a server dies", "default", "round-robin", "oracle", kind="slots")
    assert 0 < default.errors < round_robin.errors
    assert abs(default.errors - oracle.errors) < 0.02 * oracle.requests


@pytest.mark.parametrize(("kind", "what"), [*((kind, "404") for kind in KIND), *(("slots", what) for what, _ in FAILURES[1:])])
def test_a_server_that_answers_errors_at_once_gets_little_traffic(kind: str, what: str) -> None:
    """It has the shortest queue of all, and good metrics."""
    traffic = f"a server answers {what}"
    (default,) = outcomes(traffic, "default", kind=kind, seconds=20.0)
    assert default.astray <= ASTRAY_MAX
    assert default.errors < 0.2 * default.requests


def test_a_server_that_answers_errors_at_once_draws_traffic_to_no_policy_of_ours_and_to_formulas() -> None:
    token_weights, field, formula = outcomes("a server answers 404", "token weights", "field's, own load", "LMetric")
    assert max(token_weights.astray, field.astray) <= ASTRAY_MAX < 0.8 < formula.astray


@pytest.mark.parametrize("kind", KIND)
def test_a_server_that_sheds_load_is_no_magnet_and_the_pool_does_not_oscillate(kind: str) -> None:
    default, even = outcomes("a server sheds", "default", "round-robin", kind=kind, seconds=20.0)
    assert default.errors <= even.errors


@pytest.mark.parametrize("kind", ["shared", "slots", "chunked"])
@pytest.mark.parametrize("seed", [1, 2])
def test_bursts_spread_although_one_of_two_equal_servers_was_learned_as_much_faster(kind: str, seed: int) -> None:
    """One of them stands still while the model learns."""
    workload = BY_NAME["a pause while it learns"]
    found = measure(KIND[kind], workload, {name: POLICIES[name] for name in ("default", "oracle")}, seed, 24.0)
    assert found["default"].ttft_mean <= 1.2 * found["oracle"].ttft_mean


def calls(workload: Workload, policy: str, seconds: float) -> list[Call]:
    sessions = workload.make(random.Random("1"), seconds, 1.0)
    make = POLICIES[policy]
    return Fleet(sessions, lambda fleet: make(fleet, 1), 1, kind=KIND["shared"], workload=workload, seconds=seconds).run()


@pytest.mark.parametrize("policy", ["default", "round-robin", "LBGR", "oracle"])
def test_a_server_gets_requests_from_when_it_joins_and_until_it_is_known_to_be_dead(policy: str) -> None:
    workload = replace(BY_NAME["nothing shared"], joins=(3, 0.4), dies=(5, 0.4))
    run = calls(workload, policy, 20.0)
    joined = [call.at for call in run if call.server == 3]
    dead = [call for call in run if call.server == 5 and call.at >= 8.0]
    assert min(joined) >= 8.0
    assert len(joined) > 20
    assert all(call.failed for call in dead)
    assert max((call.at for call in dead), default=8.0) < 8.0 + LEAVES_S
    assert {call.server for call in run if call.failed} == {5}


def test_a_duplicate_computes_most_of_a_prompt_that_another_server_holds() -> None:
    turns = [Turn(bytes(8192), 1), Turn(bytes(8192), 1), Turn(bytes(8192) + b"x" * 8192, 1), Turn(b"y" * 8192, 1)]
    sessions = [Session(float(at), [turn]) for at, turn in enumerate(turns)]
    workload = WORKLOADS[0]
    fleet = Fleet(sessions, lambda _: RoundRobin(), 1, kind=KIND["slots"], workload=workload, seconds=9.0)
    assert [call.duplicate for call in fleet.run()] == [False, True, True, False]


@pytest.mark.parametrize("workload", ["documents", "chats"])
def test_replicas_that_share_nothing_agree_on_new_prefixes_by_rendezvous(workload: str) -> None:
    one, apart, agreed = outcomes(workload, "token weights", "token weights, 3 replicas", "rendezvous, 3 replicas", seconds=20.0)
    assert agreed.cached > 0.9 * one.cached > apart.cached
    assert agreed.ttft_mean < apart.ttft_mean


def test_rendezvous_does_not_pin_a_hot_prefix_to_the_endpoints_named_for_it() -> None:
    apart, agreed = outcomes("hot prefix", "token weights, 3 replicas", "rendezvous, 3 replicas")
    assert agreed.ttft_mean < 1.1 * apart.ttft_mean
    assert agreed.load < 2.0


def test_where_caches_evict_events_save_hits_and_time() -> None:
    approximate, precise, round_robin, oracle, most = outcomes(
        "library, evicting", "token weights", "token weights, precise", "round-robin", "oracle", "most hits", seconds=30.0
    )
    assert precise.cached > 1.02 * approximate.cached
    assert precise.cached > 0.94 * oracle.cached
    assert precise.cached > 1.5 * round_robin.cached
    assert precise.ttft_mean < approximate.ttft_mean
    assert most.cached > oracle.cached  # hits are not all that counts
    assert most.ttft_mean > oracle.ttft_mean


def test_the_informed_policy_takes_as_likely_what_past_answers_became_and_leaves_the_answers_as_they_are() -> None:
    fleet = Fleet([], lambda _: RoundRobin(), 1, kind=KIND["slots"], workload=BY_NAME["chats"], seconds=1.0)
    policy = Informed(fleet, 1)
    under_way = Call(0, Turn(b"", 400), 0.0, 0, iter(()))
    for output in (50, 60, 200, 300):
        past = Call(1, Turn(b"", output), 0.0, 0, iter(()))
        policy.choose(past, 0.0)
        past.first_at = 1.0
        policy.ended(past, 1.0 + 0.01 * output)
    policy.choose(under_way, 5.0)
    under_way.first_at = 5.0
    assert {policy.drawn(under_way, 5.0 + 1.0) for _ in range(50)} == {200, 300}
    assert policy.drawn(under_way, 5.0 + 3.5) == 400
    policy.choose(Call(2, Turn(b"", 10), 6.0, 0, iter(())), 6.0)
    assert under_way.job.max_tokens == 400


def test_the_informed_policy_is_between_the_oracle_and_round_robin() -> None:
    for kind in ("shared", "slots"):
        informed, oracle, round_robin = outcomes("bursts", "informed", "oracle", "round-robin", kind=kind)
        assert oracle.ttft_mean != informed.ttft_mean < round_robin.ttft_mean, kind
