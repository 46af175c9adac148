"""Bands and flows come and go by configuration and by use, and neither loses a request."""

import pytest

from epp.flow import registry as module
from epp.flow.registry import IDLE_S, OVERFLOW, Registry
from epp.request.flows import FlowKey
from tests.epp.flow.policies import band, plan
from tests.epp.flow.shards import Board, BoardPeers, Shard


def priorities(shard: Shard) -> list[int]:
    return [each.priority for each in shard.controller._registry.order]


def test_the_bands_of_the_plan_and_band_zero_exist_from_the_start_ordered_by_rank() -> None:
    shard = Shard(plan(band(-3), band(7)))
    assert priorities(shard) == [7, 0, -3]
    assert shard.gate.priorities == (7, 0, -3)


def test_the_templates_create_other_bands_when_objectives_name_them() -> None:
    made = plan(band(7), template=band(99, max_requests=11), negative_template=band(99, max_requests=22))
    shard = Shard(made)
    shard.controller.provision([4, -4])
    assert priorities(shard) == [7, 4, 0, -4]
    assert [each.plan.max_requests for each in shard.controller._registry.order] == [5_000, 11, 11, 22]
    assert shard.gate.priorities == (7, 4, 0, -4)


def test_without_a_negative_template_the_other_template_is_used() -> None:
    made = plan(template=band(0, max_requests=11))
    assert made.band(-4).max_requests == made.band(4).max_requests == 11
    assert made.band(-4).priority == -4


def test_an_empty_band_that_is_no_longer_named_is_removed_at_once() -> None:
    shard = Shard()
    shard.controller.provision([4])
    shard.controller.provision([])
    assert priorities(shard) == [0]


def test_a_leaving_band_dispatches_what_waits_in_it_and_accepts_nothing_new() -> None:
    shard = Shard()
    shard.controller.provision([4])
    waits = shard.call(priority=4)
    shard.controller.provision([])
    assert priorities(shard) == [4, 0]
    later = shard.call(priority=4)
    assert shard.seen.flows == {FlowKey("a", 4): (1, 10), FlowKey("a", 0): (1, 10)}
    shard.room(1)
    assert (waits.outcome, later.outcome) == ("Dispatched", ""), "it keeps its place in the order"
    assert priorities(shard) == [0]


@pytest.mark.parametrize("how", ["leaves", "expires", "shuts down"])
def test_a_leaving_band_is_removed_with_its_last_request_however_that_ends(how: str) -> None:
    shard = Shard()
    shard.controller.provision([4])
    waits = shard.call(priority=4)
    shard.controller.provision([])
    if how == "leaves":
        waits.leave()
    elif how == "expires":
        shard.after(60.0)
    else:
        shard.controller.shut_down()
    assert priorities(shard) == [0]


def test_a_leaving_band_that_is_named_again_returns_unchanged() -> None:
    shard = Shard()
    shard.controller.provision([4])
    first = shard.call(priority=4)
    shard.controller.provision([])
    shard.controller.provision([4])
    second = shard.call(priority=4)
    assert shard.seen.flows == {FlowKey("a", 4): (2, 20)}
    shard.room(2)
    assert (first.outcome, second.outcome) == ("Dispatched", "Dispatched")
    assert priorities(shard) == [4, 0]


def test_a_flow_is_created_on_first_use_and_removed_after_its_idle_time() -> None:
    shard = Shard()
    registry = shard.controller._registry
    call = shard.call("x")
    assert registry.flows == 1
    call.leave()
    shard.after(IDLE_S - 1)
    assert registry.flows == 1
    shard.after(1)
    assert registry.flows == 0


def test_a_flow_is_not_removed_while_a_request_refers_to_it() -> None:
    shard = Shard(plan(request_ttl_s=1e9, no_endpoint_ttl_s=1e9))
    call = shard.call("x")
    shard.after(100 * IDLE_S)
    assert shard.controller._registry.flows == 1
    shard.room(1)
    assert call.outcome == "Dispatched"


def test_use_restarts_the_idle_time_of_a_flow() -> None:
    shard = Shard()
    shard.call("x").leave()
    shard.after(IDLE_S - 1)
    shard.call("x").leave()
    shard.after(IDLE_S - 1)
    assert shard.controller._registry.flows == 1


def test_beyond_the_maximum_the_flow_that_is_idle_longest_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLOWS_MAX", 2)
    shard = Shard()
    shard.call("old").leave()
    shard.call("young").leave()
    shard.call("new")
    known = shard.controller._registry.order[0].known
    assert set(known) == {FlowKey("young", 0), FlowKey("new", 0)}


def test_further_flows_share_one_if_no_flow_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLOWS_MAX", 2)
    shard = Shard()
    calls = [shard.call(f"t{i}") for i in range(6)]
    known = shard.controller._registry.order[0].known
    assert set(known) == {FlowKey("t0", 0), FlowKey("t1", 0), FlowKey(OVERFLOW, 0)}
    assert len(known[FlowKey(OVERFLOW, 0)]) == 4
    shard.room(6)
    assert [call.outcome for call in calls] == ["Dispatched"] * 6
    assert [key.fairness_id for key, *_ in shard.seen.outcomes].count("t5") == 1, "each keeps its name"


def test_a_million_fairness_ids_leave_a_bounded_state() -> None:
    made = Registry(plan(), lambda plugin, problem: None, lambda order: None, BoardPeers(Board(1)).ledger)
    for i in range(30_000):
        made.release(made.lease(FlowKey(f"t{i}", 0)), now=0.0)
    assert made.flows == len(made.order[0].known) == module.FLOWS_MAX
