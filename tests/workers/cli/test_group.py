import importlib
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from compiled.finder import choose
from workers import cli


def failing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(importlib, "import_module", load)


def test_a_command_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "rich")
    result = CliRunner().invoke(cli.main, ["demo"])
    assert result.exit_code == 1
    assert "'epp demo' needs the Python module rich, which is not installed; run pip install 'endpoint-picker[lab]'" in result.stderr


def test_a_command_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "loadtest.demo.command")
    assert "'epp demo' is not part of this installation" in CliRunner().invoke(cli.main, ["demo"]).stderr


def test_a_missing_module_of_this_project_is_shown_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "shm.gone")
    assert isinstance(CliRunner().invoke(cli.main, ["demo"]).exception, ModuleNotFoundError)


def test_sim_becomes_the_simulator_with_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    become: list[list[str]] = []
    monkeypatch.setattr("os.execve", lambda path, argv, environment: become.append(argv))
    result = CliRunner().invoke(cli.main, ["sim", "--servers", "2", "--help"])
    assert result.exit_code == 0
    assert become == [[sys.executable, "-P", "-m", "loadtest.sim.main", "--servers", "2", "--help"]]


def test_without_the_laboratory_its_commands_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(**_: str) -> list[Any]:
        return [SimpleNamespace(load=lambda: importlib.import_module("loadtest_is_gone"))]

    monkeypatch.setattr("importlib.metadata.entry_points", gone)
    cli.added.cache_clear()
    try:
        help_text = CliRunner().invoke(cli.main, ["--help"]).stdout
        assert "The picker:" in help_text and "The laboratory:" not in help_text
        assert "No such command 'demo'" in CliRunner().invoke(cli.main, ["demo"]).stderr
    finally:
        cli.added.cache_clear()


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli.main, ["chek"])
    assert result.exit_code == 2
    assert "No such command 'chek'" in result.stderr


@pytest.mark.parametrize(
    ("commit", "version", "shown"),
    [
        ("0123456789abcdef", "1.2.3", "epp 1.2.3 (0123456789ab)"),
        ("", "1.2.3", "epp 1.2.3"),
        ("", "", "epp (not installed: run from a source tree)"),
    ],
)
def test_the_version_names_distribution_commit_and_mode(monkeypatch: pytest.MonkeyPatch, commit: str, version: str, shown: str) -> None:
    monkeypatch.setattr(cli, "commit", lambda: commit)
    monkeypatch.setattr(cli, "version", lambda: version)
    assert CliRunner().invoke(cli.main, ["--version"]).stdout == f"{shown}, {choose()}\n"


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", f"exec {sys.executable} -m workers {command}"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30, env=buffered)


def test_a_full_disk_under_the_output_is_an_error_of_one_line() -> None:
    for command in ("--version", "schema"):
        done = in_shell(f"{command} >/dev/full")
        assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_an_error_that_cannot_be_printed_keeps_its_exit_code() -> None:
    assert in_shell("check /nowhere 2>/dev/full").returncode == 78


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_output_changes_no_exit_code(closed: str) -> None:
    assert in_shell(f"--version {closed}").returncode == 0
    assert in_shell(f"check /nowhere {closed}").returncode == 78


def test_a_closed_standard_input_is_an_error() -> None:
    for command in ("check -", "explain --request - --endpoints-file /nowhere"):
        done = in_shell(f"{command} <&-")
        assert (done.returncode, done.stderr) == (78, "<stdin>: error[unreadable]: standard input is closed\n")


def test_help_imports_no_command_and_the_thread_count_is_set_before_numpy_is_imported() -> None:
    code = (
        "import os, sys; from workers.cli import main; "
        "assert os.environ['OPENBLAS_NUM_THREADS'] == '1'; main(['--help'], standalone_mode=False); "
        "assert not {'numpy', 'epp', 'asyncio'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
