"""What one worker sees of the others in the areas, and what it publishes for them."""

import os
from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.flow.ports import Elsewhere, Head, Held, Wanted
from epp.request.flows import FlowKey
from shm.areas import Areas
from shm.flow_areas import FlowAreas, FlowSchema
from shm.remote_area import RemoteArea, RemoteSchema
from tests.examples import examples
from tests.shm.memory import region_for
from tests.shm.test_flow_areas import areas_of
from workers.worker.flow.peers import FRESH_S, AreaPeers

WORKERS = 3
PLACES = {0: 0, 5: 1, -1: 2}
POLICY = "some-fairness-policy"


class Shards:
    """The views of all workers on one set of areas."""

    def __init__(self) -> None:
        self.now = 10.0
        self.areas: Areas = areas_of(WORKERS)
        schema = FlowSchema(4, WORKERS)
        self.flow = FlowAreas(schema, region_for(schema), self.areas)
        self.wakeups = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(WORKERS)]
        self.peers = [self.view(worker) for worker in range(WORKERS)]
        for worker in range(WORKERS):
            self.areas.area(worker + 1).heartbeat(self.now)

    def view(self, worker: int, pool: str = "") -> AreaPeers:
        return AreaPeers(self.flow, self.areas, worker, PLACES, wakeups=self.wakeups, now=lambda: self.now, pool=pool)


@pytest.fixture
def shards() -> Iterator[Shards]:
    made = Shards()
    yield made
    for descriptor in made.wakeups:
        os.close(descriptor)


def test_a_shard_sees_the_others_and_not_itself(shards: Shards) -> None:
    one, two, three = shards.peers
    one.publish(5, 2, 20, 1.0)
    three.publish(5, 1, 10, 2.0)
    assert two.waiting() == 3
    assert one.waiting() == 1
    assert two.totals() == (3, 30)
    assert two.band(5) == (3, 30)
    assert one.band(5) == (1, 10)
    assert list(one.shards()) == [1, 2]
    assert two.held(0, 5) == Held(2, 20, 1.0)
    assert two.band(77) == (0, 0)


def test_a_shard_that_does_not_serve_is_not_seen(shards: Shards) -> None:
    one, two, _ = shards.peers
    two.publish(0, 4, 40, 1.0)
    two.head(0, 1.0)
    shards.areas.set_serving(2, False)
    assert one.waiting() == 0
    assert list(one.shards()) == [2]
    assert list(one.heads()) == []


def test_the_ledger_of_a_band_is_what_the_other_serving_shards_show(shards: Shards) -> None:
    one, two, three = (peers.ledger(5, POLICY) for peers in shards.peers)
    flow_hash = one.flow_hash(FlowKey("a", 5))
    assert flow_hash == three.flow_hash(FlowKey("a", 5)) != one.flow_hash(FlowKey("b", 5))
    assert (one.position(flow_hash), one.time(), one.end(), one.backlogged(), one.alone()) == (-inf, 0.0, 0.0, 0, True)
    two.move(flow_hash, 7.0)
    three.move(flow_hash, 5.0)
    two.show(3.0, 8.0, 2)
    three.show(4.0, 6.0, 1)
    assert (one.position(flow_hash), one.time(), one.end(), one.backlogged()) == (7.0, 4.0, 8.0, 2)
    assert (two.position(flow_hash), two.time(), two.end(), two.backlogged()) == (5.0, 4.0, 6.0, 1)
    shards.areas.set_serving(2, False)
    assert (one.position(flow_hash), one.end()) == (5.0, 6.0)
    shards.areas.set_serving(2, True)
    assert one.position(flow_hash) == 7.0


def test_each_band_has_a_separate_ledger_and_one_without_a_place_has_none(shards: Shards) -> None:
    one, two, _ = shards.peers
    a, b, nowhere = two.ledger(0, POLICY), two.ledger(5, POLICY), two.ledger(77, POLICY)
    for position, ledger in enumerate((a, b, nowhere), 1):
        ledger.move(ledger.flow_hash(FlowKey("a", 0)), float(position))
        ledger.show(float(position), float(position), position)
    for position, priority in enumerate((0, 5), 1):
        ledger = one.ledger(priority, POLICY)
        assert ledger.position(ledger.flow_hash(FlowKey("a", priority))) == ledger.time() == ledger.end() == position
    ledger = one.ledger(77, POLICY)
    assert (ledger.time(), ledger.end(), ledger.backlogged(), ledger.alone()) == (0.0, 0.0, 0, True)


def test_a_flow_has_no_position_of_another_policy_or_band_or_pool_that_had_its_place_before(shards: Shards) -> None:
    flow = FlowKey("a", 5)
    before = shards.view(1).ledger(5, POLICY)
    before.move(before.flow_hash(flow), 7.0)
    same = shards.view(0).ledger(5, POLICY)
    assert same.position(same.flow_hash(flow)) == 7.0
    others = [shards.view(0).ledger(5, "another-fairness-policy"), shards.view(0, "next").ledger(5, POLICY)]
    next_band = shards.view(0)
    next_band.know({9: PLACES[5]})
    others.append(next_band.ledger(9, POLICY))
    assert [ledger.position(ledger.flow_hash(flow)) for ledger in others] == [-inf, -inf, -inf]


def test_the_ledger_shows_whether_others_have_served_and_whether_a_request_of_the_band_waits_elsewhere(shards: Shards) -> None:
    one, two, _ = shards.peers
    ledger = one.ledger(5, POLICY)
    before = ledger.served()
    one.let_through(1)
    assert ledger.served() == before
    two.let_through(1)
    assert ledger.served() != before
    one.publish(5, 1, 10, 1.0)
    two.publish(0, 1, 10, 1.0)
    assert ledger.alone()
    two.publish(5, 1, 10, 1.0)
    assert not ledger.alone()


def test_names_that_cannot_be_encoded_have_marks_too(shards: Shards) -> None:
    assert shards.peers[0].ledger(0, POLICY).flow_hash(FlowKey("\udcff", 0)) > 0


def test_heads_are_those_of_shards_with_a_fresh_heartbeat(shards: Shards) -> None:
    one, two, three = shards.peers
    two.head(5, 3.0)
    three.head(-1, 2.0)
    assert list(one.heads()) == [Head(1, 5, 3.0), Head(2, -1, 2.0)]
    shards.now += FRESH_S
    shards.areas.area(3).heartbeat(shards.now)
    assert list(one.heads()) == [Head(2, -1, 2.0)]
    three.head(None, 0.0)
    assert list(one.heads()) == []


def test_all_shards_see_a_demand_until_it_is_answered(shards: Shards) -> None:
    one, two, three = shards.peers
    assert list(three.demands()) == []
    one.demand(2, Wanted(-1, 2, 200))
    two.demand(2, Wanted(-1, 1, 0))
    assert one.asked(2, -1) == two.asked(2, -1) == (3, 200)
    assert list(three.demands()) == [Wanted(-1, 3, 200)]
    three.answered(Wanted(-1, 3, 200))
    assert list(three.demands()) == []
    assert one.asked(2, -1) == (0, 0)


def test_a_successor_starts_with_all_demands_on_its_predecessor_answered(shards: Shards) -> None:
    one, _, _ = shards.peers
    one.demand(1, Wanted(0, 2, 20))
    shards.flow.area(1).take_over()
    successor = shards.view(1)
    assert list(successor.demands()) == []
    one.demand(1, Wanted(5, 1, 1))
    assert list(successor.demands()) == [Wanted(5, 1, 1)]


def test_a_wake_is_one_write_to_that_shards_eventfd(shards: Shards) -> None:
    shards.peers[0].wake(2)
    shards.peers[1].wake(2)
    assert os.eventfd_read(shards.wakeups[2]) == 2
    with pytest.raises(BlockingIOError):
        os.eventfd_read(shards.wakeups[1])


def test_requests_that_were_let_through_are_counted_and_shown(shards: Shards) -> None:
    one, two, _ = shards.peers
    one.let_through(1)
    one.let_through(2)
    assert two.progress(0) == 2
    one.pending(0)
    assert two.progress(0) == 2


def test_yields_are_counted_and_shown(shards: Shards) -> None:
    one, two, _ = shards.peers
    one.yielded()
    one.yielded()
    assert (two.yields(0), two.yields(2), two.progress(0)) == (2, 0, 0)


def test_a_band_keeps_its_place_until_another_band_gets_it(shards: Shards) -> None:
    one, two, _ = shards.peers
    one.know({0: 0, 5: 1})
    one.publish(-1, 1, 1, 1.0)
    assert two.band(-1) == (1, 1)
    one.publish(-1, 0, 0, 0.0)
    one.know({0: 0, 9: 2})
    assert one.band(-1) == (0, 0)
    one.publish(-1, 3, 3, 1.0)
    assert shards.flow.band(2).requests == 0


@given(st.lists(st.dictionaries(st.integers(-3, 3), st.integers(0, 3), max_size=4), max_size=12))
@examples(100)
def test_no_place_ever_belongs_to_two_bands(steps: list) -> None:
    areas = areas_of(1)
    schema = FlowSchema(4, 1)
    peers = AreaPeers(FlowAreas(schema, region_for(schema), areas), areas, 0, {}, wakeups=(), now=lambda: 0.0)
    for places in steps:
        distinct = {priority: place for place, priority in {v: k for k, v in places.items()}.items()}
        peers.know(distinct)
        assert distinct.items() <= peers._places.items()
        assert {place: priority for priority, place in peers._places.items()} == peers._priorities


def test_what_waits_in_other_replicas_counts_for_limits_while_it_is_fresh(shards: Shards) -> None:
    schema = RemoteSchema(1, 4)
    remote = shards.areas.remote = RemoteArea(schema, region_for(schema))
    remote.set_band(PLACES[5], 7, 70)
    remote.set_waiting(7, 70)
    remote.heartbeat(shards.now, 1)
    one, two, _ = shards.peers
    two.publish(5, 1, 10, 1.0)
    assert (one.totals(), one.band(5)) == ((1, 10), (1, 10))
    shards.areas.add_remote(shards.now)
    assert (one.totals(), one.band(5), one.band(0), one.band(77)) == ((8, 80), (8, 80), (0, 0), (0, 0))
    assert (list(one.shards()), one.heads()) == ([1, 2], ())
    assert (one.waiting(), one.elsewhere()) == (1, None)
    remote.set_head(PLACES[5], 9)
    assert (one.waiting(), one.elsewhere()) == (2, Elsewhere(5, 9))
    remote.set_head(3, 9)
    assert one.elsewhere() is None, "no band of this replica has that place"
    remote.set_head(PLACES[5], 9)
    shards.areas.add_remote(shards.now + 1.5)
    assert (one.totals(), one.waiting(), one.elsewhere()) == ((1, 10), 1, None)
    remote.set_head(None, 9)
    shards.areas.add_remote(shards.now)
    assert (one.waiting(), one.elsewhere()) == (1, None)
