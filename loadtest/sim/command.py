"""`epp sim`: becomes the process of the simulated model servers (`loadtest.sim.main`).

This module passes all arguments on: the simulator parses them, because the picker's modules do not know its flags.
"""

import os
import sys

import click

from loadtest.demo.children import environment, python

SETTINGS = {"ignore_unknown_options": True, "help_option_names": []}


@click.command("sim", context_settings=SETTINGS, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run simulated model servers until SIGTERM or SIGINT."""
    sys.stdout.flush()
    sys.stderr.flush()
    argv = python("loadtest.sim.main", *arguments)
    os.execve(argv[0], argv, environment())
