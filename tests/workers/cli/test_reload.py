"""`epp config reload`, `try`, `promote` and `rollback` wait for a picker."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from shm.observe import Life, Seen
from workers.cli import reload
from workers.process.asks import Ask


class Silent:
    """Stands in for `Watched`: the picker tells nothing."""

    def status(self) -> None:
        return None


@pytest.fixture
def ended() -> Iterator[int]:
    """The id of a process that has ended and was not reaped, as that of a picker in a container whose first process reaps nothing."""
    with subprocess.Popen(["true"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()  # returns when the process has ended
        yield process.pid


def test_a_picker_that_ends_before_it_gives_a_result_ends_the_wait(tmp_path: Path, ended: int) -> None:
    seen = Seen("epp", ended, {}, (), 0.0, Life.RUNNING)
    watched: Any = Silent()
    with pytest.raises(click.ClickException, match=rf"epp \(pid {ended}\) has ended without a result"):
        reload._after(seen, watched, str(tmp_path), Ask("reload"), time.monotonic() + 1.0)
