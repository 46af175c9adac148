"""Finds the picker that a command is about, among those that run on this machine, and the pool: the option --pool."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from epp.request.pools import no_such_pool
from shm import observe
from shm.observe import Seen
from workers.cli.output import echo

F = TypeVar("F", bound=Callable[..., Any])


def find(run_dir: str, metrics_port: int | None, name: str) -> Seen:
    """Returns the picker with this name or metrics port, or the only one. On a terminal, asks which of several. Raises SegmentError."""
    return observe.find(run_dir, metrics_port=metrics_port, name=name, ask=_ask if _asks() else None)


def _asks() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _ask(running: list[Seen]) -> Seen:
    for number, seen in enumerate(running, 1):
        echo(f"{number}  {seen}", err=True)
    chosen: int = click.prompt("which picker", type=click.IntRange(1, len(running)), err=True)
    return running[chosen - 1]


def pool_option(command: F) -> F:
    """Adds the option --pool."""
    return click.option("--pool", default="", metavar="NAME", help="Show only this pool of several.  [default: all]")(command)


def check_pool(name: str, known: Sequence[str]) -> None:
    """Refuses the name of a pool that is not `known`: those of the picker, none if it has only one. Raises UsageError."""
    if why := no_such_pool(name, known):
        raise click.UsageError(f"--pool: {why}")
