"""Endpoints of several pools from one watch of pods and one of InferencePools, with a fake API server in virtual time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

from epp.endpoints.label_selectors import parse
from tests.reports import Reports
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import PODS, POOLS, FakeApi, pod, pool
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.kube.discovery import KubernetesDiscovery, Selecting, WantedPools
from workers.supervisor.kube.errors import Unreachable
from workers.supervisor.kube.pods import Pod
from workers.supervisor.kube.pool import InferencePool
from workers.supervisor.kube.reflect import Outage, Reflector

NAMES = ("llama", "qwen", "phi")  # those of the pools, by number


class World:
    """Discovery with the fake server, and the present endpoints of each pool."""

    def __init__(self, api: FakeApi, fixed: Mapping[int, InferencePool], *, successor: bool) -> None:
        self.api = api
        self.fixed = fixed
        self.reports = Reports()
        self.states: list[str] = []
        self.applied: list[int] = []  # the pools in the order of the calls
        self.endpoints: dict[int, set[str]] = {}
        self.discovery = KubernetesDiscovery(
            partial(Reflector, api, report=self.reports, outage=Outage(self.reports), cpu=float),
            WantedPools("space", range(len(NAMES)), asks=not fixed, only=None),
            self.choose,
            apply=self._apply,
            state_changed=self.states.append,
            mismatch=lambda _: "",
            successor=successor,
        )

    def choose(self, known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
        return self.fixed or {number: known[name] for number, name in enumerate(NAMES) if name in known}

    def _apply(self, specs: Collection[EndpointSpec], number: int) -> None:
        assert all(spec.pool == number for spec in specs)
        self.applied.append(number)
        self.endpoints[number] = {f"{spec.name} {spec.host}:{spec.port}" for spec in specs}


def scenario(
    main: Callable[[World], Awaitable[None]], api: FakeApi, fixed: Mapping[int, InferencePool] | None = None, *, successor: bool = False
) -> None:
    async def run() -> None:
        world = World(api, fixed or {}, successor=successor)
        task = asyncio.create_task(world.discovery.run())
        try:
            await elapse(0.5)
            await main(world)
            assert not task.done(), task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    in_virtual_time(run)


def cluster() -> FakeApi:
    api = FakeApi()
    api.put(POOLS, "llama", pool(8000, app="llama"))
    api.put(POOLS, "qwen", pool(8001, 8002, app="qwen"))
    api.put(PODS, "l", pod("10.0.0.1", app="llama"))
    api.put(PODS, "q", pod("10.0.0.2", app="qwen"))
    return api


def test_each_pool_has_its_pods_by_one_watch_of_each_resource() -> None:
    async def main(world: World) -> None:
        assert world.endpoints == {0: {"l-rank-0 10.0.0.1:8000"}, 1: {"q-rank-0 10.0.0.2:8001", "q-rank-1 10.0.0.2:8002"}, 2: set()}
        assert world.states == [""]
        assert world.api.watching == 2 and world.discovery.missing() == ""

    scenario(main, cluster())


def test_a_pod_changes_only_its_pools() -> None:
    async def main(world: World) -> None:
        world.applied.clear()
        world.api.put(PODS, "q2", pod("10.0.0.3", app="qwen"))
        await elapse(0.5)
        assert world.applied == [1] and len(world.endpoints[1]) == 4
        world.api.put(PODS, "q2", pod("10.0.0.3", app="llama"))
        await elapse(0.5)
        assert (len(world.endpoints[0]), len(world.endpoints[1])) == (2, 2)
        world.applied.clear()
        world.api.put(PODS, "stranger", pod("10.0.0.9", app="other"))
        await elapse(0.5)
        assert world.applied == []
        world.api.delete(PODS, "l")
        world.api.delete(PODS, "q2")
        await elapse(0.5)
        assert world.endpoints[0] == set()

    scenario(main, cluster())


def test_a_pool_that_appears_changes_and_goes_changes_no_other_one() -> None:
    async def main(world: World) -> None:
        world.applied.clear()
        world.api.put(PODS, "p", pod("10.0.0.4", app="phi"))
        world.api.put(POOLS, "phi", pool(9000, app="phi"))
        await elapse(0.5)
        assert world.endpoints[2] == {"p-rank-0 10.0.0.4:9000"}
        world.api.put(POOLS, "phi", pool(9001, app="llama"))
        await elapse(0.5)
        assert world.endpoints[2] == {"l-rank-0 10.0.0.1:9001"}
        world.api.delete(POOLS, "phi")
        await elapse(0.5)
        assert world.endpoints[2] == set()
        assert set(world.applied) == {2}

    scenario(main, cluster())


def test_a_pool_that_is_not_there_is_nothing_that_is_missing() -> None:
    api = cluster()
    api.delete(POOLS, "qwen")

    async def main(world: World) -> None:
        assert world.discovery.missing() == "" and world.states == [""]
        assert world.discovery.unread("qwen") == "there is none"
        assert world.endpoints == {0: {"l-rank-0 10.0.0.1:8000"}, 1: set(), 2: set()}

    scenario(main, api)


def test_nothing_is_applied_before_everything_is_listed() -> None:
    api = cluster()
    api.failure = Unreachable("connection refused")

    async def main(world: World) -> None:
        assert "are not known: connection refused" in world.discovery.missing()
        assert world.endpoints == {} and world.states == []
        api.failure = None
        await elapse(10.0)
        assert set(world.endpoints) == {0, 1, 2} and world.states == [""]

    scenario(main, api)


def test_selectors_of_the_file_need_no_inference_pools() -> None:
    fixed = {0: InferencePool(parse("app in (llama, qwen)"), (8000,)), 1: InferencePool(parse("app!=llama"), (8001,))}

    async def main(world: World) -> None:
        assert world.endpoints == {0: {"l-rank-0 10.0.0.1:8000", "q-rank-0 10.0.0.2:8000"}, 1: {"q-rank-0 10.0.0.2:8001"}, 2: set()}
        assert world.api.watching == 1

    scenario(main, cluster(), fixed)


def test_a_pod_is_compared_only_with_the_pools_that_may_select_it() -> None:
    selecting = Selecting([(number, parse(f"app=a{number}")) for number in range(100)] + [(100, parse("tier!=slow"))])
    assert sorted(selecting.of(Pod("space", "p", "u", "10.0.0.1", True, (("app", "a7"),)))) == [7, 100]
