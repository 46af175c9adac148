"""Forks pickers, simulated servers and commands from processes that have imported them: a start takes a fifth of the CPU.

    forked(argv, out, err)                 in pytest: starts a command line as a child of a zygote
    python -P -m tests.zygote NAME...      a zygote: imports modules, and forks a child for each request on its standard input

A name `module:function` also calls a function that imports more.

A zygote has one thread and no state but its imports. A child gets the session, arguments, environment, directory and files of a new
process, and runs its module as `python -m` does. A test can see the difference in /proc/PID/cmdline and environ. All children of a zygote
also share one seed of hashes, and the limits and umask that it started with.

A command line is not forked if it begins with another command than this interpreter (`env` may set variables first), if its module is
not listed here, or if a variable that decides about imports has changed since pytest imported this module.
"""

import atexit
import ctypes
import functools
import gc
import importlib
import itertools
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from loadtest.demo.children import PR_SET_PDEATHSIG, environment, new_process, python

PYTHON: Final = python()
COMMANDS: Final = (
    "workers.cli.doctor.command workers.cli.doctor.access workers.cli.explain workers.cli.check workers.cli.record workers.cli.reload "
    "workers.cli.top.command workers.supervisor.kube.election workers.shared.recording.export encodings.idna"
)
SERVERS: Final = (
    "loadtest.sim.fleet loadtest.sim.server loadtest.sim.events loadtest.sim.kv_publisher loadtest.sim.kv_settings argparse encodings.idna "
    "resource shutil uvloop"
)
SERVE: Final = (
    "workers.cli.serve workers.cli.trial workers.supervisor.main:import_own workers.supervisor.kube.session workers.worker.main "
    "workers.supervisor.replication workers.supervisor.kv_events.main epp.config.registry:known numpy.ma encodings.idna"
)
IMPORTED: Final = {  # by the first one or two words of a command line
    "workers serve": SERVE,
    "workers demo": "",  # a new process, like all that it starts
    "workers": COMMANDS,
    "loadtest.sim.main": SERVERS,
    "tests.faults.fake_picker": "epp.config.load workers.process.parent workers.process.instance",
}
DECIDING: Final = ("EPP_COMPILED", "PYTHON", "OPENBLAS_", "COV", "LD_", "MALLOC_", "LC_", "LANG", "TZ")  # prefixes
POLL_S: Final = 0.005
MESSAGE_BYTES_MAX: Final = 1 << 18

# In pytest


def forked(argv: Sequence[str], out: int, err: int) -> "subprocess.Popen[bytes] | None":
    """Starts a command line as a child of a zygote. Returns None if that would not be the same as a new process.

    The child reads nothing, leads a session, and gets SIGTERM when this process ends. `out`, `err`: descriptors of its output.
    """
    given = [*itertools.takewhile(lambda word: "=" in word, argv[1:])] if argv[0] == "env" else []
    argv = argv[1 + len(given) :] if given else argv
    words, variables = argv[len(PYTHON) :], {**environment(), **dict(pair.split("=", 1) for pair in given)}
    modules = IMPORTED.get(" ".join(words[:2]), IMPORTED.get(" ".join(words[:1])))
    # Outside pytest are benchmarks, which measure new processes.
    if "PYTEST_VERSION" not in os.environ or [*PYTHON, *words] != [*argv] or not modules:
        return None
    return Forked(_zygote(modules), words, variables, (out, err)) if _deciding(variables) == DECIDED else None


def started(argv: Sequence[str], output: int) -> "subprocess.Popen[bytes]":
    """Starts a child: forked, where that is the same as a new process. `output`: the descriptor of its output."""
    return forked(argv, output, output) or new_process(argv, output)


def _deciding(variables: Mapping[str, str]) -> Mapping[str, str]:
    return {name: value for name, value in variables.items() if name.startswith(DECIDING)}


DECIDED: Final = _deciding(environment())


class Zygote:
    """A zygote, as pytest sees it. It ends with pytest."""

    def __init__(self, modules: str) -> None:
        self._asking = threading.Lock()
        self._control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = subprocess.Popen(
                [*PYTHON, "tests.zygote", *modules.split()], stdin=its, stdout=subprocess.DEVNULL, env=environment(), start_new_session=True
            )
        atexit.register(process.wait)
        atexit.register(self._control.close)

    def ask(self, request: Any, descriptors: Sequence[int] = ()) -> Any:
        """Returns the answer to a request: the pid of a new child, or what `waitpid` says about one."""
        with self._asking:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            return json.loads(self._control.recv(MESSAGE_BYTES_MAX))


_zygote = functools.cache(Zygote)


class Forked(subprocess.Popen[bytes]):
    """A child of a zygote. Its pid, exit code, waits and signals are as those of a child of pytest. It has no pipes."""

    def __init__(self, zygote: Zygote, words: Sequence[str], variables: Mapping[str, str], files: Sequence[int]) -> None:
        self.args, self._zygote = [*PYTHON, *words], zygote
        self.returncode: int | None = None
        self.pid = zygote.ask((words, variables, os.getcwd()), files)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = self._zygote.ask(self.pid)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begun = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begun > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


# In the zygote


def obey(control: socket.socket) -> Sequence[str]:
    """Forks and waits for children as pytest requests, until pytest ends. Returns in each child, with its module and arguments."""
    own = os.getpid()
    while True:
        request, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 2)
        match json.loads(request or "null"):
            case None:
                os._exit(0)
            case int(pid):
                control.send(json.dumps(os.waitpid(pid, os.WNOHANG)).encode())
            case [words, variables, directory]:
                if os.fork() == 0:
                    become(control, own, files, variables, directory)
                    return words
                for descriptor in files:
                    os.close(descriptor)


def become(control: socket.socket, parent: int, files: Sequence[int], variables: Any, directory: str) -> None:
    """Makes this child what a new process would be, and then tells its pid."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)
    os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    for number, descriptor in enumerate(files, start=1):
        os.dup2(descriptor, number)
    control.send(str(os.getpid()).encode())
    os.dup2(os.open(os.devnull, os.O_RDONLY), control.detach())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def leave(codes: Sequence[int]) -> None:
    """Ends a child as its last atexit function: its memory goes at once. Python would destroy each object, and the kernel copy its page."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    ended: list[int] = []  # the exit code of a child that ends by itself, not by an exception or signal
    atexit.register(leave, ended)  # before the imports: functions that they register run earlier
    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    gc.freeze()
    module, *sys.argv[1:] = obey(socket.socket(fileno=0))
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            ended.append((end.code or 0) & 0xFF)
        raise
