"""Background work: with one, several or no waiters; ended by its timeout, when all waiters leave, or with the worker."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from epp.errors import ProducerFailed
from tests.waiting import turns, until
from workers.worker import plugin_work
from workers.worker.plugin_work import Background

LONG_S = 60.0


class Site:
    """The background work of a worker, and the reported failures."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.background = Background(self.failures.append)
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
    """Runs a coroutine until it waits, as the stream does."""
    waiting: asyncio.Future[None] = coroutine.send(None)
    return waiting


def test_await_returns_the_result_of_the_work_or_raises_its_exception() -> None:
    async def good() -> int:
        await turns()
        return 7

    async def bad() -> None:
        raise ZeroDivisionError

    async def scenario(site: Site) -> None:
        work = site.background.spawn(good(), LONG_S)
        assert await work == 7
        assert await work == 7, "work that is done can be awaited again"
        with pytest.raises(ZeroDivisionError):
            await site.background.spawn(bad(), LONG_S)

    assert run(scenario).failures == []


def test_a_coroutine_that_is_stepped_by_hand_continues_when_the_work_is_done() -> None:
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
        await turns(5)
        assert results == []
        future.set_result("done")
        await turns(5)
        assert results == ["done"]

    run(scenario)


def test_work_that_takes_too_long_is_cancelled_and_the_error_names_it() -> None:
    async def scenario(site: Site) -> None:
        with pytest.raises(TimeoutError, match=r"Site.forever: not done within 0.01 s"):
            await site.background.spawn(site.forever(), 0.01)
        assert site.cancelled == 1

    run(scenario)


def test_work_is_cancelled_when_its_last_waiter_leaves() -> None:
    async def scenario(site: Site) -> None:
        work = site.background.spawn(site.forever(), LONG_S)

        async def decide() -> None:
            await work

        clients = [decide() for _ in range(3)]
        for client in clients:
            step(client)
        for left, client in enumerate(clients):
            await turns(5)
            assert site.cancelled == 0, f"{3 - left} still wait"
            client.close()
        await turns(5)
        assert site.cancelled == 1
        assert not site.background._tasks

    assert run(scenario).failures == []


def test_a_waiter_that_leaves_does_not_disturb_other_waiters() -> None:
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


def test_a_failure_of_work_without_a_waiter_is_reported_once() -> None:
    async def bad() -> None:
        raise ZeroDivisionError

    async def scenario(site: Site) -> None:
        site.background.spawn(bad(), LONG_S)
        await turns(5)
        site.background.spawn(site.forever(), 0.0)
        await until(lambda: len(site.failures) == 2)

    assert [type(problem) for problem in run(scenario).failures] == [ZeroDivisionError, TimeoutError]


def test_the_amount_of_running_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_work, "WORK_MAX", 2)

    async def scenario(site: Site) -> None:
        for _ in range(2):
            site.background.spawn(site.forever(), LONG_S)
        with pytest.raises(ProducerFailed, match="2 coroutines of plugins are running already"):
            site.background.spawn(site.forever(), LONG_S)

    run(scenario)


def test_close_ends_work_and_timers_and_waiting_decisions_fail_open() -> None:
    site, acts = Site(), []

    async def main() -> None:
        work = site.background.spawn(site.forever(), LONG_S)
        site.background.every(0.001, lambda: acts.append(1))

        async def decide() -> None:
            await work

        waiter = asyncio.create_task(decide())
        await turns(5)
        closed: list[str] = []

        async def last() -> None:
            closed.append("client")

        await site.background.close(last)
        assert closed == ["client"]
        with pytest.raises(ProducerFailed, match="cancelled, because no request waits"):
            await waiter
        with pytest.raises(ProducerFailed, match="the worker ends"):
            site.background.spawn(site.forever(), LONG_S)
        seen = len(acts)
        # Ten times the interval of the timer, which does not act any more.
        await asyncio.sleep(0.01)
        assert len(acts) == seen

    asyncio.run(main())
    assert site.cancelled == 1 and site.failures == []


def test_a_periodic_call_is_repeated_after_a_failure() -> None:
    async def scenario(site: Site) -> None:
        acts: list[int] = []

        def act() -> None:
            acts.append(1)
            raise ZeroDivisionError

        site.background.every(0.001, act)
        async with asyncio.timeout(10):
            while len(acts) < 3:
                await site.background.after(0.001)
        assert len(site.failures) >= 2

    run(scenario)
