"""Another program writes garbage over the endpoint table and the documents. A successor of the supervisor publishes all of it again."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shm.documents import DocumentReader
from shm.table import State, TableReader
from tests.waiting import until
from tests.workers.instances import made
from tests.workers.supervisor.supervising import killed, model_server, run, supervised
from workers.process.instance import Instance
from workers.shared.documents import EndpointsView
from workers.supervisor.data_layer import OverwrittenError
from workers.supervisor.main import Supervisor

GARBAGE: dict[str, Callable[[int], bytes]] = {"random": random.Random(1).randbytes, "ones": lambda size: b"\xff" * size, "zeros": bytes}


def overwrite(instance: Instance, garbage: Callable[[int], bytes]) -> None:
    for region in (instance.memory.table, instance.memory.documents):
        region.bytes[:] = garbage(region.size)


def seen(instance: Instance) -> list[tuple[str, State]]:
    """Returns name and state of each endpoint, as a worker sees them that starts now."""
    copy = TableReader(instance.layout.table, instance.memory.table).copy()
    view = EndpointsView(DocumentReader(instance.layout.documents, instance.memory.documents))
    return [
        (endpoint.name, State(int(copy.state[endpoint.slot])))
        for endpoint in view.current()
        if copy.generation[endpoint.slot] == endpoint.generation
    ]


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_successor_publishes_the_endpoints_again_although_it_finds_garbage(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                first = Supervisor(instance)
                serving = asyncio.ensure_future(first.serve())
                await until(instance.reports.received, "ready")
                await killed(serving)
                overwrite(instance, GARBAGE[kind])
                with capture_logs() as lines:
                    async with supervised(instance):
                        whole = [(f"127.0.0.1:{port}", State.FRESH)]
                        await until(lambda: seen(instance) == whole, "the endpoint is published and scraped")
                named = [line for line in lines if line["event"].startswith("shared memory was overwritten")]
                counted = instance.memory.areas.counters()["shared_memory_overwritten_total"]
                assert len(named) == counted == (kind != "zeros")  # zeros are a table without endpoints
                if named:
                    assert "endpoints" in named[0]["documents"] and named[0]["rows"] > 0

    run(scenario)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_supervisor_whose_memory_is_overwritten_ends_and_names_the_segment(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                serving = asyncio.ensure_future(Supervisor(instance).serve())
                await until(lambda: [state for _, state in seen(instance)] == [State.FRESH], "fresh")
                overwrite(instance, GARBAGE[kind])
                with pytest.raises(OverwrittenError, match=f"endpoint table in {instance.memory.state_name}"):
                    await asyncio.wait_for(serving, 60)
                assert instance.memory.areas.counters()["shared_memory_overwritten_total"] == 1

    run(scenario)


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_document_that_is_overwritten_ends_the_supervisor(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        async with model_server(3) as port:
            with made(tmp_path, endpoints=f"127.0.0.1:{port}") as instance:
                serving = asyncio.ensure_future(Supervisor(instance).serve())
                await until(lambda: [state for _, state in seen(instance)] == [State.FRESH], "fresh")
                instance.memory.documents.bytes[:] = GARBAGE[kind](instance.memory.documents.size)
                with pytest.raises(OverwrittenError, match="documents in "):
                    await asyncio.wait_for(serving, 60)

    run(scenario)
