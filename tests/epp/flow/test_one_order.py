"""One comparison orders bands everywhere: the priorities -1, 0 and 5 in dispatch, in displacement and in eviction."""

from epp.flow.eviction import Victims
from epp.plugin import NoParams
from epp.plugins.displacement import PriorityThenTime
from epp.request.flows import FlowKey, rank
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Shard

ARRIVE = (0, 5, -1)
MOST_IMPORTANT_FIRST = [5, 0, -1]


def dispatched() -> list[int]:
    shard = Shard(plan(band(-1), band(5)))
    for priority in ARRIVE:
        shard.call(priority=priority)
    shard.room(3)
    return [key.priority for key, *_ in shard.seen.outcomes]


def displaced() -> list[int]:
    shard = Shard(plan(band(-1), band(5), band(9), max_requests=3))
    for priority in (*ARRIVE, 9, 9, 9):
        shard.call(priority=priority)
    return [key.priority for key, outcome, *_ in shard.seen.outcomes if outcome.value == "EvictedDisplaced"]


def evicted() -> list[int]:
    victims = Victims(lambda flow: True, PriorityThenTime("order", NoParams()).key)
    for at, priority in enumerate(ARRIVE):
        victims.track(FlowKey("a", priority), float(at), lambda: True)
    order = []
    while (victim := victims.best()) is not None:
        order.append(victim.flow.priority)
        victims.drop(victim)
    return order


def test_dispatch_displacement_and_eviction_use_the_same_order() -> None:
    assert sorted(ARRIVE, key=rank) == MOST_IMPORTANT_FIRST
    assert dispatched() == MOST_IMPORTANT_FIRST
    assert displaced() == MOST_IMPORTANT_FIRST[::-1]
    assert evicted() == MOST_IMPORTANT_FIRST[::-1]
