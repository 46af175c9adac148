"""Which endpoints are asked for their models: those of the pools that are chosen by model at present."""

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from epp.request.pool_choice import Matched, PoolChoice
from shm.documents import DocumentSchema, DocumentWriter
from shm.segment import Region
from tests.waiting import turns
from workers.shared.documents import ENDPOINTS
from workers.supervisor import served_models
from workers.supervisor.served_models import follow_models


class Pages:
    """Stands for `ModelPages`. `followed`: the names of the endpoints to ask."""

    followed: list[str]

    def follow(self, specs: Iterable[Any]) -> None:
        self.followed = [spec.name for spec in specs]

    async def look(self) -> None:
        """Asks no endpoint."""


@pytest.mark.parametrize(("before", "after"), [((), ("m",)), (("m",), ())], ids=["from then on", "no longer"])
def test_a_pool_that_is_chosen_by_model_from_a_change_of_the_pools_file_on(
    monkeypatch: pytest.MonkeyPatch, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """Also if its endpoints stay the same."""
    schema, pages = DocumentSchema((64,) * 8), Pages()
    memory = SimpleNamespace(documents=Region(memoryview(bytearray(schema.bytes))))
    instance: Any = SimpleNamespace(layout=SimpleNamespace(documents=schema), memory=memory, pools=[None, None])
    table: Any = SimpleNamespace(specs=lambda: [SimpleNamespace(name="a", pool=0), SimpleNamespace(name="b", pool=1)])
    DocumentWriter(schema, memory.documents).write(ENDPOINTS, b"any")
    monkeypatch.setattr(served_models, "ModelPages", lambda *_: pages)
    monkeypatch.setattr(served_models, "LOOK_S", 0.0)

    async def main() -> None:
        instance.choice = PoolChoice([Matched("one", 1, (), before), Matched("two", 2, (), ("n",))])
        following = asyncio.ensure_future(follow_models(lambda: instance, lambda: table, print))
        await turns(3)
        assert pages.followed == (["a", "b"] if before else ["b"])
        instance.choice = PoolChoice([Matched("one", 1, (), after), Matched("two", 2, (), ("n",))])
        await turns(3)
        assert pages.followed == (["a", "b"] if after else ["b"])
        following.cancel()

    asyncio.run(main())
