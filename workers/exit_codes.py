"""How processes of this program end."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """OK and FAULT as everywhere; the others say who must act."""

    OK = 0
    FAULT = 1  # something at run time: a port in use, shared memory that does not fit, a child that cannot start
    USAGE = 2  # the command line cannot be read
    BOOT_FAILED = 70  # of a child, to the parent: starting again will not help
    RECYCLED = 75  # of a worker, to the parent: it had grown over its share of memory, and its streams have ended
    CONFIG = 78  # the configuration, or a flag that would be ignored


INTENDED = frozenset((ExitCode.OK, ExitCode.RECYCLED))  # of a child: nothing is wrong, a successor may start at once


def ending(code: int) -> str:
    """How a child ended, in words. `code` as `os.waitstatus_to_exitcode` gives it: negative for a signal."""
    if code < 0:
        return f"signal {-code}{_named(signal.Signals, -code)}"
    return f"exit code {code}{_named(ExitCode, code)}"


def _named(names: type[IntEnum], number: int) -> str:
    try:
        return f" ({names(number).name})"
    except ValueError:  # a real-time signal, or another program's exit code
        return ""
