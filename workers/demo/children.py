"""Child processes of the demo: started in groups of their own, asked to end by pid, and never left behind.

A terminal sends Ctrl-C to its foreground group. Every child has its own group, so that it reaches the demo alone, which then
ends the children in order. Should the demo be killed, the kernel sends each child SIGTERM (PR_SET_PDEATHSIG); what these
children fork follows its own parent. Their output goes to files in the demo's directory; the last lines of one that dies
early are its error message.

What this does not do: restart anything.
"""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_LINES = 15
TAIL_BYTES = 16_384
END_S = 10.0
POLL_S = 0.05
PORTS = (20_000, 32_000)
PORT_TRIES_MAX = 1_000
_libc = ctypes.CDLL(None)


class ChildFailed(Exception):
    """A child ended early or did not get ready; the text has its name, what happened and its last lines."""


class Child:
    """One process and its log."""

    def __init__(self, name: str, argv: Sequence[str], directory: Path) -> None:
        self.name = name
        self.log = directory / f"{name.replace(' ', '-')}.log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment(),
                preexec_fn=_die_with(os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What it has written, from the end at most 16 KiB."""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode(errors="replace")

    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(self.text().splitlines()[-TAIL_LINES:])

    def check(self) -> None:
        """Raises ChildFailed if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise ChildFailed(f"{self.name} ended with {_ending(code)}; its last lines:\n{self.tail()}")

    def signal(self, number: int) -> None:
        """By pid; nothing happens if it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def kill_group(self) -> None:
        """Whatever is left of it and its own children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Children:
    """All children, in the order in which they were started; they end in the opposite one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.all: list[Child] = []

    def start(self, name: str, argv: Sequence[str]) -> Child:
        """Raises OSError if it cannot be executed."""
        child = Child(name, argv, self.directory)
        self.all.append(child)
        return child

    def check(self) -> None:
        """Raises ChildFailed for the first that has ended."""
        for child in self.all:
            child.check()

    async def ready(self, child: Child, probe: Callable[[], bool], seconds: float) -> None:
        """Wait until the probe says yes; it blocks the loop, so it is short. Raises ChildFailed."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not probe():
            self.check()
            if asyncio.get_running_loop().time() > deadline:
                raise ChildFailed(f"{child.name} was not ready after {seconds:.0f} s; its last lines:\n{child.tail()}")
            await asyncio.sleep(POLL_S)

    async def end(self, seconds: float = END_S) -> None:
        """SIGTERM to one after the other, SIGKILL to those that do not listen."""
        loop = asyncio.get_running_loop()
        for child in reversed(self.all):
            child.signal(signal.SIGTERM)
            deadline = loop.time() + seconds
            # A child watcher would take signals that are the demo's.
            while child.process.poll() is None and loop.time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S / 5)
            child.kill_group()
            child.process.wait()
        self.all.clear()


def environment() -> dict[str, str]:
    """Ours, and the folder of these packages first, so that `python -m` finds them from any directory."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def python(*arguments: str) -> list[str]:
    """A command line of this interpreter, which takes no module from the working directory."""
    return [sys.executable, "-P", "-m", *arguments]


def free_ports(count: int) -> list[int]:
    """Different ports that nobody listens on now, of a range from which systems take none for outgoing connections.

    A port of the outgoing range may be taken by anybody's connection between this look and its use.
    """
    ports: set[int] = set()
    for _ in range(PORT_TRIES_MAX):
        if len(ports) == count:
            return list(ports)
        port = random.SystemRandom().randrange(*PORTS)
        if is_free(port, "0.0.0.0"):
            ports.add(port)
    raise OSError(f"fewer than {count} free ports found from {PORTS[0]} to {PORTS[1]} in {PORT_TRIES_MAX} tries")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def descendants(pid: int) -> list[int]:
    """The direct children of a process, by /proc."""
    return [child for child, parent in _parents() if parent == pid]


def cpu_seconds(pid: int) -> float:
    """User and system time so far; 0 when it is gone."""
    fields = _stat(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def command_name(pid: int) -> str:
    """The short name that a process gave itself."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parents() -> Iterable[tuple[int, int]]:
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := _stat(int(entry))):
            yield int(entry), int(fields[1])


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _die_with(parent: int) -> Callable[[], None]:
    def in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return in_child


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
