"""`epp record start --pool`: the picker knows which pools there are, because pools come and go while it runs."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from epp.config.load import load
from loadtest.demo.ports import free_ports
from tests.waiting import wait_until
from tests.workers.instances import options, removed
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
