"""Prints the output of commands. Names of models, endpoints and tenants come from strangers, so each text is escaped first
(`printable`).
"""

from collections.abc import Iterable, Sequence
from typing import TextIO

import click

from workers.host.printable import printable, printable_lines

# Prints text as it is: only for control sequences of our own, and for files that must not change.
echo_as_is = click.echo


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a standard stream is a terminal. `stream`: None if it was closed before the start."""
    return stream is not None and stream.isatty()


def echo(line: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Prints one line: a line feed in it is escaped, too. `nl`: whether the line ends. `err`: on stderr."""
    click.echo(printable(line), nl=nl, err=err)


def echo_lines(lines: Iterable[str], *, err: bool = False) -> None:
    """Prints lines."""
    for line in lines:
        echo(line, err=err)


def echo_text(text: str | bytes, *, nl: bool = True, err: bool = False) -> None:
    """Prints a text whose line feeds are meant, such as JSON."""
    click.echo(printable_lines(text if isinstance(text, str) else text.decode(errors="replace")), nl=nl, err=err)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lays out a table: columns as wide as their widest cells, all but the first two right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        texts = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return "  ".join(texts).rstrip()

    return [line(header), *(line(row) for row in rows)]
