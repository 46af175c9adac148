"""Watches directories with inotify, in the event loop: no thread, no polling, and nothing to import.

A library that used a thread of its own woke up 50 times per second and took 6 MiB. One change of a directory causes several events. They
are reported once: after no event has come for `QUIET_S`, but at the latest `DELAY_S_MAX` after the first one.
"""

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

QUIET_S: Final = 0.02
DELAY_S_MAX: Final = 0.2
LOOK_EVERY_S: Final = 5.0  # how often to look for changes without an event, as on a network file system
READ_BYTES: Final = 1 << 16
# See inotify(7).
IN_MODIFY: Final = 0x2
IN_ATTRIB: Final = 0x4
IN_CLOSE_WRITE: Final = 0x8
IN_MOVED: Final = 0x40 | 0x80
IN_CREATE: Final = 0x100
IN_DELETE: Final = 0x200
CHANGES: Final = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE | IN_MOVED | IN_CREATE | IN_DELETE


@contextlib.asynccontextmanager
async def changes(directories: Iterable[str]) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
    """Watches directories. Yields a function that waits for the next change in one of the directories. Its argument is the longest wait in
    seconds.
    """
    moved = asyncio.Event()
    watching = [asyncio.create_task(watch(directory, moved)) for directory in directories]

    async def next_change(seconds_max: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds_max):
                await moved.wait()
        moved.clear()

    try:
        yield next_change
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def watch(directory: str, moved: asyncio.Event) -> None:
    """Sets `moved` after every change in the directory, until it is cancelled. Returns if the directory cannot be watched."""
    descriptor = _watching(directory)
    if descriptor < 0:
        return
    loop = asyncio.get_running_loop()
    events = DirectoryEvents(loop, descriptor, moved)
    loop.add_reader(descriptor, events.readable)
    try:
        await loop.create_future()
    finally:
        loop.remove_reader(descriptor)
        events.close()
        os.close(descriptor)


def _watching(directory: str) -> int:
    """Returns an inotify descriptor for a directory. It is negative if the kernel refuses."""
    libc = ctypes.CDLL(None)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor >= 0 and libc.inotify_add_watch(descriptor, os.fsencode(directory), CHANGES) < 0:
        os.close(descriptor)
        return -1
    return descriptor


class DirectoryEvents:
    """Reads the events of one directory, and sets `moved` once per group of events."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int, moved: asyncio.Event) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._moved = moved
        self._timer: asyncio.TimerHandle | None = None
        self._latest = 0.0  # the time of the event loop at which `moved` is set at the latest

    def readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, READ_BYTES)  # empties the queue; which files the events name does not matter
        now = self._loop.time()
        if self._timer is None:
            self._latest = now + DELAY_S_MAX
        else:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(min(QUIET_S, self._latest - now), 0.0), self._settled)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _settled(self) -> None:
        self._timer = None
        self._moved.set()
