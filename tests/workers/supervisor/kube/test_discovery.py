"""Discovery turns a pool and its pods into the right endpoints, whatever changes and in any order."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epp.endpoints.label_selectors import parse
from tests.examples import examples
from tests.waiting import elapse, in_virtual_time
from tests.workers.supervisor.kube.fake import PODS, POOLS, FakeApi, pod, pool
from tests.workers.supervisor.kube.worlds import APPLIED_S, BY_NAME, World, cluster, running, scenario, two_pods
from workers.host.options import Options
from workers.supervisor.endpoints.discovery import HOLD_S
from workers.supervisor.kube.discovery import WantedPools, fixed_pool
from workers.supervisor.kube.errors import Unreachable
from workers.supervisor.kube.pods import ACTIVE_PORTS


def test_existing_pods_become_endpoints_when_the_pool_is_created() -> None:
    async def main(world: World) -> None:
        assert world.names == set()
        assert world.states == ["InferencePool 'pool' in namespace space is not known: there is none"]
        world.api.put(POOLS, "pool", pool(8000, 8001))
        await elapse(APPLIED_S)
        assert world.names == {f"p{n}-rank-{rank}" for n in range(3) for rank in range(2)}
        assert world.states[1:] == [""]
        assert world.missing == ""

    scenario(main)


def test_each_of_8_ports_of_a_pod_is_an_endpoint_of_its_own() -> None:
    async def main(world: World) -> None:
        ports = range(8000, 8008)
        world.api.put(POOLS, "pool", pool(*ports))
        await elapse(APPLIED_S)
        found = {(name, host, port) for name, host, port, _ in world.applied[-1]}
        assert found == {(f"p{n}-rank-{r}", f"10.0.0.{n + 1}", port) for n in range(2) for r, port in enumerate(ports)}
        world.api.put(PODS, "p0", pod("10.0.0.1", annotations={ACTIVE_PORTS: "8007,8002"}))
        await elapse(APPLIED_S)
        of_first = {(name, port) for name, host, port, _ in world.applied[-1] if host == "10.0.0.1"}
        assert of_first == {("p0-rank-2", 8002), ("p0-rank-7", 8007)}, "a port keeps its rank"

    scenario(main, two_pods())


def test_all_endpoints_are_applied_again_under_another_limit_without_a_change_of_pods() -> None:
    async def main(world: World) -> None:
        before = len(world.applied)
        world.discovery.apply_all()
        await elapse(APPLIED_S)
        assert world.applied[before:] == [world.applied[before - 1]]

    scenario(main, cluster(pool()))


def test_pods_are_listed_by_the_labels_of_the_pool() -> None:
    async def main(world: World) -> None:
        assert ("list", "app=vllm") in world.api.requests
        assert ("list", "") not in world.api.requests

    scenario(main, cluster(pool()))


def test_a_pod_that_is_being_deleted_or_not_ready_is_removed_at_once() -> None:
    async def main(world: World) -> None:
        world.api.put(PODS, "p0", pod("10.0.0.0", deletionTimestamp="2030-01-01T00:00:00Z"))
        world.api.put(PODS, "p1", pod("10.0.0.1", ready=False))
        await elapse(APPLIED_S)
        assert world.names == {"p2-rank-0"}
        world.api.put(PODS, "p1", pod("10.0.0.1"))
        world.api.put(PODS, "p2", pod("10.0.0.2", app="other"))
        await elapse(APPLIED_S)
        assert world.names == {"p1-rank-0"}

    scenario(main, cluster(pool()))


def test_a_new_pod_with_an_old_name_and_address_is_another_endpoint() -> None:
    async def main(world: World) -> None:
        (before,) = {uid for name, _, _, uid in world.applied[-1] if name == "p0-rank-0"}
        world.api.delete(PODS, "p0")
        world.api.put(PODS, "p0", pod("10.0.0.0"))
        await elapse(APPLIED_S)
        (after,) = {uid for name, _, _, uid in world.applied[-1] if name == "p0-rank-0"}
        assert before != after

    scenario(main, cluster(pool()))


def test_new_ports_and_a_new_selector_apply_at_once() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(9000))
        await elapse(APPLIED_S)
        assert {port for _, _, port, _ in world.applied[-1]} == {9000}
        world.api.put(PODS, "other", pod("10.0.1.1", app="other"))
        world.api.put(POOLS, "pool", pool(9000, app="other"))
        await elapse(APPLIED_S)
        assert world.names == {"other-rank-0"}
        world.api.put(PODS, "p0", pod("10.0.0.9", app="other"))
        await elapse(APPLIED_S)
        assert world.names == {"other-rank-0", "p0-rank-0"}
        assert world.api.watching == 2  # no watch is left for the old selector

    scenario(main, cluster(pool()))


def test_a_new_selector_removes_other_pods_even_while_the_api_is_away() -> None:
    async def main(world: World) -> None:
        world.api.put(PODS, "both", {**pod("10.0.2.1"), "metadata": {"labels": {"app": "vllm", "tier": "a"}}})
        await elapse(APPLIED_S)
        narrow = pool()
        narrow["spec"]["selector"]["matchLabels"]["tier"] = "a"
        world.api.put(POOLS, "pool", narrow)
        await elapse(0)
        world.api.failure = Unreachable("away")
        await elapse(60)
        assert world.names == {"both-rank-0"}
        world.api.failure = None
        await elapse(7)
        assert world.names == {"both-rank-0"}

    scenario(main, cluster(pool()))


def test_a_protocol_that_no_parser_reads_is_reported_and_endpoints_stay() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(protocol="kubernetes.io/h2c"))
        await elapse(APPLIED_S)
        assert "appProtocol is 'kubernetes.io/h2c', which parser 'grpc' does not read" in world.states[-1]
        assert len(world.names) == 3
        world.api.put(POOLS, "pool", pool())
        await elapse(APPLIED_S)
        assert world.states[-1] == ""

    scenario(main, cluster(pool()))


def test_deleting_the_pool_removes_its_endpoints_until_it_is_created_again() -> None:
    async def main(world: World) -> None:
        for end in (
            lambda: world.api.delete(POOLS, "pool"),
            lambda: world.api.put(POOLS, "pool", pool(deletionTimestamp="2030-01-01T00:00:00Z")),
        ):
            end()
            await elapse(APPLIED_S)
            assert world.names == set()
            assert world.states[-1].endswith("is not known: there is none")
            assert world.api.watching == 1
            world.api.put(POOLS, "pool", pool())
            await elapse(APPLIED_S)
            assert (len(world.names), world.states[-1]) == (3, "")

    scenario(main, cluster(pool()))


def test_a_selector_needs_no_pool() -> None:
    options = Options(endpoint_selector="app in (vllm, sglang),!canary", endpoint_target_ports=(8000, 8001), pool_namespace="space")

    async def main(world: World) -> None:
        assert world.states == [""]
        assert len(world.names) == 6
        world.api.put(PODS, "s", pod("10.0.3.1", app="sglang"))
        world.api.put(PODS, "c", {**pod("10.0.3.2"), "metadata": {"labels": {"app": "vllm", "canary": ""}}})
        await elapse(APPLIED_S)
        assert len(world.names) == 8
        assert {selector for _, selector in world.api.requests} == {options.endpoint_selector}

    scenario(main, pods_of=WantedPools("space", (0,), asks=False, only=""), fixed=fixed_pool(options))
    assert fixed_pool(Options(pool_name="p", pool_namespace="n")) is None


def test_a_burst_of_events_is_applied_a_few_times() -> None:
    async def main(world: World) -> None:
        before = len(world.applied)
        for n in range(200):
            world.api.put(PODS, f"n{n}", pod(f"10.1.0.{n}"))
        await elapse(APPLIED_S)
        assert len(world.names) == 203
        assert len(world.applied) - before < 10

    scenario(main, cluster(pool()))


def test_only_pods_that_match_become_endpoints_whatever_the_server_sends() -> None:
    async def main(world: World) -> None:
        assert world.names == {"p0-rank-0"}

    async def run() -> None:
        api = cluster(pool(), pods=1)
        api.put(PODS, "x", pod("10.0.9.9", app="other"))
        request = api.request

        async def careless(verb: str, path: str, *, query: Any, **more: Any) -> bytes:
            return await request(verb, path, query={key: v for key, v in query.items() if key != "labelSelector"}, **more)

        api.request = careless  # type: ignore[method-assign]
        async with running(api, BY_NAME, successor=False) as world:
            await main(world)

    in_virtual_time(run)


APPS = ("vllm", "other")


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("pod", "pod", "pod", "unready", "going", "delete", "pool", "no pool", "break", "forget", "away", "back")),
        st.integers(0, 4),
        st.sampled_from(APPS),
        st.sampled_from((0.0, 0.0, 0.02, 0.5, 3.0)),
    ),
    max_size=30,
)


@examples(200)
@given(STEPS)
def test_the_endpoints_become_those_of_the_pool_whatever_changes_in_any_order(steps: list[tuple[str, int, str, float]]) -> None:
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
            await elapse(wait)
        world.api.failure = None
        await elapse(2 * HOLD_S + 20)
        found = world.api.install(POOLS).objects.get("pool")
        expected = set()
        if found is not None:
            app, ports = found["spec"]["selector"]["matchLabels"]["app"], len(found["spec"]["targetPorts"])
            for name, thing in world.api.install(PODS).objects.items():
                ready = thing["status"]["conditions"][0]["status"] == "True"
                if ready and "deletionTimestamp" not in thing["metadata"] and thing["metadata"]["labels"]["app"] == app:
                    uid = thing["metadata"]["uid"]
                    expected |= {(f"{name}-rank-{rank}", thing["status"]["podIP"], 8000 + rank, uid) for rank in range(ports)}
        assert (world.applied[-1] if world.applied else set()) == expected
        assert (world.missing == "") == (found is not None)

    scenario(main, cluster(pods=0))


def test_the_text_of_a_selector_reaches_the_server_unchanged() -> None:
    assert parse(" a in (b) ").text == "a in (b)"


def test_thousands_of_flapping_pods_are_applied_in_batches_and_the_last_state_counts() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(8000))
        await elapse(APPLIED_S)
        before = len(world.applied)
        for turn in range(4):
            for n in range(10_000):
                if (n + turn) % 2:
                    world.api.put(PODS, f"flap{n}", pod(f"10.{n // 62_500}.{n // 250 % 250}.{n % 250}"))
                else:
                    world.api.delete(PODS, f"flap{n}")
            await elapse(0.05)
        await elapse(APPLIED_S)
        assert len(world.applied) - before <= 15
        assert {name for name in world.names if name.startswith("flap")} == {f"flap{n}-rank-0" for n in range(0, 10_000, 2)}

    scenario(main)


def test_a_pod_with_a_megabyte_of_labels_is_named_and_the_others_are_endpoints() -> None:
    async def main(world: World) -> None:
        world.api.put(POOLS, "pool", pool(8000))
        await elapse(APPLIED_S)
        hostile = pod("10.1.0.1")
        hostile["metadata"]["labels"] |= {f"key-{n}": "v" * 58 for n in range(15_000)}
        world.api.put(PODS, "hostile", hostile)
        world.api.put(PODS, "good", pod("10.1.0.2"))
        await elapse(APPLIED_S)
        assert "good-rank-0" in world.names
        assert "hostile-rank-0" not in world.names
        assert any("hostile" in text and "15001 labels" in text for text in world.reports), world.reports

    scenario(main)
