"""The supervisor: scrapes of model servers, probes, endpoints that change, and its end."""

import asyncio
import contextlib
import os
import re
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

from shm.table import DOWN, State, TableReader
from tests.waiting import until
from tests.workers.instances import made
from tests.workers.supervisor.supervising import check, file_config, model_server, page, page_server, run, serve_worker, supervised
from workers.host.exit_codes import ExitCode
from workers.host.yaml_files import DiscoveryError
from workers.supervisor.endpoints import discovery, endpoint_log
from workers.supervisor.endpoints.names import Names
from workers.supervisor.main import Supervisor
from workers.worker.extproc.health import NOT_SERVING, SERVING


def test_endpoints_are_scraped_into_the_table_and_shown_on_the_page(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as one, model_server(5) as two:
            with made(tmp_path, endpoints=f"127.0.0.1:{one},127.0.0.1:{two}") as instance:
                async with supervised(instance):
                    table = TableReader(instance.layout.table, instance.memory.table)
                    await until(lambda: (table.copy().state == State.FRESH).sum() == 2, "both fresh")
                    status, body = await page(instance, "/metrics")
                    assert status == 200
                    assert 'llm_d_epp_ready_endpoints{name="epp"} 2.0' in body
                    assert 'llm_d_epp_average_queue_size{name="epp"} 4.0' in body
                    assert f'per_endpoint_queue_size{{model_server_endpoint="127.0.0.1:{two}",name="epp"}} 5.0' in body
                    for port in (one, two):
                        assert re.search(rf'endpoint_scrape_seconds\{{[^}}]*="127\.0\.0\.1:{port}"[^}}]*\}} [\d.e-]+', body)

    run(scenario)


def test_pages_are_scraped_from_the_port_of_the_data_source(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3) as serving, model_server(5) as metrics:
            config = f"plugins: [{{type: queue-scorer}}, {{type: metrics-data-source, parameters: {{port: {metrics}}}}}]"
            with made(tmp_path, config, endpoints=f"127.0.0.1:{serving}") as instance:
                async with supervised(instance):
                    table = TableReader(instance.layout.table, instance.memory.table)
                    await until(lambda: (table.copy().state == State.FRESH).any(), "fresh")
                    _, body = await page(instance, "/metrics")
                    assert f'per_endpoint_queue_size{{model_server_endpoint="127.0.0.1:{serving}",name="epp"}} 5.0' in body

    run(scenario)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_all_endpoints_and_each_failed_scrape_are_logged_at_debug_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setattr(endpoint_log, "SNAPSHOT_EVERY_S", 0.05)

    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port},127.0.0.1:1", log_level=level) as instance:
                with capture_logs() as lines:
                    async with supervised(instance):
                        table = TableReader(instance.layout.table, instance.memory.table)
                        await until(lambda: DOWN in table.copy().flags, "one is down")
                        # Several snapshots come due. At level info nothing says so.
                        await asyncio.sleep(0.2)
                events = {line["event"] for line in lines}
                assert {"endpoint appeared", "endpoint fresh", "endpoint down"} <= events
                assert ({"endpoints", "scrape failed"} <= events) == (level == "debug")
                for line in lines:
                    if line["event"] == "endpoints" and "fresh" in line:
                        assert line["fresh"][f"default/127.0.0.1:{port}"]["waiting_requests"] == 3

    run(scenario)


def test_the_picker_is_ready_while_a_serving_worker_heartbeats_and_it_is_not_stopping(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance) as supervisor:
                assert not supervisor.readiness.ready()
                assert (await page(instance, "/readyz"))[0] == 503
                assert await check(instance, "readiness") == NOT_SERVING
                assert await check(instance, "liveness") == SERVING
                serve_worker(instance)
                assert supervisor.readiness.ready()
                assert (await page(instance, "/readyz"))[0] == 200
                assert await check(instance, "") == SERVING
                instance.memory.areas.area(1).heartbeat(time.monotonic() - 60)
                assert not supervisor.readiness.ready()
                serve_worker(instance)
                instance.words.stop()
                assert not supervisor.readiness.ready()
                assert (await page(instance, "/healthz")) == (200, "ok\n")

    run(scenario)


def test_a_grpc_client_gets_unimplemented_for_watch(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance):
                target = f"127.0.0.1:{instance.sockets.health.getsockname()[1]}"
                async with grpc.aio.insecure_channel(target) as channel:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        async for _ in channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=10):
                            pass
                assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(scenario)


def test_blocks_that_a_worker_reports_on_the_bus_are_in_the_index(tmp_path: Path) -> None:
    from shm.prefix_index import IndexReader
    from workers.shared.bus import BusWriter

    async def scenario() -> None:
        with made(tmp_path) as instance:
            async with supervised(instance) as supervisor:
                (owner,) = supervisor.index.writer.owners()
                index = IndexReader(instance.layout.index, instance.memory.index)
                hashes = np.array([11 << 32 | 5, 12 << 32 | 6, 13 << 32 | 7], dtype=np.uint64)
                BusWriter(instance.pipes.bus_writers[1], pytest.fail).learn(hashes, owner)
                await until(lambda: index.match(hashes) == {owner: 3}, "learned")

    run(scenario)


def test_the_cache_size_of_a_server_limits_its_index_entries(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with model_server(3, b'vllm:cache_config_info{block_size="16",num_gpu_blocks="400"} 1\n') as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                async with supervised(instance) as supervisor:
                    table = TableReader(instance.layout.table, instance.memory.table)
                    await until(lambda: (table.copy().state == State.FRESH).sum() == 1, "fresh")
                    (owner,) = supervisor.index.writer.owners()
                    rng = np.random.default_rng(1)
                    for age in range(50):
                        supervisor.index.writer.insert(rng.integers(1, 2**64, 10, dtype=np.uint64), owner, age)
                        assert supervisor.index.writer.held(owner) <= 110

    run(scenario)


def test_a_bad_endpoints_file_ends_the_first_start_with_a_report(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 0}\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            assert await Supervisor(instance).serve() == ExitCode.BOOT_FAILED
            (report,) = instance.reports.received()
            assert "port '0'" in report.text
            assert f"{path}:2" in report.text

    run(scenario)


def test_a_resolver_that_hangs_does_not_delay_endpoints_with_an_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_names: Names, _name: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Names, "_look_up", hang)
    monkeypatch.setattr(discovery, "NAMES_S_MAX", 0.02)

    async def scenario() -> None:
        with made(tmp_path, endpoints="model.test:1,127.0.0.1:1") as instance:
            async with supervised(instance):
                table = TableReader(instance.layout.table, instance.memory.table).copy()
                assert (table.state != State.FREE).sum() == 1

    run(scenario)


def test_a_changed_file_changes_the_endpoints(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "endpoints.yaml"
        path.write_text("endpoints: []\n")
        with made(tmp_path / "run", file_config(path), endpoints="") as instance:
            async with supervised(instance):
                table = TableReader(instance.layout.table, instance.memory.table)
                path.write_text("endpoints:\n- {name: a, address: 127.0.0.1, port: 1}\n")
                await until(lambda: (table.copy().state != State.FREE).sum() == 1, "seen")

    run(scenario)


def test_without_the_parent_the_supervisor_is_not_ready_and_ends_after_the_last_worker(tmp_path: Path) -> None:
    async def scenario() -> None:
        with made(tmp_path) as instance:
            supervisor = Supervisor(instance)
            serving = asyncio.ensure_future(supervisor.serve())
            await until(instance.reports.received, "ready")
            serve_worker(instance)
            assert supervisor.readiness.ready()
            os.close(instance.pipes.parent_pipe.writer)
            await until(lambda: not supervisor.readiness.ready(), "not ready")
            assert not serving.done()
            os.close(instance.pipes.workers_pipe.writer)
            instance.parent_pid = -1
            assert await serving == ExitCode.OK
            assert not any(Path(f"/dev/shm{segment.name}").exists() for segment in instance.memory.segments.values())

    run(scenario)


def test_a_fault_in_a_background_task_ends_the_supervisor(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def broken() -> None:
            raise DiscoveryError(["broken"])

        with made(tmp_path) as instance:
            supervisor = Supervisor(instance)
            serving = asyncio.ensure_future(supervisor.serve())
            await until(instance.reports.received, "ready")
            supervisor.background.keep(broken())
            with pytest.raises(DiscoveryError):
                await serving

    run(scenario)


def exporter(busy: int) -> contextlib.AbstractAsyncContextManager[int]:
    """Runs a DCGM exporter that reports this utilization. Yields its port."""
    return page_server(b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} %d\n' % busy)


GPUS = """
plugins:
- {type: dcgm-data-source, parameters: {port: %d}}
- {type: dcgm-extractor}
- type: endpoint-attribute-scorer
  parameters: {attributeKey: GPUUtilization, producer: dcgm-extractor, algorithm: {type: linear_lower_is_better}}
dataLayer:
  sources: [{pluginRef: dcgm-data-source, extractors: [{pluginRef: dcgm-extractor}]}]
"""


@pytest.mark.parametrize("works", [True, False])
def test_a_further_source_adds_its_columns_and_its_failures_make_no_endpoint_down(tmp_path: Path, works: bool) -> None:
    async def scenario() -> None:
        async with model_server(3) as serving, exporter(85) as gpus, model_server(1) as wrong:
            text = GPUS % (gpus if works else wrong)
            with made(tmp_path, text, endpoints=f"127.0.0.1:{serving}", allow_experimental=True) as instance:
                async with supervised(instance) as supervisor:
                    table = TableReader(instance.layout.table, instance.memory.table)
                    columns = instance.layout.table.columns
                    at = columns.index("GPUUtilization")
                    counters = supervisor.data.further[0].scraper.counters
                    await until(lambda: (table.copy().state == State.FRESH).any(), "fresh")
                    await until(lambda: counters.taken if works else counters.extract_errors > 1, "scraped")
                    await until(lambda: bool(table.copy().present[0] & np.uint64(1 << at)) == works, "in the table")
                    copy = table.copy()
                    if works:
                        assert copy.column(at)[0] == 0.85
                    else:
                        area = instance.memory.areas.area(0)
                        failed = area.schema.counter["datalayer_extract_errors_total@1"]
                        await until(lambda: area.counters[failed] > 1, "counted")
                    assert copy.column(columns.index("waiting_requests"))[0] == 3
                    assert not (copy.flags & np.uint64(DOWN)).any()

    run(scenario)
