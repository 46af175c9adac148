from shm.flow_lanes import DISPATCHED
from tests.workers.replicas.live import Replica
from workers.replicas.wire import Band, Flow
from workers.shared.documents import OBJECTIVES
from workers.shared.objectives import ObjectivesRecord, encode

PRIORITIES = (-1, 0, 5)  # at the places 0, 1 and 2


def test_the_head_of_other_replicas_is_their_most_important_band_with_the_progress_of_those_that_have_it() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0}, priorities=PRIORITIES)
    waiting, remote = replica.exchange.parts.waiting, replica.remote
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
    waiting, lane = replica.exchange.parts.waiting, replica.flow.lane(0)
    waiting.bands(whole=False)
    replica.flow.words[replica.flow.base(0) + DISPATCHED] += 1
    assert waiting.bands(whole=False) is None, "nothing waits"
    lane.publish(2, 1, 10, 1.0)
    assert waiting.bands(whole=False) == Flow([Band(5, 1, 10)], 1)
    assert waiting.bands(whole=False) is None
    replica.flow.words[replica.flow.base(0) + DISPATCHED] += 1
    assert waiting.bands(whole=False) == Flow([Band(5, 1, 10)], 2)


def test_the_bands_of_a_later_configuration_are_shown_although_nothing_waits_here() -> None:
    replica = Replica("unix:///none", "a", {"10.0.0.1:8000": 0})
    replica._documents.write(OBJECTIVES, encode(ObjectivesRecord({}, {0: 0, 5: 1})))
    replica.exchange.parts.waiting.show([Flow([Band(5, 2, 20)], 1)])
    assert replica.remote.band(1) == (2, 20)
