"""Finds the picker that a command is about, from the options that name it, and one of its pools."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from epp.request.pool_choice import no_such_pool
from shm import observe
from shm.observe import Seen
from shm.segment import SegmentError
from workers.cli.flags import PORT, flag
from workers.cli.output import echo, is_terminal

if TYPE_CHECKING:
    from workers.cli.metrics_port import MetricsPort

F = TypeVar("F", bound=Callable[..., Any])

pool_option: Callable[[F], F] = click.option("--pool", default="", metavar="NAME", help="Of several pools, show this one.  [default: all]")


class Named(NamedTuple):
    """Which picker a command is about: a picker on this machine, or the picker with a metrics port at `url`; by default the only picker."""

    metrics_port: int | None = None
    instance: str = ""
    run_dir: str = observe.RUN_DIR
    url: str = ""
    ca_file: str = ""

    def find(self) -> Seen:
        """Returns the picker on this machine. On a terminal, asks which of several pickers. Raises SegmentError."""
        return observe.find(self.run_dir, metrics_port=self.metrics_port, name=self.instance, ask=_ask if _asks() else None)

    def port(self) -> "MetricsPort":
        """Returns the metrics port. Raises ClickException, and UsageError if the URL is malformed."""
        from workers.cli import metrics_port

        if self.url:
            return metrics_port.at(self.url, self.ca_file)
        try:
            return metrics_port.of(self.find(), self.ca_file)
        except SegmentError as refused:
            raise click.ClickException(f"{refused}; or give --url of a metrics port") from refused


def picker_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that name a picker on this machine. The command then gets a `Named` as `picker`."""

    @flag("metrics-port", PORT, None, "The picker on this machine with this metrics port. [default: the only one that runs]")
    @flag("instance", str, "", "The picker on this machine with this name, whatever its ports are.")
    @flag("run-dir", str, observe.RUN_DIR, "Folder in which the picker keeps its file.")
    @functools.wraps(command)
    def named(*args: Any, metrics_port: int | None, instance: str, run_dir: str, url: str = "", ca_file: str = "", **others: Any) -> Any:
        return command(*args, picker=Named(metrics_port, instance, run_dir, url, ca_file), **others)

    return named


def port_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the same options, and options that name a metrics port, perhaps on another machine."""
    command = flag("ca-file", str, "", "PEM file with the CA of the metrics port's certificate; it then has to use TLS.")(command)
    return picker_options(flag("url", str, "", "Ask this metrics port instead: host:port, http://... or https://...")(command))


def _asks() -> bool:
    return is_terminal(sys.stdin) and is_terminal(sys.stderr)


def _ask(running: list[Seen]) -> Seen:
    for number, seen in enumerate(running, 1):
        echo(f"{number}  {seen}", err=True)
    chosen: int = click.prompt("which picker", type=click.IntRange(1, len(running)), err=True)
    return running[chosen - 1]


def check_pool(name: str, known: Sequence[str]) -> None:
    """Refuses the name of a pool that is not `known`: the names of the picker's pools, or no names if it has one pool. Raises
    UsageError.
    """
    if why := no_such_pool(name, known):
        raise click.UsageError(f"--pool: {why}")
