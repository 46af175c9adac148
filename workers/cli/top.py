"""`epp top`: a running picker's endpoints, workers and prefix index, from its shared memory."""

import os
import time
from collections.abc import Iterator
from contextlib import closing

import click
import msgspec

from shm import observe
from shm.segment import SegmentError
from workers.cli import missing
from workers.cli.flags import DURATION, PORT, flag
from workers.top.figures import Figures, Instance, Look, figures, life
from workers.top.source import Source
from workers.top.terminal import Terminal

INTERVAL_MIN_S = 0.1
INTERVAL_MAX_S = 3600.0
WIDTH = 120  # of what is not printed on a terminal


@click.command("top")
@flag("metrics-port", PORT, observe.METRICS_PORT, "Look at the picker that has this metrics port.")
@flag("instance", str, "", "Look at the picker with this name, whatever its ports.")
@flag("run-dir", str, observe.RUN_DIR, "Folder in which the picker has its file.")
@click.option(
    "--interval", type=DURATION, default="1s", show_default=True, help="Time between two looks, 100ms or more."
)
@click.option("--once", is_flag=True, help="Print one table, of the first interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a line per interval, or one document with --once.")
def command(metrics_port: int, instance: str, run_dir: str, interval: float, once: bool, as_json: bool) -> None:
    """Show a running picker's endpoints, workers and prefix index, until q, Ctrl-C or the picker's end.

    Reads the picker's shared memory and nothing else; the picker does not notice. Run it as the picker's user, where its
    /dev/shm is (in its container).

    \b
    JSON keys; null = unknown, times in seconds, shares 0..1:
      instance     name pid ports life uptime_s
      interval_s   between the two looks that rates, quantiles and traffic_share come from
      requests     per_s errors_per_s processing_p50_s processing_p99_s
                   in_flight tokens_in_flight cached_share
                   predicted_share reported_share
      supervisor   serving beat_age_s starts
      workers[]    worker state beat_age_s starts streams connections accepted_share
                   loop_lag_s requests_per_s in_flight gauges{}
      workers_serving
      endpoints[]  name namespace address state age_s scraped{} in_flight
                   tokens_in_flight picks_per_s traffic_share index_entries
                   predicted_share reported_share
      index        entries used used_share estimated owners_live owners_retired
                   evictions dropped
      bus_drops
      bands[]      with flow control, what waits by priority, else null: priority, requests, bytes, oldest_age_s
      left_out{}   plugins that failed too often: in how many workers they are left out
      counters{}   all counters of all processes, summed

    Exit code 0: ended by you or with the picker; 1: no such picker, or it cannot be read; 2: wrong flags.
    """
    if not INTERVAL_MIN_S <= interval <= INTERVAL_MAX_S:
        raise click.UsageError(f"--interval is {INTERVAL_MIN_S * 1e3:.0f}ms to {INTERVAL_MAX_S:.0f}s")
    try:
        source = Source(observe.find(run_dir, metrics_port=metrics_port, name=instance), run_dir)
        with closing(source), Terminal(keys=not (once or as_json)) as terminal:
            looks = Looks(source, terminal, interval, once)
            said = _print_json(looks, once) if as_json else _print_tables(looks, once)
    except SegmentError as refused:
        raise click.ClickException(str(refused)) from refused
    if said and once:
        raise click.ClickException(said)
    if said:
        click.echo(said, err=True)


class Looks:
    """One look after the other, each compared with the one before; `ended` says why there are no more, if not by the user."""

    def __init__(self, source: Source, terminal: Terminal, interval: float, once: bool) -> None:
        self._source = source
        self._terminal = terminal
        self._interval = interval
        self._once = once
        self._before: Look | None = None
        self.ended = ""

    def __iter__(self) -> Iterator[Figures]:
        """The first comes at once and has no rates; where only one is wanted, it is the second."""
        first = self._figures()
        if not self._once:
            yield first
        while not self._terminal.wait(self._interval):
            self.ended = self._source.ended(time.monotonic())
            if self.ended:
                return
            yield self._figures()
            if self._once:
                return

    def _figures(self) -> Figures:
        seen = self._source.seen
        look, before = self._source.look(time.monotonic()), self._before
        self._before = look
        up = max(0.0, time.time() - seen.started_at)
        instance = Instance(name=seen.name, pid=seen.pid, ports=seen.ports, life=life(look), uptime_s=up)
        return figures(instance, look, before)


def _print_json(looks: Looks, once: bool) -> str:
    for found in looks:
        text = msgspec.json.encode(found)
        click.echo(msgspec.json.format(text, indent=2) if once else text)
    return looks.ended


def _print_tables(looks: Looks, once: bool) -> str:
    try:
        from rich.console import Console
        from rich.live import Live

        from workers.top.view import screen
    except ModuleNotFoundError as error:
        raise missing("top", error.name or str(error)) from error
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH
    if once or not console.is_terminal:
        for found in looks:
            console.print(screen(found, console.width, None), end="" if once else "\n")
        return looks.ended
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for found in looks:
            live.update(screen(found, console.width, console.height), refresh=True)
    return looks.ended
