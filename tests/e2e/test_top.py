"""The live view of a real picker, as a process: with requests, on a terminal, and when the picker ends."""

import json
import os
import pty
import select
import signal
import subprocess
import termios
import time
from pathlib import Path

from loadtest.demo.children import environment, python
from tests.e2e.cluster import ANSWER_S, Cluster, Picker, run
from tests.e2e.conftest import SERVERS, WORKERS, Gateway

ALTERNATE_SCREEN, MAIN_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"


def top(picker: Picker, run_dir: Path, *flags: str) -> list[str]:
    return python("workers", "top", f"--metrics-port={picker.metrics}", f"--run-dir={run_dir}", *flags)


def test_once_shows_all_workers_and_endpoints_of_a_running_picker(gateway: Gateway) -> None:
    run_dir = gateway.cluster.directory / "run"
    done = run(top(gateway.picker, run_dir, "--once", "--json", "--interval=200ms"))
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["instance"]["pid"] == gateway.picker.child.pid
    assert document["workers_serving"] == WORKERS
    assert [endpoint["state"] for endpoint in document["endpoints"]] == ["fresh"] * SERVERS
    assert all(endpoint["age_s"] < 5 for endpoint in document["endpoints"])
    table = run(top(gateway.picker, run_dir, "--once", "--interval=100ms")).stdout
    assert f"{WORKERS} of {WORKERS} workers serving" in table
    assert all(endpoint["address"] in table for endpoint in document["endpoints"])


def test_on_a_terminal_it_runs_until_q_and_restores_the_terminal(gateway: Gateway) -> None:
    keyboard, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    argv = top(gateway.picker, gateway.cluster.directory / "run", "--interval=200ms")
    size = {"COLUMNS": "120", "LINES": "30", "TERM": "xterm"}
    viewer = subprocess.Popen(
        argv, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE, env=environment() | size, start_new_session=True
    )
    try:
        shown = seen_until(keyboard, b":%d" % gateway.fleet.addresses[0][1])
        assert ALTERNATE_SCREEN in shown
        os.write(keyboard, b"q")
        shown += seen_until(keyboard, MAIN_SCREEN)
        assert viewer.wait(ANSWER_S) == 0
    finally:
        viewer.kill()
        viewer.communicate()
    assert termios.tcgetattr(terminal) == before
    os.close(terminal)
    os.close(keyboard)


def test_it_reports_the_end_of_the_picker_and_exits_with_0(cluster: Cluster) -> None:
    picker = cluster.picker(cluster.fleet(1).file, workers=1)
    argv = top(picker, cluster.directory / "run", "--json", "--interval=100ms")
    viewer = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True)
    try:
        assert viewer.stdout is not None
        first = json.loads(viewer.stdout.readline())
        assert first["interval_s"] is None
        assert json.loads(viewer.stdout.readline())["interval_s"] > 0
        picker.child.signal(signal.SIGTERM)
        _, errors = viewer.communicate(timeout=ANSWER_S)
    finally:
        viewer.kill()
        viewer.communicate()
    cluster.forget(picker.child)
    assert picker.child.process.wait(ANSWER_S) == 0
    assert viewer.returncode == 0
    assert errors == f"{picker.instance} (pid {picker.child.pid}) has stopped\n"


def seen_until(keyboard: int, text: bytes) -> bytes:
    """Reads the output until it contains this text. Returns the output."""
    shown, deadline = b"", time.monotonic() + ANSWER_S
    while text not in shown:
        left = deadline - time.monotonic()
        assert left > 0, f"{text!r} does not appear, but {shown[-500:]!r}"
        if select.select([keyboard], [], [], left)[0]:
            shown += os.read(keyboard, 1 << 16)
    return shown
