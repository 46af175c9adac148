"""Usage limits, displacement and in-flight eviction: which bands are held back, and which requests give way."""

from typing import Any

import msgspec
import pytest

from epp.config.findings import ConfigErrors
from epp.config.load import load
from epp.config.registry import find, stability
from epp.plugins.displacement import Largest, Newest, PriorityThenTime, Sheddable
from epp.plugins.fairness.round_robin import RoundRobin
from epp.plugins.ordering import EarliestDeadline, FirstCome
from epp.plugins.usage_limits import PriorityHoldback, SoftReflective, Static
from epp.request.flows import FlowKey
from tests.contract.waiting import Band, Waits, made


def test_all_bands_have_the_static_ceiling() -> None:
    assert list(made(Static).ceilings(0.5, [5, 0, -1])) == [1.0] * 3
    assert list(made(Static, threshold=0.7).ceilings(2.0, [5, 0])) == [0.7] * 2


@pytest.mark.parametrize(
    ("domain", "priorities", "ceilings"),
    [
        ("rank", [100, 1, 0], [0.9, 0.7, 0.5]),
        ("value", [100, 25, 0], [0.9, 0.6, 0.5]),
        ("value", [10, 0, -10], [0.9, 0.7, 0.5]),
        ("rank", [0], [0.9]),
        ("value", [0], [0.9]),
        ("rank", [], []),
    ],
)
def test_the_ceiling_of_a_band_falls_with_its_rank_or_its_value(domain: str, priorities: list[int], ceilings: list[float]) -> None:
    policy = made(PriorityHoldback, minCeiling=0.5, maxCeiling=0.9, domain=domain)
    assert policy.ceilings(0.0, priorities) == pytest.approx(ceilings)
    assert policy.ceilings(0.0, [3, 1]) == pytest.approx([0.9, 0.5]), "bands may change"


@pytest.mark.parametrize(
    ("cls", "parameters"),
    [
        (Static, {"threshold": 0}),
        (Static, {"threshold": 1.1}),
        (PriorityHoldback, {"minCeiling": 1.0}),
        (PriorityHoldback, {"minCeiling": -0.1}),
        (PriorityHoldback, {"minCeiling": 0.5, "maxCeiling": 0}),
        (PriorityHoldback, {"minCeiling": 0.5, "maxCeiling": 1.01}),
        (PriorityHoldback, {"minCeiling": 0.5, "shape": "convex"}),
        (PriorityHoldback, {"minCeiling": 0.5, "domain": "priority"}),
        (SoftReflective, {"threshold": 1}),
    ],
)
def test_invalid_parameters_are_refused(cls: Any, parameters: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        made(cls, **parameters)


def test_the_lowest_ceiling_is_required_and_must_be_below_the_highest() -> None:
    with pytest.raises(msgspec.ValidationError, match="minCeiling"):
        msgspec.convert({}, PriorityHoldback.Params)
    with pytest.raises(ValueError, match=r"^minCeiling: 0.5 is not below maxCeiling 0.5"):
        made(PriorityHoldback, minCeiling=0.5, maxCeiling=0.5)


def test_between_its_line_and_a_full_pool_a_band_is_served_at_some_readings() -> None:
    policy = made(SoftReflective)
    bands = [2, 1, 0]  # lines at saturation .75: 1, .625, .25
    readings = [list(policy.ceilings(0.75, bands)) for _ in range(6)]
    assert readings == [[1, 0, 0], [1, 0, 0], [1, 1, 1]] * 2  # one in round(.75 / .25)
    assert list(policy.ceilings(0.3, bands)) == [1, 1, 1]
    assert [list(policy.ceilings(0.65, bands)) for _ in range(2)] == [[1, 1, 0], [1, 1, 1]]  # .65 is below the line of the second band
    assert list(policy.ceilings(1.0, bands)) == [1, 0, 0]
    assert list(policy.ceilings(0.9999999999, bands)) == [1, 0, 0]
    assert list(policy.ceilings(0.9, [0])) == [1]


def full(displacement: Any, *items: Waits, ordering: Any = FirstCome) -> list[Waits]:
    """All displaced items, in order."""
    band = Band(made(RoundRobin), made(ordering))
    for item in items:
        band.offer(item)
    victims: list[Waits] = []
    while (victim := displacement.victim(band)) is not None:
        band.remove(victim)
        victims.append(victim)
    return victims


def test_the_newest_item_of_the_flow_with_the_most_bytes_gives_way() -> None:
    a1, a2, b1, b2, b3 = Waits("a", bytes=30), Waits("a", bytes=30), *(Waits("b", bytes=25) for _ in range(3))
    assert full(made(Newest), a1, b1, a2, b2, b3) == [b3, a2, b2, a1, b1]


def test_in_a_queue_by_deadline_the_item_that_would_leave_last_gives_way() -> None:
    late, soon = Waits(arrival=1, ttl_s=100), Waits(arrival=2, ttl_s=1)
    assert full(made(Newest), late, soon, ordering=EarliestDeadline) == [late, soon]


def test_the_largest_item_of_the_flow_with_the_most_bytes_gives_way_and_among_equals_the_newest() -> None:
    small, old, new = Waits(bytes=1), Waits(arrival=1, bytes=50), Waits(arrival=2, bytes=50)
    other = Waits("b", bytes=60)
    assert full(made(Largest), small, old, new, other) == [new, other, old, small]


def test_among_many_flows_the_heaviest_give_way_first_and_in_the_end_all_do() -> None:
    """There are more flows than the policy looks at for each victim."""
    items = [Waits(f"u{number}", bytes=number) for number in range(200) for _ in range(2)]
    victims = full(made(Newest), *items)
    assert len(victims) == 400
    assert {victim.bytes for victim in victims[:64]} <= set(range(130, 200))
    heaviest = [victim.bytes for victim in victims]
    assert heaviest[0] == 199 and sum(heaviest[:200]) > 0.7 * sum(heaviest)


def test_the_least_important_request_is_evicted_first_and_among_equals_the_one_sent_last() -> None:
    sent = [(-1, 5.0), (-2, 1.0), (-1, 9.0), (-2, 3.0)]
    key = made(PriorityThenTime).key
    ordered = sorted(sent, key=lambda one: key(FlowKey("a", one[0]), one[1]))
    assert ordered == [(-2, 3.0), (-2, 1.0), (-1, 9.0), (-1, 5.0)]
    assert [made(Sheddable).evictable(FlowKey("a", p)) for p in (-2, -1, 0, 1)] == [True, True, False, False]


@pytest.mark.parametrize("name", ["sheddable-eviction-filter", "eviction-sheddable-filter"])
def test_an_experimental_type_needs_the_flag_under_each_of_its_names(name: str) -> None:
    text = f"plugins: [{{type: {name}}}, {{type: queue-scorer}}]\nschedulingProfiles: [{{name: a, plugins: [{{pluginRef: queue-scorer}}]}}]"
    with pytest.raises(ConfigErrors, match="is experimental"):
        load(text, "c.yaml")
    load(text, "c.yaml", allow_experimental=True)


def test_types_have_the_names_and_the_stability_of_the_reference_picker() -> None:
    for name in ("priority-holdback-policy", "soft-reflective-ceiling-policy", "eviction-sheddable-filter"):
        assert stability(find(name)) == "experimental"
    for name in ("static-usage-limit-policy", "utilization-detector", "concurrency-detector", "program-aware-fairness"):
        assert stability(find(name)) == "stable"
    assert find("eviction-sheddable-filter") is find("sheddable-eviction-filter")
    assert find("eviction-priority-then-time-ordering") is find("priority-then-time-eviction-order-policy")
    assert (find("listqueue"), find("maxminheap")) == (find("fifo-queue"), find("priority-queue"))
