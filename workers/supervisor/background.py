"""Runs the timers and tasks of the supervisor until its end.

If a task raises an exception, the supervisor ends, and a successor starts. If the function of a timer raises an exception, this timer
stops, and the event loop's handler logs the exception.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Holds timers and tasks. `every` and `keep` start them, `ended` waits for the end, `close` stops them all."""

    def __init__(self) -> None:
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fault: BaseException | None = None
        self._over = asyncio.Event()

    def every(self, seconds: float, act: Callable[[], None]) -> None:
        """Calls `act` now, and then every `seconds`."""
        act()
        self._timers[act] = asyncio.get_running_loop().call_later(seconds, self.every, seconds, act)

    def keep(self, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Runs a coroutine as a task. An exception in it ends the supervisor."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def end(self) -> None:
        """Lets `ended` return."""
        self._over.set()

    def fail(self, fault: BaseException) -> None:
        """Lets `ended` return and `raise_fault` raise this exception."""
        self._fault = fault
        self._over.set()

    async def ended(self) -> None:
        """Returns after `end`, or when a task has failed."""
        await self._over.wait()

    async def cancel_tasks(self) -> None:
        """Cancels all tasks and waits until they are done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Stops all timers and tasks, without waiting."""
        for timer in self._timers.values():
            timer.cancel()
        for task in self._tasks:
            task.cancel()

    def raise_fault(self) -> None:
        """Raises the exception of a failed task, if a task has failed."""
        if self._fault is not None:
            raise self._fault

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.fail(fault)
