"""Pool and pods, as they come and go and in any order, become the endpoints that there should be."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kube.fake import PODS, POOLS, FakeApi, Object, in_virtual_time, pod, pool
from workers.cli.options import Options
from workers.discovery import EndpointSpec
from workers.kube.api import ApiError, Resource, Unreachable
from workers.kube.discovery import KubernetesDiscovery, Wanted, wanted
from workers.kube.pool import Pool, unspoken
from workers.kube.reflect import HOLD_S, Outage
from workers.kube.selector import parse

BY_NAME = Wanted("space", "pool")
TOLD_S = 0.25  # within which an event is to have reached the table
Scenario = Callable[["World"], Awaitable[None]]


class World:
    """Discovery on the fake server, and what it applied."""

    def __init__(self, api: FakeApi, whose: Wanted, *, successor: bool) -> None:
        self.api = api
        self.said: list[str] = []
        self.stood: list[str] = []
        self.applied: list[set[tuple[str, str, int, str]]] = []
        self.discovery = KubernetesDiscovery(
            api,
            whose,
            apply=self._apply,
            stands=self.stood.append,
            fits=self._fits,
            report=self.said.append,
            outage=Outage(self.said.append),
            successor=successor,
        )

    def _apply(self, specs: Collection[EndpointSpec]) -> None:
        self.applied.append({(spec.name, spec.host, spec.port, spec.uid) for spec in specs})

    def _fits(self, found: Pool) -> str:
        return unspoken(found, [("grpc", ("h2c", "http") if found.app_protocol == "http" else ("http",))])

    @property
    def names(self) -> set[str]:
        return {name for name, *_ in self.applied[-1]} if self.applied else set()

    @property
    def standing(self) -> str:
        return self.discovery.standing()


@contextlib.asynccontextmanager
async def living(api: FakeApi, whose: Wanted, *, successor: bool) -> AsyncIterator[World]:
    world = World(api, whose, successor=successor)
    task = asyncio.create_task(world.discovery.run())
    try:
        await asyncio.sleep(0.5)
        yield world
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def scenario(main: Scenario, api: FakeApi | None = None, whose: Wanted = BY_NAME, *, successor: bool = False) -> None:
    async def run() -> None:
        async with living(api or cluster(), whose, successor=successor) as world:
            await main(world)

    in_virtual_time(run)


def cluster(*pools: Object, pods: int = 3) -> FakeApi:
    api = FakeApi()
    api.install(POOLS)
    api.install(PODS)
    for found in pools:
        api.put(POOLS, "pool", found)
    for n in range(pods):
        api.put(PODS, f"p{n}", pod(f"10.0.0.{n}"))
    return api


def test_pods_that_were_seen_first_are_judged_when_the_pool_comes() -> None:
    async def main(world: World) -> None:
        assert world.names == set()
        assert world.stood == ["InferencePool 'pool' in namespace space is not known: there is none"]
        world.api.put(POOLS, "pool", pool(8000, 8001))
        await asyncio.sleep(TOLD_S)
        assert world.names == {f"p{n}-rank-{rank}" for n in range(3) for rank in range(2)}
        assert world.stood[1:] == [""]
        assert world.standing == ""

    scenario(main)


def test_pods_are_asked_for_by_the_pools_labels() -> None:
    async def main(world: World) -> None:
        assert ("list", "app=vllm") in world.api.asked
        assert ("list", "") not in world.api.asked

    scenario(main, cluster(pool()))


def test_a_pod_that_is_being_deleted_or_not_ready_leaves_at_once() -> None:
    async def main(world: World) -> None:
        world.api.put(PODS, "p0", pod("10.0.0.0", deletionTimestamp="2030-01-01T00:00:00Z"))
        world.api.put(PODS, "p1", pod("10.0.0.1", ready=False))
        await asyncio.sleep(TOLD_S)
        assert world.names == {"p2-rank-0"}
        world.api.put(PODS, "p1", pod("10.0.0.1"))
        world.api.put(PODS, "p2", pod("10.0.0.2", app="other"))
        await asyncio.sleep(TOLD_S)
        assert world.names == {"p1-rank-0"}

    scenario(main, cluster(pool()))


def test_a_name_or_an_address_that_comes_back_is_another_endpoint() -> None:
    async def main(world: World) -> None:
        (before,) = {uid for name, _, _, uid in world.applied[-1] if name == "p0-rank-0"}
        world.api.delete(PODS, "p0")
        world.api.put(PODS, "p0", pod("10.0.0.0"))
        await asyncio.sleep(TOLD_S)
        (after,) = {uid for name, _, _, uid in world.applied[-1] if name == "p0-rank-0"}
        assert before != after

    scenario(main, cluster(pool()))


def test_other_ports_and_another_selector_count_at_once() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(9000))
        await asyncio.sleep(TOLD_S)
        assert {port for _, _, port, _ in world.applied[-1]} == {9000}
        world.api.put(PODS, "other", pod("10.0.1.1", app="other"))
        world.api.put(POOLS, "pool", pool(9000, app="other"))
        await asyncio.sleep(TOLD_S)
        assert world.names == {"other-rank-0"}
        world.api.put(PODS, "p0", pod("10.0.0.9", app="other"))
        await asyncio.sleep(TOLD_S)
        assert world.names == {"other-rank-0", "p0-rank-0"}
        assert world.api.watching == 2  # nobody watches for the old selector

    scenario(main, cluster(pool()))


def test_a_new_selector_takes_out_who_it_does_not_select_even_while_the_api_is_away() -> None:
    async def main(world: World) -> None:
        world.api.put(PODS, "both", {**pod("10.0.2.1"), "metadata": {"labels": {"app": "vllm", "tier": "a"}}})
        await asyncio.sleep(TOLD_S)
        narrow = pool()
        narrow["spec"]["selector"]["matchLabels"]["tier"] = "a"
        world.api.put(POOLS, "pool", narrow)
        await asyncio.sleep(0)
        world.api.failure = Unreachable("away")
        await asyncio.sleep(60)
        assert world.names == {"both-rank-0"}
        world.api.failure = None
        await asyncio.sleep(7)
        assert world.names == {"both-rank-0"}

    scenario(main, cluster(pool()))


def test_a_protocol_that_no_parser_reads_is_said_and_endpoints_stay() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(protocol="kubernetes.io/h2c"))
        await asyncio.sleep(TOLD_S)
        assert "appProtocol is 'kubernetes.io/h2c', which parser 'grpc' does not read" in world.stood[-1]
        assert len(world.names) == 3
        world.api.put(POOLS, "pool", pool())
        await asyncio.sleep(TOLD_S)
        assert world.stood[-1] == ""

    scenario(main, cluster(pool()))


def test_a_pool_that_is_deleted_takes_its_endpoints_with_it_and_comes_back() -> None:
    async def main(world: World) -> None:
        for end in (
            lambda: world.api.delete(POOLS, "pool"),
            lambda: world.api.put(POOLS, "pool", pool(deletionTimestamp="2030-01-01T00:00:00Z")),
        ):
            end()
            await asyncio.sleep(TOLD_S)
            assert world.names == set()
            assert world.stood[-1].endswith("is not known: there is none")
            assert world.api.watching == 1
            world.api.put(POOLS, "pool", pool())
            await asyncio.sleep(TOLD_S)
            assert (len(world.names), world.stood[-1]) == (3, "")

    scenario(main, cluster(pool()))


def test_while_the_api_is_away_everything_stays() -> None:
    async def main(world: World) -> None:
        world.api.failure = ApiError(500, "InternalError", "etcd", "list", "/x")
        world.api.break_watches()
        applied = len(world.applied)
        await asyncio.sleep(3600)
        assert len(world.applied) == applied
        assert world.standing == ""
        assert len(world.said) == 1

    scenario(main, cluster(pool()))


def test_an_outage_that_is_over_is_no_reason_any_more() -> None:
    async def main(world: World) -> None:
        assert world.standing.endswith("is not known: refused")
        world.api.failure = None
        await asyncio.sleep(6)
        assert world.stood == ["InferencePool 'pool' in namespace space is not known: there is none"]

    api = cluster()
    api.failure = Unreachable("refused")
    scenario(main, api)


def test_a_successor_applies_nothing_before_it_knows() -> None:
    async def main(world: World) -> None:
        await asyncio.sleep(600)
        assert (world.applied, world.stood) == ([], [])
        assert "InferencePool 'pool' in namespace space is not known: refused" in world.standing
        world.api.failure = None
        await asyncio.sleep(7)
        assert (len(world.names), world.stood) == (3, [""])

    api = cluster(pool())
    api.failure = Unreachable("refused")
    scenario(main, api, successor=True)


def test_a_successor_does_not_believe_at_once_that_there_is_nothing() -> None:
    async def main(world: World) -> None:
        await asyncio.sleep(HOLD_S - 2)
        assert (world.applied, world.stood) == ([], [])
        await asyncio.sleep(4)
        assert world.applied == [set()]

    scenario(main, successor=True)


def test_a_first_list_of_no_pods_is_held_after_a_predecessor() -> None:
    async def main(world: World) -> None:
        await asyncio.sleep(HOLD_S - 2)
        assert world.applied == []
        world.api.empty_lists = False
        await asyncio.sleep(4)
        assert len(world.names) == 3

    async def run() -> None:
        api = cluster(pool())
        request = api.request

        async def lying(verb: str, path: str, **more: Any) -> bytes:
            real, api.empty_lists = api.empty_lists, api.empty_lists and path == PODS.path
            try:
                return await request(verb, path, **more)
            finally:
                api.empty_lists = real

        api.request = lying  # type: ignore[method-assign]
        api.empty_lists = True
        async with living(api, BY_NAME, successor=True) as world:
            await main(world)

    in_virtual_time(run)


def test_a_definition_that_is_not_installed_is_said_and_its_coming_is_seen() -> None:
    async def main(world: World) -> None:
        assert world.standing.endswith("is not known: its definition (CRD) is not installed")
        world.api.install(POOLS)
        await asyncio.sleep(5)
        assert world.standing.endswith("is not known: there is none")
        world.api.put(POOLS, "pool", pool())
        await asyncio.sleep(TOLD_S)
        assert len(world.names) == 3

    api = cluster()
    api.remove(POOLS)
    scenario(main, api)


def test_a_pool_that_cannot_be_read_is_not_said_to_be_missing() -> None:
    async def main(world: World) -> None:
        without_ports = (
            "InferencePool 'pool' in namespace space is not known: it cannot be read: Object missing required field"
        )
        assert world.standing.startswith(without_ports)
        world.api.put(POOLS, "pool", pool())
        await asyncio.sleep(TOLD_S)
        assert world.standing == ""
        world.api.delete(POOLS, "pool")
        await asyncio.sleep(TOLD_S)
        assert world.standing.endswith("there is none")
        world.api.put(POOLS, "pool", {"spec": {}})
        await asyncio.sleep(TOLD_S)
        assert world.standing.startswith(without_ports)

    scenario(main, cluster({"spec": {}}))


@pytest.mark.parametrize("missing", [POOLS, PODS])
def test_a_rule_that_is_missing_is_why_nothing_is_known(missing: Resource) -> None:
    async def main(world: World) -> None:
        await asyncio.sleep(20)
        assert f"not allowed to list {missing.plural} in namespace space; add to a Role" in world.standing
        assert world.names == set()

    async def run() -> None:
        api = cluster(pool())
        request = api.request

        async def refusing(verb: str, path: str, **more: Any) -> bytes:
            if path == missing.path:
                raise ApiError(403, "Forbidden", "no", "list", path)
            return await request(verb, path, **more)

        api.request = refusing  # type: ignore[method-assign]
        async with living(api, BY_NAME, successor=False) as world:
            await main(world)

    in_virtual_time(run)


def test_a_selector_needs_no_pool() -> None:
    options = Options(
        endpoint_selector="app in (vllm, sglang),!canary", endpoint_target_ports=(8000, 8001), pool_namespace="space"
    )

    async def main(world: World) -> None:
        assert world.stood == [""]
        assert len(world.names) == 6
        world.api.put(PODS, "s", pod("10.0.3.1", app="sglang"))
        world.api.put(PODS, "c", {**pod("10.0.3.2"), "metadata": {"labels": {"app": "vllm", "canary": ""}}})
        await asyncio.sleep(TOLD_S)
        assert len(world.names) == 8
        assert {selector for _, selector in world.api.asked} == {options.endpoint_selector}

    scenario(main, whose=wanted(options))
    assert wanted(Options(pool_name="p", pool_namespace="n")) == Wanted("n", "p")


def test_a_burst_of_events_is_applied_a_few_times() -> None:
    async def main(world: World) -> None:
        before = len(world.applied)
        for n in range(200):
            world.api.put(PODS, f"n{n}", pod(f"10.1.0.{n}"))
        await asyncio.sleep(TOLD_S)
        assert len(world.names) == 203
        assert len(world.applied) - before < 10

    scenario(main, cluster(pool()))


def test_only_who_matches_gets_in_whatever_the_server_sends() -> None:
    async def main(world: World) -> None:
        assert world.names == {"p0-rank-0"}

    async def run() -> None:
        api = cluster(pool(), pods=1)
        api.put(PODS, "x", pod("10.0.9.9", app="other"))
        request = api.request

        async def careless(verb: str, path: str, *, query: Any, **more: Any) -> bytes:
            return await request(
                verb, path, query={key: v for key, v in query.items() if key != "labelSelector"}, **more
            )

        api.request = careless  # type: ignore[method-assign]
        async with living(api, BY_NAME, successor=False) as world:
            await main(world)

    in_virtual_time(run)


APPS = ("vllm", "other")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ("pod", "pod", "pod", "unready", "going", "delete", "pool", "no pool", "break", "forget", "away", "back")
        ),
        st.integers(0, 4),
        st.sampled_from(APPS),
        st.sampled_from((0.0, 0.0, 0.02, 0.5, 3.0)),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_in_whatever_order_pool_and_pods_change_the_endpoints_come_to_be_those_of_the_pool(
    steps: list[tuple[str, int, str, float]],
) -> None:
    def act(api: FakeApi, step: str, which: int, app: str) -> None:
        name, ip = f"p{which}", f"10.0.0.{which}"
        match step:
            case "pod" | "unready":
                api.put(PODS, name, pod(ip, app=app, ready=step == "pod"))
            case "going":
                api.put(PODS, name, pod(ip, app=app, deletionTimestamp="2030-01-01T00:00:00Z"))
            case "delete":
                api.delete(PODS, name)
            case "pool":
                api.put(POOLS, "pool", pool(*range(8000, 8001 + which), app=app))
            case "no pool":
                api.delete(POOLS, "pool")
            case "forget" | "break":
                if step == "forget":
                    api.forget()
                api.break_watches()
            case "away":
                api.failure = Unreachable("away")
                api.break_watches()
            case "back":
                api.failure = None

    async def main(world: World) -> None:
        for step, which, app, wait in steps:
            act(world.api, step, which, app)
            await asyncio.sleep(wait)
        world.api.failure = None
        await asyncio.sleep(2 * HOLD_S + 20)
        found = world.api.install(POOLS).objects.get("pool")
        expected = set()
        if found is not None:
            app, ports = found["spec"]["selector"]["matchLabels"]["app"], len(found["spec"]["targetPorts"])
            for name, thing in world.api.install(PODS).objects.items():
                ready = thing["status"]["conditions"][0]["status"] == "True"
                if ready and "deletionTimestamp" not in thing["metadata"] and thing["metadata"]["labels"]["app"] == app:
                    uid = thing["metadata"]["uid"]
                    expected |= {
                        (f"{name}-rank-{rank}", thing["status"]["podIP"], 8000 + rank, uid) for rank in range(ports)
                    }
        assert (world.applied[-1] if world.applied else set()) == expected
        assert (world.standing == "") == (found is not None)

    scenario(main, cluster(pods=0))


def test_a_selectors_text_reaches_the_server_as_it_was_given() -> None:
    assert parse(" a in (b) ").text == "a in (b)"
