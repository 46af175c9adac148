"""The option --pool of commands that ask a running picker: shows one of several pools."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from epp.request.pools import no_such_pool

F = TypeVar("F", bound=Callable[..., Any])


def pool_option(command: F) -> F:
    """Adds the option --pool."""
    return click.option("--pool", default="", metavar="NAME", help="Show only this pool of several.  [default: all]")(command)


def check_pool(name: str, known: Sequence[str]) -> None:
    """Refuses the name of a pool that is not `known`: those of the picker, none if it has only one. Raises UsageError."""
    if why := no_such_pool(name, known):
        raise click.UsageError(f"--pool: {why}")
