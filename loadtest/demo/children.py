"""Runs the child processes of the demo, and ends each of them by its pid.

A terminal sends Ctrl-C to its foreground process group. Every child has a group of its own, so only the demo gets the signal, and then
ends the children in order. If the demo is killed, the kernel sends each child SIGTERM (PR_SET_PDEATHSIG), and each child ends the
processes that it has forked. The output of the children goes to files in the demo's directory. If a child dies early, the error message
has the last lines of its output.

This module does not restart a child.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

PR_SET_PDEATHSIG = 1
TAIL_LINES = 15
TAIL_BYTES = 16_384
END_S = 10.0
POLL_S = 0.05
Spawn: TypeAlias = Callable[[Sequence[str], int], "subprocess.Popen[bytes]"]
_libc = ctypes.CDLL(None)


class ChildFailed(Exception):
    """Raised if a child ends early or does not get ready. The text has the child's name, the cause, and the last lines of its output."""


def new_process(argv: Sequence[str], output: int) -> subprocess.Popen[bytes]:
    """Starts a process that leads a session and gets SIGTERM when this process ends. `output`: the descriptor of its output."""
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=environment(),
        preexec_fn=_die_with(os.getpid()),
    )


class Child:
    """Starts one process, with a file for its output. `spawn`: starts it, like `new_process`."""

    def __init__(self, name: str, argv: Sequence[str], directory: Path, spawn: Spawn = new_process) -> None:
        self.name = name
        self.log = directory / f"{name.replace(' ', '-')}.log"
        with self.log.open("wb") as output:
            self.process = spawn(argv, output.fileno())

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """Returns the output of the process, at most the last 16 KiB."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def tail(self) -> str:
        """Returns the last lines of the output."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def check(self) -> None:
        """Raises ChildFailed if the process has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildFailed(f"{self.name} ended with {_ending(code)}; its last lines:\n{self.tail()}")

    def signal(self, number: int) -> None:
        """Sends a signal to the process, by its pid. Does nothing if the process has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """Kills the process and its children, if any are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Children:
    """Holds all children in the order of their start, and ends them in the opposite order."""

    def __init__(self, directory: Path, spawn: Spawn = new_process) -> None:
        self.directory = directory
        self._spawn = spawn
        self.all: list[Child] = []

    def start(self, name: str, argv: Sequence[str]) -> Child:
        """Starts a child. Raises OSError if the command cannot be executed."""
        child = Child(name, argv, self.directory, self._spawn)
        self.all.append(child)
        return child

    def check(self) -> None:
        """Raises ChildFailed for the first child that has ended."""
        for child in self.all:
            child.check()

    async def ready(self, child: Child, probe: Callable[[], bool], seconds: float) -> None:
        """Waits until the probe returns True. The probe blocks the event loop, so it must be short. Raises ChildFailed."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not probe():
            self.check()
            if asyncio.get_running_loop().time() > deadline:
                raise ChildFailed(f"{child.name} was not ready after {seconds:.0f} s; its last lines:\n{child.tail()}")
            await asyncio.sleep(POLL_S)

    async def end(self, seconds: float = END_S) -> None:
        """Ends the children one by one: sends SIGTERM to a child, then SIGKILL to its group when it has ended, or after `seconds`."""
        loop = asyncio.get_running_loop()
        for child in reversed(self.all):
            child.signal(signal.SIGTERM)
            deadline = loop.time() + seconds
            # Polls, because a child watcher would change the demo's signal handlers.
            while child.process.poll() is None and loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S / 5)
            child.kill_group()
            child.process.wait()
        self.all.clear()


def environment() -> dict[str, str]:
    """Returns the environment of a child: that of this process, with this project first in PYTHONPATH.

    So `python -m` finds the project's modules in any directory.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def python(*arguments: str) -> list[str]:
    """Returns a command line for this interpreter. The child imports no module from its working directory."""
    return [sys.executable, "-P", "-m", *arguments]


def descendants(pid: int) -> list[int]:
    """Returns the pids of a process's direct children, from /proc."""
    return [child for child, parent in _parents() if parent == pid]


def cpu_seconds(pid: int) -> float:
    """Returns the user and system time of a process so far, in seconds; 0 if the process is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def command_name(pid: int) -> str:
    """Returns the short name that a process has set; "" if the process is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parents() -> Iterable[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := _stat(int(entry))):
            yield int(entry), int(fields[1])


def _stat(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat, beginning with the state; an empty list if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return in_child


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
