"""`epp config reload`, `try`, `promote` and `rollback`: give a running picker another configuration, and wait for the result."""

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import click

from epp.decision.tryout import BY_FLOW, BY_REQUEST, WHOLE, Share
from epp.request.pool_choice import listed
from shm import observe
from shm.areas import Areas, AreaSchema
from shm.documents import DocumentReader, DocumentSchema
from shm.observe import Seen
from shm.segment import SegmentError
from workers.cli.flags import DURATION, WithArguments
from workers.cli.output import echo, echo_text
from workers.cli.which import Named, check_pool, picker_options
from workers.host.exit_codes import ExitCode
from workers.host.printable import printable
from workers.host.proc import process_use
from workers.process.asks import Ask, AskRefused, put
from workers.process.layout import CANDIDATE, GENERATION, gauge_of_pool
from workers.shared import reload_status
from workers.shared.documents import PoolNames
from workers.shared.reload_status import ReloadStatus

LOOK_S: Final = 0.02
PART: Final = "reload"

SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,4})?)(%?)")
PER_CENT: Final = WHOLE // 100


class Watched:
    """Reads the state of one picker's reloads from its shared memory. Raises SegmentError if the memory cannot be read.

    `key`: the number of the pool; None for the only pool, or for the list of pools.
    """

    def __init__(self, seen: Seen) -> None:
        self._segments, parts = observe.attach(seen.segments)
        areas = next((part for part in parts.values() if isinstance(part.schema, AreaSchema)), None)
        if PART not in parts or areas is None or not isinstance(areas.schema, AreaSchema) or CANDIDATE not in areas.schema.scalar:
            raise SegmentError(f"instance {seen} is of another version: it cannot reload")
        status = parts[PART]
        assert isinstance(status.schema, DocumentSchema)
        self._reader = DocumentReader(status.schema, status.region)
        self._areas = Areas(areas.schema, areas.region)
        self._last = len(status.schema.capacities) - 1
        self.key: int | None = None
        documents = parts["documents"]
        assert isinstance(documents.schema, DocumentSchema)
        self._documents = DocumentReader(documents.schema, documents.region)

    def status(self) -> ReloadStatus | None:
        """Returns the present state, or None if the picker has just started."""
        return reload_status.read(self._reader, self._last if self.key is None else self.key)

    def generations(self) -> list[int]:
        """Returns the number of the configuration that each serving worker uses."""
        used = self._areas.scalars(gauge_of_pool(GENERATION, self.key))
        return [number for ordinal, number in enumerate(used) if ordinal and self._areas.serving(ordinal)]

    def pools(self, seen: Seen) -> Sequence[str]:
        """Returns the names of several pools by number, with "" for a place without a pool. Returns no names if the picker has one pool."""
        return PoolNames(self._documents, seen.pools).current()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()


def of_picker(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags that choose a picker on this machine and one of its pools, and --timeout."""
    waiting = click.option("--timeout", type=DURATION, default="30s", show_default=True, help="How long to wait for the result.")
    return picker_options(click.option("--pool", default="", metavar="NAME", help="Which of several pools.")(waiting(command)))


@click.command("reload", cls=WithArguments)
@of_picker
def command(picker: Named, pool: str, timeout: float) -> None:
    """Load the configuration of a running picker again: its file, and the files of --plugin-path. No request is lost.

    First, a separate process of the picker tries the configuration. If that fails, the configuration in force stays. Flags of `epp serve`
    stay as they are: to change flags, restart the picker. A candidate that is being tried (`epp config try`) is taken back.

    Exit code 0: all workers use the configuration; 1: no such picker, or no result in time; 78: the configuration was refused.
    """
    result, workers = changed(picker, timeout, Ask("reload", pool=pool))
    if result.text_of_pools:
        echo_text(result.text)
    else:
        echo(in_force(result, workers))


class Portion(click.ParamType[int]):
    """A flag's type for a share of the traffic, such as 0, 5% or 0.5%. Its values are millionths."""

    name = "share"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = SHARE.fullmatch(str(value))
        if found is None or (not found[2] and float(found[1])) or float(found[1]) > 100:
            self.fail(f"'{value}' is no share: give 0 for a shadow, or a percentage such as 5% or 0.5%, at most 100%", param, ctx)
        return round(float(found[1]) * PER_CENT)


@click.command("try", cls=WithArguments)
@click.argument("file")
@click.option(
    "--share", type=Portion(), required=True, help="0: the candidate decides, and nothing follows it. 5%: it decides 5% of the requests."
)
@click.option(
    "--by",
    type=click.Choice((BY_REQUEST, BY_FLOW)),
    default=BY_REQUEST,
    show_default=True,
    help="What belongs together: one request, or all requests with one fairness id.",
)
@of_picker
def try_(file: str, share: int, by: str, picker: Named, pool: str, timeout: float) -> None:
    """Try the configuration FILE (-: standard input) in a running picker, beside the one in force. No request is lost.

    As with a reload, a separate process of the picker tries it first. Then its workers count time to first token, errors, hit rate and cost
    of both configurations. `epp top` and the metrics show them. `epp config promote` ends the trial with the candidate in force, `epp
    config rollback` without it. The picker rolls back by itself when the candidate is worse.

    Exit code 0: all workers try it; 1: no such picker, or no result in time; 78: the configuration was refused.
    """
    from workers.cli.configuration import read_file, shown_path  # a slow import, which the other commands do not need

    ask = Ask("try", read_file(file), printable(shown_path(file)), Share(share, by), pool)
    result, workers = changed(picker, timeout, ask)
    tried = result.tryout
    if tried is None:
        raise click.ClickException("the candidate has been taken back already; see `epp top` and the picker's log")
    echo(f"candidate {tried.generation} ({tried.hash}) is tried in {workers} workers, {tried.share}")


@click.command("promote", cls=WithArguments)
@of_picker
def promote(picker: Named, pool: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`): the candidate is in force from now on. No request is lost.

    Put it into the picker's configuration file, too, because the next reload or start reads that file.

    Exit code 0: all workers use it; 1: no such picker, or no result in time; 78: no candidate is tried, or it could not be taken over.
    """
    echo(in_force(*changed(picker, timeout, Ask("promote", pool=pool))))


@click.command("rollback", cls=WithArguments)
@of_picker
def rollback(picker: Named, pool: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`) without it. If there is no candidate, go back to the configuration before the one in
    force.

    The picker keeps the last 5 good configurations, so this can be repeated. No request is lost. Change the picker's configuration file,
    too, because the next reload or start reads that file.

    Exit code 0: done; 1: no such picker, or no result in time; 78: there is no configuration before this one.
    """
    echo(in_force(*changed(picker, timeout, Ask("rollback", pool=pool))))


def in_force(result: ReloadStatus, workers: int) -> str:
    """Returns the text that a command prints after a change."""
    return f"generation {result.generation} ({result.hash}) is in force in {workers} workers"


def changed(picker: Named, timeout: float, ask: Ask) -> tuple[ReloadStatus, int]:
    """Gives a picker a command and waits for the result. `timeout`: in seconds. Prints findings.

    Returns the picker's state afterwards, and the number of its workers. Ends this command if there is no such picker or if it refuses.
    """
    try:
        seen = picker.find()
        with contextlib.closing(Watched(seen)) as watched:
            watched.key = _key(watched, seen, ask)
            result = _after(seen, watched, picker.run_dir, ask, time.monotonic() + timeout)
            workers = len(watched.generations())
    except (SegmentError, AskRefused) as refused:
        raise click.ClickException(str(refused)) from refused
    except OSError as refused:
        raise click.ClickException(
            f"the picker cannot be given a command ({refused.strerror}): run this beside it, as its user"
        ) from refused
    if result is None:
        raise click.ClickException(f"the picker has given no result within {timeout:g} s; see its log")
    if result.text and not (result.text_of_pools and result.successful):
        echo_text(result.text, err=True)
    if not result.successful:
        if not result.text_of_pools:
            keeps = f"pool {ask.pool} of {seen.name}" if ask.pool else seen.name
            echo(f"refused: {keeps} keeps generation {result.generation} ({result.hash})", err=True)
        sys.exit(ExitCode.CONFIG)
    return result, workers


def _key(watched: Watched, seen: Seen, ask: Ask) -> int | None:
    """Returns the number of the pool that a command is about; None for all pools, or for the only pool. Raises UsageError."""
    names = watched.pools(seen)
    check_pool(ask.pool, names)
    if not ask.pool and names and ask.what != "reload":
        raise click.UsageError(f"the picker has several pools: give --pool NAME; pools: {listed([name for name in names if name])}")
    return names.index(ask.pool) if ask.pool else None


def _after(seen: Seen, watched: Watched, run_dir: str, ask: Ask, until: float) -> ReloadStatus | None:
    """Gives the command to the picker and returns its state after the next attempt. Returns None if the attempt does not end in time.

    Raises ClickException if the picker ends meanwhile.
    """
    before = watched.status()
    # An attempt under way may have read older files.
    wanted = 1 + (before.answered + before.owed if before is not None else 0)
    if ask.pool or ask.what != "reload":
        put(run_dir, seen.name, ask)
    os.kill(seen.pid, signal.SIGHUP)
    while time.monotonic() < until:
        status = watched.status()
        if status is not None and status.answered >= wanted:
            return status
        if process_use(seen.pid) is None:
            raise click.ClickException(f"{seen.name} (pid {seen.pid}) has ended without a result; see its log")
        time.sleep(LOOK_S)
    return None
