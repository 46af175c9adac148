"""Forks one child and gives it a clean state.

The parent must have one thread and no event loop; this module checks that before every fork. Otherwise a lock that another thread
held during the fork would stay locked in the child for ever. The child starts with default signal handlers, no blocked signal, new
random seeds, and only the descriptors that it needs. It ends with `os._exit`, so it never returns into the parent's stack.

The child ignores SIGINT and SIGTERM until it sets its own handlers. A terminal or a process manager sends these signals to the whole
process group, but the parent decides when a child ends. The child ignores SIGTTIN and SIGTTOU for the same reason. It also ignores SIGUSR1,
SIGUSR2 and SIGALRM, which have no meaning in this program. SIGABRT prints the stacks of all threads and ends the child.
"""

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from workers.host import mapped_code, memory
from workers.host.exit_codes import ExitCode
from workers.host.log import name_process

TITLE = "epp: "  # begins the title of every child
COMM_BYTES_MAX = 15
MEANINGLESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)  # all processes ignore them
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU, *MEANINGLESS)


PR_SET_PDEATHSIG = 1


class NotForkSafe(AssertionError):
    """Raised if this process may not fork in its present state."""


def threads() -> int:
    """Returns the number of threads of this process, including those of C libraries."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Threads:"):
                return int(line.split()[1])
    raise NotForkSafe("/proc/self/status has no line 'Threads:': mount /proc")


def prepare() -> None:
    """Keeps memory shared with future children, by making their garbage collectors not write to the objects that exist now.

    The kernel copies each page to which a child writes (copy-on-write). Also gives back the memory that only the imports needed. Call this
    once in the parent, after all imports.
    """
    memory.trim()
    gc.freeze()
    mapped_code.note()
    mapped_code.give_back()


def spawn(name: str, main: Callable[[], int], *, closed: Iterable[int], failed: Callable[[str], None]) -> int:
    """Forks a child that runs `main` and exits with its result. Returns the pid.

    The child closes the descriptors in `closed`. If `main` raises, the child calls `failed` with the error text.
    Raises NotForkSafe, and OSError if the system refuses the fork.
    """
    if (count := threads()) != 1:
        raise NotForkSafe(f"the parent has {count} threads: import and call nothing that starts a thread before a fork")
    closed = tuple(closed)
    every = signal.valid_signals()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, every)
    try:
        pid = os.fork()
        if pid == 0:
            _child(name, main, closed, failed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def end_with(parent: int) -> None:
    """In a child: lets the kernel kill this process when `parent` ends. Exits at once if `parent` has ended already."""
    import ctypes  # a late import, because the parent does not need ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(ExitCode.FAULT)


def _child(name: str, main: Callable[[], int], closed: tuple[int, ...], failed: Callable[[str], None]) -> NoReturn:
    code: int = ExitCode.FAULT
    try:
        _clean_state(name, closed)
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else ExitCode.FAULT
    except BaseException as fault:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
            failed(f"{type(fault).__name__}: {fault}")
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _clean_state(name: str, closed: tuple[int, ...]) -> None:
    name_process(name.removeprefix(TITLE))
    signal.set_wakeup_fd(-1)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor in closed:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    random.seed()
    if "numpy.random" in sys.modules:  # an import here would cost each child 4 MiB
        sys.modules["numpy.random"].seed()
    faulthandler.enable()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name[:COMM_BYTES_MAX])
