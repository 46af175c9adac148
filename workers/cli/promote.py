"""`epp config promote`: puts the configuration in force that a running picker tries."""

import click

from workers.cli.flags import WithArguments
from workers.cli.output import echo
from workers.cli.reload import changed, in_force, of_picker
from workers.process.asks import Ask


@click.command("promote", cls=WithArguments)
@of_picker
def command(metrics_port: int | None, instance: str, run_dir: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`): the candidate is in force from now on. No request is lost.

    Put it into the picker's configuration file, too: the next reload or start reads that.

    Exit code 0: all workers use it; 1: no such picker, or no result in time; 78: no candidate is tried, or it could not be taken over.
    """
    result, workers = changed(metrics_port, instance, run_dir, timeout, Ask("promote"))
    echo(in_force(result, workers))
