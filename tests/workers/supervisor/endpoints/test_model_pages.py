"""Which models endpoints list: asked seldom and within bounds, new endpoints first, and kept while an endpoint fails."""

import asyncio
import json
from typing import Any

import pytest
import uvloop

from epp.protocol.models import Model
from tests.reports import Reports
from workers.shared.documents import Served
from workers.supervisor.endpoints.discovery import EndpointSpec
from workers.supervisor.endpoints.http_client import Dialer
from workers.supervisor.endpoints.model_pages import AT_ONCE, EVERY_S, FAILING_S, FAILURES_TO_LOG, ModelPages, Unlisted, get


def spec(name: str, pool: int = 0, port: int = 8000, **more: Any) -> EndpointSpec:
    return EndpointSpec("default", name, "127.0.0.1", port, pool=pool, **more)


class World:
    """Endpoints with their models, and a clock. A server with a text instead of models fails with it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.models: dict[str, list[Any] | str] = {}
        self.took_s = 0.0
        self.asked: list[str] = []
        self.published: list[Served] = []
        self.reports = Reports()
        self.pages = ModelPages(self._get, self.published.append, self.reports, lambda: self.now)

    async def _get(self, spec: EndpointSpec) -> bytes:
        self.asked.append(spec.name)
        self.now += self.took_s
        found = self.models[spec.name]
        if isinstance(found, str):
            raise Unlisted(found)
        return json.dumps({"data": [{"id": each} if isinstance(each, str) else each for each in found]}).encode()

    def look(self, later_s: float = 0.0) -> list[str]:
        """Returns which endpoints a look asks."""
        self.now += later_s
        self.asked.clear()
        asyncio.run(self.pages.look())
        return self.asked


def test_the_models_of_all_endpoints_of_a_pool_are_listed_once_and_sorted() -> None:
    world = World()
    world.models = {"a": ["base", "lora-2"], "b": [{"id": "base", "root": "org/base", "max_model_len": 8}, "lora-1"], "c": ["other"]}
    world.pages.follow([spec("a"), spec("b"), spec("c", 2)])
    assert world.look() == ["a", "b", "c"]
    base = Model("base", "org/base", "", 8)
    assert world.published == [{0: [base, Model("lora-1"), Model("lora-2")], 2: [Model("other")]}]


def test_an_endpoint_is_asked_again_after_a_while_and_only_changes_are_published() -> None:
    world = World()
    world.models = {"a": ["base"]}
    world.pages.follow([spec("a")])
    assert world.look() == ["a"]
    assert world.look(EVERY_S / 2) == []
    assert world.look(EVERY_S) == ["a"] and len(world.published) == 1
    world.models = {"a": ["base", "lora"]}
    world.look(EVERY_S)
    assert world.published[-1] == {0: [Model("base"), Model("lora")]}


def test_a_slow_server_is_asked_less_often() -> None:
    world = World()
    world.models, world.took_s = {"a": ["base"]}, 0.1
    world.pages.follow([spec("a")])
    world.look()
    assert world.look(2 * EVERY_S) == []
    assert world.look(100.0) == ["a"]


def test_a_look_asks_a_limited_number_and_the_others_come_next() -> None:
    world = World()
    names = [f"e{number:03}" for number in range(AT_ONCE + 3)]
    world.models = {name: ["m"] for name in names}
    world.pages.follow([spec(name) for name in names])
    assert len(world.look()) == AT_ONCE
    world.pages.follow([spec(name) for name in names])
    assert world.look(1.0) == names[AT_ONCE:]


def test_an_endpoint_that_fails_keeps_its_models_and_is_asked_less_and_less_often() -> None:
    world = World()
    world.models = {"a": ["base"]}
    world.pages.follow([spec("a")])
    world.look()
    world.models = {"a": "status 401"}
    gaps, last = [], 0.0
    for _ in range(400):
        if world.look(5.0):
            gaps.append(world.now - last)
            last = world.now
    assert gaps[1:] == sorted(gaps[1:]) and gaps[-1] <= FAILING_S + 5.0 and len(gaps) < 40
    assert world.pages.served() == {0: [Model("base")]} and len(world.published) == 1
    (report,) = world.reports
    assert "status 401" in str(report) and len(gaps) > FAILURES_TO_LOG


def test_a_page_that_is_no_list_of_models_is_a_failure() -> None:
    world = World()
    world.models = {"a": [{"name": "x"}]}
    world.pages.follow([spec("a")])
    world.look()
    assert world.pages.served() == {} and world.look(1.0) == [] and world.look(5.0) == ["a"]


def test_the_models_of_an_endpoint_that_leaves_or_becomes_another_server_are_dropped() -> None:
    world = World()
    world.models = {"a": ["one"], "b": ["two"]}
    world.pages.follow([spec("a"), spec("b")])
    world.look()
    world.pages.follow([spec("b")])
    world.look()
    assert world.published[-1] == {0: [Model("two")]}
    world.models = {"b": "refused"}
    world.pages.follow([spec("b", uid="another")])
    assert world.look() == ["b"], "it is asked at once"
    assert world.published[-1] == {}


def answering(answer: bytes) -> bytes | str:
    """What `get` returns of a server that sends this to each client and closes, or why it fails."""

    async def main() -> bytes | str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            request = await reader.readuntil(b"\r\n\r\n")
            assert request.startswith(b"GET /v1/models HTTP/1.1\r\n")
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await get(Dialer(asyncio.get_running_loop()), spec("a", port=port))
        except Unlisted as failure:
            return str(failure)
        finally:
            server.close()

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", b"{}"),
        (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "401"),
        (b"", "the connection ended before the answer"),
    ],
)
def test_an_endpoint_is_asked_on_a_connection_of_its_own(answer: bytes, found: bytes | str) -> None:
    got = answering(answer)
    assert got == found if isinstance(found, bytes) else found in str(got)


def test_an_endpoint_that_refuses_is_a_failure() -> None:
    async def main() -> None:
        await get(Dialer(asyncio.get_running_loop()), spec("a", port=1))

    with pytest.raises(Unlisted, match="refused"):
        uvloop.run(main())
