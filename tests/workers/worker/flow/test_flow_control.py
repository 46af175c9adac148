"""Flow control of real workers in one process: streams, areas, eventfds, timers; no network, no second process."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from epp.errors import Cause, Refused
from epp.metrics import Group
from epp.metrics.flow_control import FLOW_DURATIONS, FLOW_QUEUES, FLOW_REQUESTS
from shm.flow_areas import PENDING, WAITING, WAITING_BYTES
from tests.modes import interpreted_only
from tests.waiting import until
from tests.workers.flow_world import SentRequest, World, objective, rewrite, world
from workers.worker.flow.flow_control import QueuedRequest
from workers.worker.flow.metrics import FlowMetrics
from workers.worker.setup import WorkerParts

THREE = {"high": 5, "normal": 0, "low": -1}


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def order(*asked: SentRequest) -> Callable[[], list[str]]:
    """The names of the requests that got an endpoint, the earliest first. Ends each one, so that the next can be dispatched."""
    seen: list[str] = []

    def look() -> list[str]:
        for each in asked:
            if each.sent and each.name not in seen:
                seen.append(each.name)
                each.end()
        return seen

    return look


def test_a_request_does_not_wait_while_there_is_room_and_leaves_no_timer(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            asked = shard.ask()
            assert asked.sent
            assert shard.flow._look is None
            assert shard.flow._sweep is None
            assert w.instance.memory.flow is not None
            assert w.instance.memory.flow.total(PENDING) == 0
            asked.end()
            assert sum(shard.worker.area.inflight) == 0

    run(test)


def test_a_request_waits_while_the_pool_is_full_and_is_dispatched_when_an_answer_has_ended(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            first, second = shard.ask("first"), shard.ask("second")
            assert first.sent
            assert second.waits
            assert w.instance.memory.flow is not None
            assert w.instance.memory.flow.total(WAITING) == 1
            assert w.instance.memory.flow.total(WAITING_BYTES) > 0
            first.end()
            await until(lambda: second.sent)
            assert w.instance.memory.flow.total(WAITING) == 0
            assert w.instance.memory.flow.total(PENDING) == 0
            second.end()
            await until(lambda: shard.flow._look is None)

    run(test)


@pytest.mark.parametrize("shards", [1, 2])
def test_priorities_are_dispatched_in_one_order_for_any_number_of_workers(tmp_path: Path, shards: int) -> None:
    async def test() -> None:
        async with world(tmp_path, objectives=THREE, shards=shards) as w:
            one, other = w.shards[0], w.shards[-1]
            held = one.ask("held")
            low, normal, high = other.ask("low", "low"), one.ask("normal"), other.ask("high", "high")
            assert low.waits
            assert normal.waits
            assert high.waits
            look = order(held, low, normal, high)
            await until(lambda: len(look()) == 4)
            assert look() == ["held", "high", "normal", "low"]

    run(test)


def test_an_answer_that_ends_in_one_worker_wakes_a_request_that_waits_in_another(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, shards=2) as w:
            one, other = w.shards
            held, waits = one.ask("held"), other.ask("waits")
            assert held.sent
            assert waits.waits
            assert other.flow._look is not None
            other.flow._look.cancel()  # only the eventfd can wake this worker
            held.end()
            await until(lambda: waits.sent)
            waits.end()

    run(test)


def test_a_full_queue_accepts_a_more_important_request_and_refuses_one_that_waits_in_any_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "maxRequests: 2", objectives=THREE, shards=2) as w:
            one, other = w.shards
            held = one.ask("held")
            low, normal = other.ask("low", "low"), other.ask("normal")
            assert low.waits
            assert normal.waits
            begun = time.monotonic()
            high = one.ask("high", "high")
            assert high.waits
            await until(lambda: low.refused is not None)
            assert time.monotonic() - begun < 1
            assert low.refused == (429, "evicted-priority")
            assert low.header("retry-after").isdecimal()
            assert normal.waits
            again = one.ask("low again", "low")
            assert again.refused == (429, "rejected-saturated")
            look = order(held, high, normal)
            await until(lambda: len(look()) == 3)
            assert look() == ["held", "high", "normal"]

    run(test)


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            held, leaves = shard.ask("held"), shard.ask("leaves")
            assert leaves.waits
            leaves.end()
            assert w.instance.memory.flow is not None
            assert w.instance.memory.flow.total(WAITING) == w.instance.memory.flow.total(WAITING_BYTES) == 0
            held.end()
            assert shard.ask("next").sent

    run(test)


def test_a_request_is_refused_at_the_end_of_its_ttl(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            held, short = shard.ask("held"), shard.ask("short", x_llm_d_request_ttl_ms="20")
            assert short.waits
            await until(lambda: short.refused is not None)
            assert short.refused == (429, "rejected-ttl-expired")
            held.end()

    run(test)


def test_at_the_end_of_the_drain_timeout_all_waiting_requests_and_all_later_ones_are_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            held, waits = shard.ask("held"), shard.ask("waits")
            shard.flow.shut_down()
            await until(lambda: waits.refused is not None)
            assert waits.refused == (503, "rejected-shutting-down")
            assert shard.ask("late").refused == (503, "rejected-shutting-down")
            assert shard.flow._look is None
            held.end()

    run(test)


def queued() -> list[QueuedRequest]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, QueuedRequest)]


def test_nothing_is_kept_of_a_request_that_was_refused_at_once(tmp_path: Path) -> None:
    before = queued()  # of earlier tests; kept here so that no new one gets the same id
    earlier = {id(each) for each in before}

    async def test() -> None:
        async with world(tmp_path, "maxRequests: 1") as w:
            (shard,) = w.shards
            held, waits = shard.ask("held"), shard.ask("waits")
            assert shard.ask("full").refused == (429, "rejected-saturated")
            kept = {id(q): q.request.id for q in queued()}
            assert [kept[each] for each in kept.keys() - earlier] == ["waits"]
            held.end()
            await until(lambda: waits.sent)
            waits.end()

    run(test)


def test_a_worker_that_no_longer_serves_holds_no_capacity(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "maxRequests: 1", shards=2) as w:
            one, other = w.shards
            held, dead = one.ask("held"), other.ask("dead")
            assert dead.waits
            assert one.ask("full").refused == (429, "rejected-saturated")
            w.instance.memory.areas.set_serving(2, False)  # the parent has reaped it
            waits = one.ask("waits")
            assert waits.waits
            held.end()
            await until(lambda: waits.sent)

    run(test)


def test_an_unknown_objective_is_ignored_and_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, objectives=THREE) as w:
            (shard,) = w.shards
            asked = shard.ask("a", "nobody")
            assert asked.envoy.handler.request.priority == 0
            assert shard.counter("objectives_unknown_total") == 1
            asked.end()
            known = shard.ask("b", **{"x-gateway-inference-objective": "high"})
            assert known.envoy.handler.request.priority == 5
            assert shard.counter("objectives_unknown_total") == 1
            known.end()

    run(test)


def test_a_request_finds_what_was_published_before_it_without_a_heartbeat_between(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, objectives={}) as w:
            (shard,) = w.shards
            held = shard.ask("held")
            (w.folder / "high.yaml").write_text(objective("high", 7))
            (w.folder / "rewrite.yaml").write_text(rewrite("asked", "served"))
            w.watch.look()
            asked = shard.ask("a", "high", body=b'{"model": "asked", "prompt": "a"}')
            request = asked.envoy.handler.request
            assert (request.priority, request.target_model) == (7, "served")
            assert [band.priority for band in shard.flow._controller._registry.order] == [7, 0]
            unnamed = shard.ask("b", body=b'{"model": "other", "prompt": "b"}')
            assert unnamed.envoy.handler.request.target_model == "other"
            for each in (held, asked, unnamed):
                each.end()

    run(test)


def test_a_band_comes_and_goes_with_its_objectives_and_loses_no_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, objectives={"low": -1}) as w:
            (shard,) = w.shards
            held, low = shard.ask("held"), shard.ask("low", "low")
            (w.folder / "low.yaml").unlink()
            (w.folder / "high.yaml").write_text(objective("high", 7))
            w.watch.look()
            high = shard.ask("high", "high")  # before the worker's next heartbeat
            assert low.waits
            look = order(held, low, high)
            await until(lambda: len(look()) == 3)
            assert look() == ["held", "high", "low"]

    run(test)


def shown(w: World, group: Group) -> dict[tuple[str, ...], list[int]]:
    rows = w.instance.memory.series_reader(group).rows()
    return {labels: [*values.gauges, *values.counters] for labels, values in rows.items() if labels[0] != "other"}


def test_the_outcome_of_each_request_is_counted_once_and_waiting_requests_while_they_wait(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "maxRequests: 1", objectives=THREE) as w:
            (shard,) = w.shards
            shard.parts.kept.caps.served("m", "m", "t")
            fair = "x-llm-d-inference-fairness-id"
            held = shard.ask("held", **{fair: "t"})
            waits = shard.ask("waits", body=b'{"model": "m", "prompt": "x"}', **{fair: "t"})
            refused = shard.ask("refused", **{fair: "t"})
            assert refused.refused is not None
            assert shown(w, FLOW_QUEUES) == {("t", "0", "epp", "m", "m"): [1, 29]}
            held.end()
            await until(lambda: waits.sent)
            waits.end()
            assert shown(w, FLOW_QUEUES) == {("t", "0", "epp", "m", "m"): [0, 0]}
            assert shown(w, FLOW_REQUESTS) == {("Dispatched", "0", "epp"): [2], ("RejectedCapacity", "0", "epp"): [1]}
            durations = w.instance.memory.series_reader(FLOW_DURATIONS).rows()
            assert {labels[2]: sum(row.histograms[0][0]) for labels, row in durations.items() if labels[0] == "t"} == {
                "Dispatched": 2,
                "RejectedCapacity": 1,
            }

    run(test)


def test_a_flow_without_waiting_requests_has_a_queue_length_of_0_for_autoscalers(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "maxRequests: 1", objectives=THREE) as w:
            (shard,) = w.shards
            shard.parts.kept.caps.served("m", "m", "t")
            shard.ask("through", **{"x-llm-d-inference-fairness-id": "t"}).end()
            assert shown(w, FLOW_QUEUES) == {("t", "0", "epp", "m", "m"): [0, 0]}

    run(test)


def test_without_the_gate_a_sheddable_request_is_refused_with_its_reason_while_its_endpoints_are_full(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, objectives=THREE, gate=False) as w:
            (shard,) = w.shards
            assert shard.parts.flow is None
            first = shard.ask("low", "low")
            assert first.sent
            low = shard.ask("low", "low")
            assert low.refused == (429, "rejected-saturated")
            assert b"system saturated, sheddable request dropped" in low.answers[-1].immediate_response.body
            others = [shard.ask("normal"), shard.ask("high", "high")]
            assert all(each.sent for each in others)
            for each in (first, *others):
                each.end()
            assert shard.ask("low", "low").sent

    run(test)


def test_a_failing_check_for_room_leaves_no_request_waiting_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            faults: list[object] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
            held, waits = shard.ask("held"), shard.ask("waits", x_llm_d_request_ttl_ms="500")
            monkeypatch.setattr(shard.flow._observer, "cycled", broken)
            await until(lambda: len(faults) > 2)
            assert shard.flow._look is not None
            await until(lambda: waits.refused is not None)
            held.end()

    run(test)


def test_a_request_that_has_waited_is_decided_by_the_current_pipeline(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            held, waits = shard.ask("held"), shard.ask("waits")
            before = shard.app.pipelines.current.pipeline
            sent: list[str] = []
            shard.app.pipelines.use(replace(before, pre_request=(lambda request, _: sent.append(request.id),)))
            held.end()
            await until(lambda: waits.sent)
            assert sent == ["waits"], "the plugin ran, and one that was left out in the meantime did not"
            assert waits.envoy.handler.lease.pipeline is shard.app.pipelines.current.pipeline
            assert held.envoy.handler.lease.pipeline is before

    run(test)


def broken(*_: object) -> None:
    raise ValueError("a fault of a plugin")


def test_idle_flows_need_one_timer_when_no_request_waits(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            held, waits = shard.ask("held"), shard.ask("waits")
            held.end()
            await until(lambda: waits.sent)
            waits.end()
            await until(lambda: shard.flow._look is None)
            await until(lambda: shard.flow._sweep_at > time.monotonic() + 10)
            assert shard.flow._sweep is not None

    run(test)


@interpreted_only("replaces a method")
@pytest.mark.parametrize(("broken", "waits"), [("passed", False), ("enters", True), ("leaves", True), ("ended", True)])
def test_a_fault_while_a_request_is_counted_leaves_nothing_pending_or_waiting(
    broken: str, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_arguments: object) -> None:
        raise ZeroDivisionError

    async def test() -> None:
        async with world(tmp_path) as w:
            (shard,) = w.shards
            first = shard.ask("first") if waits else None
            with monkeypatch.context() as patch:
                patch.setattr(FlowMetrics, broken, raises)
                asked = shard.ask("second")
                if first is not None:
                    first.end()
                await until(lambda: asked.refused is not None)
            assert asked.refused == (500, "")
            assert w.instance.memory.flow is not None
            assert w.instance.memory.flow.total(PENDING) == w.instance.memory.flow.total(WAITING) == 0
            assert sum(shard.worker.area.inflight) == 0
            assert shard.ask("third").sent, "the pool has room again"

    run(test)


def test_a_pool_that_gives_its_place_to_another_one_writes_nothing_there_any_more(tmp_path: Path) -> None:
    async def test() -> None:
        async with world(tmp_path, "enableEviction: true") as w:
            (shard,) = w.shards
            flow = w.instance.memory.flow
            running, waits = shard.ask("running"), shard.ask("waits")
            assert running.sent and waits.waits and flow.total(WAITING) == 1
            gone = Refused(Cause.NO_POOL, "the pool is gone")
            for asked in (running, waits):
                asked.envoy.handler.leave(gone)
            left, worker = shard.parts, shard.worker
            left.leave()
            assert waits.refused is not None and waits.refused[0] == 404
            assert running.refused is None and flow.total(WAITING) == flow.total(PENDING) == 0
            shard.parts = WorkerParts(w.instance, 0, worker.area, bus=shard.bus, faults=worker.faults, clock=worker._clock, kept=left.kept)
            shard.app = shard.parts.app
            assert left.kept.flows() == [shard.flow]
            of_next = shard.ask("of the next pool")
            assert of_next.waits and flow.total(WAITING) == 1
            shown = bytes(flow.area(0).words)
            running.end()
            assert bytes(flow.area(0).words) == shown
            await until(lambda: of_next.sent)
            assert flow.total(WAITING) == flow.total(PENDING) == 0

    run(test)
