"""Defines the exit codes of this program's processes, and describes how a child ended."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of the program and of its children."""

    OK = 0
    FAULT = 1  # an error at run time: a port in use, too little shared memory, a child that cannot start
    USAGE = 2  # a wrong command line
    BOOT_FAILED = 70  # a child cannot start, and starting it again does not help
    RECYCLED = 75  # a worker used more than its share of memory, and left after all its streams had ended
    CONFIG = 78  # an error in the configuration, or a flag that would be ignored


INTENDED = frozenset((ExitCode.OK, ExitCode.RECYCLED))  # codes of a child after which a successor may start at once


def ending(code: int) -> str:
    """Returns a text that says how a child ended. `code`: the result of `os.waitstatus_to_exitcode`, negative for a signal."""
    if code < 0:
        return f"signal {-code}{_named(signal.Signals, -code)}"
    return f"exit code {code}{_named(ExitCode, code)}"


def _named(names: type[IntEnum], number: int) -> str:
    try:
        return f" ({names(number).name})"
    except ValueError:  # a real-time signal, or an exit code of another program
        return ""
