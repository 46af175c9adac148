"""A policy that holds requests back although there is room."""

from collections.abc import Callable
from typing import Any

from epp.plugin import NoParams
from epp.request.flows import FlowView, Queued
from tests.epp.flow.policies import InTurn, Turns, band, plan
from tests.epp.flow.shards import Board, BoardPeers, FakeGate, Shard, outcomes


class Held(InTurn):
    """Holds every request back until `open` is set."""

    holds = True
    open = False

    def share(self, key: Callable[[Queued], Any]) -> "HeldTurns":
        return HeldTurns(self)


class HeldTurns(Turns):
    def __init__(self, policy: Held) -> None:
        super().__init__()
        self._policy = policy

    def pick(self, now: float) -> FlowView | None:
        return super().pick(now) if self._policy.open else None


def test_a_policy_may_hold_requests_back_although_there_is_room_and_nothing_else_waits() -> None:
    policy = Held("held", NoParams())
    shard = Shard(plan(template=band(fairness=policy)), gate=FakeGate(10))
    first, second = shard.call("a"), shard.call("b")
    assert outcomes(first, second) == ["", ""]
    shard.controller.woken()
    assert shard.controller.waiting == 2
    policy.open = True
    shard.controller.woken()
    assert outcomes(first, second) == ["Dispatched", "Dispatched"]
    assert shard.call("c").outcome == "Dispatched"


def test_requests_that_are_held_do_not_block_less_important_bands() -> None:
    policy = Held("held", NoParams())
    shard = Shard(plan(band(5, fairness=policy), template=band()), gate=FakeGate(10))
    important, other = shard.call("a", 5), shard.call("a", 0)
    assert outcomes(important, other) == ["", "Dispatched"]


def test_a_request_that_is_held_for_too_long_is_refused() -> None:
    shard = Shard(plan(template=band(fairness=Held("held", NoParams()))), gate=FakeGate(10))
    call = shard.call("a", ttl_s=1.0)
    shard.after(1.0)
    assert call.outcome == "EvictedTTL"


def test_a_shard_that_holds_its_requests_back_shows_no_head_and_does_not_stop_others() -> None:
    board = Board(2)
    made = plan(template=band(fairness=Held("held", NoParams())))
    holding = Shard(made, board=board, number=0, gate=FakeGate(10))
    other = Shard(plan(template=band()), board=board, number=1, gate=FakeGate(10), clock=holding.clock)
    held, call = holding.call("a"), other.call("b")
    assert outcomes(held, call) == ["", "Dispatched"]
    assert list(BoardPeers(board, 1).heads()) == []
