"""The `epp` command: one file or folder per command, imported when it is called.

So `epp config check` starts without the modules that `epp serve` needs, and a missing extra breaks only the command that needs it.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported, so that a process that forks has one thread

import contextlib
import errno
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import click

from compiled.finder import choose
from workers.cli.output import echo, is_terminal
from workers.host.build import SHORT, commit, version
from workers.host.printable import printable


class Entry(NamedTuple):
    """One command, or a group of commands.

    `module`, `command`: where its code is; "" for a group. `extra`: the extra of the distribution that it needs. `commands`: the commands
    of a group. `usual`: the command of a group that runs if none is named.
    """

    help: str
    module: str = ""
    extra: str = ""
    commands: Mapping[str, "Entry"] = {}
    usual: str = ""
    command: str = "command"


_CONFIG: Final[Mapping[str, Entry]] = {
    "check": Entry("Check a configuration; print the effective one.", "workers.cli.check"),
    "plugins": Entry("List the plugin types, or describe one.", "workers.cli.plugins"),
    "schema": Entry("Print a JSON Schema of the configuration file, for editors.", "workers.cli.plugins", command="print_schema"),
    "reload": Entry("Load a running picker's configuration again, without losing a request.", "workers.cli.reload"),
    "try": Entry("Try a configuration in a running picker, beside the one in force.", "workers.cli.reload", command="try_"),
    "promote": Entry("Put the configuration in force that a running picker tries.", "workers.cli.reload", command="promote"),
    "rollback": Entry("End a trial, or go back to the configuration before.", "workers.cli.reload", command="rollback"),
}
_RECORD: Final[Mapping[str, Entry]] = {
    "start": Entry("Record the requests of a running picker, without prompts.", "workers.cli.record"),
    "export": Entry("Export the requests of a recording.", "workers.cli.record", command="export"),
}
PICKER: Final[Mapping[str, Entry]] = {
    "serve": Entry("Run the picker.", "workers.cli.serve"),
    "doctor": Entry("Find what is wrong with a picker, its servers and its gateway.", "workers.cli.doctor.command", "kv-events"),
    "top": Entry("Show a running picker's endpoints, workers and prefix index.", "workers.cli.top.command", "top"),
    "tenants": Entry("List who used what in the last hour and day.", "workers.cli.tenants"),
    "explain": Entry("Explain a decision: of a running picker, or offline.", "workers.cli.explain"),
    "config": Entry("Check configurations; change that of a running picker.", commands=_CONFIG),
    "record": Entry("Record traffic; replay it under other configurations.", commands=_RECORD, usual="start"),
    "manifests": Entry("Print the Kubernetes objects that install a picker.", "workers.cli.manifests.command"),
}
# Earlier names of commands, which work until version 0.4.
EARLIER: Final[Mapping[str, tuple[str, str]]] = {
    **{name: ("config", name) for name in _CONFIG},
    "replay": ("record", "replay"),
    "tune": ("record", "tune"),
}
DISTRIBUTION = "endpoint-picker"
COMMANDS: Final = "epp.commands"  # the group of entry points by which other packages add commands
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a full disk; without a file name, they concern the output
OWN_PACKAGES = frozenset(("epp", "shm", "workers", "loadtest"))


@functools.cache
def added(group: str = "") -> Mapping[str, Entry]:
    """Returns the commands that installed packages add to `epp`, or to a group of it, by name.

    Each entry point is a mapping from name to `Entry`; `record replay` is the command `replay` of the group `record`.
    """
    import importlib.metadata  # takes 30 ms, and most commands do not need it

    found: dict[str, Entry] = {}
    for point in importlib.metadata.entry_points(group=COMMANDS):
        with contextlib.suppress(ModuleNotFoundError):  # the picker's image lacks the laboratory
            found |= point.load()
    names = {name.rpartition(" "): entry for name, entry in found.items()}
    return {name: entry for (before, _, name), entry in names.items() if before == group}


class Group(click.Group):
    """A group of commands. The module of a command is imported when the command is called. `entries`: the group's own commands by name."""

    def __init__(self, *, entries: Mapping[str, Entry], usual: str = "", group: str = "", **attributes: Any) -> None:
        super().__init__(**attributes)
        self._entries = entries
        self._usual = usual
        self._group = group

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*self._entries, *added(self._group)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(cmd_name) or added(self._group).get(cmd_name)
        return None if entry is None else _loaded(cmd_name, entry)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._usual and (not args or (args[0].startswith("-") and not {*args} & {*ctx.help_option_names})):
            args = [self._usual, *args]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, entries in (("The picker", self._entries), ("The laboratory", added(self._group))):
            if entries:
                with formatter.section(title):
                    formatter.write_dl([(name, entry.help) for name, entry in entries.items()])


class Main(Group):
    """The command `epp`. It also knows the earlier names of commands."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            return super().main(*args, **extra)
        except OSError as failure:
            if failure.errno not in FULL or failure.filename is not None:
                raise
            with contextlib.suppress(OSError):
                echo(f"Error: the output cannot be written: {failure.strerror}", err=True)
            sys.exit(1)
        finally:
            drop_unwritable()

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as refused:
            from workers.cli.flags import BadConfiguration  # the command that raised has imported this already

            if not isinstance(refused, BadConfiguration):  # a BadConfiguration has several lines, and escapes them itself
                refused.message = printable(refused.message)  # type: ignore[misc]
            raise

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in EARLIER:
            return super().get_command(ctx, cmd_name)
        group, name = EARLIER[cmd_name]
        if is_terminal(sys.stderr):
            echo(f"epp {cmd_name} is epp {group} {name} now; the earlier name works until version 0.4", err=True)
        entry = PICKER[group].commands.get(name) or added(group).get(name)
        return None if entry is None else _loaded(cmd_name, entry)


def commands() -> Iterator[tuple[str, str]]:
    """Yields the name of each command, as `config check`, and its help line."""
    for name, entry in (*PICKER.items(), *added().items()):
        if not entry.commands:
            yield name, entry.help
            continue
        for part, each in (*entry.commands.items(), *added(name).items()):
            yield f"{name} {part}", each.help


def _loaded(name: str, entry: Entry) -> click.Command:
    """Imports a command. Raises ClickException if this installation lacks it, or a module that it needs."""
    if entry.commands:
        return Group(name=name, help=entry.help, entries=entry.commands, usual=entry.usual, group=name)
    try:
        module = importlib.import_module(entry.module)
    except ModuleNotFoundError as error:
        module_name = error.name or str(error)
        if module_name == entry.module:
            raise click.ClickException(f"'epp {name}' is not part of this installation") from error
        if module_name.partition(".")[0] in OWN_PACKAGES:
            raise
        raise missing(name, module_name, entry.extra) from error
    command: click.Command = getattr(module, entry.command)
    return command


def drop_unwritable() -> None:
    """Writes the buffered output, or drops it if writing fails. Otherwise Python would try again at its end, and exit with 120."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # it was closed before the start
            continue
        try:
            stream.flush()
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def missing(command_name: str, module: str, extra: str) -> click.ClickException:
    """Returns the error for a command that needs a Python module which is not installed. `extra`: the extra with this module, or ""."""
    return click.ClickException(
        f"'epp {command_name}' needs the Python module {module}, which is not installed; "
        f"run pip install '{DISTRIBUTION}{f'[{extra}]' if extra else ''}'"
    )


def _print_version(ctx: click.Context, _option: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        digits = commit()[:SHORT]
        which = version() or "(not installed: run from a source tree)"
        echo(f"epp {which}{f' ({digits})' if digits else ''}, {choose()}")
        ctx.exit()


@click.group(cls=Main, entries=PICKER, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print version, commit and mode.")
def main() -> None:
    """Endpoint picker: chooses the model server for every LLM request of an Envoy gateway."""
