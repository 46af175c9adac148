"""Runs background work of plugins: coroutines with a timeout, pauses, and periodic calls.

`Work` is the `Waiting` that plugins and `epp.decision.decide` await. Each waiter has its own future, so a waiter that gives up does not
disturb the others. When the last waiter has given up, the coroutine is cancelled. Work without a waiter runs to its end, and `on_failure`
gets its exception. At the worker's end, `close` cancels all work.

There are no retries, because only the plugin knows whether a repetition is safe.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from epp.errors import ProducerFailed, blame

WORK_MAX = 4096  # limit for running coroutines in one worker
CLOSE_S = 1.0

OnFailure = Callable[[BaseException], None]


class Work:
    """One running coroutine of a plugin. Implements `epp.plugin.Waiting`."""

    __slots__ = ("_awaited", "_late", "_loop", "_on_failure", "_owner", "_task", "_timeout_s", "_timer", "_waiters", "_what")

    def __init__(self, loop: asyncio.AbstractEventLoop, what: str, timeout_s: float, on_failure: OnFailure, owner: object | None) -> None:
        self._loop = loop
        self._owner = owner
        self._what = what
        self._timeout_s = timeout_s
        self._on_failure = on_failure
        self._late = self._awaited = False
        self._waiters = 0
        self._task: asyncio.Task[Any]
        self._timer: asyncio.TimerHandle

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts the coroutine. Its task keeps this object alive."""
        self._task = self._loop.create_task(work)
        self._timer = self._loop.call_later(self._timeout_s, self._expire)
        self._task.add_done_callback(self._done)
        return self._task

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self._task
        self._awaited = True
        if not task.done():
            waiter = self._loop.create_future()

            def wake(_task: object) -> None:
                if not waiter.done():
                    waiter.set_result(None)

            task.add_done_callback(wake)
            self._waiters += 1
            try:
                yield from waiter
            finally:
                self._waiters -= 1
                task.remove_done_callback(wake)
                if not self._waiters:
                    task.cancel()  # has no effect on a task that is done
        return self._outcome()

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        self._task.add_done_callback(call)

    def _outcome(self) -> Any:
        if not self._task.cancelled():
            return self._task.result()
        if self._late:
            raise TimeoutError(f"{self._what}: not done within {self._timeout_s:g} s")
        raise ProducerFailed(f"{self._what}: cancelled, because no request waits for it any more")

    def _expire(self) -> None:
        self._late = True
        self._task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._timer.cancel()
        problem = None if task.cancelled() else task.exception()  # always read, because otherwise asyncio logs an error
        if self._awaited:
            return
        if self._late:
            problem = TimeoutError(f"{self._what}: not done within {self._timeout_s:g} s")
        if problem is not None:
            blame(problem, self._owner)
            self._on_failure(problem)


class Background:
    """Runs the work of one worker's plugins. `on_failure` gets exceptions of work without a waiter, and of periodic calls."""

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float, what: str = "", *, owner: object | None = None) -> Work:
        """Starts a coroutine. Raises ProducerFailed while WORK_MAX coroutines run, and after `close`."""
        what = what or getattr(work, "__qualname__", "work")
        if self._closed or len(self._tasks) >= WORK_MAX:
            work.close()
            why = "the worker ends" if self._closed else f"{WORK_MAX} coroutines of plugins are running already"
            raise ProducerFailed(f"{what}: not started, {why}")
        started = Work(asyncio.get_running_loop(), what, timeout_s, self._on_failure, owner)
        task = started.begin(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return started

    def after(self, seconds: float) -> Work:
        return self.spawn(asyncio.sleep(seconds), seconds + 60.0)

    def every(self, seconds: float, act: Callable[[], object], *, owner: object | None = None) -> None:
        loop, number = asyncio.get_running_loop(), len(self._timers)

        def turn() -> None:
            if self._closed:
                return
            self._timers[number] = loop.call_later(seconds, turn)
            try:
                act()
            except Exception as problem:  # the plugin's fault; its next turn is already set
                blame(problem, owner)
                self._on_failure(problem)

        self._timers[number] = loop.call_later(seconds, turn)

    async def close(self, last: Callable[[], Awaitable[object]] | None = None) -> None:
        """Cancels all work, then awaits `last`."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=CLOSE_S)
        if last is not None:
            await last()
