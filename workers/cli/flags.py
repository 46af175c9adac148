"""Types of flags for click, written as in Go's pflag and Kubernetes.

Every flag has the form `--name=value`, booleans included; `--name` without a value is true. Every
flag has an environment variable `EPP_<NAME>`. Precedence: command line, environment, default.
"""

import contextlib
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import click

from epp.quantities import parse_bool, parse_duration, parse_size
from workers.cli.output import echo, echo_text
from workers.host.exit_codes import ExitCode

PREFIX = "EPP_"
PORT_MAX = 65535
# Kubernetes sets <SERVICE>_PORT=tcp://... in every pod: a service named epp-grpc sets EPP_GRPC_PORT.
_SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
_SERVICE_NAMES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)$")
SIMILARITY_MIN = 0.85
HELP_ALL = "workers.cli.help_all"  # in the meta of a context: whether --help-all asked
_NAMED_FLAG = re.compile(r"--[a-z][-a-z0-9]*")

F = TypeVar("F", bound=Callable[..., Any])


class BadConfiguration(click.ClickException):
    """Ends the command with exit code 78; `message` may have several lines."""

    exit_code = int(ExitCode.CONFIG)

    def show(self, file: Any = None) -> None:
        with contextlib.suppress(OSError):  # a full disk does not change the exit code
            echo_text(self.message, err=True)


class _Parsed(click.ParamType[Any]):
    """A type of flag. `parse` reads its value from text."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _not_negative(text: str) -> float:
    seconds = parse_duration(text)
    if seconds < 0:
        raise ValueError(f"'{text}' is negative; give 0 or more")
    return seconds


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a whole number") from None


def _verbosity(text: str) -> int:
    return max(-1, _whole(text.removeprefix("=")))  # `-v=4`: click keeps the '=' after a short flag


def _ranges(text: str) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not part.strip():
            continue
        low, high = _whole(first), _whole(last if dash else first)
        if not 1 <= low <= high <= PORT_MAX:
            raise ValueError(f"'{part.strip()}' is neither a port nor a range of ports, such as 9100-9131")
        found |= dict.fromkeys(range(low, high + 1))
    return tuple(found)


class Whole(click.IntRange):
    """A whole number within limits. Other text gives an error that names the limits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            int(value)
        except ValueError:
            limits = f"from {self.min}" + ("" if self.max is None else f" to {self.max}")
            self.fail(f"'{value}' is not a whole number {limits}.", param, ctx)
        return super().convert(value, param, ctx)


BOOL = _Parsed("boolean", parse_bool)
DURATION = _Parsed("duration", _not_negative)
SIZE = _Parsed("size", lambda text: parse_size(text) if text else 0)  # empty text: not set
VERBOSITY = _Parsed("integer", _verbosity)
PORTS = _Parsed("ports", lambda text: tuple(_whole(part) for part in text.split(",") if part))
RANGES = _Parsed("ranges", _ranges)
NAMES = _Parsed("names", lambda text: tuple(filter(None, (part.strip() for part in text.split(",")))))
PORT = Whole(0, PORT_MAX)
COUNT = Whole(min=1)


class Flag(click.Option):
    """An option with environment variables. It ignores the values that Kubernetes sets for services.

    `group`: its heading in the help text. If a value came from a variable, the text of an error also has the variable.
    """

    group = ""

    @property
    def variables(self) -> list[str]:
        """Returns the environment variables of this option. The first variable that is set gives the value."""
        return [self.envvar] if isinstance(self.envvar, str) else list(self.envvar or ())

    def variable(self) -> str | None:
        """Returns the environment variable that gives the value, or None if no variable is set."""
        for name in self.variables:
            value = os.environ.get(name)
            if value and not value.startswith(_SERVICE_LINKS):
                return name
        return None

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        name = self.variable()
        return None if name is None else os.environ[name]

    def get_error_hint(self, ctx: click.Context | None) -> str:
        hint = click.Parameter.get_error_hint(self, ctx)  # an Option's hint names the variable even if it is not set
        if ctx is None or ctx.get_parameter_source(self.name or "") is not click.core.ParameterSource.ENVIRONMENT:
            return hint
        return f"{hint} (from the environment variable {self.variable()})"


class Once(click.Command):
    """Warns of a flag that is given more than once. As usual, only the last value is used."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, options = self.make_parser(ctx).parse_args(list(args))
        for option in dict.fromkeys(options):
            if not getattr(option, "multiple", False) and options.count(option) > 1:
                echo(f"warning: {max(option.opts, key=len)} is given {options.count(option)} times; the last one is used", err=True)
        return super().parse_args(ctx, args)


class Grouped(Once):
    """Shows the flags that most users need with --help, and all flags, under the headings of their groups, with --help-all.

    `common`: the names of the flags that most users need.
    """

    def __init__(self, *args: Any, common: Sequence[str], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._common = [name.replace("-", "_") for name in common]
        show_all = click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_print_all, help="Show all flags."
        )
        self.params.append(show_all)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        common = None if ctx.meta.get(HELP_ALL) else {*self._common, "help", "help_all"}
        for option in self.get_params(ctx):
            if (common is None or option.name in common) and (record := option.get_help_record(ctx)):
                title = "Options" if common is not None else getattr(option, "group", "") or "Other options"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _print_all(ctx: click.Context, _option: click.Parameter, requested: bool) -> None:
    if requested and not ctx.resilient_parsing:
        ctx.meta[HELP_ALL] = True
        echo_text(ctx.get_help())
        ctx.exit()


def group(title: str, *flags: Callable[[F], F]) -> tuple[Callable[[F], F], ...]:
    """Puts flags under a heading of the help text."""

    def headed(decorate: Callable[[F], F]) -> Callable[[F], F]:
        def decorated(function: F) -> F:
            function = decorate(function)
            function.__click_params__[-1].group = title  # type: ignore[attr-defined]
            return function

        return decorated

    return tuple(map(headed, flags))


def with_variables(message: str, ctx: click.Context) -> str:
    """Returns the message. If it names flags whose values came from environment variables, adds the names of these variables."""
    given = {
        f"--{option.name.replace('_', '-')}": option.variable()
        for option in ctx.command.params
        if isinstance(option, Flag)
        and option.name is not None
        and ctx.get_parameter_source(option.name) is click.core.ParameterSource.ENVIRONMENT
    }
    named = dict.fromkeys(name for name in _NAMED_FLAG.findall(message) if name in given)
    origins = ", ".join(f"{name} comes from the environment variable {given[name]}" for name in named)
    return f"{message} ({origins})" if origins else message


def given(ctx: click.Context) -> dict[str, str]:
    """Returns name of a flag -> the source of its value: the flag itself, or an environment variable. Skips defaults."""
    sources = {
        click.core.ParameterSource.COMMANDLINE: lambda flag: f"--{flag.name.replace('_', '-')}",
        click.core.ParameterSource.ENVIRONMENT: lambda flag: f"environment variable {flag.variable()}",
    }
    return {
        option.name: sources[source](option)
        for option in ctx.command.params
        if isinstance(option, Flag) and option.name and (source := ctx.get_parameter_source(option.name)) in sources
    }


class WithArguments(click.Command):
    """A command with boolean flags and arguments. `--name` without `=` is true, and the next word is an argument, as in Go."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        booleans = {name for option in self.params if option.type is BOOL for name in option.opts}
        return super().parse_args(ctx, [f"{word}=true" if word in booleans else word for word in args])


def misspelt(environ: Iterable[str], variables: Collection[str]) -> list[str]:
    """Returns warnings about variables that have nearly the name of a flag's variable.

    Skips the variables that Kubernetes sets for services.
    """
    known = sorted(variables)
    return [
        f"{name} has no effect: no flag has this variable (did you mean '{close[0]}'?)"
        for name in environ
        if name.startswith(PREFIX) and name not in variables and not _SERVICE_NAMES.search(name) and (close := _closest(name, known))
    ]


def _closest(name: str, known: Sequence[str]) -> list[str]:
    from difflib import get_close_matches  # a late import, because few processes see a wrong name

    return get_close_matches(name, known, n=1, cutoff=SIMILARITY_MIN)


def flag(
    name: str, kind: Any, default: Any, text: str, *, short: str = "", env: tuple[str, ...] = (), repeated: bool = False
) -> Callable[[F], F]:
    """Makes one flag. `env`: further environment variables, which are read if `EPP_<NAME>` is not set.

    `repeated`: whether the flag may be given several times. Its value is then one text with commas.
    """
    variables = [PREFIX + name.upper().replace("-", "_"), *env]
    names = [f"--{name}", *([short] if short else []), name.replace("-", "_")]
    bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if kind is BOOL else {}
    if repeated:
        bare = {"multiple": True, "callback": lambda _context, _option, values: ",".join(values)}
    shown = default not in (None, "")
    default = () if repeated else default
    return click.option(
        *names, cls=Flag, type=kind, default=default, envvar=variables, show_envvar=True, help=text, show_default=shown, **bare
    )
