"""Several pools of one picker with a real API server: they appear, change and go under load, and no request of the others fails.

The Service of the picker exists only by its name: Envoy calls the port of each pool.
"""

import asyncio
import json
import os
import signal
from collections.abc import Collection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from loadtest.demo.children import command_name, descendants, python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import COMPLETIONS, Picker, ask, completion, run
from tests.kube.client import Object
from tests.kube.objects import pool, rewrite
from tests.kube.table import Table
from tests.kube.test_gateway import Load, Server
from tests.kube.world import PORT, World, supervisor_of, until, warnings
from workers.shared.documents import rewrites_of
from workers.worker import rewrites

SERVICE = "endpoint-picker"


def named(world: World, name: str, port: int, app: str = "", service: str = SERVICE) -> Object:
    """An InferencePool of the pods with the label `app`, else with its own name, whose picker has this port."""
    thing = pool(world.space, name, {"app": app or name}, (PORT,))
    thing["spec"]["endpointPickerRef"] = {"name": service, "port": {"number": port}}
    return thing


def served(world: World, *apps: str) -> list[Server]:
    """Starts a server for each label, and makes their pods ready."""
    servers = [Server(world, f"{app}-0") for app in apps]
    for app, server in zip(apps, servers, strict=True):
        world.cluster.wait(server.child, lambda server=server: "ready" in server.child.text())
        world.pod(server.name, server.host, {"app": app})
    return servers


def gateway(world: World, picker: Picker, port: int) -> int:
    """Starts an Envoy that calls the picker at the port of a pool."""
    return world.cluster.envoy(Picker(picker.child, port, picker.health, picker.metrics))


def answers(port: int) -> int:
    return ask(port, COMPLETIONS, completion("hello", max_tokens=2)).status


def command_of(world: World, picker: Picker, command: str, *flags: str) -> CompletedProcess[str]:
    """Runs a command of `epp` about a picker."""
    return run(python("workers", *command.split(), f"--run-dir={world.run_dir}", f"--metrics-port={picker.metrics}", *flags))


def told(picker: Picker, *words: str) -> bool:
    return any(all(word in line for word in words) for line in warnings(picker))


def pools_of(table: Table) -> Collection[tuple[int, str]]:
    """The number of its pool and the name of each endpoint."""
    table.look()
    return {(record.pool, record.name) for record in table._records}


def test_pools_of_the_service_appear_change_and_go_and_no_request_of_the_others_fails(world: World) -> None:
    ports = free_ports(3)
    llama, *_ = served(world, "llama", "qwen", "other")
    world.kube.create(named(world, "llama", ports[0]))
    world.kube.create(named(world, "stranger", ports[1], "qwen", service="another-picker"))
    picker = world.picker("--pool-ports=" + ",".join(map(str, ports)), follow=f"--service-name={SERVICE}", workers=2)
    first, later = gateway(world, picker, ports[0]), gateway(world, picker, ports[2])

    async def scenario() -> Load:
        async with Load(first) as load:
            await asyncio.to_thread(changes)
            await asyncio.sleep(0.5)
            return load

    def changes() -> None:
        assert answers(later) == 404, "no pool has this port"
        for _ in range(3):
            qwen = world.kube.create(named(world, "qwen", ports[2]))
            until(lambda: answers(later) == 200, "the new pool answers")
            world.kube.apply(named(world, "qwen", ports[2], "nothing"))
            until(lambda: answers(later) == 503, "it has no endpoint")
            world.kube.apply(named(world, "qwen", ports[2], "other"))
            until(lambda: answers(later) == 200, "it has another one")
            world.kube.delete(qwen)
            until(lambda: answers(later) == 404, "it is gone")
        world.kube.create(named(world, "qwen", ports[2]))
        until(lambda: answers(later) == 200, "it is there again")
        os.kill(supervisor_of(picker.child.pid), signal.SIGKILL)
        until(lambda: answers(later) == 200, "workers know the pools without a supervisor")
        world.kube.apply(named(world, "qwen", ports[1]))
        until(lambda: answers(later) == 404, "the next supervisor follows, and the pool has another port")

    load = asyncio.run(scenario())
    assert set(load.endings) == {200}, f"{load.endings}: {load.first_failure}"
    assert load.endings[200] > 100 and llama.requests >= load.endings[200]
    assert 'name="qwen"' in picker.page() and 'name="llama"' in picker.page()


def test_commands_know_pools_that_appear_while_the_picker_runs(world: World) -> None:
    ports = free_ports(3)
    served(world, "llama", "qwen")
    world.kube.create(named(world, "llama", ports[0]))
    world.kube.create(named(world, "outside", 1))
    picker = world.picker("--pool-ports=" + ",".join(map(str, ports)), follow=f"--service-name={SERVICE}", workers=2)

    def shown(command: str, *flags: str) -> Any:
        done = command_of(world, picker, command, *flags, "--json")
        assert done.returncode in (0, 1), done.stderr
        return json.loads(done.stdout or "{}")

    def findings(*flags: str) -> set[tuple[str, str]]:
        return {(each["rule"], each["title"]) for each in shown("doctor", *flags)["findings"]}

    first = gateway(world, picker, ports[0])
    assert answers(first) == 200
    top = ("top", "--once", "--interval=100ms")
    assert [each["name"] for each in shown(*top)["pools"]] == ["llama"]
    refused = command_of(world, picker, *top, "--pool=qwen")
    assert refused.returncode == 2 and "there is no pool 'qwen'; pools: llama" in refused.stderr
    assert ("pool-not-served", "InferencePool outside is not served") in findings()
    qwen = world.kube.create(named(world, "qwen", ports[2]))
    second = gateway(world, picker, ports[2])
    until(lambda: answers(second) == 200, "the new pool answers")
    assert [each["name"] for each in shown(*top)["pools"]] == ["llama", "qwen"]
    assert [(each["name"], each["pool"]) for each in shown(*top, "--pool=qwen")["endpoints"]] == [("qwen-0-rank-0", "qwen")]
    assert {each["pool"] for each in shown("explain", "--n=9", "--pool=qwen")["decisions"]} == {"qwen"}
    # the state that the doctor reads is up to some seconds old
    until(lambda: "there is no pool" not in command_of(world, picker, "doctor", "--pool=qwen").stderr, "the doctor knows it, too")
    assert not {title for _, title in findings("--pool=qwen") if "llama" in title}
    world.kube.delete(qwen)
    for command in (top, ("explain",), ("doctor",)):
        until(lambda command=command: "pools: llama" in command_of(world, picker, *command, "--pool=qwen").stderr, "it is gone")


def test_ports_are_opened_when_inference_pools_name_them(world: World) -> None:
    one, two = free_ports(2)
    served(world, "llama", "qwen", "other")
    world.kube.create(named(world, "llama", one))
    picker = world.picker(follow=f"--service-name={SERVICE}", workers=2)
    first, later, shared = (gateway(world, picker, port) for port in (one, two, picker.grpc))
    assert answers(first) == 200
    qwen = world.kube.create(named(world, "qwen", two))
    until(lambda: answers(later) == 200, "the pool answers at its new port")
    world.kube.create(named(world, "other", picker.grpc))
    until(lambda: answers(shared) == 200, "a pool may have the port of the picker")
    world.kube.create(named(world, "llama-2", picker.metrics, "llama"))
    until(lambda: told(picker, f"port {picker.metrics} (of the InferencePool) is in use"), "the port is another one of the picker")
    for child in descendants(picker.child.pid):
        if "worker" in command_name(child):
            os.kill(child, signal.SIGKILL)
    until(lambda: answers(first) == answers(later) == 200, "the next workers have the ports, too")
    world.kube.delete(qwen)
    until(lambda: answers(later) == 404, "no pool has the port any more")
    os.kill(supervisor_of(picker.child.pid), signal.SIGKILL)
    world.kube.create(named(world, "qwen", two))
    until(lambda: answers(later) == 200, "the next supervisor knows the port")
    assert answers(first) == 200


def test_pools_by_name_have_their_own_configurations_and_bad_ones_are_told(world: World, tmp_path: Path) -> None:
    ports = free_ports(2)
    served(world, "llama", "qwen")
    (tmp_path / "llama.yaml").write_text("plugins: [{type: queue-scorer}, {type: max-score-picker}]\n")
    (tmp_path / "default.yaml").write_text("plugins: [{type: random-picker}]\n")
    world.kube.create(named(world, "llama", ports[0]))
    world.kube.create(named(world, "qwen", ports[0]))
    flags = ("--pool-name=llama", "--pool-name=absent", f"--config-dir={tmp_path}", "--pool-ports=" + ",".join(map(str, ports)))
    picker = world.picker(*flags, follow="--pool-name=qwen")
    assert told(picker, "an InferencePool is not served", "there is none")
    until(lambda: told(picker, f"has port {ports[0]}, as that of InferencePool 'llama'"), "two pools have one port")
    first, second = (gateway(world, picker, port) for port in ports)
    assert answers(first) == 200
    world.kube.apply(named(world, "qwen", 1))
    until(lambda: told(picker, "has port 1, which --pool-ports does not have"), "the port is outside")
    world.kube.apply(named(world, "qwen", ports[1]))
    until(lambda: answers(second) == 200, "each is on its port")
    assert answers(first) == 200


def test_pools_of_a_file_have_the_pods_and_the_rewrites_of_their_inference_pools(world: World, tmp_path: Path) -> None:
    own, other = free_ports(2)
    file = tmp_path / "pools.yaml"
    pools = [
        {"name": "small", "port": own, "poolName": "llama", "maxEndpoints": 4},
        {"name": "large", "port": other, "selector": "app in (qwen)", "targetPorts": [PORT], "maxEndpoints": 4},
        {"name": "absent", "poolName": "nowhere", "models": ["x"], "maxEndpoints": 4},
    ]
    file.write_text(json.dumps({"pools": pools}))
    for app, host in (("llama", "127.64.1.1"), ("qwen", "127.64.1.2")):
        world.pod(f"{app}-0", host, {"app": app})
    world.kube.create(named(world, "llama", own + 1))
    world.kube.create(rewrite(world.space, "canary", "alias", {"one": 1}, of="llama"))
    world.kube.create(rewrite(world.space, "lost", "lost", {"one": 1}, of="nowhere"))
    picker = world.picker(follow=f"--pools-file={file}")
    table = world.table(picker)
    assert pools_of(table) == {(0, "llama-0-rank-0"), (1, "qwen-0-rank-0")}
    until(lambda: told(picker, f"names port {own + 1}", f"says {own}"), "the file names another port")
    until(lambda: told(picker, "InferencePool 'nowhere'", "there is none"), "a pool is absent")
    found = {pool: table._documents.read(rewrites_of(pool)) for pool in range(3)}
    models = {pool: set(rewrites.decode(each[1]).exact) for pool, each in found.items() if each is not None}
    assert models == {0: {"alias"}, 2: {"lost"}}
    world.pod("qwen-1", "127.64.1.3", {"app": "qwen"})
    until(lambda: (1, "qwen-1-rank-0") in pools_of(table), "a new pod")


def test_a_changed_file_of_the_folder_reloads_its_pool_and_those_without_one_follow_the_default(world: World, tmp_path: Path) -> None:
    ports = free_ports(3)
    served(world, "llama", "qwen")
    folder = tmp_path / "configurations"
    folder.mkdir()
    texts = {each: f"plugins: [{{type: {each}-scorer}}]\n" for each in ("queue", "kv-cache-utilization", "running-requests-size")}
    (folder / "default.yaml").write_text(texts["queue"])
    (folder / "llama.yaml").write_text(texts["queue"])
    for name, port in zip(("llama", "qwen"), ports, strict=False):
        world.kube.create(named(world, name, port))
    flags = ("--pool-ports=" + ",".join(map(str, ports)), f"--config-dir={folder}", "--config-watch")
    picker = world.picker(*flags, follow=f"--service-name={SERVICE}", workers=2)
    first, second, third = (gateway(world, picker, port) for port in ports)

    def generations() -> dict[str, int]:
        head = 'llm_d_epp_config_generation{pool="'
        lines = [line.removeprefix(head) for line in picker.page().splitlines() if line.startswith(head)]
        return {name: int(float(number)) for name, _, number in (line.partition('"} ') for line in lines)}

    until(lambda: answers(first) == answers(second) == 200, "both pools answer")
    (folder / "llama.yaml").write_text(texts["kv-cache-utilization"])
    until(lambda: generations() == {"llama": 2, "qwen": 1}, "the pool of the file has it")
    (folder / "default.yaml").write_text(texts["running-requests-size"])
    until(lambda: generations() == {"llama": 2, "qwen": 2}, "the pool without a file has the default one")
    assert command_of(world, picker, "config rollback", "--pool=qwen").returncode == 0
    assert generations() == {"llama": 2, "qwen": 3}
    world.kube.delete(named(world, "qwen", ports[1]))
    world.kube.create(named(world, "qwen", ports[2]))
    until(lambda: answers(third) == 200, "the pool has another port")
    until(lambda: generations().get("qwen", 0) > 1, "it has the file of the present")
    assert answers(first) == 200 and generations()["llama"] == 2
