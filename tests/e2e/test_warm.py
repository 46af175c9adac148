"""The prefix index survives the death of the picker's processes, and with a state directory also a restart of the picker.

Each group of requests has a different long prefix, which one server has cached. A round sends one request per group. Its hit ratio is the
share of the prompt tokens that the servers report as cached.
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.demo.children import ChildFailed
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import COMPLETIONS, Cluster, Fleet, Picker, ask_all, completion, eventually
from tests.e2e.conftest import FAST
from tests.e2e.echo import gateway

GROUPS = 40
PREFIX_BYTES = 6144
SERVERS = 4
BACK_S = 1.0
END_S = 15.0


class Traffic:
    """Sends rounds of requests through one gateway."""

    def __init__(self, port: int, generation: str) -> None:
        self.port = port
        self._generation = generation
        self._numbers = iter(range(10**6))

    async def round(self, within_s: float = 0.25) -> float:
        """Sends one round. Returns the share of cached tokens among all prompt tokens of the answered requests."""
        number = next(self._numbers)
        bodies = [
            completion(f"{self._generation} group {n} ".ljust(PREFIX_BYTES, "x") + f"question {number}", max_tokens=1)
            for n in range(GROUPS)
        ]
        answers = await ask_all(self.port, COMPLETIONS, bodies, within_s)
        usages = [answer.json()["usage"] for answer in answers if answer.status == 200]
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return cached / max(1, sum(usage["prompt_tokens"] for usage in usages))

    async def warm(self) -> float:
        """Sends a few rounds, so that every group has a server. Returns the hit ratio of the last one."""
        for _ in range(3):
            ratio = await self.round()
        return ratio


def events(picker: Picker) -> list[dict[str, Any]]:
    return [json.loads(line) for line in picker.child.log.read_text().splitlines() if line.startswith("{")]


def child_pid(picker: Picker, child: str) -> int:
    """Returns the pid of the latest process with this name that was ready, from the picker's log."""
    pids = [event["child_pid"] for event in events(picker) if event["event"] == "child ready" and event["child"] == child]
    return int(pids[-1])


def stop(cluster: Cluster, picker: Picker) -> None:
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(END_S) == 0
    cluster.forget(picker.child)


@pytest.fixture
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    yield cluster.fleet(SERVERS, *FAST)


def start(cluster: Cluster, fleet: Fleet, *flags: str) -> tuple[Picker, int]:
    picker = cluster.picker(fleet.file, *flags, workers=2)
    return picker, cluster.envoy(picker)


async def killed_amid_traffic(picker: Picker, traffic: Traffic, *children: str) -> float:
    """Kills the children during traffic. Returns the hit ratio of the first round that begins BACK_S later."""
    ongoing = asyncio.ensure_future(rounds_without_end(traffic))
    try:
        await asyncio.sleep(0.3)
        pids = {child: child_pid(picker, child) for child in children}
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        await asyncio.sleep(max(0.0, killed_at + BACK_S - time.monotonic()))
        ratio = await traffic.round()
    finally:
        ongoing.cancel()
        await asyncio.gather(ongoing, return_exceptions=True)
    restarted = [child for child, pid in pids.items() if eventually(lambda c=child, p=pid: child_pid(picker, c) != p)]  # type: ignore[misc]
    assert restarted == list(children)
    return ratio


async def rounds_without_end(traffic: Traffic) -> None:
    while True:
        await traffic.round()


def test_the_index_survives_the_death_of_a_worker_of_the_supervisor_and_of_both(cluster: Cluster, fleet: Fleet) -> None:
    picker, port = start(cluster, fleet)
    traffic = Traffic(port, "a")

    async def story() -> None:
        before = await traffic.warm()
        assert before > 0.9
        ratios = {
            children: await killed_amid_traffic(picker, traffic, *children)
            for children in (("worker 0",), ("supervisor",), ("worker 1", "supervisor"))
        }
        print(f"hit ratio {before:.3f} before, {ratios}")
        assert min(ratios.values()) > 0.95 * before
        later = Traffic(port, "b")  # the successors learn, too
        assert await later.warm() > 0.95 * before

    asyncio.run(story())


def test_a_restarted_picker_with_a_state_directory_sends_requests_to_the_same_servers(cluster: Cluster, fleet: Fleet) -> None:
    state = cluster.directory / "state"
    picker, port = start(cluster, fleet, f"--state-dir={state}")
    before = asyncio.run(Traffic(port, "a").warm())
    assert before > 0.9
    with pytest.raises(ChildFailed, match=f"(?s)exit code 1.*--state-dir {state} is used by {picker.instance}"):
        start(cluster, fleet, f"--state-dir={state}")
    cluster.forget(cluster.children.all[-1])
    stop(cluster, picker)
    assert sorted(path.name for path in Path(state).iterdir()) == ["lock", "prefix-index", "prefix-secret", "recent"]

    picker, port = start(cluster, fleet, f"--state-dir={state}")
    after = asyncio.run(Traffic(port, "a").round())
    (taken,) = [event for event in events(picker) if event["event"] == "prefix index taken over"]
    assert taken["endpoints"] == SERVERS
    stop(cluster, picker)

    picker, port = start(cluster, fleet)
    cold = asyncio.run(Traffic(port, "a").round())
    print(f"hit ratio {before:.3f} before, {after:.3f} after a restart, {cold:.3f} without a state directory")
    assert after > 0.9 * before
    assert cold < 0.7 * before


def test_a_copy_of_the_state_directory_that_is_taken_while_the_picker_runs_can_be_restored(
    cluster: Cluster, fleet: Fleet, tmp_path: Path
) -> None:
    state, backup = cluster.directory / "backed-up", tmp_path / "backup"
    picker, port = start(cluster, fleet, f"--state-dir={state}")
    asyncio.run(Traffic(port, "backup").warm())
    stop(cluster, picker)
    picker, port = start(cluster, fleet, f"--state-dir={state}")
    shutil.copytree(state, backup)
    stop(cluster, picker)
    shutil.rmtree(state)
    shutil.copytree(backup, state)
    picker, port = start(cluster, fleet, f"--state-dir={state}")
    assert asyncio.run(Traffic(port, "backup").round()) > 0.5
    stop(cluster, picker)


def test_each_pool_of_a_restarted_picker_sends_requests_to_the_same_servers(cluster: Cluster) -> None:
    state = cluster.directory / "state"
    fleets = {name: cluster.fleet(2, *FAST) for name in ("one", "two", "three")}
    ports = dict(zip(fleets, free_ports(3), strict=True))

    def begin(*names: str) -> tuple[Picker, dict[str, Traffic]]:
        pools = [
            {"name": name, "port": ports[name], "endpoints": [f"{host}:{port}" for host, port in fleets[name].addresses]} for name in names
        ]
        picker = cluster.picker(cluster.directory, f"--state-dir={state}", workers=1, pools_text=json.dumps({"pools": pools}))
        return picker, {name: Traffic(gateway(cluster, ports[name]), name) for name in names}

    picker, traffic = begin("one", "two", "three")
    before = {name: asyncio.run(each.warm()) for name, each in traffic.items()}
    assert min(before.values()) > 0.9, before
    for each in traffic.values():  # streamed answers teach latencies
        asyncio.run(ask_all(each.port, COMPLETIONS, [completion(f"latency {n}", max_tokens=4, stream=True) for n in range(16)]))
    stop(cluster, picker)
    kept = {path.name for path in state.iterdir()}
    assert kept >= {"lock", "prefix-index-of-pools", "prefix-secret", "pools"}
    assert sorted(path.name for path in (state / "pools").iterdir()) == ["one", "three", "two"]

    picker, traffic = begin("two", "one")  # in another order, and without one of them
    after = {name: asyncio.run(each.round()) for name, each in traffic.items()}
    (taken,) = [event for event in events(picker) if event["event"] == "prefix index taken over"]
    models = [event for event in events(picker) if event["event"] == "latency model taken over"]
    print(f"hit ratio {before} before, {after} after a restart")
    assert taken["endpoints"] == 6 and len(models) == 2
    assert min(after.values()) > 0.9 * min(before.values())
    stop(cluster, picker)
    assert (state / "pools" / "three").exists(), "it may come back"
