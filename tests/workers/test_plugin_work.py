"""Work beside the requests: awaited by one, several or nobody, ended by time, by its waiters' leaving, or with the worker."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epp.errors import ProducerFailed
from workers import plugin_work
from workers.plugin_work import Background

LONG_S = 60.0


class Site:
    """What a worker has, and what was said of work that nobody heard."""

    def __init__(self) -> None:
        self.unheard: list[BaseException] = []
        self.background = Background(self.unheard.append)
        self.cancelled = 0

    async def forever(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def run(scenario: Callable[[Site], Coroutine[Any, Any, None]]) -> Site:
    site = Site()

    async def main() -> None:
        await scenario(site)
        await site.background.close()

    asyncio.run(main())
    return site


def step(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[None]:
    """As the server does: run it until it waits."""
    waiting: asyncio.Future[None] = coroutine.send(None)
    return waiting


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_awaiting_gives_the_result_or_raises_what_the_work_raised() -> None:
    async def good() -> int:
        await asyncio.sleep(0)
        return 7

    async def bad() -> None:
        raise ZeroDivisionError

    async def scenario(site: Site) -> None:
        work = site.background.spawn(good(), LONG_S)
        assert await work == 7
        assert await work == 7, "what is done can be awaited again"
        with pytest.raises(ZeroDivisionError):
            await site.background.spawn(bad(), LONG_S)

    assert run(scenario).unheard == []


def test_a_coroutine_that_is_stepped_by_hand_goes_on_when_the_work_is_done() -> None:
    async def scenario(site: Site) -> None:
        future = asyncio.get_running_loop().create_future()

        async def work() -> str:
            return str(await future)

        async def decide() -> str:
            result: str = await site.background.spawn(work(), LONG_S)
            return result

        coroutine, results = decide(), list[str]()

        def on(_done: object) -> None:
            with pytest.raises(StopIteration) as stop:
                coroutine.send(None)
            results.append(stop.value.value)

        step(coroutine).add_done_callback(on)
        await turns()
        assert results == []
        future.set_result("done")
        await turns()
        assert results == ["done"]

    run(scenario)


def test_work_that_takes_too_long_is_cancelled_and_named() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(TimeoutError, match=r"Site.forever: not done within 0.01 s"):
            await site.background.spawn(site.forever(), 0.01)
        assert site.cancelled == 1

    run(scenario)


def test_the_work_is_cancelled_when_the_last_who_waits_for_it_leaves() -> None:
    async def scenario(site: Site) -> None:
        work = site.background.spawn(site.forever(), LONG_S)

        async def decide() -> None:
            await work

        clients = [decide() for _ in range(3)]
        for client in clients:
            step(client)
        for left, client in enumerate(clients):
            await turns()
            assert site.cancelled == 0, f"{3 - left} still wait"
            client.close()
        await turns()
        assert site.cancelled == 1
        assert not site.background._tasks

    assert run(scenario).unheard == []


def test_who_leaves_disturbs_nobody_else_who_waits_for_the_same() -> None:
    async def scenario(site: Site) -> None:
        future = asyncio.get_running_loop().create_future()

        async def wait() -> Any:
            return await future

        work = site.background.spawn(wait(), LONG_S)

        async def nested() -> Any:
            return await work

        leaves, stays = site.background.spawn(nested(), 0.01), site.background.spawn(nested(), LONG_S)
        with pytest.raises(TimeoutError):
            await leaves
        future.set_result("shared")
        assert await stays == "shared"

    run(scenario)


def test_what_goes_wrong_in_work_that_nobody_awaits_is_told_once() -> None:
    async def bad() -> None:
        raise ZeroDivisionError

    async def scenario(site: Site) -> None:
        site.background.spawn(bad(), LONG_S)
        await turns()
        site.background.spawn(site.forever(), 0.0)
        await asyncio.sleep(0.01)

    assert [type(problem) for problem in run(scenario).unheard] == [ZeroDivisionError, TimeoutError]


def test_no_more_work_is_begun_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_work, "WORK_MAX", 2)

    async def scenario(site: Site) -> None:
        for _ in range(2):
            site.background.spawn(site.forever(), LONG_S)
        with pytest.raises(ProducerFailed, match="2 pieces of work are under way"):
            site.background.spawn(site.forever(), LONG_S)

    run(scenario)


def test_closing_ends_work_timers_and_who_waits_fails_open() -> None:
    site, acts = Site(), []

    async def main() -> None:
        work = site.background.spawn(site.forever(), LONG_S)
        site.background.every(0.001, lambda: acts.append(1))

        async def decide() -> None:
            await work

        waiter = asyncio.create_task(decide())
        await turns()
        closed: list[str] = []

        async def last() -> None:
            closed.append("client")

        await site.background.close(last)
        assert closed == ["client"]
        with pytest.raises(ProducerFailed, match="cut short"):
            await waiter
        with pytest.raises(ProducerFailed, match="the worker ends"):
            site.background.spawn(site.forever(), LONG_S)
        seen = len(acts)
        await asyncio.sleep(0.01)
        assert len(acts) == seen

    asyncio.run(main())
    assert site.cancelled == 1 and site.unheard == []


def test_a_periodic_act_comes_again_although_it_failed() -> None:
    async def scenario(site: Site) -> None:
        acts: list[int] = []

        def act() -> None:
            acts.append(1)
            raise ZeroDivisionError

        site.background.every(0.001, act)
        async with asyncio.timeout(10):
            while len(acts) < 3:
                await site.background.after(0.001)
        assert len(site.unheard) >= 2

    run(scenario)
