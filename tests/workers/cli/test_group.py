import importlib
import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest
from click.testing import CliRunner

from workers import cli


def failing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(importlib, "import_module", load)


def test_a_command_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "rich")
    result = CliRunner().invoke(cli.main, ["demo"])
    assert result.exit_code == 1
    assert (
        "'epp demo' needs the Python module rich, which is not installed; pip install 'endpoint-picker[demo]'"
        in result.stderr
    )


def test_a_command_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "workers.cli.demo")
    assert "'epp demo' is not part of this installation" in CliRunner().invoke(cli.main, ["demo"]).stderr


def test_a_missing_module_of_our_own_is_a_bug_and_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "shm.gone")
    assert isinstance(CliRunner().invoke(cli.main, ["demo"]).exception, ModuleNotFoundError)


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli.main, ["chek"])
    assert result.exit_code == 2
    assert "No such command 'chek'" in result.stderr


def test_the_version_is_that_of_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"endpoint-picker": "1.2.3"}.__getitem__)
    assert CliRunner().invoke(cli.main, ["--version"]).stdout == "epp 1.2.3\n"

    def none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", none)
    assert CliRunner().invoke(cli.main, ["--version"]).stdout == "epp (not installed: run from a source tree)\n"


def in_shell(command: str) -> subprocess.CompletedProcess[str]:
    argv = ["sh", "-c", f"exec {sys.executable} -m workers {command}"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)


def test_output_for_which_a_disk_has_no_room_is_said_in_one_line() -> None:
    for command in ("--version", "schema"):
        done = in_shell(f"{command} >/dev/full")
        assert (done.returncode, done.stderr) == (1, "Error: the output cannot be written: No space left on device\n")


def test_an_error_that_nobody_can_be_told_keeps_its_exit_code() -> None:
    assert in_shell("check /nowhere 2>/dev/full").returncode == 78


def test_a_standard_input_that_is_closed_cannot_be_read() -> None:
    for command in ("check -", "explain --request - --endpoints-file /nowhere"):
        done = in_shell(f"{command} <&-")
        assert (done.returncode, done.stderr) == (78, "-: error[unreadable]: standard input is closed\n")


def test_help_imports_no_command_and_the_thread_count_is_set_before_numpy_comes() -> None:
    code = (
        "import os, sys; from workers.cli import main; "
        "assert os.environ['OPENBLAS_NUM_THREADS'] == '1'; main(['--help'], standalone_mode=False); "
        "assert not {'numpy', 'epp', 'asyncio'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=30)
