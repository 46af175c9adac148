"""The list of models that a worker answers: of all pools that the request could reach, and only to clients that their pools know."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epp.config.load import load
from epp.errors import Cause, Refused
from epp.protocol import codec
from epp.protocol.models import Model
from epp.request.pool_choice import Matched, PoolChoice
from loadtest.load.proto import ext_proc_pb2 as pb
from shm.documents import DocumentReader, DocumentWriter
from tests.waiting import until
from tests.workers.instances import options, removed
from workers.process import pool_views
from workers.process.generations import Bundle, Given, TrialResult
from workers.process.instance import Instance
from workers.process.places import Pool
from workers.shared.bus import BusWriter
from workers.shared.documents import Served, ServedView, encode, models_of
from workers.worker.main import Worker
from workers.worker.model_list import ModelList
from workers.worker.worker_pools import WorkerPools

TENANTS = "tenants: {{from: [{{header: x-tenant-{}, trusted: true}}], unknown: refuse}}"
MATCHED = {"llama": ("llama-*",), "phi": ("phi-*", "gemma"), "rest": ("*-chat",), "port": ()}


class World:
    """Four pools, of which the last has a port and no models."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.list = ModelList(ServedView(DocumentReader(instance.layout.documents, instance.memory.documents), 4), 7)
        self._writer = DocumentWriter(instance.layout.documents, instance.memory.documents)

    def publish(self, served: Served) -> None:
        self._writer.write(models_of(4), encode(served))

    def answer(self, **headers: str) -> list[Any]:
        found = codec.headers_of({name.replace("_", "-"): value for name, value in headers.items()})
        choice, pools = self.instance.choice, self.instance.pools
        assert choice is not None
        framed = self.list.answer(choice, pools, found, b"")
        return json.loads(pb.ProcessingResponse.FromString(framed[5:]).immediate_response.body)["data"]

    def ids(self, **headers: str) -> list[str]:
        return [f"{each['owned_by']}: {each['id']}" for each in self.answer(**headers)]


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """`request.param`: the configurations of pools, by their names."""
    texts = getattr(request, "param", {})
    given = [Pool(name, Given(texts.get(name), name, {}), load(texts.get(name), name), "127.0.0.1:1", 4) for name in MATCHED]
    choice = PoolChoice([Matched(name, 9102 if name == "port" else 0, (), matched) for name, matched in MATCHED.items()])
    with removed(pool_views.create(options(tmp_path, max_endpoints=16), given, choice, {})) as instance:
        yield World(instance)


def test_names_of_the_file_are_listed_before_an_endpoint_has_listed_any(world: World) -> None:
    assert world.ids() == ["phi: gemma"]


def test_what_endpoints_have_is_listed_if_its_name_leads_to_their_pool(world: World) -> None:
    world.publish(
        {
            0: [Model("llama-7b"), Model("llama-chat"), Model("x-chat")],  # x-chat leads to the pool `rest`
            1: [Model("gemma", "org/gemma", "", 8192), Model("phi-4"), Model("phi-lora", "phi-4", "phi-4")],
            2: [Model("qwen-chat"), Model("llama-chat"), Model("unreachable")],
            3: [Model("phi-5")],
        }
    )
    assert world.ids() == ["phi: gemma", "llama: llama-7b", "llama: llama-chat", "phi: phi-4", "phi: phi-lora", "rest: qwen-chat"]
    gemma, *_, lora, _ = world.answer()
    assert (gemma["root"], gemma["max_model_len"]) == ("org/gemma", 8192)
    assert (lora["id"], lora["parent"]) == ("phi-lora", "phi-4")


def test_the_list_follows_what_endpoints_have(world: World) -> None:
    world.publish({0: [Model("llama-7b")]})
    assert world.ids() == ["phi: gemma", "llama: llama-7b"]
    world.publish({0: [Model("llama-8b")]})
    assert world.ids() == ["phi: gemma", "llama: llama-8b"]


@pytest.mark.parametrize("world", [{"llama": TENANTS.format("a"), "phi": TENANTS.format("b")}], indirect=True)
def test_a_client_sees_the_pools_that_know_it(world: World) -> None:
    world.publish({0: [Model("llama-7b")], 1: [Model("phi-4")], 2: [Model("a-chat")]})
    assert world.ids() == ["rest: a-chat"]
    assert world.ids(x_tenant_a="me") == ["rest: a-chat", "llama: llama-7b"]
    assert world.ids(x_tenant_a="me", x_tenant_b="me") == ["rest: a-chat", "phi: gemma", "llama: llama-7b", "phi: phi-4"]


@pytest.mark.parametrize("world", [dict.fromkeys(MATCHED, TENANTS.format("a"))], indirect=True)
def test_a_client_that_no_pool_knows_is_refused(world: World) -> None:
    with pytest.raises(Refused) as refused:
        world.answer()
    assert refused.value.cause is Cause.UNKNOWN_TENANT
    assert world.ids(x_tenant_a="me") == ["phi: gemma"]


class Reloaded:
    """A worker of these pools, which has loaded the first one. `asked`: how often the list was asked for again, after a load."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        worker = Worker(instance, 0)
        serving: Any = SimpleNamespace(streams=list, look=lambda: None)
        worker._serving = serving
        worker.set_up(BusWriter(instance.pipes.bus_writers[0], lambda: None))
        assert isinstance(worker._adoption, WorkerPools)
        self.pools = worker._adoption
        self.pools.look()

    def reload(self, pool: int, text: str) -> None:
        """Puts another configuration of a pool in force."""
        names = self.instance.layout.names
        bundle = Bundle(2, "c.yaml", text, "", {}, names, 0.0, pool=self.instance.pools[pool].options.pool_name)
        generations = self.instance.generations.of(pool)
        generations.store(1, TrialResult(0, "", bundle))
        generations.publish(1, bundle.number)
        self.pools.look()

    async def owners(self, **headers: str) -> set[str]:
        """Returns the pools in the list, as soon as the worker has loaded what it needs for the answer."""
        found = codec.headers_of({name.replace("_", "-"): value for name, value in headers.items()})
        again = asyncio.Event()
        while (framed := self.pools.models(found, b"", again.set)) is None:
            await asyncio.wait_for(again.wait(), 10)
            again.clear()
        return {each["owned_by"] for each in json.loads(pb.ProcessingResponse.FromString(framed[5:]).immediate_response.body)["data"]}


@pytest.mark.parametrize("world", [{"llama": TENANTS.format("a"), "phi": TENANTS.format("a")}], indirect=True)
def test_a_client_sees_the_pools_that_know_it_under_their_present_configurations(world: World) -> None:
    """Also of a pool that this worker has not loaded: its place may have had another pool at the start."""
    world.publish({0: [Model("llama-7b")], 1: [Model("phi-4")], 2: [Model("a-chat")]})

    async def main() -> None:
        worker = Reloaded(world.instance)
        assert await worker.owners(x_tenant_a="me") == {"llama", "phi", "rest"}
        for pool in (0, 1):
            worker.reload(pool, "plugins: [{type: queue-scorer}]\n" + TENANTS.format("b"))
        await until(lambda: worker.pools.look() or worker.pools.every()[0].instance.number == 2)
        assert await worker.owners(x_tenant_a="me") == {"rest"}
        assert await worker.owners(x_tenant_b="me") == {"llama", "phi", "rest"}

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("world", [{"phi": TENANTS.format("a")}], indirect=True)
def test_a_pool_that_cannot_be_loaded_is_left_out(world: World) -> None:
    world.publish({0: [Model("llama-7b")], 1: [Model("phi-4")]})

    async def main() -> None:
        worker = Reloaded(world.instance)
        worker.reload(1, "plugins: [{type: no-such-plugin}]")
        assert await worker.owners(x_tenant_a="me") == {"llama"}

    asyncio.run(asyncio.wait_for(main(), 20))
