"""`epp tenants`: lists who used what, from the page `/debug/tenants` of a running picker."""

from typing import Any

import click
import msgspec

from shm import observe
from workers.cli.flags import PORT, flag
from workers.cli.metrics_port import at, found, unusable
from workers.cli.output import echo, echo_lines, echo_text

PATH = "/debug/tenants"
SPANS = {"hour": "1h", "day": "24h"}
COLUMNS = ("requests", "waited", "input_tokens", "cached_tokens", "output_tokens", "over_budget", "refused")
TITLES = ("requests", "waited", "in", "cached", "out", "over budget", "refused")
UNITS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))  # 10,000 and more are shortened


@click.command("tenants")
@flag("metrics-port", PORT, None, "Ask the picker with this metrics port. [default: the only one that runs]")
@flag("instance", str, "", "Ask the picker with this name, whatever its ports are.")
@flag("run-dir", str, observe.RUN_DIR, "Folder in which the picker keeps its file.")
@flag("url", str, "", "Ask the picker at this URL or host:port of a metrics port.")
@flag("ca-file", str, "", "With TLS: the certificate authority of the metrics port.")
@click.option("--json", "as_json", is_flag=True, help="Print the page as it is: JSON.")
def command(metrics_port: int | None, instance: str, run_dir: str, url: str, ca_file: str, as_json: bool) -> None:
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
    port = at(url, ca_file) if url else found(run_dir, metrics_port, instance, ca_file)
    data = port.page(PATH)
    if as_json:
        echo_text(data, nl=False)
        return
    try:
        tenants = msgspec.json.decode(data, type=dict[str, Any])["tenants"]
        echo_lines(lines(tenants))
    except (msgspec.MsgspecError, KeyError, TypeError) as strange:
        raise unusable(port.url + PATH, str(strange)) from strange
    if not tenants:
        echo("no tenant has sent a request yet, or the configuration has no section tenants")


def lines(tenants: list[dict[str, Any]]) -> list[str]:
    """Returns the table: two lines per tenant, for the hour and for the day."""
    if not tenants:
        return []
    rows = [["tenant", "", *TITLES]]
    for each in tenants:
        for span, title in SPANS.items():
            rows.append([each["tenant"] if span == "hour" else "", title, *(_short(each[span][column]) for column in COLUMNS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    names, spans = widths[:2]
    return ["  ".join([row[0].ljust(names), row[1].ljust(spans), *map(str.rjust, row[2:], widths[2:])]) for row in rows]


def _short(number: int) -> str:
    for least, unit in UNITS:
        if number >= least:
            return f"{number / (least if unit != 'k' else 1e3):.3g}{unit}"
    return str(number)
