"""A pool and its pods in a fake cluster, with discovery that runs in virtual time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from functools import partial

from tests.reports import Reports
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import PODS, POOLS, FakeApi, Object, pod
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.kube.discovery import KubernetesDiscovery, WantedPools
from workers.supervisor.kube.pool import InferencePool, protocol_mismatch
from workers.supervisor.kube.reflect import Outage, Reflector

BY_NAME = WantedPools("space", (0,), asks=True, only="pool")
NO_WORK: Callable[[], float] = float  # a clock of CPU time that stands still
APPLIED_S = 0.25  # an event must reach the table within this time
Scenario = Callable[["World"], Awaitable[None]]


class World:
    """Discovery with the fake server, and the endpoints and states that it has published."""

    def __init__(self, api: FakeApi, wanted: WantedPools, fixed: InferencePool | None = None, *, successor: bool) -> None:
        self.api = api
        self.reports = Reports()
        self.states: list[str] = []
        self.applied: list[set[tuple[str, str, int, str]]] = []
        self.discovery = KubernetesDiscovery(
            partial(Reflector, api, report=self.reports, outage=Outage(self.reports), cpu=NO_WORK),
            wanted,
            self._choose,
            apply=self._apply,
            state_changed=self.states.append,
            mismatch=self._mismatch,
            successor=successor,
        )
        self._fixed = fixed

    def _choose(self, known: Mapping[str, InferencePool]) -> Mapping[int, InferencePool]:
        pool = self._fixed or known.get("pool")
        return {0: pool} if pool is not None else {}

    def _apply(self, specs: Collection[EndpointSpec], number: int) -> None:
        assert number == 0
        self.applied.append({(spec.name, spec.host, spec.port, spec.uid) for spec in specs})

    def _mismatch(self, found: InferencePool) -> str:
        return protocol_mismatch(found, [("grpc", ("h2c", "http") if found.app_protocol == "http" else ("http",))])

    @property
    def names(self) -> set[str]:
        return {name for name, *_ in self.applied[-1]} if self.applied else set()

    @property
    def missing(self) -> str:
        return self.discovery.missing()


@contextlib.asynccontextmanager
async def running(api: FakeApi, wanted: WantedPools, fixed: InferencePool | None = None, *, successor: bool) -> AsyncIterator[World]:
    world = World(api, wanted, fixed, successor=successor)
    task = asyncio.create_task(world.discovery.run())
    try:
        await elapse(0.5)
        yield world
        assert not task.done(), task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def scenario(
    main: Scenario,
    api: FakeApi | None = None,
    pods_of: WantedPools = BY_NAME,
    fixed: InferencePool | None = None,
    *,
    successor: bool = False,
) -> None:
    async def run() -> None:
        async with running(api or cluster(), pods_of, fixed, successor=successor) as world:
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


def two_pods() -> FakeApi:
    api = cluster(pods=0)
    for n in range(2):
        api.put(PODS, f"p{n}", pod(f"10.0.0.{n + 1}"))
    return api
