"""Clients that leave, servers that die, and a machine that runs out of resources, while the picker keeps serving."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from loadtest.demo.children import python
from loadtest.demo.ports import free_ports
from loadtest.demo.stack import LOOPBACK, picker_config
from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, completion, eventually, run, serve, write_endpoints
from tests.e2e.conftest import FAST, WORKERS, Gateway
from tests.faults import client
from tests.faults.client import Ending
from tests.faults.watch import Watched

SERVERS = 8
CLIENTS = 16
KILL_AFTER_S = 1.0
GO_ON_S = 2.5
SETTLED_S = 2.0  # generous: two scrapes of 50 ms are enough


def idle(picker: Picker) -> bool:
    return sum(picker.gauge("streams_open")) == 0 and picker.in_flight() == []


def send_and_leave(port: int, head: str, part: bytes, hold_s: float, picker: Picker) -> None:
    """Sends the head and a part of the body, waits until the picker has the stream, and closes the connection."""
    opened = picker.counter("streams_total")
    with socket.create_connection((LOOPBACK, port), 5) as client:
        client.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode() + part)
        assert eventually(lambda: picker.counter("streams_total") > opened)
        time.sleep(hold_s)


def test_a_client_that_leaves_during_its_body_leaves_nothing_in_flight(gateway: Gateway) -> None:
    assert eventually(lambda: idle(gateway.picker))
    send_and_leave(gateway.port, "content-length: 1000000", b'{"prompt":"' + b"x" * 100_000, 0.1, gateway.picker)
    assert eventually(lambda: idle(gateway.picker)), gateway.picker.in_flight()
    assert ask(gateway.port, COMPLETIONS, completion("after that", max_tokens=1)).status == 200


def test_a_client_that_leaves_during_the_answer_leaves_nothing_in_flight(gateway: Gateway) -> None:
    assert eventually(lambda: idle(gateway.picker))
    body = completion("a long answer", max_tokens=2_000, stream=True)
    send_and_leave(gateway.port, f"content-length: {len(body)}", body, 0.3, gateway.picker)
    assert eventually(lambda: idle(gateway.picker)), gateway.picker.in_flight()
    assert eventually(lambda: sum(stats["running"] for stats in gateway.fleet.stats()) == 0)


ABORTS = """
import os

from epp.plugin import Scorer, plugin


@plugin("aborts-on-sight")
class Aborts(Scorer):
    \"\"\"A plugin that aborts its process.\"\"\"

    reads_headers = ("x-test",)

    def score(self, request, candidates, profile):
        if "deadly" in request.headers.get("x-test", ""):
            os.abort()
"""
ABORTING = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: aborts-on-sight
- type: file-discovery
  parameters: {path: FILE}
dataLayer: {discovery: {pluginRef: file-discovery}}
"""


def test_a_request_that_kills_workers_kills_two_and_is_then_refused() -> None:
    with Cluster() as cluster:
        folder = cluster.directory / "plugins"
        folder.mkdir()
        (folder / "aborts.py").write_text(ABORTS)
        fleet = cluster.fleet(1)
        picker = cluster.picker(fleet.file, f"--plugin-path={folder}", workers=2, config_text=ABORTING.replace("FILE", str(fleet.file)))
        port = cluster.envoy(picker)
        deadly = completion("the same body for every retry", max_tokens=1)
        answers = [ask(port, COMPLETIONS, deadly, {"x-test": "deadly"}).status for _ in range(100)]
        assert picker.child.text().count("child ended") == 2
        assert answers[-90:] == [400] * 90
        assert picker.counter("deadly_requests_total") >= 90
        assert ask(port, COMPLETIONS, completion("another", max_tokens=1)).status == 200
        assert ask(port, COMPLETIONS, deadly).status == 200


@dataclass
class Load:
    """Sends requests from closed-loop clients, and collects the answers: (sent at, status, server)."""

    port: int
    stop: bool = False
    answers: list[tuple[float, int, str]] = field(default_factory=list)

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        count = 0
        while not self.stop:
            count += 1
            body = completion(f"{number} {count} " + "load " * 50, max_tokens=8)
            sent = time.monotonic()
            async with session.post(f"http://{LOOPBACK}:{self.port}{COMPLETIONS}", data=body) as response:
                await response.read()
                self.answers.append((sent, response.status, response.headers.get("x-sim-server", "")))


def test_a_killed_server_is_avoided_soon(cluster: Cluster) -> None:
    fleets = cluster.fleets(SERVERS, *FAST)
    addresses = [fleet.addresses[0] for fleet in fleets]
    picker = cluster.picker(write_endpoints(cluster.directory / "all.yaml", addresses), workers=WORKERS)
    load = Load(cluster.envoy(picker))
    victim = fleets[3]
    name = victim.stats()[0]["address"]

    async def scenario() -> float:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(load.client(session, n)) for n in range(CLIENTS)]
            await asyncio.sleep(KILL_AFTER_S)
            killed = time.monotonic()
            victim.child.signal(signal.SIGKILL)
            await asyncio.sleep(GO_ON_S)
            load.stop = True
            await asyncio.gather(*clients)
            return killed

    killed = asyncio.run(scenario())
    cluster.forget(victim.child)
    victim.child.process.wait()
    before = [status for sent, status, _ in load.answers if sent < killed - 0.5]
    failed = [sent - killed for sent, status, _ in load.answers if status != 200]
    after = [status for sent, status, _ in load.answers if sent > killed + SETTLED_S]
    print(
        f"{name} killed under load: {len(failed)} of {len(load.answers)} requests failed; "
        f"the last of them was sent {max(failed, default=0.0) * 1e3:.0f} ms after the kill"
    )
    assert set(before) == {200}
    assert len(after) > 20
    assert set(after) == {200}
    assert len(failed) < 200


def command(cluster: Cluster, ports: list[int], *flags: str, workers: int = 2) -> list[str]:
    """Returns the command line of a picker with an unreachable endpoint. The tests never need the endpoint."""
    endpoints = write_endpoints(cluster.directory / "nowhere.yaml", [(LOOPBACK, 1)])
    config = cluster.directory / "nowhere-config.yaml"
    config.write_text(picker_config(endpoints))
    return [*serve(config, *ports, workers, cluster.directory / "run"), *flags]


def in_shell(cluster: Cluster, script: str, *arguments: str, workers: int = 2) -> Picker:
    """Lets a shell start a picker. `script`: has "$@" in place of the picker's command line."""
    ports = free_ports(3)
    argv = ["sh", "-c", script, "sh", *command(cluster, ports, *arguments, workers=workers)]
    picker = Picker(cluster.children.start("picker in a shell", argv), *ports)
    cluster.wait(picker.child, picker.ready)
    return picker


def exchanges(picker: Picker, count: int, *, each_connects: bool = False) -> tuple[list[Ending], list[int]]:
    """Sends `count` requests. Returns their endings, and the ports of their connections."""

    async def main() -> tuple[list[Ending], list[int]]:
        shared = client.Gateway(picker.grpc)
        endings, ports = [], []
        for number in range(count):
            gateway = client.Gateway(picker.grpc) if each_connects else shared
            async with asyncio.timeout(10):
                ending, stream = await gateway.exchange(number)
            endings.append(ending)
            ports.append(stream.connection.port)
            if each_connects:
                await gateway.close()
        await shared.close()
        return endings, ports

    return asyncio.run(main())


def test_a_stopped_worker_gets_no_new_connections_and_is_replaced(cluster: Cluster) -> None:
    picker = cluster.picker(write_endpoints(cluster.directory / "nowhere.yaml", [(LOOPBACK, 1)]), workers=3)
    watched = Watched(picker.child.pid, picker.instance, picker.grpc)
    victim, generation = watched.children()[2], watched.generation(2)
    os.kill(victim, signal.SIGSTOP)
    stopped = time.monotonic()
    endings, ports = exchanges(picker, 40, each_connects=True)
    served = time.monotonic() - stopped
    assert endings == [Ending.OK] * 40
    assert not set(ports) & watched.client_ports(victim)
    assert eventually(lambda: watched.up(2, generation), 20)
    print(f"40 connections served in {served:.2f} s; a successor after {time.monotonic() - stopped:.2f} s (5 s and its start)")
    assert watched.children()[2] != victim


@contextlib.contextmanager
def full_pipe(path: Path) -> Iterator[int]:
    """Creates a named pipe that is full. Yields its descriptor."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(descriptor, b"x" * 4096)
        yield descriptor
    finally:
        os.close(descriptor)


def test_log_lines_that_no_process_reads_are_dropped_and_serving_continues(cluster: Cluster) -> None:
    pipe = cluster.directory / "log-pipe"
    with full_pipe(pipe) as descriptor:
        picker = in_shell(cluster, f'exec "$@" >{pipe} 2>&1')
        assert exchanges(picker, 50)[0] == [Ending.OK] * 50
        with contextlib.suppress(BlockingIOError):
            while os.read(descriptor, 65536):
                pass
        picker.child.signal(signal.SIGHUP)  # makes the picker write a log line
        lines: list[bytes] = []

        def logged() -> bool:
            with contextlib.suppress(BlockingIOError):
                lines.extend(os.read(descriptor, 65536).splitlines())
            return any(b"SIGHUP" in line for line in lines)

        assert eventually(logged)
        assert json.loads(lines[0])["event"] == "log lines dropped"
        assert json.loads(lines[0])["lines"] >= 4
        picker.child.signal(signal.SIGTERM)
        assert picker.child.process.wait(15) == 0
        cluster.forget(picker.child)


def test_a_full_disk_loses_log_lines_and_nothing_else(cluster: Cluster) -> None:
    picker = in_shell(cluster, 'exec "$@" >/dev/full 2>&1')
    assert exchanges(picker, 50)[0] == [Ending.OK] * 50
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(15) == 0
    cluster.forget(picker.child)


def test_without_standard_descriptors_it_serves_and_discards_stacks(cluster: Cluster) -> None:
    picker = in_shell(cluster, 'exec "$@" <&- >&- 2>&-', workers=1)
    watched = Watched(picker.child.pid, picker.instance, picker.grpc)
    assert [os.readlink(f"/proc/{picker.child.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3
    generation = watched.generation(1)
    os.kill(watched.children()[1], signal.SIGABRT)  # the worker prints its stacks
    assert eventually(lambda: watched.up(1, generation))
    assert exchanges(picker, 10)[0] == [Ending.OK] * 10
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(15) == 0
    cluster.forget(picker.child)


def test_with_64_descriptors_open_connections_are_served_and_the_log_names_the_limit(cluster: Cluster) -> None:
    picker = in_shell(cluster, 'ulimit -n 64; exec "$@"', workers=1)
    assert exchanges(picker, 10)[0] == [Ending.OK] * 10
    crowd = [socket.create_connection((LOOPBACK, picker.grpc), 5) for _ in range(100)]
    try:
        assert eventually(lambda: "raise the limit of open files" in picker.child.log.read_text())
        assert picker.ready()
    finally:
        for one in crowd:
            one.close()
    assert exchanges(picker, 10, each_connects=True)[0] == [Ending.OK] * 10


def test_too_few_descriptors_to_start_are_an_error_in_one_line(cluster: Cluster) -> None:
    done = run(["sh", "-c", 'ulimit -n 32; exec "$@"', "sh", *command(cluster, free_ports(3), workers=4)])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "may have 32 open files, and a picker of up to 8 workers needs 60" in line


def test_a_picker_whose_names_in_dev_shm_were_removed_serves_on_and_replaces_processes(cluster: Cluster) -> None:
    fleet = cluster.fleet(2, *FAST)
    picker = cluster.picker(fleet.file, workers=1)
    watched = Watched(picker.child.pid, picker.instance, picker.grpc)
    run_dir = cluster.directory / "run"
    for path in [*Path("/dev/shm").glob(f"{picker.instance}-*"), *run_dir.glob(f"{picker.instance}.*")]:
        path.unlink()
    for ordinal, pid in watched.children().items():
        before = watched.generation(ordinal)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda ordinal=ordinal, before=before: watched.up(ordinal, before)), ordinal  # type: ignore[misc]
    assert eventually(lambda: picker.complete(1))
    assert exchanges(picker, 10)[0] == [Ending.OK] * 10
    picker.child.signal(signal.SIGHUP)
    assert eventually(lambda: '"event": "reload", "successful": true' in picker.child.text())
    assert eventually(lambda: "another program has removed names of this picker" in picker.child.log.read_text())
    done = run(python("workers", "top", "--once", f"--run-dir={run_dir}"))
    assert (done.returncode, done.stderr.count("restart one whose file there was removed")) == (1, 1)
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(15) == 0
    cluster.forget(picker.child)


def may_mount() -> bool:
    unshare = shutil.which("unshare")
    argv = [unshare or "", "-m", "sh", "-c", "mount -t tmpfs -o size=1m tmpfs /dev/shm"]
    return unshare is not None and subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="needs permission for a new mount namespace; tests/shm covers the refusal without one")
def test_a_small_dev_shm_is_refused_with_the_sizes_before_anything_runs(cluster: Cluster) -> None:
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && "$@"; code=$?; ls -A /dev/shm; exit $code'
    done = run(["unshare", "-m", "sh", "-c", script, "sh", *command(cluster, free_ports(3))])
    assert done.returncode == 1
    assert re.search(r"does not fit into /dev/shm: [\d.]+ MiB needed \(state .* index .*\), 1.0 MiB free of 1.0 MiB", done.stderr)
    assert "Kubernetes: an emptyDir with medium: Memory" in done.stderr
    assert done.stdout == ""
