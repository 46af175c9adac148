"""`epp config reload`, `promote` and `rollback`: give a running picker on this machine another configuration, and wait for the result."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from shm import observe
from shm.documents import DocumentReader
from shm.lanes import Lanes, LaneSchema
from shm.observe import Seen
from shm.segment import SegmentError
from workers.cli import which
from workers.cli.flags import DURATION, PORT, WithArguments, flag
from workers.cli.output import echo, echo_text
from workers.host.exit_codes import ExitCode
from workers.process.asks import Ask, Refused, put
from workers.process.layout import CANDIDATE, GENERATION
from workers.shared import reload_status
from workers.shared.reload_status import ReloadStatus

LOOK_S: Final = 0.02
PART: Final = "reload"

F = TypeVar("F", bound=Callable[..., Any])


class Watched:
    """Reads the state of one picker's reloads from its shared memory. Raises SegmentError if the memory cannot be read."""

    def __init__(self, seen: Seen) -> None:
        self._segments, parts = observe.attach(seen.segments)
        lanes = next((part for part in parts.values() if isinstance(part.schema, LaneSchema)), None)
        if PART not in parts or lanes is None or not isinstance(lanes.schema, LaneSchema) or CANDIDATE not in lanes.schema.scalar:
            raise SegmentError(f"instance {seen} is of another version: it cannot reload")
        self._reader = DocumentReader(reload_status.SCHEMA, parts[PART].region)
        self._lanes = Lanes(lanes.schema, lanes.region)

    def status(self) -> ReloadStatus | None:
        """Returns the present state; None if the picker has just been started."""
        return reload_status.read(self._reader)

    def generations(self) -> list[int]:
        """Returns the number of the configuration that each serving worker uses."""
        used = self._lanes.scalars(GENERATION)
        return [number for seat, number in enumerate(used) if seat and self._lanes.serving(seat)]

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def of_picker(command: F) -> F:
    """Adds the flags that choose a picker on this machine, and --timeout."""
    waiting = click.option("--timeout", type=DURATION, default="30s", show_default=True, help="How long to wait for the result.")
    command = waiting(command)
    command = flag("run-dir", str, observe.RUN_DIR, "Folder in which the picker keeps its file.")(command)
    command = flag("instance", str, "", "The picker on this machine with this name, whatever its ports are.")(command)
    return flag("metrics-port", PORT, None, "The picker on this machine with this metrics port. [default: the only one that runs]")(command)


@click.command("reload", cls=WithArguments)
@of_picker
def command(metrics_port: int | None, instance: str, run_dir: str, timeout: float) -> None:
    """Load the configuration of a running picker again: its file, and the files of --plugin-path. No request is lost.

    The picker tries the configuration in a process of its own first. If that fails, the configuration in force stays. Flags of
    `epp serve` stay as they are: to change flags, restart the picker. A candidate that is being tried (`epp config try`) is taken back.

    Exit code 0: all workers use the configuration; 1: no such picker, or no result in time; 78: the configuration was refused.
    """
    echo(in_force(*changed(metrics_port, instance, run_dir, timeout)))


@click.command("promote", cls=WithArguments)
@of_picker
def promote(metrics_port: int | None, instance: str, run_dir: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`): the candidate is in force from now on. No request is lost.

    Put it into the picker's configuration file, too: the next reload or start reads that.

    Exit code 0: all workers use it; 1: no such picker, or no result in time; 78: no candidate is tried, or it could not be taken over.
    """
    echo(in_force(*changed(metrics_port, instance, run_dir, timeout, Ask("promote"))))


@click.command("rollback", cls=WithArguments)
@of_picker
def rollback(metrics_port: int | None, instance: str, run_dir: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`) without it. If none is tried, go back to the configuration before the one in force.

    The picker keeps the last 5 good configurations, so this can be repeated. No request is lost. Change the picker's configuration file,
    too: the next reload or start reads that.

    Exit code 0: done; 1: no such picker, or no result in time; 78: there is no configuration before this one.
    """
    echo(in_force(*changed(metrics_port, instance, run_dir, timeout, Ask("rollback"))))


def in_force(result: ReloadStatus, workers: int) -> str:
    """Returns the text that a command prints after a change."""
    return f"generation {result.generation} ({result.hash}) is in force in {workers} workers"


def changed(metrics_port: int | None, instance: str, run_dir: str, timeout: float, ask: Ask | None = None) -> tuple[ReloadStatus, int]:
    """Gives a picker a command and waits for the result. `ask`: None for a reload. `timeout`: in seconds. Prints findings.

    Returns the picker's state afterwards, and the number of its workers. Ends this command if there is no such picker or if it refuses.
    """
    try:
        seen = which.find(run_dir, metrics_port, instance)
        with contextlib.closing(Watched(seen)) as watched:
            result = _after(seen, watched, run_dir, ask, time.monotonic() + timeout)
            workers = len(watched.generations())
    except (SegmentError, Refused) as refused:
        raise click.ClickException(str(refused)) from refused
    except OSError as refused:
        raise click.ClickException(
            f"the picker cannot be given a command ({refused.strerror}): run this beside it, as its user"
        ) from refused
    if result is None:
        raise click.ClickException(f"the picker has given no result within {timeout:g} s; see its log")
    if result.text:
        echo_text(result.text, err=True)
    if not result.successful:
        echo(f"refused: {seen.name} keeps generation {result.generation} ({result.hash})", err=True)
        sys.exit(ExitCode.CONFIG)
    return result, workers


def _after(seen: Seen, watched: Watched, run_dir: str, ask: Ask | None, until: float) -> ReloadStatus | None:
    """Gives the command to the picker and returns its state after the next attempt. Returns None if the attempt does not end in time."""
    before = watched.status()
    # An attempt under way may have read older files.
    wanted = 1 + (before.answered + before.owed if before is not None else 0)
    if ask is not None:
        put(run_dir, seen.name, ask)
    os.kill(seen.pid, signal.SIGHUP)
    while time.monotonic() < until:
        status = watched.status()
        if status is not None and status.answered >= wanted:
            return status
        time.sleep(LOOK_S)
    return None
