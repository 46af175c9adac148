"""Flow control behind a real gateway: waiting, order, and refusals with status and text. The tests check order and outcome, not times.

One simulated server serves one request at a time. Requests that arrive while it is busy wait in the picker.
"""

import asyncio
import json
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import aiohttp
import pytest

from loadtest.demo.stack import LOOPBACK
from tests.bench.overload_stack import config, objectives
from tests.bench.waiting import queued_for
from tests.e2e.cluster import COMPLETIONS, Answer, Cluster, Fleet, Picker, completion, eventually, write_endpoints

ENGINE = ("--decode-ms", "20", "--prefill-us-per-token", "1")
HELD = 60  # tokens of the request that keeps the server busy for more than a second
REASON = "x-llm-d-request-dropped-reason"
QUEUED = r"queue_size\{[^}]*\}"


class Site(NamedTuple):
    port: int
    picker: Picker
    fleet: Fleet


def one_at_a_time(**flow: Any) -> dict[str, Any]:
    return {
        "featureGates": ["flowControl"],
        "plugins": [
            {"type": "concurrency-detector", "parameters": {"maxConcurrency": 1}},
            {"type": "token-weighted-fairness-policy", "parameters": {"quantumTokens": 16}},  # about one request
        ],
        "flowControl": {
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            "defaultPriorityBand": {"fairnessPolicyRef": "token-weighted-fairness-policy", **flow.pop("band", {})},
            **flow,
        },
    }


def site(cluster: Cluster, flow: Mapping[str, Any], *flags: str, workers: int = 2) -> Site:
    fleet = cluster.fleet(1, *ENGINE)
    more = (f"--objects-dir={objectives(cluster.directory / 'objects')}", "--pool-name=pool", *flags)
    picker = cluster.picker(fleet.file, *more, workers=workers, config_text=config(fleet.file, flow))
    return Site(cluster.envoy(picker), picker, fleet)


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(shared_cluster: Cluster) -> Site:
    return site(shared_cluster, one_at_a_time())


class Clients:
    """Sends requests and keeps them open. `order`: the names of the requests in the order in which their answers ended."""

    def __init__(self, at: Site) -> None:
        self.at = at
        self.order: list[str] = []
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __aenter__(self) -> "Clients":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._session.close()

    def ask(self, name: str, objective: str = "", tenant: str = "", *, tokens: int = 2, **more: Any) -> None:
        self._tasks[name] = asyncio.create_task(self._ask(name, objective, tenant, tokens, more))

    async def _ask(self, name: str, objective: str, tenant: str, tokens: int, more: dict[str, Any]) -> Answer:
        headers = {key.replace("_", "-"): str(value) for key, value in more.pop("headers", {}).items()}
        if objective:
            headers["x-llm-d-inference-objective"] = objective
        if tenant:
            headers["x-llm-d-inference-fairness-id"] = tenant
        body = completion(name, max_tokens=tokens, **more)
        try:
            async with self._session.post(f"http://{LOOPBACK}:{self.at.port}{COMPLETIONS}", data=body, headers=headers) as response:
                lowered = {key.lower(): value for key, value in response.headers.items()}
                return Answer(response.status, lowered, await response.read())
        finally:
            self.order.append(name)

    async def answers(self, *names: str) -> list[Answer]:
        return await asyncio.wait_for(asyncio.gather(*(self._tasks[name] for name in names)), 30)

    async def waiting(self, count: int) -> None:
        """Waits until `count` requests wait in the picker."""
        await self.until(lambda: waiting(self.at.picker) == count)

    async def served(self, count: int) -> None:
        """Waits until `count` requests are at the server."""
        await self.until(lambda: sum(s["running"] + s["waiting"] for s in self.at.fleet.stats()) == count)

    async def until(self, condition: Any) -> None:
        assert await asyncio.to_thread(eventually, condition)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks[name], return_exceptions=True)


def waiting(picker: Picker) -> int:
    lines = [line for line in picker.page().splitlines() if line.startswith("llm_d_epp_flow_control_queue_size{")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def outcomes(picker: Picker) -> dict[str, int]:
    """Returns flow control outcome -> number of requests, from the metrics page."""
    counts: dict[str, int] = {}
    for line in picker.page().splitlines():
        if line.startswith("llm_d_epp_flow_control_requests_total{"):
            outcome = line.split('outcome="')[1].split('"')[0]
            counts[outcome] = counts.get(outcome, 0) + int(float(line.rpartition(" ")[2]))
    return counts


def message(answer: Answer) -> str:
    text: str = answer.json()["error"]["message"]
    return text


def test_a_request_waits_in_the_picker_and_not_in_the_server(plain: Site) -> None:
    async def run() -> None:
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            for name in "abc":
                clients.ask(name)
            await clients.waiting(3)
            assert [(s["running"], s["waiting"]) for s in plain.fleet.stats()] == [(1, 0)]
            assert [a.status for a in await clients.answers("held", *"abc")] == [200] * 4
            assert clients.order[0] == "held"

    asyncio.run(run())


def test_the_request_with_the_higher_priority_goes_first(plain: Site) -> None:
    async def run() -> None:
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            for count, name in enumerate(("low", "normal", "high"), 1):
                clients.ask(name, name)
                await clients.waiting(count)
            await clients.answers("low", "normal", "high")
            assert clients.order == ["held", "high", "normal", "low"]

    asyncio.run(run())


def test_a_small_tenant_does_not_wait_for_all_requests_of_a_big_one(plain: Site) -> None:
    async def run() -> None:
        big, small = [f"big-{n}" for n in range(12)], ["small-0", "small-1"]
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            for name in big:
                clients.ask(name, tenant="big")
            await clients.waiting(len(big))
            for name in small:
                clients.ask(name, tenant="small")
            await clients.waiting(len(big) + len(small))
            await clients.answers(*big, *small)
            assert max(clients.order.index(name) for name in small) < len(big) - 1

    asyncio.run(run())


@pytest.mark.parametrize(
    "ttl",
    [
        {"x_llm_d_inference_ttl": "100ms"},
        {"x_llm_d_request_ttl_ms": 100},
        {"x_llm_d_inference_ttl": "1h", "x_llm_d_request_ttl_ms": 100},
        {"x_llm_d_inference_ttl": "0.1s", "x_llm_d_request_ttl_ms": "never"},
    ],
)
def test_a_request_that_exceeds_its_ttl_is_refused_with_retry_after(plain: Site, ttl: dict[str, Any]) -> None:
    async def run() -> None:
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            clients.ask("short", headers=ttl)
            (answer,) = await clients.answers("short")
            assert answer.status == 429
            assert answer.headers[REASON] == "rejected-ttl-expired"
            assert int(answer.headers["retry-after"]) >= 1
            assert message(answer) == (
                "inference error: ResourceExhausted - request timed out in queue: request evicted from queue: request TTL expired"
            )
            assert clients.order == ["short"]

    asyncio.run(run())


def test_a_client_that_leaves_while_waiting_is_never_served(plain: Site) -> None:
    async def run() -> None:
        before, cancelled = plain.fleet.requests()[0], outcomes(plain.picker).get("EvictedContextCancelled", 0)
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            clients.ask("leaves")
            await clients.waiting(1)
            await clients.leave("leaves")
            await clients.waiting(0)
            await clients.answers("held")
        assert plain.fleet.requests()[0] == before + 1
        assert outcomes(plain.picker)["EvictedContextCancelled"] == cancelled + 1

    asyncio.run(run())


def test_a_full_queue_refuses_and_a_higher_priority_displaces_a_lower_one(shared_cluster: Cluster) -> None:
    full = site(shared_cluster, one_at_a_time(maxRequests=2))

    async def run() -> None:
        async with Clients(full) as clients:
            clients.ask("held", tokens=2 * HELD)
            await clients.served(1)
            for count, name in enumerate(("low", "normal"), 1):
                clients.ask(name, name)
                await clients.waiting(count)
            clients.ask("too much", "low")
            (answer,) = await clients.answers("too much")
            assert (answer.status, answer.headers[REASON]) == (429, "rejected-saturated")
            assert "request rejected pre-queue: queue at capacity" in message(answer)
            assert int(answer.headers["retry-after"]) >= 1
            clients.ask("high", "high")
            (answer,) = await clients.answers("low")
            assert (answer.status, answer.headers[REASON]) == (429, "evicted-priority")
            assert "request evicted from queue: request displaced" in message(answer)
            assert [a.status for a in await clients.answers("high", "normal")] == [200, 200]
            assert clients.order == ["too much", "low", "held", "high", "normal"]

    asyncio.run(run())


def test_requests_wait_for_the_first_endpoint(shared_cluster: Cluster) -> None:
    listed = write_endpoints(shared_cluster.directory / "soon.yaml", [])
    fleet = shared_cluster.fleet(1, *ENGINE)
    picker = shared_cluster.picker(listed, workers=2, ready=False, config_text=config(listed, one_at_a_time()))
    shared_cluster.wait(picker.child, lambda: "worker_serving" in picker.page())
    without_endpoints = Site(shared_cluster.envoy(picker), picker, fleet)

    async def run() -> None:
        async with Clients(without_endpoints) as clients:
            clients.ask("a")
            clients.ask("b")
            clients.ask("short", headers={"x_llm_d_request_ttl_ms": 100})
            await clients.waiting(2)
            write_endpoints(listed, fleet.addresses)
            assert [a.status for a in await clients.answers("a", "b")] == [200, 200]
            (answer,) = await clients.answers("short")
            assert (answer.status, answer.headers[REASON]) == (503, "rejected-no-endpoints")

    asyncio.run(run())


def test_a_sheddable_request_in_flight_is_evicted_for_a_higher_priority(shared_cluster: Cluster) -> None:
    evicting = site(shared_cluster, one_at_a_time(enableEviction=True), "--allow-experimental-plugins")

    async def run() -> None:
        async with Clients(evicting) as clients:
            clients.ask("low", "low", tokens=500)
            await clients.served(1)
            clients.ask("high", "high")
            answer, high = await clients.answers("low", "high")
            assert (answer.status, answer.headers[REASON]) == (429, "evicted")
            assert answer.body == b"request evicted by flow control"
            assert high.status == 200
            assert clients.order == ["low", "high"]
            clients.ask("normal", "normal", tokens=HELD)
            await clients.served(1)
            clients.ask("again", "high")
            await clients.answers("normal", "again")
            assert clients.order[2:] == ["normal", "again"]
        assert evicting.fleet.stats()[0]["aborted"] == 1
        page = evicting.picker.page()
        assert 'flow_control_revocations_issued_total{inference_pool="pool",priority="10"} 1' in page.replace(
            'priority="10",inference_pool="pool"', 'inference_pool="pool",priority="10"'
        )

    asyncio.run(run())


def test_an_evicted_answer_that_has_begun_is_cut_and_does_not_look_whole(shared_cluster: Cluster) -> None:
    evicting = site(shared_cluster, one_at_a_time(enableEviction=True), "--allow-experimental-plugins")

    async def run() -> None:
        async with Clients(evicting) as clients:
            clients.ask("low", "low", tokens=500, stream=True)
            await clients.served(1)
            await asyncio.sleep(0.3)  # the client has the first tokens
            clients.ask("high", "high")
            with pytest.raises(aiohttp.ClientPayloadError):
                await clients.answers("low")
            (high,) = await clients.answers("high")
            assert high.status == 200

    asyncio.run(run())


@pytest.mark.parametrize(("tokens", "statuses"), [(HELD, {200}), (2_000, {503})])
def test_a_stopping_picker_serves_waiting_requests_within_its_drain_timeout_and_refuses_the_rest(
    shared_cluster: Cluster, tokens: int, statuses: set[int]
) -> None:
    ending = site(shared_cluster, one_at_a_time())
    names = [f"waits-{n}" for n in range(6)]

    async def run() -> None:
        async with Clients(ending) as clients:
            clients.ask("held", tokens=tokens)
            await clients.served(1)
            for name in names:
                clients.ask(name)
            await clients.waiting(len(names))
            ending.picker.child.signal(signal.SIGTERM)
            answers = await clients.answers(*names)
            assert {answer.status for answer in answers} == statuses
            if statuses == {503}:
                assert {answer.headers[REASON] for answer in answers} == {"rejected-shutting-down"}
                assert "request evicted from queue" in message(answers[0])

    asyncio.run(run())
    assert eventually(lambda: ending.picker.child.process.poll() is not None)
    shared_cluster.forget(ending.picker.child)


def test_changed_objectives_take_effect(shared_cluster: Cluster) -> None:
    at = site(shared_cluster, one_at_a_time())
    objects = shared_cluster.directory / "objects"

    async def run() -> None:
        async with Clients(at) as clients:
            objectives(objects, {"high": -1, "low": 10, "normal": 0})
            await clients.until(lambda: priorities(at.picker) >= {"10", "-1"})
            clients.ask("held", tokens=2 * HELD)
            await clients.served(1)
            clients.ask("named high", "high")
            await clients.waiting(1)
            clients.ask("named low", "low")
            await clients.waiting(2)
            await clients.answers("named high", "named low")
            assert clients.order == ["held", "named low", "named high"]

    try:
        asyncio.run(run())
    finally:
        objectives(objects)


def priorities(picker: Picker) -> set[str]:
    """Returns the priorities of the bands on the metrics page."""
    name = "llm_d_epp_flow_control_capacity_utilization_requests{"
    lines = [line for line in picker.page().splitlines() if line.startswith(name)]
    return {line.split('priority="')[1].split('"')[0] for line in lines}


def test_the_body_of_a_request_that_waited_arrives_whole(plain: Site) -> None:
    async def run() -> None:
        async with Clients(plain) as clients:
            clients.ask("held", tokens=HELD)
            await clients.served(1)
            clients.ask("x" * 200_000)
            await clients.waiting(1)
            (answer,) = await clients.answers("x" * 200_000)
            assert answer.headers["x-sim-body-bytes"] == str(len(completion("x" * 200_000, max_tokens=2)))
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 2

    asyncio.run(run())


def test_a_long_wait_ends_in_an_answer_through_the_gateway() -> None:
    """`python -m tests.bench.waiting --five-minutes` does the same with a wait of five minutes."""
    assert queued_for(3.0, lambda _: None)["status"] == 200
