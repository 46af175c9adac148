"""`epp config try`: tries a configuration in a running picker, beside the one in force."""

import re
from typing import Final

import click

from epp.decision.tryout import BY_FLOW, BY_REQUEST, WHOLE, Share
from workers.cli.configuration import read_file, shown_path
from workers.cli.flags import WithArguments
from workers.cli.output import echo
from workers.cli.reload import changed, of_picker
from workers.process.asks import Ask

SHARE: Final = re.compile(r"(\d{1,3}(?:\.\d{1,4})?)(%?)")
PER_CENT: Final = WHOLE // 100


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
def command(file: str, share: int, by: str, metrics_port: int | None, instance: str, run_dir: str, pool: str, timeout: float) -> None:
    """Try the configuration FILE (-: standard input) in a running picker, beside the one in force. No request is lost.

    The picker tries it in a process of its own first, as a reload does. Then its workers count time to first token, errors, hit rate and
    cost of both configurations. `epp top` and the metrics show them. `epp config promote` ends the trial with the candidate in force,
    `epp config rollback` without it. The picker rolls back by itself when the candidate is worse.

    Exit code 0: all workers try it; 1: no such picker, or no result in time; 78: the configuration was refused.
    """
    ask = Ask("try", read_file(file), shown_path(file), Share(share, by), pool)
    result, workers = changed(metrics_port, instance, run_dir, timeout, ask)
    tried = result.tryout
    if tried is None:
        raise click.ClickException("the candidate has been taken back already; see `epp top` and the picker's log")
    echo(f"candidate {tried.generation} ({tried.hash}) is tried in {workers} workers, {tried.share}")
