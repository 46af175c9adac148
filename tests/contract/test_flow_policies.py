"""Every registered policy of flow control meets the contract of its extension point. A new policy is tested because it is registered."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.candidates import Candidates
from epp.decision.decision import Decision, ProfileRun, Response, Usage
from epp.flow.ports import Held
from epp.plugin import (
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FlowQueue,
    OrderingPolicy,
    Plugin,
    PreRequest,
    ResponseComplete,
    SaturationDetector,
    UsageLimitPolicy,
)
from epp.plugins.ordering import FirstCome
from epp.request.flows import Capability, FlowKey, rank
from tests.contract.test_every_plugin import situations
from tests.contract.waiting import Band, Waits, asking, every, made
from tests.epp.flow.shards import Board, BoardPeers
from tests.examples import examples
from tests.fakes import candidates

SCRAPED = ("waiting_requests", "kv_cache_usage")


def each(kind: type[Plugin]) -> Any:
    return pytest.mark.parametrize("cls", every(kind), ids=lambda cls: cls.type_name)


# Ordering

ITEMS = st.builds(Waits, arrival=st.floats(0, 1e9), bytes=st.integers(0, 10**9), ttl_s=st.one_of(st.floats(0, 1e6), st.just(math.inf)))


@each(OrderingPolicy)
@given(items=st.lists(ITEMS, min_size=2, max_size=10))
@examples(50)
def test_keys_are_comparable_and_stay_the_same(cls: type[OrderingPolicy], items: list[Waits]) -> None:
    policy = made(cls)
    keys = [policy.key(item) for item in items]
    assert keys == [policy.key(item) for item in items]
    for before, after in pairwise(sorted(keys)):
        assert not after < before


@each(OrderingPolicy)
def test_equal_items_go_in_order_of_arrival(cls: type[OrderingPolicy]) -> None:
    policy = made(cls)
    assert policy.key(asking("a", arrival=1.0)) < policy.key(asking("a", arrival=2.0))


@each(OrderingPolicy)
def test_some_queue_has_the_capabilities_that_an_ordering_policy_needs(cls: type[OrderingPolicy]) -> None:
    assert any(cls.queue_needs in queue.capabilities for queue in every(FlowQueue))


def test_some_queue_has_the_capabilities_that_all_policies_of_a_band_need_together() -> None:
    kinds = (OrderingPolicy, FairnessPolicy, DisplacementPolicy)
    needs = Capability(0)
    for kind in kinds:
        for cls in every(kind):  # type: ignore[type-abstract]
            needs |= cls.queue_needs  # type: ignore[attr-defined]
    assert any(needs in queue.capabilities for queue in every(FlowQueue))


# Fairness

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["offer", "offer", "offer", "dispatch", "dispatch", "cancel", "answer", "forget"]),
        st.integers(0, 5),
        st.integers(0, 2000),
    ),
    max_size=120,
)


PLAIN = candidates({"waiting_requests": [0.0]})
RUN = ProfileRun(PLAIN, PLAIN.zeros(), [0])


def decided() -> Decision:
    return Decision(RUN.targets, {"default": RUN}, "default")


def sent(policy: FairnessPolicy, item: Waits, now: float) -> None:
    item.request.now = now
    if isinstance(policy, PreRequest):
        policy.before_send(item.request, decided())


def answered(policy: FairnessPolicy, item: Waits, now: float, usage: Usage | None) -> None:
    item.request.now = now
    response = Response(200)
    response.usage = usage
    if isinstance(policy, ResponseComplete):
        policy.response_complete(item.request, decided(), response)


@given(steps=STEPS)
@examples(40)
def test_only_flows_with_waiting_items_are_picked_and_every_item_is_dispatched(steps: list[tuple[str, int, int]]) -> None:
    for cls in every(FairnessPolicy):  # in one test: to make the steps costs more than to take them
        for ordering in every(OrderingPolicy):
            check_steps(made(cls), made(ordering), steps)


def check_steps(policy: FairnessPolicy, ordering: OrderingPolicy, steps: list[tuple[str, int, int]]) -> None:
    band = Band(policy, ordering)
    waiting: list[Waits] = []
    served: list[Waits] = []
    for number, (step, which, size) in enumerate(steps):
        now = number * 0.004
        if step == "offer":
            waiting.append(band.offer(asking(f"u{which}", arrival=now, bytes=size)))
        elif step == "cancel" and waiting:
            band.remove(waiting.pop(which % len(waiting)))
        elif step == "dispatch":
            picked = band.share.pick(now)
            assert picked is band.share.pick(now), "a pick changes nothing"
            assert (picked is None) == (not waiting)
            if picked is not None:
                first = picked.head
                item = band.dispatch(now)
                assert item is first
                waiting.remove(item)
                sent(policy, item, now)
                served.append(item)
        elif step == "answer" and served:
            usage = None if size % 3 == 0 else Usage(size, size * 2, None if size % 2 else size // 2)
            answered(policy, served.pop(which % len(served)), now, usage)
        elif step == "forget":
            for name in [name for name, flow in band.known.items() if not len(flow)]:
                band.forget(name)
    for _ in range(len(waiting)):
        item = band.dispatch(len(steps) * 0.004)
        assert item is not None
        waiting.remove(item)
    assert not waiting and band.share.pick(1e6) is None


@each(FairnessPolicy)
@pytest.mark.parametrize("tokens", [1, 100, 100_000])
def test_a_policy_that_isolates_lets_no_flow_starve(cls: type[FairnessPolicy], tokens: int) -> None:
    """Nine flows keep twenty items waiting each. One flow offers an item now and then, and each time it is served soon."""
    policy = made(cls)
    band = Band(policy, made(FirstCome))
    now, longest, waited = 0.0, 0, 0
    small: Waits | None = None
    for number in range(180):
        band.offer(asking(f"big{number % 9}", arrival=now))
    for number in range(3000):
        now += 0.01
        if small is None and number % 7 == 0:
            small, waited = band.offer(asking("small", arrival=now)), 0
        item = band.dispatch(now)
        assert item is not None
        waited += 1
        if item is small:
            small = None
            longest = max(longest, waited)
        else:
            band.offer(asking(item.flow.fairness_id, arrival=now))
        sent(policy, item, now)
        answered(policy, item, now, Usage(tokens, tokens))
    longest = max(longest, waited if small is not None else 0)
    if policy.isolates:
        assert longest <= 30, "it has a turn within a few rounds of ten flows"
    else:
        assert longest > 30, "a backlog of 180 goes before it, or it never has a turn"


@each(FairnessPolicy)
def test_a_single_flow_is_always_served(cls: type[FairnessPolicy]) -> None:
    policy = made(cls)
    band = Band(policy, made(FirstCome))
    for number in range(50):
        band.offer(asking("alone", arrival=float(number), bytes=10**6))
        item = band.dispatch(float(number))
        assert item is not None
        answered(policy, item, float(number), Usage(10**6, 10**6))


@each(FairnessPolicy)
def test_the_state_of_flows_that_are_gone_is_bounded(cls: type[FairnessPolicy]) -> None:
    policy = made(cls)
    band = Band(policy, made(FirstCome))
    keeper = band.offer(asking("keeper"))
    for number in range(21_000):
        item = band.offer(asking(f"u{number}", arrival=1.0))
        band.remove(item)
        sent(policy, item, 1.0)
        answered(policy, item, 1.0, Usage(1, 1))
        if number % 2:
            band.forget(f"u{number}")
    for of in (policy, band.share):
        for name in dir(of):
            held = getattr(of, name, None)
            if isinstance(held, (dict, list)) or hasattr(held, "nbytes"):
                assert len(held) <= 20_100, name
    assert band.dispatch(2.0) is keeper


@each(FairnessPolicy)
def test_items_that_are_not_requests_are_served(cls: type[FairnessPolicy]) -> None:
    """A caller may hand in objects of any type."""
    band = Band(made(cls), made(FirstCome))
    items = [band.offer(Waits(flow, arrival=1.0, request=object())) for flow in "abcabc"]
    assert {id(band.dispatch(1.0)) for _ in items} == set(map(id, items))


@each(FairnessPolicy)
def test_the_tolerance_of_a_policy_is_a_finite_number_from_0_on(cls: type[FairnessPolicy]) -> None:
    assert math.isfinite(made(cls).tolerance) and made(cls).tolerance >= 0.0


@given(steps=STEPS)
@examples(40)
def test_the_claims_of_a_policy_that_ranks_are_finite_stable_and_shared_by_workers(steps: list[tuple[str, int, int]]) -> None:
    """Two workers share one ledger. In every state each worker's pick has a stable, finite claim, and everything is served in the end."""
    ranking = [cls for cls in every(FairnessPolicy) if cls.ranks]
    assert ranking
    for cls in ranking:
        check_claims(cls, steps)


def check_claims(cls: type[FairnessPolicy], steps: list[tuple[str, int, int]]) -> None:
    board = Board(2)
    bands = []
    for worker in range(2):
        bands.append(Band(made(cls), made(FirstCome), ledger=BoardPeers(board, worker).ledger(0)))
    for number, (step, which, size) in enumerate(steps):
        band, area = bands[which % 2], board.areas[which % 2]
        if step == "offer":
            band.offer(asking(f"u{which // 2}", arrival=number * 0.004, bytes=size))
        elif step == "dispatch" and band.dispatch(number * 0.004) is not None:
            area.progress += 1
        area.bands[0] = Held(len(band))
        for each_band in bands:
            picked = each_band.share.pick(number * 0.004)
            if picked is not None:
                claim = each_band.share.claim(picked)
                assert math.isfinite(claim) and claim == each_band.share.claim(picked)
    for band in bands:
        while len(band):
            assert band.dispatch(1.0) is not None


# Displacement


@each(DisplacementPolicy)
@given(items=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=30))
@examples(50)
def test_victims_wait_in_the_band_and_a_whole_band_can_be_displaced(cls: type[DisplacementPolicy], items: list[tuple[int, int]]) -> None:
    policy = made(cls)
    queue = next(q for q in every(FlowQueue) if policy.queue_needs in q.capabilities and q.type_name != "example-sorted-queue")
    band = Band(made(every(FairnessPolicy)[0]), made(FirstCome), made(queue))
    waiting = {id(item): item for item in (band.offer(Waits(f"u{flow}", bytes=size)) for flow, size in items)}
    for _ in items:
        before = (band.bytes, len(band))
        victim = policy.victim(band)
        assert victim is policy.victim(band), "a look displaces no item"
        assert victim is not None and id(victim) in waiting
        assert (band.bytes, len(band)) == before
        band.remove(waiting.pop(id(victim)))
    assert policy.victim(band) is None


# Saturation


def gates_itself(detector: SaturationDetector) -> bool:
    """Whether it holds requests back as the fairness policy, so the pool is never full for it."""
    return isinstance(detector, FairnessPolicy) and detector.holds


@given(situation=situations())
@examples(100)
def test_saturation_is_a_finite_number_from_0_on(situation: Candidates) -> None:
    for cls in every(SaturationDetector):  # in one test: to make the situations costs more than to ask the detectors
        detector = made(cls)
        saturation = detector.saturation(situation)
        assert isinstance(saturation, float) and math.isfinite(saturation) and saturation >= 0.0, cls.type_name
        step = detector.step(situation)
        assert math.isfinite(step) and step >= 0.0, cls.type_name
        assert 0 <= detector.stale(situation) <= len(situation), cls.type_name


@given(situation=situations(), more=st.integers(0, 50), where=st.integers(0, 11))
@examples(100)
def test_more_load_in_flight_never_lowers_the_saturation(situation: Candidates, more: int, where: int) -> None:
    extra = np.zeros(len(situation.snapshot.endpoints))
    extra[where % len(extra)] = more
    tokens = np.zeros(len(extra))
    loaded = Candidates(situation.snapshot, situation._inflight + extra, tokens + extra, situation.rows)
    plain = Candidates(situation.snapshot, situation._inflight, tokens, situation.rows)
    for cls in every(SaturationDetector):
        detector = made(cls)
        before, after = detector.saturation(plain), detector.saturation(loaded)
        assert after >= before, cls.type_name
        most = before * (1 + 1e-9) + detector.step(loaded) * more + 1e-9
        assert after <= most, f"{cls.type_name}: `step` is the most that one request can add"


@each(SaturationDetector)
def test_a_pool_without_endpoints_is_full(cls: type[SaturationDetector]) -> None:
    some = candidates({"waiting_requests": [0.0]})
    none = some.keep(np.array([False]))
    detector = made(cls)
    assert detector.saturation(none) == 1.0
    assert math.isfinite(detector.step(none)) and detector.stale(none) == 0
    assert detector.saturation(candidates({}, count=0)) == 1.0


@each(SaturationDetector)
def test_an_idle_pool_has_room_and_a_flooded_one_has_none(cls: type[SaturationDetector]) -> None:
    detector = made(cls)
    assert detector.saturation(candidates({name: [0.0, 0.0] for name in SCRAPED})) == 0.0
    flood = candidates({name: [0.0, 0.0] for name in SCRAPED}, inflight=[10**6] * 2, tokens=[10**10] * 2)
    assert (detector.saturation(flood) >= 1.0) != gates_itself(detector)


@each(SaturationDetector)
@pytest.mark.parametrize("state", ["never scraped", "no longer scraped", "does not report"])
def test_without_scraped_values_the_load_in_flight_alone_fills_and_frees_the_pool(cls: type[SaturationDetector], state: str) -> None:
    """However scraping fails, an idle pool has room. The detector slows down to counting, and never stops dispatch."""
    detector = made(cls)
    many, nan = [10**6] * 2, float("nan")
    values = dict.fromkeys(SCRAPED, [nan, nan] if state == "does not report" else [1000.0, 1000.0])
    fresh, known = [state == "does not report"] * 2, [state != "never scraped"] * 2
    for inflight, full in (([0, 0], False), (many, True), ([0, 0], False)):
        pool = candidates(values, inflight=inflight, tokens=[n * 1000 for n in inflight], fresh=fresh, known=known)
        assert (detector.saturation(pool) >= 1.0) == (full and not gates_itself(detector))


# Usage limits


@each(UsageLimitPolicy)
@given(saturation=st.floats(0, 3), priorities=st.sets(st.integers(-100, 100), max_size=10), again=st.integers(1, 4))
@examples(100)
def test_a_lower_band_never_has_a_higher_ceiling(cls: type[UsageLimitPolicy], saturation: float, priorities: set[int], again: int) -> None:
    policy = made(cls)
    bands = sorted(priorities, key=rank)
    for _ in range(again):
        ceilings = policy.ceilings(saturation, bands)
        assert len(ceilings) == len(bands)
        assert all(0.0 <= ceiling <= 1.0 for ceiling in ceilings)
        assert all(higher >= lower for higher, lower in pairwise(ceilings))


@each(UsageLimitPolicy)
def test_the_highest_band_is_always_served_in_an_idle_pool(cls: type[UsageLimitPolicy]) -> None:
    policy = made(cls)
    for bands in ([0], [5, 0, -1], [7, 7]):
        assert policy.ceilings(0.0, bands)[0] > 0.0


# In-flight eviction


@each(EvictionFilter)
def test_a_request_that_is_not_sheddable_is_never_evicted(cls: type[EvictionFilter]) -> None:
    policy = made(cls)
    assert [policy.evictable(FlowKey("a", priority)) for priority in (-1, 0, 5)] == [True, False, False]


@each(EvictionOrder)
def test_a_less_important_request_is_evicted_first(cls: type[EvictionOrder]) -> None:
    policy = made(cls)
    keys = [policy.key(FlowKey("a", priority), 1.0) for priority in (-5, -1, 0, 5)]
    assert keys == sorted(keys)
    assert all(isinstance(part, (int, float)) for key in keys for part in (key if isinstance(key, tuple) else (key,)))


def test_dispatch_limits_and_eviction_use_the_same_order_of_bands() -> None:
    priorities = [0, 5, -1]
    by_rank = sorted(priorities, key=rank)
    assert by_rank == [5, 0, -1]
    for cls in every(EvictionOrder):
        policy = made(cls)
        eviction_order = sorted(priorities, key=lambda priority, policy=policy: policy.key(FlowKey("a", priority), 1.0))  # type: ignore[misc]
        assert eviction_order == by_rank[::-1]
    for limits in every(UsageLimitPolicy):
        ceilings = made(limits).ceilings(0.9, by_rank)
        assert list(ceilings) == sorted(ceilings, reverse=True)
