"""Processes that tests fork are as new ones: `tests.zygote`."""

import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from loadtest.demo.children import Child, environment, python
from tests.e2e.cluster import Cluster, run
from tests.zygote import Forked, forked

SERVERS = python("loadtest.sim.main", "--port=0")


def seen(child: Child) -> list[object]:
    """Returns what the kernel says about a process: session, directory, limits, signals, and its open files and what they are."""
    proc = Path(f"/proc/{child.pid}")
    signals = re.findall(r"^(?:Sig(?:Blk|Ign|Cgt)|Umask|Threads):.*", (proc / "status").read_text(), re.MULTILINE)
    files = {file.name: re.sub(r"\d+", "N", os.readlink(file)) for file in (proc / "fd").iterdir()}
    leads = os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
    return [leads, os.readlink(proc / "cwd"), (proc / "limits").read_text(), signals, files]


def test_a_process_has_what_a_new_one_has_and_ends_as_it_does(cluster: Cluster) -> None:
    new = Child("server 0", SERVERS, cluster.directory)
    cluster.children.all.append(new)
    same = cluster.children.start("server 1", SERVERS)
    for child in (new, same):
        cluster.wait(child, lambda child=child: "ready" in child.text())  # type: ignore[misc]
    assert isinstance(same.process, Forked)
    assert seen(same) == seen(new)
    for child, end in ((new, signal.SIGKILL), (same, signal.SIGKILL)):
        child.signal(end)
        assert child.process.wait(10) == -end


@pytest.mark.parametrize(
    "argv",
    [
        python("workers", "--version"),
        python("workers", "explain", "--no-such-flag"),
        python("workers", "config", "check", "no-such-file"),
        ["env", "EPP_WORKERS=few", "HOME=/", *python("workers", "serve")],
    ],
    ids=lambda argv: argv[-1],
)
def test_a_command_says_what_it_says_in_a_new_process(argv: list[str]) -> None:
    new = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
    same = run(argv)
    assert (same.returncode, same.stdout, same.stderr) == (new.returncode, new.stdout, new.stderr)


def test_what_a_fork_would_change_is_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile() as output:
        for argv in (["env", *SERVERS], python("workers", "demo"), python("tests.e2e.activation", *SERVERS)):
            assert forked(argv, output.fileno(), output.fileno()) is None
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        assert forked(SERVERS, output.fileno(), output.fileno()) is None
