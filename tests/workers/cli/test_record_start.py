"""`epp record start --pool`: the picker knows which pools there are, because pools come and go while it runs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from epp.config.load import load
from loadtest.demo.ports import free_ports
from tests.waiting import wait_until
from tests.workers.instances import options, removed
from workers.cli import record
from workers.cli.record import command
from workers.process.generations import Given
from workers.process.instance import Instance
from workers.process.places import DEFAULT, Places, Pool
from workers.process.pool_views import create_places
from workers.shared.recording import asks


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    """A picker with places for pools, which had no pool at its start."""
    places = Places({DEFAULT: Pool(DEFAULT, Given(None, "", {}), load(None, ""), "", 4)}, free_ports(2), service="epp")
    with removed(create_places(options(tmp_path, pool_given=True), places)) as made:
        yield made


class Clock:
    """Stands in for the module `time`: a sleep only moves the clock."""

    def __init__(self) -> None:
        self._now = 0.0
        self.sleep = self._move

    def monotonic(self) -> float:
        return self._now

    def _move(self, seconds: float) -> None:
        self._now += seconds


def test_a_pool_that_has_come_since_the_start_is_recorded_and_what_the_picker_says_is_shown(instance: Instance) -> None:
    run_dir, name = instance.options.run_dir, instance.options.instance
    done: list[Result] = []
    line = [f"--run-dir={run_dir}", f"--instance={name}", "--pool=llama", "--seconds=1"]
    running = threading.Thread(target=lambda: done.append(CliRunner().invoke(command, line)))
    running.start()
    asked: Any = wait_until(lambda: asks.take(run_dir, name) or done)
    assert isinstance(asked, asks.RecordAsk), done[0].output
    assert asked.pool == "llama"
    asks.tell(run_dir, name, asks.RecordingState(asked.id, "failed", "there is no pool 'llama'; pools: qwen"))
    running.join()
    assert (done[0].exit_code, done[0].output) == (1, "Error: there is no pool 'llama'; pools: qwen\n")


def test_a_recording_without_a_supervisor_is_given_up_long_before_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(record, "time", clock)

    def told(_run_dir: str, _name: str, id: str) -> asks.RecordingState | None:
        left_s = 600.0 - int(clock.monotonic())
        return asks.RecordingState(id, "recording", left_s=left_s, files=["f"]) if clock.monotonic() < 60 else None

    monkeypatch.setattr(record.asks, "told", told)
    with pytest.raises(click.ClickException, match="was broken off; its files are readable: f"):
        record._recorded(str(tmp_path), "epp", asks.RecordAsk("1", str(tmp_path), 600.0))
    assert 60 < clock.monotonic() < 80


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_question_without_an_answer_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    clock = Clock()
    monkeypatch.setattr(record, "time", clock)
    ask = asks.RecordAsk("1", str(tmp_path), 600.0)
    asks.put(str(tmp_path), "epp", ask)

    def told(_run_dir: str, _name: str, _id: str) -> None:
        if interrupted:
            raise KeyboardInterrupt

    monkeypatch.setattr(record.asks, "told", told)
    with pytest.raises(KeyboardInterrupt if interrupted else click.ClickException):
        record._recorded(str(tmp_path), "epp", ask)
    assert asks.take(str(tmp_path), "epp") == asks.RecordAsk("1", "", 0)
