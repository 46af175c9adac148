"""`epp doctor`: exit codes, JSON, what is skipped, and the report for the page."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from workers.cli import main
from workers.cli.doctor import command as doctor
from workers.cli.doctor.running import Running
from workers.shared.doctor_report import DOCTOR, Finding

ENVOY = str(Path(__file__).parents[4] / "deploy/envoy.yaml")
WARNED = Finding("hot-flow", "warning", "One flow has most", "x has 9 of 10", "limit it")
FAILED = Finding("endpoints-down", "error", "1 endpoint refuses", "a: refused\x1b[31m", "look at its log")


@pytest.fixture(autouse=True)
def no_envoy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Envoy that other tests run on this machine is not found."""
    monkeypatch.setattr(doctor.envoy_admin, "PORTS", ())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def with_state(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    state: dict[str, Any] = {"version": 1, "endpoints": {}, "settings": {"flags": {}}}
    monkeypatch.setattr(doctor, "running", lambda *_: Running(None, "http://x", state, list(findings)))


def test_a_closed_standard_input_is_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(click.UsageError, match="standard input is closed"):
        doctor._gateway("-", "")


def test_without_a_picker_the_command_says_so_and_still_checks_the_gateway(tmp_path: Path) -> None:
    done = run("--run-dir", str(tmp_path), "--gateway-config", ENVOY, "--json")
    document = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [each["rule"] for each in document["findings"]] == ["no-picker"]
    assert document["checked"] == ["gateway"]
    assert set(document["skipped"]) == {"picker", "servers", "client headers", "tls", "access"}


def test_warnings_do_not_fail_unless_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    with_state(monkeypatch, WARNED)
    assert run().exit_code == 0
    assert run("--strict").exit_code == 1
    with_state(monkeypatch)
    assert run("--strict").exit_code == 0


def test_errors_come_first_and_control_characters_do_not_reach_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with_state(monkeypatch, WARNED, FAILED)
    done = run()
    assert done.exit_code == 1
    assert done.stdout.startswith("error    1 endpoint refuses [endpoints-down]\n         a: refused\\u001b[31m\n")
    assert "1 errors, 1 warnings" in done.stdout
    assert "not checked: gateway (give --gateway-admin" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gateway-config", "/nowhere.yaml"), "No such file"),
        (("--gateway-admin", "127.0.0.1:1"), "refused"),
        (("--gateway-config", "x", "--gateway-admin", "y"), "cannot be given together"),
    ],
)
def test_a_gateway_that_cannot_be_read_is_a_wrong_command_line(arguments: tuple[str, ...], text: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert text in done.stderr


def test_the_report_has_what_the_page_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    picker = Running(None, "", {"version": 1, "endpoints": {}, "settings": {}}, [FAILED])
    visit = doctor.Visit(picker, doctor.Gateway({}), ())
    visit.make()
    check = visit.report(5.0)["gateway"]
    (found,) = check.findings
    assert check.at == 5.0
    assert (found.rule, found.found_by) == ("gateway-filter", DOCTOR)


def test_a_picker_of_kubernetes_whose_api_is_not_known_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/nowhere")
    flags = {"pool-name": {"value": "pool", "origin": "--pool-name"}}
    picker = Running(None, "", {"version": 1, "endpoints": {}, "settings": {"flags": flags}}, [])
    visit = doctor.Visit(picker, doctor.Gateway(), ())
    visit.make()
    (found,) = visit.found["access"]
    assert (found.rule, found.severity) == ("kubernetes-api", "error")
    assert "KUBECONFIG" in found.fix
