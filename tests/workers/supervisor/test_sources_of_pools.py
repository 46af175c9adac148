"""Further data sources of several pools: each pool has its own columns and its own failures."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from epp.config.load import load
from epp.request.pool_choice import PoolChoice
from shm.documents import DocumentReader
from shm.table import DOWN, State, TableReader
from tests.waiting import until
from tests.workers.instances import options, removed
from tests.workers.supervisor.supervising import model_server, page, run, supervised
from tests.workers.supervisor.test_main import GPUS, exporter
from workers.process import pool_views
from workers.process.generations import Given
from workers.process.places import Pool
from workers.shared.documents import EndpointsView


def pool(name: str, text: str | None, *ports: int) -> Pool:
    config = load(text, name, allow_experimental=True)
    return Pool(name, Given(text, name, {}), config, ",".join(f"127.0.0.1:{port}" for port in ports), 4)


@contextlib.asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[int]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(model_server(number)) for number in range(count)]


def test_each_pool_has_the_values_of_its_own_further_sources(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with servers(5) as ports, exporter(85) as busy, exporter(20) as idle, model_server(1) as wrong:
            busy_text = GPUS % busy
            given = [
                pool("busy", busy_text, ports[0]),
                pool("none", None, ports[1]),
                pool("idle", GPUS % idle, ports[2]),
                pool("wrong", GPUS % wrong, ports[3]),
            ]
            given.append(given[0]._replace(name="also-busy", endpoints=f"127.0.0.1:{ports[4]}"))
            with removed(pool_views.create(options(tmp_path, max_endpoints=20), given, PoolChoice([]), {})) as instance:
                async with supervised(instance) as supervisor:
                    table = TableReader(instance.layout.table, instance.memory.table)
                    at = instance.layout.table.columns.index("GPUUtilization")
                    documents = DocumentReader(instance.layout.documents, instance.memory.documents)

                    def shown() -> dict[str, float | None]:
                        copy, found = table.copy(), {}
                        for number, view in enumerate(instance.pools):
                            for endpoint in EndpointsView(documents, number).current():
                                has = bool(copy.present[endpoint.slot] & np.uint64(1 << at))
                                found[view.options.pool_name] = float(copy.column(at)[endpoint.slot]) if has else None
                        return found

                    expected = {"busy": 0.85, "none": None, "idle": 0.2, "wrong": None, "also-busy": 0.85}
                    await until(lambda: (table.copy().state == State.FRESH).sum() == 5 and shown() == expected, "the values of all")
                    assert len(supervisor.data.further) == 3, "pools with the same source share it"
                    area = instance.memory.areas.area(0)
                    failed = area.schema.counter["datalayer_extract_errors_total@1"]
                    await until(lambda: area.counters[failed] > 1, "counted")
                    assert not (table.copy().flags & np.uint64(DOWN)).any()
                    status, text = await page(instance, "/metrics")
                    rows = [
                        line
                        for line in text.splitlines()
                        if line.startswith("llm_d_epp_datalayer_extract_errors_total{") and '"dcgm-extractor"' in line
                    ]
                    assert status == 200 and len(rows) == 1, "a row for each kind of source"

    run(scenario)
