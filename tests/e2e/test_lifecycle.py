"""Start, stop, change of workers, and refusal to start, of a picker as a process."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from loadtest.demo.ports import free_ports
from loadtest.demo.stack import picker_config
from loadtest.load.proto import ext_proc_pb2 as pb
from tests.e2e.cluster import Cluster, Picker, eventually, run, serve, write_endpoints
from tests.faults.client import RESPONSE, Ending, Gateway, Lost, Stream, framed, request
from tests.faults.watch import Watched, alive

END_S = 15.0
DRAIN_S = 1.0
ROOM_MIB = 40  # what a worker may take beyond a fresh one; the bodies that it holds in this test take about 60 MiB


def residue(picker: Picker) -> list[str]:
    return sorted(path.name for path in Path("/dev/shm").glob(f"{picker.instance}-*"))


def some_endpoints(cluster: Cluster) -> Path:
    return cluster.fleet(1).file


def nowhere(cluster: Cluster) -> Path:
    """Writes an endpoints file with an unreachable endpoint: these tests send the answers of the model server themselves."""
    return write_endpoints(cluster.directory / "nowhere.yaml", [("127.0.0.1", 1)])


def watch(picker: Picker) -> Watched:
    return Watched(picker.child.pid, picker.instance, picker.grpc)


def events(picker: Picker) -> list[dict[str, Any]]:
    return [json.loads(line) for line in picker.child.log.read_text().splitlines() if line.startswith("{")]


def endings(picker: Picker) -> list[str]:
    return [event["ending"] for event in events(picker) if event["event"] == "child ended"]


def with_gateway(picker: Picker, story: Callable[[Gateway], Awaitable[None]]) -> None:
    async def main() -> None:
        gateway = Gateway(picker.grpc)
        try:
            async with asyncio.timeout(END_S):
                await story(gateway)
        finally:
            await gateway.close()

    asyncio.run(main())


async def routed(gateway: Gateway, number: int = 1) -> Stream:
    """Opens a stream and waits until its request has an endpoint."""
    stream = await gateway.stream()
    stream.send(request(number))
    first, _ = await stream.take(2)
    assert pb.ProcessingResponse.FromString(first).WhichOneof("response") == "request_headers"
    return stream


async def finish(stream: Stream) -> str:
    stream.send(RESPONSE)
    await stream.take(2)
    stream.send(b"", last=True)
    return await stream.end()


async def half_sent(gateway: Gateway, body: bytes = b'{"model":') -> Stream:
    """Opens a stream and sends an incomplete body."""
    head, part = pb.ProcessingRequest(), pb.ProcessingRequest()
    head.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    part.request_body.body = body
    stream = await gateway.stream()
    stream.send(framed(head) + framed(part))
    return stream


async def exit_code(picker: Picker) -> int:
    return await asyncio.to_thread(picker.child.process.wait, END_S)


def test_sigterm_ends_with_exit_code_0_and_leaves_nothing(cluster: Cluster) -> None:
    picker = cluster.picker(some_endpoints(cluster), workers=2)
    assert residue(picker)
    picker.child.signal(signal.SIGTERM)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    assert residue(picker) == []
    assert list((cluster.directory / "run").iterdir()) == []


def test_ctrl_c_for_the_whole_process_group_ends_it_the_same_way(cluster: Cluster) -> None:
    picker = cluster.picker(some_endpoints(cluster), workers=2)
    os.killpg(picker.child.pid, signal.SIGINT)
    assert picker.child.process.wait(END_S) == 0, picker.child.tail()
    cluster.forget(picker.child)
    assert residue(picker) == []


def test_open_streams_end_normally_and_new_ones_are_served_while_the_picker_stops(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), workers=2)

    async def story(gateway: Gateway) -> None:
        held = [await routed(gateway, n) for n in range(20)]
        picker.child.signal(signal.SIGTERM)
        assert await asyncio.to_thread(eventually, lambda: not picker.ready())
        late = Gateway(picker.grpc)
        assert (await late.exchange(99))[0] is Ending.OK
        await late.close()
        assert [await finish(stream) for stream in held] == ["0"] * 20
        assert await exit_code(picker) == 0

    with_gateway(picker, story)
    cluster.forget(picker.child)
    assert endings(picker) == ["exit code 0 (OK)"] * 3


def test_at_the_drain_timeout_waiting_streams_are_refused_with_the_reason_and_routed_ones_are_cut(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), f"--drain-timeout={DRAIN_S}s", workers=1)

    async def story(gateway: Gateway) -> None:
        held, waiting = await routed(gateway), await half_sent(gateway)
        picker.child.signal(signal.SIGTERM)
        (message,) = await waiting.take(1)
        answer = pb.ProcessingResponse.FromString(message).immediate_response
        headers = {o.header.key: o.header.raw_value.decode() for o in answer.headers.set_headers}
        assert answer.status.code == 503
        assert headers["x-llm-d-request-dropped-reason"] == "rejected-shutting-down"
        assert b"flow controller shutting down: request rejected pre-queue" in answer.body
        try:
            await held.end()
        except Lost:
            assert await exit_code(picker) == 0
            return
        raise AssertionError("a routed stream outlived the drain timeout")

    with_gateway(picker, story)
    cluster.forget(picker.child)


def test_a_second_signal_refuses_waiting_streams_at_once(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), "--drain-timeout=60s", workers=1)

    async def story(gateway: Gateway) -> None:
        waiting = await half_sent(gateway)
        picker.child.signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        picker.child.signal(signal.SIGTERM)
        (message,) = await waiting.take(1)
        assert pb.ProcessingResponse.FromString(message).immediate_response.status.code == 503
        assert await exit_code(picker) == 0

    with_gateway(picker, story)
    cluster.forget(picker.child)


def test_a_worker_that_gets_sigterm_ends_its_streams_while_its_successor_serves(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), workers=1)
    seen = watch(picker)
    old = seen.children()[1]

    async def story(gateway: Gateway) -> None:
        held = await routed(gateway)
        os.kill(old, signal.SIGTERM)
        assert await asyncio.to_thread(eventually, lambda: seen.serving() == [1, 2])
        assert picker.ready()
        assert await asyncio.to_thread(eventually, lambda: held.connection.closing)
        ending, stream = await gateway.exchange(2)
        assert ending is Ending.OK
        assert stream.connection.port in seen.client_ports(seen.children()[2])
        assert await finish(held) == "0"
        assert await asyncio.to_thread(eventually, lambda: not alive(old))

    with_gateway(picker, story)
    assert eventually(lambda: seen.serving() == [2])
    assert endings(picker) == ["exit code 0 (OK)"]
    assert starts(picker) == {"0": 1.0, "1": 1.0}


def starts(picker: Picker) -> dict[str, float]:
    """Returns worker -> number of its starts, from the metrics page."""
    lines = [line for line in picker.page().splitlines() if line.startswith("llm_d_epp_worker_starts_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_signals_add_and_remove_workers_and_no_request_fails(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), "--workers-max=4", workers=2)
    seen = watch(picker)
    assert sorted(starts(picker)) == ["0", "1"]

    async def story(gateway: Gateway) -> None:
        stop = False
        results: list[Ending] = []

        async def load(number: int) -> None:
            while not stop:
                results.append((await gateway.exchange(number, hold_s=0.05))[0])

        clients = [asyncio.create_task(load(n)) for n in range(20)]
        for number, workers in ((signal.SIGTTIN, 3), (signal.SIGTTIN, 4), (signal.SIGTTOU, 3), (signal.SIGTTOU, 2)):
            picker.child.signal(number)
            assert await asyncio.to_thread(eventually, lambda wanted=workers: len(seen.serving()) == wanted)
            await asyncio.sleep(0.2)
        stop = True
        await asyncio.gather(*clients)
        assert set(results) == {Ending.OK}

    with_gateway(picker, story)
    assert sorted(starts(picker)) == ["0", "1", "2", "3"]
    assert eventually(lambda: seen.in_flight() == 0)


def fresh_worker_mib(cluster: Cluster) -> int:
    """Returns the memory of a fresh worker, as its picker logs it when the limit is smaller."""
    picker = cluster.picker(nowhere(cluster), "--worker-memory-limit=1MiB", workers=1)
    (line,) = [event for event in events(picker) if event["event"] == "memory of workers is not watched"]
    needs: int = line["needs_mib"]
    return needs


def test_a_worker_above_its_memory_limit_is_recycled_and_its_streams_end_normally(cluster: Cluster) -> None:
    limit = fresh_worker_mib(cluster) + ROOM_MIB
    config = cluster.directory / "config.yaml"
    config.write_text(picker_config(nowhere(cluster)))
    grpc, health, metrics = free_ports(3)
    argv = serve(config, grpc, health, metrics, 1, cluster.directory / "run")
    argv[argv.index("workers")] = "tests.faults.quick_picker"
    child = cluster.children.start("quick-picker", [*argv, f"--worker-memory-limit={limit}MiB"])
    picker = Picker(child, grpc, health, metrics)
    cluster.wait(child, picker.ready)
    seen = watch(picker)

    async def story(gateway: Gateway) -> None:
        held = await routed(gateway)
        large = [await half_sent(gateway, b"x" * (10 << 20)) for _ in range(12)]
        assert await asyncio.to_thread(eventually, lambda: 2 in seen.serving())
        assert await finish(held) == "0"
        for stream in large:
            stream.cancel()
        assert await asyncio.to_thread(eventually, lambda: seen.serving() == [2])
        assert (await gateway.exchange(3))[0] is Ending.OK

    with_gateway(picker, story)
    assert endings(picker) == ["exit code 75 (RECYCLED)"]
    assert [event["limit_mib"] for event in events(picker) if event["event"] == "worker is recycled: memory"] == [limit]


def test_a_limit_below_the_size_of_a_new_worker_is_logged_and_has_no_effect(cluster: Cluster) -> None:
    picker = cluster.picker(nowhere(cluster), "--worker-memory-limit=1MiB", workers=1)
    (line,) = [event for event in events(picker) if event["event"] == "memory of workers is not watched"]
    assert line["limit_mib"] == 1 < line["needs_mib"]
    assert endings(picker) == []


def test_the_segments_of_a_killed_picker_are_removed_at_the_next_start(cluster: Cluster) -> None:
    endpoints = some_endpoints(cluster)
    killed = cluster.picker(endpoints, workers=2)
    killed.child.kill_group()
    killed.child.process.wait(END_S)
    cluster.forget(killed.child)
    assert residue(killed)
    successor = cluster.picker(endpoints, workers=1)
    assert residue(killed) == []
    assert residue(successor)


def test_a_port_in_use_is_an_error_that_names_it(cluster: Cluster) -> None:
    first = cluster.picker(some_endpoints(cluster), workers=1)
    config = cluster.directory / "second.yaml"
    config.write_text(picker_config(write_endpoints(cluster.directory / "second-endpoints.yaml", [("127.0.0.1", 1)])))
    health, metrics = free_ports(2)
    second = run(serve(config, first.grpc, health, metrics, 1, cluster.directory / "other-run"))
    assert second.returncode == 1
    assert f"port {first.grpc} (--grpc-port) is in use" in second.stderr
    assert first.ready()


def test_a_flag_with_an_unusable_file_is_a_configuration_error(cluster: Cluster) -> None:
    config = cluster.directory / "good.yaml"
    config.write_text(picker_config(write_endpoints(cluster.directory / "endpoints.yaml", [("127.0.0.1", 1)])))
    grpc, health, metrics = free_ports(3)
    plain = serve(config, grpc, health, metrics, 1, cluster.directory / "run")
    for flag in ("--metrics-cert-dir", "--prefix-secret-file"):
        done = run([*plain, f"{flag}=/nowhere"])
        assert done.returncode == 78
        assert f"error: {flag}" in done.stderr


def test_an_unknown_field_is_refused_with_its_line(cluster: Cluster) -> None:
    config = cluster.directory / "wrong.yaml"
    config.write_text("plugins:\n- type: queue-scorer\nschedulingProfile: []\n")
    grpc, health, metrics = free_ports(3)
    done = run(serve(config, grpc, health, metrics, 1, cluster.directory / "run"))
    assert done.returncode == 78
    assert "wrong.yaml:3" in done.stderr
    assert "schedulingProfiles" in done.stderr
