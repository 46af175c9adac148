"""Turn priority, against scores computed by hand: turn + time weight x seconds that the head has waited."""

from typing import Any

import pytest

from epp.decision.decision import Response
from epp.plugins.fairness.program_aware import ProgramAware
from epp.plugins.ordering import FirstCome
from epp.request import DEFAULT_FLOW
from tests.contract.waiting import Band, Waits, asking, made
from tests.epp.flow.shards import Board, BoardPeers
from tests.epp.plugins.fairness import decision


class World:
    """One band of each worker, with one policy instance per worker."""

    def __init__(self, workers: int = 1, **parameters: Any) -> None:
        board = Board(workers)
        self.policies = [made(ProgramAware, strategy="turn-priority", **parameters) for _ in range(workers)]
        self.bands = [
            Band(policy, made(FirstCome), ledger=BoardPeers(board, worker).ledger(0)) for worker, policy in enumerate(self.policies)
        ]

    def offer(self, session: str, arrival: float, worker: int = 0) -> Waits:
        return self.bands[worker].offer(asking(session, arrival=arrival))

    def next(self, now: float, worker: int = 0) -> str:
        """Dispatches the next request and sends it."""
        item = self.bands[worker].dispatch(now)
        assert item is not None
        item.request.now = now
        self.policies[worker].before_send(item.request, decision())
        self.flying = item
        return item.flow.fairness_id

    def end(self, now: float, worker: int = 0, item: Waits | None = None) -> None:
        request = (item or self.flying).request
        request.now = now
        self.policies[worker].response_complete(request, decision(), Response(200))

    def turns(self, session: str, count: int, now: float, worker: int = 0) -> None:
        for _ in range(count):
            self.offer(session, now, worker)
            self.next(now, worker)
            self.end(now, worker)

    def claim(self, worker: int = 0) -> float:
        share = self.bands[worker].share
        claim: float = share.claim(share.pick(0.0))
        return claim


def test_the_deeper_session_goes_first() -> None:
    world = World()
    world.turns("deep", 3, 100.0)
    world.offer("new", 100.0)
    world.offer("deep", 100.0)
    assert world.next(101.0) == "deep"


@pytest.mark.parametrize(("waited", "first"), [(39.0, "deep"), (41.0, "new")])
def test_at_the_default_weight_a_head_start_of_two_turns_is_worth_forty_seconds(waited: float, first: str) -> None:
    """deep: 3 + 0.05 x 0; new: 1 + 0.05 x waited. They are equal at 40 s."""
    world = World()
    world.turns("deep", 2, 1000.0)
    world.offer("new", 1000.0 - waited)
    world.offer("deep", 1000.0)
    assert world.next(1000.0) == first


def test_of_equal_scores_the_head_that_has_waited_longest_goes_first() -> None:
    world = World(turnPriorityTimeWeight=0)
    for session, arrival in (("b", 3.0), ("a", 1.0), ("c", 2.0)):
        world.offer(session, arrival)
    assert [world.next(9.0) for _ in range(3)] == ["a", "c", "b"]


@pytest.mark.parametrize(("inactivity", "returns", "first"), [(120, 219.0, "idle"), (120, 221.0, "steady"), (0, 9999.0, "idle")])
def test_after_a_long_pause_a_session_is_at_its_first_turn(inactivity: float, returns: float, first: str) -> None:
    world = World(turnPriorityInactivitySeconds=inactivity, turnPriorityTimeWeight=0)
    world.turns("idle", 9, 100.0)
    world.turns("steady", 1, returns)
    world.offer("steady", returns)
    world.offer("idle", returns)
    assert world.next(returns) == first


def test_a_session_that_returned_has_its_whole_depth_from_its_second_request_on() -> None:
    world = World(turnPriorityTimeWeight=0)
    world.turns("idle", 9, 100.0)
    world.turns("idle", 1, 500.0)
    world.turns("steady", 5, 500.0)
    world.offer("steady", 500.0)
    world.offer("idle", 500.0)
    assert world.next(500.0) == "idle"


def test_a_session_with_a_request_in_flight_is_not_idle() -> None:
    world = World(turnPriorityTimeWeight=0)
    world.turns("long", 5, 100.0)
    world.offer("long", 100.0)
    assert world.next(100.0) == "long"
    world.turns("steady", 2, 400.0)
    world.offer("steady", 400.0)
    world.offer("long", 400.0)
    assert world.next(400.0) == "long"


def test_waiting_in_the_queue_does_not_make_a_session_idle() -> None:
    world = World(turnPriorityTimeWeight=0)
    world.turns("deep", 5, 100.0)
    world.offer("deep", 110.0)
    world.offer("new", 110.0)
    assert world.next(1000.0) == "deep"


def test_requests_without_a_session_have_no_depth() -> None:
    world = World(turnPriorityTimeWeight=0)
    world.turns(DEFAULT_FLOW, 50, 100.0)
    world.turns("session", 1, 100.0)
    world.offer(DEFAULT_FLOW, 100.0)
    world.offer("session", 100.0)
    assert world.next(100.0) == "session"


def test_workers_share_the_depth_of_a_session() -> None:
    """Four turns in worker 0, one in worker 1: its sixth turn, at 200 s, claims -(6 - 0.05 x 200) = 4."""
    world = World(workers=2)
    world.turns("s", 4, 198.0, worker=0)
    world.turns("s", 1, 199.0, worker=1)
    for worker in (0, 1):
        world.offer("s", 200.0, worker)
        assert world.claim(worker) == pytest.approx(4.0)


def test_another_worker_keeps_a_session_alive_or_lets_it_become_idle() -> None:
    world = World(workers=2, turnPriorityTimeWeight=0)
    world.turns("s", 4, 100.0, worker=0)
    world.turns("s", 1, 200.0, worker=1)
    world.offer("s", 250.0, worker=0)
    assert world.claim(0) == -6.0
    world.offer("s", 400.0, worker=1)
    assert world.claim(1) == -1.0
