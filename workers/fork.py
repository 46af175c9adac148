"""One child, right.

The parent has one thread and no event loop, and this module makes sure of it before every fork: a copied lock that a thread
held stays locked for ever in the child. The child starts from known ground: signals at their defaults, none blocked, its own
random numbers, only the descriptors that are its own, and it leaves by `os._exit`, never through the parent's stack.

SIGINT and SIGTERM are ignored until the child sets its own handlers: a terminal or a process manager sends them to the whole
group, and who ends when is the parent's decision, as is what SIGTTIN and SIGTTOU change. SIGABRT prints the stacks of all
threads, then ends the child.
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

from workers.exit_codes import ExitCode

COMM_BYTES_MAX = 15
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGTTIN, signal.SIGTTOU)
_DEFAULT = (signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


class NotForkSafe(AssertionError):
    """This process must not fork."""


def threads() -> int:
    """Threads of this process, those of C libraries included."""
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"Threads:"):
                return int(line.split()[1])
    raise NotForkSafe("/proc/self/status names no Threads: mount /proc")


def prepare() -> None:
    """Once in the parent, when all that children need is imported: their collectors will not touch (and copy) it."""
    gc.collect()
    gc.freeze()


def spawn(name: str, main: Callable[[], int], *, closed: Iterable[int], failed: Callable[[str], None]) -> int:
    """The pid of a child that runs `main` and exits with its result.

    `closed` are descriptors the child must not hold; `failed` is called in the child with the text of what `main` raised.
    """
    if (count := threads()) != 1:
        raise NotForkSafe(
            f"{count} threads in the parent: nothing that starts a thread may be imported or run before a fork"
        )
    closed = tuple(closed)
    every = signal.valid_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, every)
    try:
        pid = os.fork()
        if pid == 0:
            _child(name, main, closed, failed)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, every)
    return pid


def _child(name: str, main: Callable[[], int], closed: tuple[int, ...], failed: Callable[[str], None]) -> NoReturn:
    code: int = ExitCode.FAULT
    try:
        _known_ground(name, closed)
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


def _known_ground(name: str, closed: tuple[int, ...]) -> None:
    signal.set_wakeup_fd(-1)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    for number in _DEFAULT:
        signal.signal(number, signal.SIG_DFL)
    for descriptor in closed:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    random.seed()
    if "numpy.random" in sys.modules:  # importing it costs each child 4 MiB
        sys.modules["numpy.random"].seed()
    faulthandler.enable()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(name[:COMM_BYTES_MAX])
