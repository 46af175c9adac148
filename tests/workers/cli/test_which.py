"""A command on a terminal asks which of several running pickers it is about."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from shm.observe import Life, Seen
from workers.cli import which

RUNNING = [Seen(name, 7, {"metrics": port}, (), 0.0, Life.RUNNING) for name, port in (("a", 9090), ("b", 9190))]


@click.command()
def command() -> None:
    click.echo(which.Named(run_dir="/run").find().name)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    is_one = [True]
    monkeypatch.setattr(which, "_asks", lambda: is_one[0])
    monkeypatch.setattr(which.observe, "find", lambda run_dir, *, ask, **wanted: (ask or (lambda seen: seen[0]))(RUNNING))
    yield is_one


def test_on_a_terminal_it_lists_them_and_asks(terminal: list[bool]) -> None:
    said = CliRunner().invoke(command, input="2\n")
    assert said.stdout == "b\n"
    assert "1  a (pid 7, metrics port 9090, running)\n2  b (pid 7, metrics port 9190, running)\n" in said.stderr


def test_a_number_out_of_range_is_asked_again(terminal: list[bool]) -> None:
    assert CliRunner().invoke(command, input="3\n1\n").stdout == "a\n"


@pytest.mark.parametrize("closed", ["stdin", "stderr"])
def test_without_a_standard_stream_it_does_not_ask(monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    monkeypatch.setattr(which.sys, closed, None)
    assert not which._asks()


def test_without_a_terminal_it_does_not_ask(terminal: list[bool]) -> None:
    terminal[0] = False
    assert CliRunner().invoke(command).stdout == "a\n"
