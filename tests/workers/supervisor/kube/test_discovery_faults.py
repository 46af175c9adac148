"""While the API is away, unreadable or wrong, endpoints stay, and discovery says why it knows nothing new."""

from typing import Any

import pytest

from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import PODS, POOLS, pool
from tests.workers.supervisor.kube.worlds import APPLIED_S, BY_NAME, World, cluster, running, scenario
from workers.supervisor.endpoints.discovery import HOLD_S
from workers.supervisor.kube.api import Resource
from workers.supervisor.kube.errors import ApiError, Unreachable


def test_all_endpoints_stay_while_the_api_is_away() -> None:
    async def main(world: World) -> None:
        world.api.failure = ApiError(500, "InternalError", "etcd", "list", "/x")
        world.api.break_watches()
        applied = len(world.applied)
        await elapse(3600)
        assert len(world.applied) == applied
        assert world.missing == ""
        assert len(world.reports) == 1

    scenario(main, cluster(pool()))


def test_an_outage_that_is_over_is_no_longer_the_reason() -> None:
    async def main(world: World) -> None:
        assert world.missing.endswith("is not known: refused")
        world.api.failure = None
        await elapse(6)
        assert world.states == ["InferencePool 'pool' in namespace space is not known: there is none"]

    api = cluster()
    api.failure = Unreachable("refused")
    scenario(main, api)


def test_a_successor_applies_nothing_before_the_api_answers() -> None:
    async def main(world: World) -> None:
        await elapse(600)
        assert (world.applied, world.states) == ([], [])
        assert "InferencePool 'pool' in namespace space is not known: refused" in world.missing
        world.api.failure = None
        await elapse(7)
        assert (len(world.names), world.states) == (3, [""])

    api = cluster(pool())
    api.failure = Unreachable("refused")
    scenario(main, api, successor=True)


def test_a_successor_does_not_believe_an_empty_pool_list_at_once() -> None:
    async def main(world: World) -> None:
        await elapse(HOLD_S - 2)
        assert (world.applied, world.states) == ([], [])
        await elapse(4)
        assert world.applied == [set()]

    scenario(main, successor=True)


def test_a_successor_does_not_believe_an_empty_pod_list_at_once() -> None:
    async def main(world: World) -> None:
        await elapse(HOLD_S - 2)
        assert world.applied == []
        world.api.empty_lists = False
        await elapse(4)
        assert len(world.names) == 3

    async def run() -> None:
        api = cluster(pool())
        request = api.request

        async def wrong(verb: str, path: str, **more: Any) -> bytes:
            real, api.empty_lists = api.empty_lists, api.empty_lists and path == PODS.path
            try:
                return await request(verb, path, **more)
            finally:
                api.empty_lists = real

        api.request = wrong  # type: ignore[method-assign]
        api.empty_lists = True
        async with running(api, BY_NAME, successor=True) as world:
            await main(world)

    in_virtual_time(run)


def test_a_missing_definition_is_reported_and_its_installation_is_noticed() -> None:
    async def main(world: World) -> None:
        assert world.missing.endswith("is not known: its definition (CRD) is not installed")
        world.api.install(POOLS)
        await elapse(5)
        assert world.missing.endswith("is not known: there is none")
        world.api.put(POOLS, "pool", pool())
        await elapse(APPLIED_S)
        assert len(world.names) == 3

    api = cluster()
    api.remove(POOLS)
    scenario(main, api)


def test_a_pool_that_cannot_be_read_is_not_reported_as_missing() -> None:
    async def main(world: World) -> None:
        without_ports = "InferencePool 'pool' in namespace space is not known: it cannot be read: Object missing required field"
        assert world.missing.startswith(without_ports)
        world.api.put(POOLS, "pool", pool())
        await elapse(APPLIED_S)
        assert world.missing == ""
        world.api.delete(POOLS, "pool")
        await elapse(APPLIED_S)
        assert world.missing.endswith("there is none")
        world.api.put(POOLS, "pool", {"spec": {}})
        await elapse(APPLIED_S)
        assert world.missing.startswith(without_ports)

    scenario(main, cluster({"spec": {}}))


@pytest.mark.parametrize("missing", [POOLS, PODS])
def test_a_missing_role_is_the_reason_why_nothing_is_known(missing: Resource) -> None:
    async def main(world: World) -> None:
        await elapse(20)
        assert f"not allowed to list {missing.plural} in namespace space; add to a Role" in world.missing
        assert world.names == set()

    async def run() -> None:
        api = cluster(pool())
        request = api.request

        async def refusing(verb: str, path: str, **more: Any) -> bytes:
            if path == missing.path:
                raise ApiError(403, "Forbidden", "no", "list", path)
            return await request(verb, path, **more)

        api.request = refusing  # type: ignore[method-assign]
        async with running(api, BY_NAME, successor=False) as world:
            await main(world)

    in_virtual_time(run)
