"""Finds the picker that a command is about, among those that run on this machine."""

import sys

import click

from shm import observe
from shm.observe import Seen
from workers.cli.output import echo


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
