"""The real supervisor with leader election and a fake API: readiness, endpoints on a standby, and giving the lease back."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from tests.workers.instances import made
from tests.workers.supervisor.kube.fake import FakeApi
from tests.workers.supervisor.kube.test_lease import ApiServer
from tests.workers.supervisor.supervising import check, killed, page, run, serve_worker, supervised
from workers.host.options import POOL_GROUP
from workers.process.instance import Instance
from workers.supervisor.kube.api import EMPTY, Api, Resource
from workers.supervisor.kube.pool import PLURAL, VERSION
from workers.supervisor.main import Supervisor
from workers.worker.extproc.health import NOT_SERVING, SERVICE_UNKNOWN, SERVING

POOLS, PODS = Resource(POOL_GROUP, VERSION, PLURAL, "ns"), Resource("", "v1", "pods", "ns")
KUBERNETES = {"endpoints": "", "pool_given": True, "pool_name": "pool", "pool_namespace": "ns"}
ELECTED = KUBERNETES | {"ha_enable_leader_election": True}
COLD = "featureGates: [haPopulateNonLeaderDatastore=false]"
LEASE = "epp-ns-pool.llm-d.ai"


class Cluster(FakeApi):
    """A pool with one pod, and a lease."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = ApiServer()
        spec = {"selector": {"matchLabels": {"app": "a"}}, "targetPorts": [{"number": 8000}]}
        self.put(POOLS, "pool", {"spec": spec})
        status = {"podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
        self.put(PODS, "one", {"metadata": {"labels": {"app": "a"}}, "status": status})

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] = EMPTY,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float = 10.0,
    ) -> bytes:
        if "/leases" in path:
            return await self.leases.request(verb, path, body=body, timeout_s=timeout_s)
        return await super().request(verb, path, query=query, body=body, content_type=content_type, timeout_s=timeout_s)

    def lines(self, path: str, *, query: Mapping[str, str], idle_s: float) -> AsyncGenerator[bytes, None]:
        if path.endswith("/leases"):
            return self.leases.lines(path, query=query, idle_s=idle_s)
        return super().lines(path, query=query, idle_s=idle_s)

    async def close(self) -> None:
        """Does nothing: no connection is open."""

    def held_by(self, holder: str | None) -> None:
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": "t"}
        self.leases.put({"metadata": {"name": LEASE}, "spec": spec})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()

    async def connect(_environ: object) -> Cluster:
        return cluster

    monkeypatch.setattr(Api, "connect", connect)
    return cluster


def leading(scenario: Callable[[Instance, Supervisor], Awaitable[None]], path: Path, text: str | None = None, **options: Any) -> None:
    """Runs a scenario with a supervisor and a worker. `options` change the defaults of ELECTED."""

    async def run_it() -> None:
        with made(path, text, **(ELECTED | options)) as instance:
            serve_worker(instance)
            async with supervised(instance) as supervisor, beating(instance):
                await scenario(instance, supervisor)

    run(run_it)


@contextlib.asynccontextmanager
async def beating(instance: Instance) -> AsyncIterator[None]:
    """Keeps the heartbeat of worker 0 fresh."""

    async def heartbeat() -> None:
        while True:
            serve_worker(instance)
            # A worker's heartbeat has an interval.
            await asyncio.sleep(0.1)

    task = asyncio.ensure_future(heartbeat())
    yield
    task.cancel()


def test_a_leader_is_ready_and_answers_the_probes_of_leader_election(tmp_path: Path, cluster: Cluster) -> None:
    async def scenario(instance: Instance, supervisor: Supervisor) -> None:
        await until(supervisor.readiness.ready, "it leads")
        assert cluster.leases.holder == instance.identity
        assert await page(instance, "/readyz") == (200, "ok\n")
        for service in ("", "readiness", "liveness"):
            assert await check(instance, service) == SERVING
        assert await check(instance, "another") == SERVICE_UNKNOWN

    leading(scenario, tmp_path)


def test_a_standby_is_not_ready_names_the_leader_and_knows_all_endpoints(tmp_path: Path, cluster: Cluster) -> None:
    cluster.held_by("other-picker")

    async def scenario(instance: Instance, supervisor: Supervisor) -> None:
        await until(lambda: len(supervisor.data.table) == 1, "the pod is known")
        await until(lambda: "held by" in supervisor.readiness.missing(), "the lease was read")
        assert await page(instance, "/readyz") == (503, "not ready: not the leader: held by other-picker\n")
        assert await check(instance, "readiness") == NOT_SERVING
        assert await check(instance, "liveness") == SERVING
        cluster.held_by(None)
        await until(supervisor.readiness.ready, "it leads")

    leading(scenario, tmp_path)


def test_without_the_feature_gate_a_standby_knows_no_endpoints_before_it_has_led_once(tmp_path: Path, cluster: Cluster) -> None:
    cluster.held_by("other-picker")

    async def scenario(_: Instance, supervisor: Supervisor) -> None:
        await until(lambda: "other-picker" in supervisor.readiness.missing(), "the lease was read")
        # Nothing says that a standby does not begin to list.
        await asyncio.sleep(0.05)
        assert cluster.requests == []
        cluster.held_by(None)
        await until(supervisor.readiness.ready, "it leads")
        assert len(supervisor.data.table) == 1
        cluster.held_by("another")
        await until(lambda: "another" in supervisor.readiness.missing(), "it has stopped leading")
        assert len(supervisor.data.table) == 1

    leading(scenario, tmp_path, COLD)


def test_the_picker_gives_the_lease_back_as_soon_as_it_begins_to_stop(tmp_path: Path, cluster: Cluster) -> None:
    async def scenario(instance: Instance, supervisor: Supervisor) -> None:
        await until(supervisor.readiness.ready, "it leads")
        instance.words.stop()
        await until(lambda: cluster.leases.holder == "", "given back while workers drain")
        assert await page(instance, "/readyz") == (503, "not ready: stopping\n")

    leading(scenario, tmp_path)


def test_a_supervisor_gives_the_lease_back_before_it_ends(tmp_path: Path, cluster: Cluster) -> None:
    async def scenario(instance: Instance, supervisor: Supervisor) -> None:
        await until(supervisor.readiness.ready, "it leads")
        instance.words.stop()

    leading(scenario, tmp_path)
    assert cluster.leases.holder == ""


def test_the_successor_of_a_killed_supervisor_leads_from_the_start(tmp_path: Path, cluster: Cluster) -> None:
    async def scenario() -> None:
        with made(tmp_path, COLD, **ELECTED) as instance:
            serve_worker(instance)
            first = Supervisor(instance)
            serving = asyncio.ensure_future(first.serve())
            await until(first.readiness.ready, "it leads")
            await killed(serving)
            instance.reports.received()
            cluster.leases.away = True  # the successor cannot read the lease
            serve_worker(instance)
            successor = Supervisor(instance)
            assert successor.readiness.ready()
            serving = asyncio.ensure_future(successor.serve())
            await until(instance.reports.received, "it serves")
            serve_worker(instance)
            assert successor.readiness.missing() == ""
            cluster.leases.away = False
            await killed(serving)

    run(scenario)


def test_the_successor_of_a_standby_does_not_lead(tmp_path: Path, cluster: Cluster) -> None:
    cluster.held_by("other-picker")

    async def scenario() -> None:
        with made(tmp_path, **ELECTED) as instance:
            serve_worker(instance)
            first = Supervisor(instance)
            serving = asyncio.ensure_future(first.serve())
            await until(lambda: "other-picker" in first.readiness.missing(), "the lease was read")
            await killed(serving)
            assert "not the leader" in Supervisor(instance).readiness.missing()

    run(scenario)


def test_the_metrics_page_needs_a_token_in_kubernetes_and_shows_the_leader(tmp_path: Path, cluster: Cluster) -> None:
    async def guarded(instance: Instance, supervisor: Supervisor) -> None:
        status, text = await page(instance, "/metrics")
        assert status == 401
        assert text.startswith("this page needs `Authorization: Bearer TOKEN`")

    async def open_to_all(instance: Instance, supervisor: Supervisor) -> None:
        await until(supervisor.readiness.ready, "it leads")
        status, text = await page(instance, "/metrics")
        assert status == 200
        assert f'llm_d_epp_leader{{name="{LEASE}"}} 1.0' in text

    leading(guarded, tmp_path)
    leading(open_to_all, tmp_path, metrics_endpoint_auth=False)


def test_without_the_flag_no_replica_requests_a_lease_and_all_are_ready(tmp_path: Path, cluster: Cluster) -> None:
    cluster.held_by("other-picker")

    async def scenario(instance: Instance, supervisor: Supervisor) -> None:
        await until(supervisor.readiness.ready, "the pool is known")
        assert cluster.leases.requests == []
        assert await check(instance, "another") == SERVING

    leading(scenario, tmp_path, ha_enable_leader_election=False)
