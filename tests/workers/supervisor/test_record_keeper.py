"""A recording says which of its records were lost."""

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.waiting import until
from tests.workers.instances import made
from workers.process.instance import Instance
from workers.process.layout import RECORDING
from workers.shared.recording import asks
from workers.supervisor.background import Background
from workers.supervisor.record_keeper import AGAIN_S, FRAME_S, RecordKeeper
from workers.worker.telemetry.recorder import RecordSender

TEXT = "plugins: [{type: queue-scorer}]\n"


def test_records_for_the_recording_before_are_lost_but_not_by_the_one_that_runs(tmp_path: Path) -> None:
    async def main(picker: Instance) -> None:
        area = picker.memory.areas.area(0)
        keeper, background = RecordKeeper(picker, area), Background()
        keeper.start(background, successor=False)
        small = -area.scalars[area.schema.scalar[RECORDING]]
        assert small > 0
        sender = RecordSender(0, lambda packet: keeper.take(packet) is None, lambda _: None)

        def send(file: int) -> None:
            sender.use(file)
            sender.add((0,))
            sender.flush()

        asks.put(picker.options.run_dir, picker.options.instance, asks.RecordAsk("1", str(tmp_path / "asked"), 60.0, ""))
        running = keeper._running
        assert running is not None
        running.file = small - 7  # a file number is a time in seconds, and this test is shorter than a second
        keeper._look_for_questions()
        number = area.scalars[area.schema.scalar[RECORDING]]
        for file in (small - 7, number, number - 100):
            send(file)
        lost = area.schema.counter["recording_lost_records_total"]
        keeper.end()
        background.close()
        state = asks.told(picker.options.run_dir, picker.options.instance, "1")
        assert state is not None and state.lost == 1, "only the one for a file that no recording has had"
        assert area.counters[lost] == 2

    with made(tmp_path, TEXT) as picker:
        asyncio.run(main(picker))


def test_the_next_file_of_the_small_recording_gets_its_folder_again_if_a_cleaner_has_removed_it(tmp_path: Path) -> None:
    async def main(picker: Instance) -> None:
        keeper, background = RecordKeeper(picker, picker.memory.areas.area(0)), Background()
        keeper.start(background, successor=False)
        running = keeper._running
        assert running is not None
        shutil.rmtree(running.files.folder)
        keeper._next_file(running, running.file + 1)
        assert os.path.isdir(running.files.folder)
        keeper.end()
        background.close()

    with made(tmp_path, TEXT, state_dir=str(tmp_path / "state")) as picker:
        asyncio.run(main(picker))


def test_after_a_time_with_a_full_disk_another_file_describes_everything_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def main(picker: Instance) -> None:
        nonlocal now
        area = picker.memory.areas.area(0)
        keeper, background = RecordKeeper(picker, area, lambda: now), Background()
        monkeypatch.setattr("workers.shared.recording.files.os.write", full)
        keeper.start(background, successor=False)
        running = keeper._running
        assert running is not None
        first = running.file

        def turn(seconds: float) -> None:
            nonlocal now
            now += seconds
            keeper._turn()

        turn(FRAME_S)
        await until(lambda: running.files.lost, "a lost frame")
        monkeypatch.undo()
        turn(AGAIN_S)
        assert running.file == first, "nothing can be written yet, for all that is known"
        running.files.records += 1  # the thread has written a frame
        turn(0.0)
        assert running.file == first + 1
        turn(AGAIN_S)
        assert running.file == first + 1
        keeper.end()
        background.close()

    with made(tmp_path, TEXT, record_dir=str(tmp_path / "recording")) as picker:
        asyncio.run(main(picker))
