"""An exchange over links that fail or lie."""

import asyncio
from typing import Any

import pytest

from tests.workers.endpoints.replicas.fake_link import FakeLink, links
from tests.workers.endpoints.replicas.live import Replica, becomes, running

X = "10.0.0.1:8000"


def over(*made: FakeLink, name: str = "a", **options: Any) -> Replica:
    replica = Replica("unix:///none", name, {X: 0}, **options)
    replica.exchange.parts = replica.exchange.parts._replace(open_link=links(*made))
    return replica


@pytest.mark.parametrize("why", ["full", "read-only", "error"])
def test_a_store_that_cannot_count_still_passes_messages_on(why: str) -> None:
    async def test() -> None:
        link = FakeLink(refusing=why)
        a = over(link)
        async with running(a):
            await becomes(lambda: a.exchange.others.echo > 0)
        assert a.exchange.failures[why] == 1
        assert a.exchange.others.life[0] == 1

    asyncio.run(test())


def test_a_fault_in_what_comes_is_counted_and_the_exchange_goes_on() -> None:
    async def test() -> None:
        bad, good = FakeLink(), FakeLink()
        bad.heard_next.put_nowait(RecursionError("deep"))
        a = over(bad, good)
        async with running(a):
            await becomes(lambda: good.published)
        assert a.exchange.failures["error"] == 1
        assert "deep" in a.reports[0]

    asyncio.run(test())
