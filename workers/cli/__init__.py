"""The `epp` command: one file per subcommand, imported when it is called.

So `epp check` starts without the modules that `epp serve` needs, and a missing extra breaks only the command that needs it.
May import: supervisor and all below it. Imported by: __main__ and the installed command.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported, so that a process that forks has one thread

import contextlib
import errno
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from compiled.finder import choose
from workers.host.build import SHORT, commit, version

COMMANDS: Mapping[str, str] = {
    "serve": "Run the picker.",
    "sim": "Run simulated model servers.",
    "demo": "Run the picker with simulated model servers, Envoy and traffic.",
    "doctor": "Find what is wrong with a picker, its servers and its gateway.",
    "check": "Check a configuration; print the effective one.",
    "plugins": "List the plugin types, their parameters and defaults.",
    "schema": "Print a JSON Schema of the configuration file, for editors.",
    "explain": "Explain a decision: of a running picker, or offline.",
    "record": "Record a running picker's traffic, without prompts; export recordings.",
    "replay": "Replay a recording under other configurations, in virtual time.",
    "tune": "Find weights and parameters that serve recorded traffic better.",
    "reload": "Load a running picker's configuration again, without losing a request.",
    "try": "Try a configuration in a running picker, beside the one in force.",
    "promote": "Put the configuration in force that a running picker tries.",
    "rollback": "End a trial, or go back to the configuration before.",
    "top": "Show a running picker's endpoints, workers and prefix index.",
    "size": "Size a picker: cores, memory and flags for a load.",
    "manifests": "Print the Kubernetes objects that install a picker.",
}
MODULES: Mapping[str, str] = (
    {name: f"workers.cli.{name}" for name in COMMANDS}
    | {name: f"workers.cli.{name}.command" for name in ("demo", "doctor", "top", "manifests", "replay", "tune")}
    | {"try": "workers.cli.tryout"}
)
DISTRIBUTION = "endpoint-picker"
EXTRAS: Mapping[str, str] = {
    "demo": "[demo]",
    "record": "[record]",
    "replay": "[record]",
    "tune": "[analysis]",
    "top": "[top]",
    "doctor": "[kv-events]",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk; without a file name, they concern the output
OWN_PACKAGES = frozenset(("epp", "shm", "workers"))


class LazyGroup(click.Group):
    """Lists commands by name and imports `workers.cli.<name>` only when that command is called."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as failure:
            if failure.errno not in FULL or failure.filename is not None:
                raise
            with contextlib.suppress(OSError):
                click.echo(f"Error: the output cannot be written: {failure.strerror}", err=True)
            sys.exit(1)
        finally:
            drop_unwritable()

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            module = importlib.import_module(MODULES[cmd_name])
        except ModuleNotFoundError as error:
            module_name = error.name or str(error)
            if module_name == MODULES[cmd_name]:
                raise click.ClickException(f"'epp {cmd_name}' is not part of this installation") from error
            if module_name.partition(".")[0] in OWN_PACKAGES:
                raise
            raise missing(cmd_name, module_name) from error
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def drop_unwritable() -> None:
    """Writes what is buffered for the output, or drops it if that fails. Else Python would try again at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # it was closed before the start
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def missing(command_name: str, module: str) -> click.ClickException:
    """Returns the error for a command that needs a Python module which is not installed."""
    return click.ClickException(
        f"'epp {command_name}' needs the Python module {module}, which is not installed; "
        f"run pip install '{DISTRIBUTION}{EXTRAS.get(command_name, '')}'"
    )


def _print_version(ctx: click.Context, _option: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        digits = commit()[:SHORT]
        which = version() or "(not installed: run from a source tree)"
        click.echo(f"epp {which}{f' ({digits})' if digits else ''}, {choose()}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print version, commit and mode.",
)
def main() -> None:
    """Endpoint picker: chooses the model server for every LLM request of an Envoy gateway."""
