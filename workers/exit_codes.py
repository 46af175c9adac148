"""How processes of this program end."""

from enum import IntEnum


class ExitCode(IntEnum):
    """OK and FAULT as everywhere; the others say who must act."""

    OK = 0
    FAULT = 1  # something at run time: a port in use, shared memory that does not fit, a child that cannot start
    USAGE = 2  # the command line cannot be read
    BOOT_FAILED = 70  # of a child, to the parent: starting again will not help
    CONFIG = 78  # the configuration, or a flag that would be ignored
