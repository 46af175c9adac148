"""Writes the man page epp(1) from the commands and their options, in the macros of man(7)."""

import re

import click

from workers.cli import commands, main

_FILES = (
    ("/dev/shm/epp-*", "Shared memory of a running picker. It removes these at its end."),
    ("--state-dir", "What survives restarts: the secret of block hashes, and snapshots of the prefix index."),
)
_EXITS = (
    ("0", "Ended as asked."),
    ("1", "Failed while running: a port in use, shared memory too small, a child that cannot start."),
    ("2", "Wrong usage of the command line."),
    ("78", "Wrong configuration, or a wrong value of a flag."),
)


def page() -> str:
    """Returns the text of the page."""
    parent = click.Context(main, info_name="epp", max_content_width=1000)
    lines = ['.TH EPP 1 "" "Endpoint Picker" "User Commands"', ".SH NAME", r"epp \- choose the model server for every LLM request"]
    lines += [".SH SYNOPSIS", ".B epp", r"[\-\-version] [\-\-help]", ".I command", "[options]"]
    lines += [".SH DESCRIPTION", text(main.help or "")]
    lines += [".SH COMMANDS"]
    for name, help_line in commands():
        lines += command(name, help_line, parent)
    for title, pairs in (("EXIT STATUS", _EXITS), ("FILES", _FILES)):
        lines += [f".SH {title}", *(line for term, meaning in pairs for line in (".TP", f".B {text(term)}", text(meaning)))]
    return "\n".join(lines) + "\n"


def command(name: str, help_line: str, parent: click.Context) -> list[str]:
    """Returns the lines of one command with its options. `name`: as `config check`."""
    found: click.Command = main
    for part in name.split():
        assert isinstance(found, click.Group)
        known = found.get_command(parent, part)
        assert known is not None
        found = known
    lines = [f".SS epp {name}", text(help_line)]
    context = click.Context(found, info_name=name, parent=parent)
    for option in found.get_params(context):
        if record := option.get_help_record(context):
            lines += [".TP", f".B {text(record[0])}", text(record[1])]
    return lines


def text(plain: str) -> str:
    """Returns plain text as roff: one line, escaped."""
    joined = re.sub(r"\s+", " ", plain).strip().replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{joined}" if joined.startswith((".", "'")) else joined
