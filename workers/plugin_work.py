"""What plugins have done beside the requests: coroutines bounded in time, pauses, and calls that come again and again.

`Work` is the `Waiting` that plugins and `epp.decide` await. Each who awaits it waits by a future of their own, so one who leaves
disturbs no other; when the last has left, the coroutine is cancelled. Nobody need await it: then it runs on, and what it raises is
handed to `unheard`. At the worker's end `close` cancels all of it.

What this does not do: retries (a plugin knows what may be sent twice).
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

from epp.errors import ProducerFailed

WORK_MAX = 4096  # coroutines under way in one worker
CLOSE_S = 1.0

Unheard = Callable[[BaseException], None]


class Work:
    """One coroutine under way; implements `epp.plugin.Waiting`."""

    __slots__ = ("_heard", "_late", "_loop", "_task", "_timeout_s", "_timer", "_unheard", "_waiters", "_what")

    def __init__(self, loop: asyncio.AbstractEventLoop, what: str, timeout_s: float, unheard: Unheard) -> None:
        self._loop = loop
        self._what = what
        self._timeout_s = timeout_s
        self._unheard = unheard
        self._late = self._heard = False
        self._waiters = 0
        self._task: asyncio.Task[Any]
        self._timer: asyncio.TimerHandle

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs it; the task keeps this object."""
        self._task = self._loop.create_task(work)
        self._timer = self._loop.call_later(self._timeout_s, self._expire)
        self._task.add_done_callback(self._done)
        return self._task

    def __await__(self) -> Generator[Any, Any, Any]:
        task = self._task
        self._heard = True
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
                    task.cancel()  # does nothing to what is done
        return self._outcome()

    def add_done_callback(self, call: Callable[[Any], object], /) -> None:
        self._task.add_done_callback(call)

    def _outcome(self) -> Any:
        if not self._task.cancelled():
            return self._task.result()
        if self._late:
            raise TimeoutError(f"{self._what}: not done within {self._timeout_s:g} s")
        raise ProducerFailed(f"{self._what}: cut short, nobody waits for it any more")

    def _expire(self) -> None:
        self._late = True
        self._task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._timer.cancel()
        problem = None if task.cancelled() else task.exception()  # asked for in any case, or asyncio complains
        if self._heard:
            return
        if self._late:
            self._unheard(TimeoutError(f"{self._what}: not done within {self._timeout_s:g} s"))
        elif problem is not None:
            self._unheard(problem)


class Background:
    """All work of one worker's plugins."""

    def __init__(self, unheard: Unheard) -> None:
        self._unheard = unheard
        self._tasks: set[asyncio.Task[Any]] = set()
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._closed = False

    def spawn(self, work: Coroutine[Any, Any, Any], timeout_s: float, what: str = "") -> Work:
        """Raises ProducerFailed while WORK_MAX are under way, or at the worker's end."""
        what = what or getattr(work, "__qualname__", "work")
        if self._closed or len(self._tasks) >= WORK_MAX:
            work.close()
            why = "the worker ends" if self._closed else f"{WORK_MAX} pieces of work are under way"
            raise ProducerFailed(f"{what}: not begun, {why}")
        begun = Work(asyncio.get_running_loop(), what, timeout_s, self._unheard)
        task = begun.begin(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return begun

    def after(self, seconds: float) -> Work:
        return self.spawn(asyncio.sleep(seconds), seconds + 60.0)

    def every(self, seconds: float, act: Callable[[], object]) -> None:
        loop, number = asyncio.get_running_loop(), len(self._timers)

        def turn() -> None:
            if self._closed:
                return
            self._timers[number] = loop.call_later(seconds, turn)
            try:
                act()
            except Exception as problem:  # a plugin's: the next turn comes all the same
                self._unheard(problem)

        self._timers[number] = loop.call_later(seconds, turn)

    async def close(self, last: Callable[[], Awaitable[object]] | None = None) -> None:
        """Ends everything; `last` is awaited when no work is left."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=CLOSE_S)
        if last is not None:
            await last()
