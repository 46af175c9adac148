from shm.flow_areas import DISPATCHED, FlowAreas, FlowSchema
from shm.remote_area import RemoteArea, RemoteSchema
from tests.shm.memory import region_for
from tests.workers.replicas.live import Replica
from workers.replicas.waiting import LOOKS_MAX, News, Waiting, WaitingInPools
from workers.replicas.wire import ONLY, Band, Flow, PoolFlow
from workers.shared.documents import OBJECTIVES
from workers.shared.objectives import ObjectivesRecord, ObjectivesView, encode

PRIORITIES = (-1, 0, 5)  # at the places 0, 1 and 2


def test_the_head_of_other_replicas_is_their_most_important_band_with_the_progress_of_those_that_have_it() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0}, priorities=PRIORITIES)
    waiting, remote = replica.waiting, replica.remote
    waiting.bands(whole=False)
    low, high = Flow([Band(-1, 3, 30)], 100), Flow([Band(-1, 1, 10), Band(5, 2, 20)], 7)
    waiting.show([low, high, Flow([], 1000), Flow([Band(5, 1, 1), Band(77, 9, 9)], 8)])
    assert remote.head() == (2, 15)
    assert (remote.band(0), remote.band(2)) == ((4, 40), (3, 21))
    waiting.show([high, low])
    assert remote.head() == (2, 7)
    waiting.show([low])
    assert remote.head() == (0, 100)
    waiting.show([Flow([Band(5, 0, 0)], 1)])
    assert remote.head() is None


def test_progress_is_said_while_something_waits() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0}, priorities=PRIORITIES)
    waiting, area = replica.waiting, replica.flow.area(0)
    waiting.bands(whole=False)
    replica.flow.words[replica.flow.base(0) + DISPATCHED] += 1
    assert waiting.bands(whole=False) is None, "nothing waits"
    area.publish(2, 1, 10, 1.0)
    assert waiting.bands(whole=False) == Flow([Band(5, 1, 10)], 1)
    assert waiting.bands(whole=False) is None
    replica.flow.words[replica.flow.base(0) + DISPATCHED] += 1
    assert waiting.bands(whole=False) == Flow([Band(5, 1, 10)], 2)


def test_the_bands_of_a_later_configuration_are_shown_although_nothing_waits_here() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0})
    replica._documents.write(OBJECTIVES, encode(ObjectivesRecord({}, {0: 0, 5: 1})))
    replica.waiting.show([Flow([Band(5, 2, 20)], 1)])
    assert replica.remote.band(1) == (2, 20)


class Pools:
    """A replica of several pools, by their keys."""

    def __init__(self, *keys: int) -> None:
        replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0})
        flow, remote = FlowSchema(4, 1), RemoteSchema(1, 4)
        self.flows = {key: FlowAreas(flow, region_for(flow), replica.areas) for key in keys}
        self.remotes = {key: RemoteArea(remote, region_for(remote)) for key in keys}
        objectives: ObjectivesView = replica.waiting._objectives
        self.parts = {key: Waiting(self.flows[key], objectives, self.remotes[key]) for key in keys}
        self.waiting = WaitingInPools(self.parts)

    def wait(self, key: int, requests: int) -> None:
        self.flows[key].area(0).publish(0, requests, 10 * requests, 1.0)


def test_a_message_names_the_pools_in_which_something_waits_and_those_in_which_it_has_ended() -> None:
    pools = Pools(1, 2, 3)
    assert not pools.waiting.news(whole=True).any
    pools.wait(2, 4)
    told = News(None, [PoolFlow(2, Flow([Band(0, 4, 40)], 0))])
    assert pools.waiting.news(whole=False) == told
    assert not pools.waiting.news(whole=False).any
    assert pools.waiting.news(whole=True) == told
    pools.wait(2, 0)
    assert pools.waiting.news(whole=False) == News(None, [PoolFlow(2, Flow([], 0))])
    assert not pools.waiting.news(whole=True).any


def test_each_whole_message_names_the_only_pool() -> None:
    pools = Pools(ONLY)
    assert not pools.waiting.news(whole=False).any
    assert pools.waiting.news(whole=True) == News(Flow([], 0), [])
    pools.wait(ONLY, 4)
    assert pools.waiting.news(whole=False) == News(Flow([Band(0, 4, 40)], 0), [])


def test_of_very_many_pools_some_are_looked_at_in_each_turn() -> None:
    pools = Pools(*range(1, 3 * LOOKS_MAX))
    for key in pools.flows:
        pools.wait(key, 1)
    said = [{each.pool for each in pools.waiting.news(whole=False).flows} for _ in range(3)]
    assert [len(each) for each in said] == [LOOKS_MAX, LOOKS_MAX, LOOKS_MAX - 1]
    assert set.union(*said) == set(pools.flows)


def test_what_waits_elsewhere_is_written_for_its_pool_and_unknown_pools_do_nothing() -> None:
    pools = Pools(1, 2)
    flows = {1: [Flow([Band(0, 3, 30)], 1)], 9: [Flow([Band(0, 7, 70)], 1)]}
    pools.waiting.show([1, 9], lambda key: flows.get(key, []))
    assert [pools.remotes[key].waiting() for key in (1, 2)] == [(3, 30), (0, 0)]
    pools.waiting.show([1], lambda _key: [])
    assert pools.remotes[1].waiting() == (0, 0)


def test_a_pool_that_goes_is_said_no_more() -> None:
    pools = Pools(1, 2)
    for key in (1, 2):
        pools.wait(key, 1)
    assert len(pools.waiting.news(whole=False).flows) == 2
    pools.waiting.use({2: pools.parts[2]})
    assert [each.pool for each in pools.waiting.news(whole=True).flows] == [2]
