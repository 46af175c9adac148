"""`epp tenants`: lists who used what, from the page `/debug/tenants` of a running picker."""

from typing import Any

import click
import msgspec

from workers.cli.output import echo_lines, echo_text, table
from workers.cli.which import Named, port_options

PATH = "/debug/tenants"
SPANS = {"hour": "1h", "day": "24h"}
COLUMNS = ("requests", "waited", "input_tokens", "cached_tokens", "output_tokens", "over_budget", "refused")
TITLES = ("requests", "waited", "in", "cached", "out", "over budget", "refused")
UNITS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))  # 10,000 and more are shortened


@click.command("tenants")
@port_options
@click.option("--json", "as_json", is_flag=True, help="Print the page as it is: JSON.")
def command(picker: Named, as_json: bool) -> None:
    """List who used what in the last hour and in the last 24 hours: requests, tokens, waits and refusals of each tenant.

    The picker knows tenants if its configuration has the section `tenants`. The figures begin when its supervisor has
    started. Tokens are those that model servers report.

    \b
    JSON keys:
      known_s    since when there are figures, in seconds
      tenants[]  tenant hour{} day{}: requests waited input_tokens cached_tokens
                 output_tokens over_budget refused

    Exit code 0: listed; 1: no such picker, or it cannot be asked; 2: wrong flags.
    """
    port = picker.port()
    if as_json:
        echo_text(port.page(PATH), nl=False)
        return
    shown = port.read(PATH, lambda data: lines(msgspec.json.decode(data, type=dict[str, Any])["tenants"]))
    echo_lines(shown or ["no tenant has sent a request yet, or the configuration has no section tenants"])


def lines(tenants: list[dict[str, Any]]) -> list[str]:
    """Returns the table: two lines per tenant, for the hour and for the day."""
    if not tenants:
        return []
    rows = [
        [each["tenant"] if span == "hour" else "", title, *(_short(each[span][column]) for column in COLUMNS)]
        for each in tenants
        for span, title in SPANS.items()
    ]
    return table(["tenant", "", *TITLES], rows)


def _short(number: int) -> str:
    for least, unit in UNITS:
        if number >= least:
            return f"{number / (least if unit != 'k' else 1e3):.3g}{unit}"
    return str(number)
