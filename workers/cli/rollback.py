"""`epp config rollback`: ends the trial of a candidate in a running picker, or goes back to the configuration before."""

import click

from workers.cli.flags import WithArguments
from workers.cli.output import echo
from workers.cli.reload import changed, in_force, of_picker
from workers.process.asks import Ask


@click.command("rollback", cls=WithArguments)
@of_picker
def command(metrics_port: int | None, instance: str, run_dir: str, timeout: float) -> None:
    """End the trial of a candidate (`epp config try`) without it. If none is tried, go back to the configuration before the one in force.

    The picker keeps the last 5 good configurations, so this can be repeated. No request is lost. Change the picker's configuration file,
    too: the next reload or start reads that.

    Exit code 0: done; 1: no such picker, or no result in time; 78: there is no configuration before this one.
    """
    result, workers = changed(metrics_port, instance, run_dir, timeout, Ask("rollback"))
    echo(in_force(result, workers))
