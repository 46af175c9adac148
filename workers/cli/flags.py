"""Kinds of flags, as Go's pflag and Kubernetes write them, for click.

`--name=value` for every flag, booleans included; a bare `--name` is true. Every flag has an
environment variable `EPP_<NAME>`. Precedence: command line, environment, default.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import click

from epp.quantities import parse_bool, parse_duration, parse_size
from workers.exit_codes import ExitCode

PREFIX = "EPP_"
# Kubernetes sets <SERVICE>_PORT=tcp://... in every pod: a service named epp-grpc sets EPP_GRPC_PORT.
_SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
_SERVICE_NAMES = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_.+)?)?)$")
NEARLY = 0.85

F = TypeVar("F", bound=Callable[..., Any])


class BadConfiguration(click.ClickException):
    """Ends the command with exit code 78; `message` may have several lines."""

    exit_code = int(ExitCode.CONFIG)

    def show(self, file: Any = None) -> None:
        with contextlib.suppress(OSError):  # a log that is full does not change the exit code
            click.echo(self.message, err=True)


class _Parsed(click.ParamType[Any]):
    """A flag whose text one function reads."""

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
        raise ValueError(f"'{text}' is negative; it is 0 or more")
    return seconds


def _verbosity(text: str) -> int:
    return max(-1, int(text.removeprefix("=")))  # `-v=4`: click leaves the '=' of a short flag


def _ports(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


BOOL = _Parsed("boolean", parse_bool)
DURATION = _Parsed("duration", _not_negative)
SIZE = _Parsed("size", lambda text: parse_size(text) if text else 0)  # empty: not set
VERBOSITY = _Parsed("integer", _verbosity)
PORTS = _Parsed("ports", _ports)
NAMES = _Parsed("names", lambda text: tuple(filter(None, (part.strip() for part in text.split(",")))))
PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(min=1)


class Flag(click.Option):
    """An option with an environment variable that ignores what Kubernetes puts there for services."""

    @property
    def variables(self) -> list[str]:
        """Its environment variables, the first one set counts."""
        return [self.envvar] if isinstance(self.envvar, str) else list(self.envvar or ())

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        for name in self.variables:
            value = os.environ.get(name)
            if value and not value.startswith(_SERVICE_LINKS):
                return value
        return None


class Once(click.Command):
    """Says that a flag was given twice: the last counts, as for others' tools, and the first would be lost without a word."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(list(args))
        for option in dict.fromkeys(given):
            if not getattr(option, "multiple", False) and given.count(option) > 1:
                click.echo(
                    f"warning: {max(option.opts, key=len)} is given {given.count(option)} times; the last counts",
                    err=True,
                )
        return super().parse_args(ctx, args)


def misspelt(environ: Iterable[str], variables: Collection[str]) -> list[str]:
    """Warnings of environment variables that are nearly those of flags. What Kubernetes sets for services has its own form."""
    known = sorted(variables)
    return [
        f"{name} has no effect: it is no flag's variable (did you mean '{close[0]}'?)"
        for name in environ
        if name.startswith(PREFIX)
        and name not in variables
        and not _SERVICE_NAMES.search(name)
        and (close := difflib.get_close_matches(name, known, n=1, cutoff=NEARLY))
    ]


def flag(
    name: str, kind: Any, default: Any, text: str, *, short: str = "", env: tuple[str, ...] = ()
) -> Callable[[F], F]:
    """One flag. `env` are further environment variables, asked after `EPP_<NAME>`."""
    variables = [PREFIX + name.upper().replace("-", "_"), *env]
    names = [f"--{name}", *([short] if short else []), name.replace("-", "_")]
    bare: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if kind is BOOL else {}
    shown = default not in (None, "")
    return click.option(
        *names, cls=Flag, type=kind, default=default, envvar=variables, help=text, show_default=shown, **bare
    )
