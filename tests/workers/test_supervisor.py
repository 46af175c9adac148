"""The real supervisor in the test's own loop: model servers that answer scrapes, probes, a successor, the end."""

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import uvloop
from structlog.testing import capture_logs

from shm.table import DOWN, State, TableReader
from tests.workers.instances import made
from workers import discovery, endpoint_log
from workers.discovery import Names
from workers.exit_codes import ExitCode
from workers.health import CHECK, NOT_SERVING, SERVING
from workers.instance import Instance
from workers.supervisor import Supervisor
from workers.transport.tls import self_signed
from workers.yaml_files import DiscoveryError

PAGE = b"""\
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} %d
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""


@contextlib.asynccontextmanager
async def model_server(waiting: int) -> AsyncIterator[int]:
    """The port of a server whose metrics page says so many wait."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = PAGE % waiting
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(page), page))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def until(happened: Callable[[], object], _what: str) -> None:
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0.005)


async def page(instance: Instance, path: str) -> tuple[int, str]:
    port = instance.metrics_listener.getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.0\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def check(instance: Instance, service: str) -> bytes:
    name = service.encode()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{instance.health_listener.getsockname()[1]}") as channel:
        answer: bytes = await channel.unary_unary(CHECK)(bytes((0x0A, len(name))) + name, timeout=10)
    return answer


def serve_worker(instance: Instance) -> None:
    """As if worker 0 had just said that it serves."""
    instance.lanes.lane(1).beat(time.monotonic())
    instance.lanes.set_serving(1, True)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    uvloop.run(scenario())


@contextlib.asynccontextmanager
async def supervised(instance: Instance) -> AsyncIterator[Supervisor]:
    """A supervisor that is ready; at the end its life is over as when the parent has let go."""
    supervisor = Supervisor(instance)
    serving = asyncio.ensure_future(supervisor.serve())
    try:
        await until(lambda: serving.done() or instance.received(), "ready")
        if serving.done():
            await serving
        yield supervisor
        instance.release_children()
        assert await serving == ExitCode.OK
    finally:
        await killed(serving)


async def killed(serving: asyncio.Future[int]) -> None:
    """The supervisor ends in the middle of what it does."""
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


def test_endpoints_are_scraped_into_the_table_and_shown_on_the_page(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as one, model_server(5) as two:
            with made(tmp_path, endpoints=f"127.0.0.1:{one},127.0.0.1:{two}") as instance:
                async with supervised(instance):
                    table = TableReader(instance.table_schema, instance.table)
                    await until(lambda: (table.copy().state == State.FRESH).sum() == 2, "both fresh")
                    status, body = await page(instance, "/metrics")
                    assert status == 200
                    assert 'llm_d_epp_ready_endpoints{name="epp"} 2.0' in body
                    assert 'llm_d_epp_average_queue_size{name="epp"} 4.0' in body
                    assert f'per_endpoint_queue_size{{model_server_endpoint="127.0.0.1:{two}",name="epp"}} 5.0' in body
                    for port in (one, two):
                        assert re.search(
                            rf'endpoint_scrape_seconds\{{[^}}]*="127\.0\.0\.1:{port}"[^}}]*\}} [\d.e-]+', body
                        )

    run(scenario)


def test_pages_are_scraped_where_the_data_source_says(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as serving, model_server(5) as telling:
            config = (
                f"plugins: [{{type: queue-scorer}}, {{type: metrics-data-source, parameters: {{port: {telling}}}}}]"
            )
            with made(tmp_path, config, endpoints=f"127.0.0.1:{serving}") as instance:
                async with supervised(instance):
                    table = TableReader(instance.table_schema, instance.table)
                    await until(lambda: (table.copy().state == State.FRESH).any(), "fresh")
                    _, body = await page(instance, "/metrics")
                    assert (
                        f'per_endpoint_queue_size{{model_server_endpoint="127.0.0.1:{serving}",name="epp"}} 5.0' in body
                    )

    run(scenario)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_only_at_debug_all_endpoints_and_each_failed_scrape_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setattr(endpoint_log, "SNAPSHOT_EVERY_S", 0.05)

    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port},127.0.0.1:1", log_level=level) as instance:
                with capture_logs() as lines:
                    async with supervised(instance):
                        table = TableReader(instance.table_schema, instance.table)
                        await until(lambda: DOWN in table.copy().flags, "one is down")
                        await asyncio.sleep(0.2)
                events = {line["event"] for line in lines}
                assert {"endpoint appeared", "endpoint fresh", "endpoint down"} <= events
                assert ({"endpoints", "scrape failed"} <= events) == (level == "debug")
                for line in lines:
                    if line["event"] == "endpoints" and "fresh" in line:
                        assert line["fresh"][f"default/127.0.0.1:{port}"]["waiting_requests"] == 3

    run(scenario)


def test_ready_means_a_worker_that_serves_and_beats_and_nobody_stops(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance) as supervisor:
                assert not supervisor.ready()
                assert (await page(instance, "/readyz"))[0] == 503
                assert await check(instance, "readiness") == NOT_SERVING
                assert await check(instance, "liveness") == SERVING
                serve_worker(instance)
                assert supervisor.ready()
                assert (await page(instance, "/readyz"))[0] == 200
                assert await check(instance, "") == SERVING
                instance.lanes.lane(1).beat(time.monotonic() - 60)
                assert not supervisor.ready()
                serve_worker(instance)
                instance.stop()
                assert not supervisor.ready()
                assert (await page(instance, "/healthz")) == (200, "ok\n")

    run(scenario)


def test_a_grpc_client_gets_unimplemented_for_watch(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance):
                target = f"127.0.0.1:{instance.health_listener.getsockname()[1]}"
                async with grpc.aio.insecure_channel(target) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        async for _ in channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10):
                            pass
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario)


def test_what_a_worker_learned_is_in_the_index(tmp_path: Path) -> None:
    from shm.prefix_index import IndexReader
    from workers.bus import BusWriter

    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance) as supervisor:
                (owner,) = supervisor.index.owners()
                index = IndexReader(instance.index_schema, instance.index)
                hashes = np.array([11 << 32 | 5, 12 << 32 | 6, 13 << 32 | 7], dtype=np.uint64)
                BusWriter(instance.bus_writers[1], pytest.fail).learn(hashes, owner)
                await until(lambda: index.match(hashes) == {owner: 3}, "learned")

    run(scenario)


def test_a_restarted_picker_knows_what_its_predecessor_learned_of_endpoints_that_are_still_there(
    tmp_path: Path,
) -> None:
    from shm.prefix_index import IndexReader

    hashes = np.random.default_rng(1).integers(1, 2**64, 199, dtype=np.uint64)
    known: dict[str, int] = {}

    async def life(endpoints: str, check: Callable[[Supervisor, IndexReader], None], **more: object) -> None:
        options = {"state_dir": str(tmp_path / "state"), **more}
        with made(tmp_path / "run", endpoints=endpoints, **options) as instance:
            async with supervised(instance) as supervisor:
                check(supervisor, IndexReader(instance.index_schema, instance.index))

    def learn(supervisor: Supervisor, _index: IndexReader) -> None:
        owners = supervisor.table.owners()
        known.update({name: owner for (_, name, *_), owner in owners.items()})
        for number, owner in enumerate(owners.values()):
            supervisor.index.insert(hashes[number * 50 : number * 50 + 50], owner, 1)

    def find(supervisor: Supervisor, index: IndexReader) -> None:
        owners = {name: owner for (_, name, *_), owner in supervisor.table.owners().items()}
        assert owners["127.0.0.1:2"] == known["127.0.0.1:2"]
        assert index.match(hashes[50:100]) == {owners["127.0.0.1:2"]: 50}
        assert sorted(supervisor.index.owners()) == sorted(owners.values())  # that of :1 is retired

    def find_nothing(_supervisor: Supervisor, index: IndexReader) -> None:
        assert index.match(hashes[50:100]) == {}

    async def scenario() -> None:
        await life("127.0.0.1:1,127.0.0.1:2", learn)
        await life("127.0.0.1:2,127.0.0.1:3", find)
        await life("127.0.0.1:2,127.0.0.1:3", find)
        await life("127.0.0.1:2,127.0.0.1:3", find_nothing, state_dir="")
        await life("127.0.0.1:2", find_nothing, index_entries=8192)

    run(scenario)


def test_a_successor_needs_no_file_of_the_scrapes_certificates(tmp_path: Path) -> None:
    """The parent has read them: a supervisor that is killed after they have gone could not come back."""
    authority = tmp_path / "ca.pem"
    authority.write_bytes(self_signed()[0])
    parameters = f"{{scheme: https, insecureSkipVerify: false, caCertPath: {authority}}}"

    async def scenario() -> None:
        source = f"plugins:\n- {{type: metrics-data-source, parameters: {parameters}}}\n"
        with made(tmp_path / "run", source) as instance:
            authority.unlink()
            async with supervised(instance):
                pass

    run(scenario)


def test_a_successor_attaches_to_the_index_whatever_the_snapshot_says(tmp_path: Path) -> None:
    from shm.prefix_index import IndexReader

    hashes = np.random.default_rng(1).integers(1, 2**64, 199, dtype=np.uint64)

    async def scenario() -> None:
        with made(tmp_path / "run", state_dir=str(tmp_path / "state")) as instance:
            first = Supervisor(instance)
            serving = asyncio.ensure_future(first.serve())
            await until(instance.received, "ready")
            (owner,) = first.index.owners()
            first.index.insert(hashes[:50], owner, 1)
            assert first.state is not None
            await first.state.save(first.table.owners)
            first.index.insert(hashes, owner, 1)
            await killed(serving)
            async with supervised(instance) as second:
                assert second.index.owners() == [owner]
                assert IndexReader(instance.index_schema, instance.index).match(hashes) == {owner: 199}

    run(scenario)


def test_a_servers_cache_sets_how_much_is_held_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        global PAGE
        page, PAGE = PAGE, PAGE + b'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1\n'
        try:
            async with model_server(3) as port:
                with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                    async with supervised(instance) as supervisor:
                        table = TableReader(instance.table_schema, instance.table)
                        await until(lambda: (table.copy().state == State.FRESH).sum() == 1, "fresh")
                        (owner,) = supervisor.index.owners()
                        rng = np.random.default_rng(1)
                        for age in range(50):
                            supervisor.index.insert(rng.integers(1, 2**64, 10, dtype=np.uint64), owner, age)
                            assert supervisor.index.held(owner) <= 110
        finally:
            PAGE = page

    run(scenario)


def test_a_successor_keeps_slots_owners_and_counters(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                table = TableReader(instance.table_schema, instance.table)
                first = Supervisor(instance)
                serving = asyncio.ensure_future(first.serve())
                await until(lambda: (table.copy().state == State.FRESH).sum() == 1, "fresh")
                await until(lambda: instance.lanes.counters()["scrapes_total"] > 2, "counted")
                before, owners = table.copy(), first.index.owners()
                counted = instance.lanes.counters()["scrapes_total"]
                await killed(serving)
                assert instance.received()
                second = Supervisor(instance)
                after = table.copy()
                assert after.generation.tolist() == before.generation.tolist()
                serving = asyncio.ensure_future(second.serve())
                await until(instance.received, "the successor ready")
                assert second.successor and not first.successor
                assert second.index.owners() == owners
                assert table.copy().generation.tolist() == before.generation.tolist()
                await until(lambda: instance.lanes.counters()["scrapes_total"] > counted, "counting on")
                instance.release_children()
                assert await serving == ExitCode.OK

    run(scenario)


def file_config(path: Path) -> str:
    return f"""\
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: file-discovery
  name: file
  parameters: {{path: {path}, watchFile: true}}
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
dataLayer:
  discovery: {{pluginRef: file}}
"""


def test_a_bad_endpoints_file_ends_the_first_start_with_its_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 0}\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            assert await Supervisor(instance).serve() == ExitCode.BOOT_FAILED
            (report,) = instance.received()
            assert "port '0'" in report.text
            assert f"{path}:2" in report.text

    run(scenario)


def test_a_file_that_went_bad_does_not_stop_a_successor_who_keeps_the_endpoints_and_scrapes_them(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            serving = asyncio.ensure_future(Supervisor(instance).serve())
            await until(instance.received, "ready")
            await killed(serving)
            path.write_text("endpoints: nonsense")
            failed = instance.lanes.counters()["datalayer_poll_errors_total"]
            async with supervised(instance):
                table = TableReader(instance.table_schema, instance.table).copy()
                assert (table.state != State.FREE).sum() == 1
                await until(lambda: instance.lanes.counters()["datalayer_poll_errors_total"] > failed, "scraped")

    run(scenario)


def test_a_resolver_that_hangs_keeps_no_endpoint_with_an_address_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_names: Names, _name: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Names, "_look_up", hang)
    monkeypatch.setattr(discovery, "NAMES_S_MAX", 0.02)

    async def scenario() -> None:
        with made(tmp_path, endpoints="model.test:1,127.0.0.1:1") as instance:
            async with supervised(instance):
                table = TableReader(instance.table_schema, instance.table).copy()
                assert (table.state != State.FREE).sum() == 1

    run(scenario)


def test_a_changed_file_changes_the_endpoints(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: []\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            async with supervised(instance):
                table = TableReader(instance.table_schema, instance.table)
                path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n")
                await until(lambda: (table.copy().state != State.FREE).sum() == 1, "seen")

    run(scenario)


def test_without_parent_it_is_not_ready_and_leaves_when_no_worker_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            supervisor = Supervisor(instance)
            serving = asyncio.ensure_future(supervisor.serve())
            await until(instance.received, "ready")
            serve_worker(instance)
            assert supervisor.ready()
            os.close(instance.life.writer)
            await until(lambda: not supervisor.ready(), "not ready")
            assert not serving.done()
            os.close(instance.family.writer)
            instance.parent_pid = -1
            assert await serving == ExitCode.OK
            assert not any(Path(f"/dev/shm{segment.name}").exists() for segment in instance.segments)

    run(scenario)


def test_a_fault_in_what_runs_beside_ends_the_supervisor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def broken() -> None:
            raise DiscoveryError(["broken"])

        with made(tmp_path) as instance:
            supervisor = Supervisor(instance)
            serving = asyncio.ensure_future(supervisor.serve())
            await until(instance.received, "ready")
            supervisor._keep(broken())
            with pytest.raises(DiscoveryError):
                await serving

    run(scenario)
