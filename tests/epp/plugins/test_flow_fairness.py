"""Which flow of a band has the next turn: by one order for all flows, or in turns."""

from epp.plugins.fairness.global_strict import GlobalStrict
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.ordering import EarliestDeadline
from tests.contract.waiting import Waits, asking
from tests.epp.plugins.fairness import band, names


def test_global_strict_has_one_order_for_all_flows() -> None:
    b = band(GlobalStrict)
    for name, arrival in (("b", 2), ("a", 1), ("a", 4), ("b", 3)):
        b.offer(asking(name, arrival=arrival))
    assert names(b, 9) == "abba"


def test_global_strict_uses_the_ordering_policy_of_the_band() -> None:
    b = band(GlobalStrict, EarliestDeadline)
    for name, ttl_s in (("a", 30), ("b", 10), ("a", 20), ("b", 40)):
        b.offer(Waits(name, arrival=1.0, ttl_s=ttl_s))
    assert names(b, 9) == "baab"


def test_global_strict_isolates_no_flow() -> None:
    assert not GlobalStrict.isolates
    b = band(GlobalStrict)
    for number in range(20):
        b.offer(asking("big", arrival=number))
    b.offer(asking("small", arrival=20))
    assert names(b, 20) == "big" * 20


def test_round_robin_gives_each_flow_one_turn_and_a_new_flow_waits_for_one_turn_of_each_other() -> None:
    b = band(RoundRobin)
    for name in "aaabbb":
        b.offer(asking(name))
    assert names(b, 2) == "ab"
    b.offer(asking("c"))
    assert names(b, 9) == "abcab"


def test_a_flow_that_was_empty_goes_behind_the_others() -> None:
    b = band(RoundRobin)
    for name in "abbb":
        b.offer(asking(name))
    assert names(b, 1) == "a"
    b.offer(asking("a"))
    assert names(b, 9) == "babb"
