"""What an installation on a machine brings: the unit, the man page, the completion of shells."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import man
from tests.deploy.renderers import ROOT
from workers.cli import commands
from workers.cli.serve import command as serve
from workers.process.sockets import BACKLOG

UNIT = ROOT / "deploy/systemd/endpoint-picker.service"
SOCKET = UNIT.with_suffix(".socket")
EXPOSURE_MAX = 20  # tenths; `systemd-analyze security` calls less than 2.0 OK


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_units_are_valid_and_hardened(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/epp/bin/epp", "/bin/true"))
    shutil.copy(SOCKET, tmp_path)
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", str(tmp_path / SOCKET.name)], capture_output=True)
    assert checked.returncode == 0, checked.stderr
    for arguments in (["verify", "--man=no"], ["security", "--offline=true", f"--threshold={EXPOSURE_MAX}"]):
        done = subprocess.run(["systemd-analyze", *arguments, str(unit)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr


def test_the_socket_has_the_port_and_the_queue_that_the_picker_would_have() -> None:
    (flag,) = [parameter for parameter in serve.params if parameter.name == "grpc_port"]
    lines = SOCKET.read_text().splitlines()
    assert {f"ListenStream={flag.default}", "FileDescriptorName=grpc", f"Backlog={BACKLOG}"} <= set(lines)


def test_the_unit_waits_longer_than_the_drain_and_does_not_repeat_a_wrong_configuration() -> None:
    text = UNIT.read_text()
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0]) > 30
    assert re.findall(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE) == ["2 78"]


def test_the_man_page_has_every_command_and_no_unescaped_line() -> None:
    lines = man.page().splitlines()
    assert [line for line in lines if line.startswith(".SS")] == [f".SS epp {name}" for name, _ in commands()]
    assert {line.split()[0] for line in lines if line.startswith(".")} == {".TH", ".SH", ".SS", ".TP", ".B", ".I"}


def test_text_in_the_man_page_is_escaped() -> None:
    assert man.text(".a -b\n  \\c") == r"\&.a \-b \ec"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    command = [sys.executable, "-c", "from workers.cli import main; main(prog_name='epp')"]

    def asked(kind: str, **more: str) -> str:
        environment = {**os.environ, "_EPP_COMPLETE": f"{shell}_{kind}", **more}
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60).stdout

    assert "_EPP_COMPLETE" in asked("source")
    words = {"COMP_WORDS": "epp conf", "COMP_CWORD": "conf" if shell == "fish" else "1"}
    assert "config" in asked("complete", **words)
