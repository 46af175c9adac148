"""`epp config reload`, `try`, `promote` and `rollback` wait for a picker."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from epp.decision.tryout import BY_REQUEST, Share
from shm.observe import Life, Seen
from workers.cli import reload
from workers.process import asks
from workers.process.asks import Ask


class Silent:
    """Stands in for `Watched`: the picker tells nothing."""

    def status(self) -> None:
        return None


@pytest.fixture
def ended() -> Iterator[int]:
    """The id of a process that has ended and was not reaped, as that of a picker in a container where the first process reaps nothing."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # returns when the process has ended
        yield process.pid


def test_a_picker_that_ends_before_it_gives_a_result_ends_the_wait(tmp_path: Path, ended: int) -> None:
    seen = Seen("epp", ended, {}, (), 0.0, Life.RUNNING)
    watched: Any = Silent()
    with pytest.raises(click.ClickException, match=rf"epp \(pid {ended}\) has ended without a result"):
        reload._after(seen, watched, str(tmp_path), Ask("reload"), time.monotonic() + 1.0)


def test_a_candidate_may_come_from_a_file_whose_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []

    def changed(_picker: object, _timeout: float, ask: Ask) -> None:
        asked.append(ask)
        raise click.ClickException("enough")

    monkeypatch.setattr(reload, "changed", changed)
    file = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.yaml")
    Path(file).write_text("plugins: []\n")
    assert CliRunner().invoke(reload.try_, [file, "--share=0"]).stderr == "Error: enough\n"
    asks.put(str(tmp_path), "epp", asked[0])
    assert asks.take(str(tmp_path), "epp") == Ask("try", "plugins: []\n", f"{tmp_path}/\\udcff.yaml", Share(0, BY_REQUEST))
