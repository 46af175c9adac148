"""`epp top` with an instance in this process, and without an instance."""

import builtins
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from shm import observe
from tests.workers.instances import made
from workers import cli
from workers.process.instance import Instance
from workers.supervisor.pages.state import source


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    with made(tmp_path) as instance:
        for ordinal in (0, 1):
            instance.memory.areas.area(ordinal).take_over()
            instance.memory.areas.area(ordinal).heartbeat(time.monotonic())
            instance.memory.areas.set_serving(ordinal, True)
        yield instance


def top(run_dir: object, *flags: str) -> Result:
    return CliRunner().invoke(cli.main, ["top", f"--run-dir={run_dir}", "--interval=100ms", *flags])


def test_once_prints_a_plain_table(instance: Instance) -> None:
    port = instance.sockets.metrics.getsockname()[1]
    result = top(instance.options.run_dir, f"--metrics-port={port}", "--once")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{instance.options.instance}  pid ")
    assert "1 of 1 workers serving" in result.stdout
    assert "\x1b" not in result.stdout


def test_once_with_json_prints_one_document_with_the_keys_of_the_help(instance: Instance) -> None:
    result = top(instance.options.run_dir, f"--instance={instance.options.instance}", "--once", "--json")
    document = json.loads(result.stdout)
    assert document["instance"]["name"] == instance.options.instance
    assert document["interval_s"] > 0
    assert document["requests"]["per_s"] == 0
    assert [worker["worker"] for worker in document["workers"]] == [0]
    described = CliRunner().invoke(cli.main, ["top", "--help"]).stdout.split()
    assert set(document) <= {word.removesuffix("[]").removesuffix("{}") for word in described}


def test_the_help_also_has_the_nested_keys(instance: Instance) -> None:
    document = json.loads(top(instance.options.run_dir, f"--instance={instance.options.instance}", "--once", "--json").stdout)
    described = CliRunner().invoke(cli.main, ["top", "--help"]).stdout.split()
    words = {word.removesuffix("{}") for word in described}
    for part in (document["requests"], document["supervisor"], document["workers"][0], document["index"], document["instance"]):
        assert set(part) <= words


def test_the_environment_variables_of_the_picker_are_used(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPP_METRICS_PORT", str(instance.sockets.metrics.getsockname()[1]))
    assert top(instance.options.run_dir, "--once").exit_code == 0


def test_without_an_instance_the_error_says_what_to_do(tmp_path: Path) -> None:
    result = top(tmp_path)
    assert result.exit_code == 1
    assert f"no instance in {tmp_path}: start a picker, or give the --run-dir" in result.stderr


def test_a_wrong_port_is_an_error_that_names_the_existing_instances(instance: Instance) -> None:
    result = top(instance.options.run_dir, "--metrics-port=1")
    assert result.exit_code == 1
    assert f"as --instance {instance.options.instance}" in result.stderr


@pytest.mark.parametrize("interval", ["1ms", "2h", "often"])
def test_an_invalid_interval_is_a_usage_error(tmp_path: Path, interval: str) -> None:
    assert top(tmp_path, f"--interval={interval}").exit_code == 2


def test_the_view_ends_with_the_picker_and_exit_code_0(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    found = observe.instance(instance.options.run_dir, instance.options.instance)
    answers = iter([found, found, None])  # found, there at the first look, gone at the second
    monkeypatch.setattr(observe, "instance", lambda *_: next(answers))
    monkeypatch.setattr(source, "GONE_S", -1.0)  # its last heartbeat is long ago
    next(answers)
    result = top(instance.options.run_dir, f"--instance={instance.options.instance}", "--json")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == f"{instance.options.instance} (pid {instance.parent_pid}) has stopped\n"


def test_a_picker_that_ends_before_the_only_look_is_an_error(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "instance", lambda *_: None)
    monkeypatch.setattr(source, "GONE_S", -1.0)
    result = top(instance.options.run_dir, f"--instance={instance.options.instance}", "--once")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has stopped" in result.stderr


def test_json_works_without_the_library_for_tables_and_the_error_of_tables_names_it(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without_rich(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    name = f"--instance={instance.options.instance}"
    assert top(instance.options.run_dir, name, "--once", "--json").exit_code == 0
    result = top(instance.options.run_dir, name, "--once")
    assert result.exit_code == 1
    assert "'epp top' needs the Python module rich" in result.stderr
