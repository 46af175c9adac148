"""How tests wait: until something has happened, for turns of the event loop, or for time that a test's own loop lets pass."""

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

PATIENCE_S: Final = 20.0  # only a failure takes as long
POLL_S: Final = 0.005
BEGIN_S: Final = 1000.0  # like a machine's clock, virtual time is not near 0
T = TypeVar("T")


async def until(happened: Callable[[], T], what: str = "it has happened") -> T:
    """Waits until `happened` returns something true, and returns that."""
    end = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return found


def wait_until(happened: Callable[[], T], what: str = "it has happened") -> T:
    """Waits like `until`, in a thread without an event loop."""
    end = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        assert time.monotonic() < end, f"not within {PATIENCE_S:g} s: {what}"
        time.sleep(POLL_S)
    return found


async def turns(count: int = 1) -> None:
    """Lets the event loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


class _Jump(selectors.DefaultSelector):
    """A selector that moves the clock to the next timer when nothing is to do, instead of waiting."""

    now = BEGIN_S

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not (ready := super().select(0)):
            assert timeout is not None, "nothing will ever happen"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which time passes only while nothing is to do, and then at once."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def in_virtual_time(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `main` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


async def elapse(seconds: float) -> None:
    """Lets virtual time pass."""
    assert isinstance(asyncio.get_running_loop(), VirtualLoop), "in real time, wait for a condition: until"
    await asyncio.sleep(seconds)
