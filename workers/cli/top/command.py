"""`epp top`: shows the endpoints, workers and prefix index of a running picker, from its shared memory."""

import os
import time
from collections.abc import Iterator
from contextlib import closing

import click
import msgspec

from shm.segment import SegmentError
from workers.cli import missing
from workers.cli.flags import DURATION
from workers.cli.output import echo, echo_text
from workers.cli.top.terminal import Terminal
from workers.cli.which import Named, check_pool, picker_options, pool_option
from workers.supervisor.pages.state.figures import Figures, Instance, figures, life, only
from workers.supervisor.pages.state.look import Look
from workers.supervisor.pages.state.source import Source

INTERVAL_MIN_S = 0.1
INTERVAL_MAX_S = 3600.0
WIDTH = 120  # without a terminal


@click.command("top")
@picker_options
@pool_option
@click.option("--interval", type=DURATION, default="1s", show_default=True, help="Time between two looks, 100ms or more.")
@click.option("--once", is_flag=True, help="Print one table, about the first interval, and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a line per interval, or one document with --once.")
def command(picker: Named, pool: str, interval: float, once: bool, as_json: bool) -> None:
    """Show the endpoints, workers and prefix index of a running picker, until q, Ctrl-C or the end of the picker.

    This command only reads the picker's shared memory and does not disturb the picker. Run it as the picker's user and
    with the picker's /dev/shm, that is, in the same container. If the picker has several pools, they come first, one row each.

    \b
    JSON keys; null = unknown, times in seconds, shares 0..1:
      instance     name pid ports life uptime_s
      interval_s   between the two looks that rates, quantiles and traffic_share come from
      requests     per_s errors_per_s processing_p50_s processing_p99_s
                   in_flight tokens_in_flight cached_share
                   predicted_share reported_share salt_lost_share
                   first_token_p50_s first_token_p95_s waited_p50_s waited_p95_s
      supervisor   serving heartbeat_age_s starts replicas_needed headroom
      workers[]    worker state heartbeat_age_s starts streams connections accepted_share
                   loop_lag_s requests_per_s in_flight gauges{}
      workers_serving
      endpoints[]  name namespace address state age_s scraped{} in_flight
                   tokens_in_flight picks_per_s traffic_share index_entries
                   predicted_share reported_share
                   not_precise events_age_s held_blocks first_token pool
      index        entries used used_share estimated owners_live owners_retired
                   evictions dropped
      bus_drops
      pools[]      of several pools: name endpoints fresh in_flight waiting queued requests_per_s errors_per_s
                   first_token_p50_s first_token_p95_s configuration
      bands[]      with flow control, waiting requests by priority, else null: priority, requests, bytes, oldest_age_s, pool
      others       with a replica store, what other replicas have, else null: replicas, requests, tokens, waiting, age_s
      errors{}     requests that failed, by error code
      flows[]      with flow control, the flows with the longest queues: fairness_id, priority, requests, bytes, pool
      outcomes[]   with flow control, how requests have left it: outcome, priority, requests, pool
      left_out{}   plugins that failed too often: the number of workers that leave them out
      configuration  of one pool: generation hash workers last_reload_failed tryout{}
      counters{}   all counters, each summed over all processes

    Exit code 0: ended by you or with the picker; 1: no such picker, or it cannot be read; 2: wrong flags.
    """
    if not INTERVAL_MIN_S <= interval <= INTERVAL_MAX_S:
        raise click.UsageError(f"--interval must be from {INTERVAL_MIN_S * 1e3:.0f}ms to {INTERVAL_MAX_S:.0f}s")
    try:
        source = Source(picker.find(), picker.run_dir)
        with closing(source), Terminal(keys=not (once or as_json)) as terminal:
            check_pool(pool, source.pools())
            looks = Looks(source, terminal, interval, once, pool)
            ended = _print_json(looks, once) if as_json else _print_tables(looks, once)
    except SegmentError as refused:
        raise click.ClickException(str(refused)) from refused
    if ended and once:
        raise click.ClickException(ended)
    if ended:
        echo(ended, err=True)


class Looks:
    """Yields figures until the picker ends or the user ends the view. Rates come from the difference of two looks.

    `ended`: at the end, why there are no more figures, or "" if the user ended the view.
    """

    def __init__(self, source: Source, terminal: Terminal, interval: float, once: bool, pool: str = "") -> None:
        """`pool`: the name of the only pool to show, or "" for all pools."""
        self._pool = pool
        self._source = source
        self._terminal = terminal
        self._interval = interval
        self._once = once
        self._before: Look | None = None
        self.ended = ""

    def __iter__(self) -> Iterator[Figures]:
        """Yields figures at once, then after each interval. The first figures have no rates. With `once`, yields only the second
        figures.
        """
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
        found = figures(instance, look, before)
        return only(found, self._pool) if self._pool else found


def _print_json(looks: Looks, once: bool) -> str:
    for found in looks:
        text = msgspec.json.encode(found)
        echo_text(msgspec.json.format(text, indent=2) if once else text)
    return looks.ended


def _print_tables(looks: Looks, once: bool) -> str:
    try:
        from rich.console import Console
        from rich.live import Live

        from workers.cli.top.view import screen
    except ModuleNotFoundError as error:
        raise missing("top", error.name or str(error), "top") from error
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
