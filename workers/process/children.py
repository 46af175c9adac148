"""Records the children: which process has each ordinal, and how earlier processes with the ordinal ended. Only the parent writes.

    per ordinal    pid (0: empty) | CPU time of ended children in us | children that ended, one word per cause

The metrics page reads these words. They are in unnamed memory, which children inherit, and stay when a child ends, so no count falls.
"""

import enum
import mmap

from shm.layout import WORD
from workers.host.exit_codes import INTENDED, ExitCode

PID, CPU_US, FIRST_CAUSE = range(3)
US_PER_S = 1_000_000


class EndCause(enum.IntEnum):
    """Why a child ended."""

    DONE = 0  # the parent told the child to end
    MEMORY = 1  # it used more than its share of memory, and its streams had ended
    BOOT_FAILED = 2  # it could not start
    FAULT = 3  # another exit code: an exception that nothing caught
    SIGNAL = 4  # it crashed, the kernel was short of memory, or a user killed it
    HUNG = 5  # the parent ended the child, because the child hung


CAUSES = {ExitCode.OK: EndCause.DONE, ExitCode.RECYCLED: EndCause.MEMORY, ExitCode.BOOT_FAILED: EndCause.BOOT_FAILED}


def cause_of(code: int, *, hung: bool) -> EndCause:
    """Returns why a child ended. `code`: the result of `os.waitstatus_to_exitcode`.

    `hung`: whether the parent had sent SIGABRT or SIGKILL, because the child hung or did not end.
    """
    if hung and code not in INTENDED:
        return EndCause.HUNG
    if code < 0:
        return EndCause.SIGNAL
    return CAUSES.get(ExitCode(code), EndCause.FAULT) if code in set(ExitCode) else EndCause.FAULT


class Children:
    """Reads and writes the words of all ordinals."""

    def __init__(self, ordinals: int) -> None:
        """`ordinals`: the number of all ordinals, including that of the kv-events process."""
        self._width = FIRST_CAUSE + len(EndCause)
        self._words = memoryview(mmap.mmap(-1, WORD * ordinals * self._width)).cast("q")
        self.ordinals = ordinals

    def started(self, ordinal: int, pid: int) -> None:
        """In the parent: records that process `pid` has the ordinal."""
        self._words[ordinal * self._width + PID] = pid

    def ended(self, ordinal: int, cause: EndCause, cpu_s: float) -> None:
        """In the parent: records that the child with the ordinal was reaped. `cpu_s`: the CPU time that it had used, in seconds."""
        at = ordinal * self._width
        self._words[at + CPU_US] += round(cpu_s * US_PER_S)
        self._words[at + PID] = 0
        self._words[at + FIRST_CAUSE + cause] += 1

    def pid(self, ordinal: int) -> int:
        """Returns the id of the process with the ordinal, or 0 if no process has it."""
        return self._words[ordinal * self._width + PID]

    def ended_cpu_s(self, ordinal: int) -> float:
        """Returns the seconds of CPU time that the ended children of the ordinal had used."""
        return self._words[ordinal * self._width + CPU_US] / US_PER_S

    def ends(self, ordinal: int) -> dict[EndCause, int]:
        """Returns how many children of the ordinal have ended, by cause."""
        at = ordinal * self._width + FIRST_CAUSE
        return dict(zip(EndCause, self._words[at : at + len(EndCause)], strict=True))
