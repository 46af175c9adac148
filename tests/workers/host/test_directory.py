import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from tests.waiting import turns
from workers.host.directory import DELAY_S_MAX, QUIET_S, DirectoryEvents, watch

WITHIN_S = 20.0


def make(folder: Path) -> None:
    (folder / "new").write_text("x")


def replace(folder: Path) -> None:
    (folder.parent / "other").write_text("y")
    (folder.parent / "other").rename(folder / "old")


def swap_link(folder: Path) -> None:
    (folder / "link2").symlink_to("old")
    (folder / "link2").rename(folder / "link")


def remove(folder: Path) -> None:
    (folder / "old").unlink()


def append(folder: Path) -> None:
    with (folder / "old").open("a") as file:
        file.write("z")


@pytest.mark.parametrize("change", [make, replace, swap_link, remove, append])
def test_every_kind_of_change_is_noticed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "old").write_text("x")

    async def scenario() -> None:
        moved = asyncio.Event()
        open_before = len(os.listdir("/proc/self/fd"))
        watching = asyncio.create_task(watch(str(folder), moved))
        await turns()
        change(folder)
        async with asyncio.timeout(WITHIN_S):
            await moved.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert len(os.listdir("/proc/self/fd")) == open_before

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


def test_a_directory_that_is_missing_ends_the_watch(tmp_path: Path) -> None:
    moved = asyncio.Event()
    asyncio.run(asyncio.wait_for(watch(str(tmp_path / "gone"), moved), WITHIN_S))
    assert not moved.is_set()


class Loop:
    """A loop with the time of the test, and one timer."""

    def __init__(self) -> None:
        self.now, self.due, self.act = 100.0, 0.0, None

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, act: Callable[[], None]) -> "Loop":
        self.due, self.act = self.now + delay, act
        return self

    def cancel(self) -> None:
        self.act = None

    def until(self, now: float) -> None:
        if self.act is not None and self.due <= now:
            act, self.act, self.now = self.act, None, self.due
            act()
        self.now = now


def test_events_of_one_change_come_together_and_endless_events_do_not_hide_it() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    loop, moved = Loop(), asyncio.Event()
    changes = DirectoryEvents(loop, reader, moved)  # type: ignore[arg-type]
    for _ in range(5):
        changes.readable()
        loop.until(loop.now + QUIET_S / 2)
    assert not moved.is_set()
    loop.until(loop.now + QUIET_S)
    assert moved.is_set()
    moved.clear()
    began = loop.now
    while not moved.is_set():
        assert loop.now <= began + DELAY_S_MAX + QUIET_S
        changes.readable()
        loop.until(loop.now + QUIET_S / 2)
    os.close(reader), os.close(writer)
