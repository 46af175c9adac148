"""Memory and CPU time of a process, as Linux reports them in /proc."""

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USER, SYSTEM, RESIDENT = 11, 12, 21  # fields of /proc/PID/stat after the name, counted from 0: see proc_pid_stat(5)


class ProcessUse(NamedTuple):
    """Says what a process uses: bytes of resident memory including shared pages, and seconds of CPU time since its start."""

    resident_bytes: int
    cpu_s: float


def process_use(pid: int, proc: Path = PROC) -> ProcessUse | None:
    """Returns the memory and CPU time of a process. Returns None without such a process, or if it has ended and was not reaped."""
    try:
        # The name is in brackets and may hold blanks and brackets itself.
        fields = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        if fields[0] == "Z":
            return None
        cpu_ticks = int(fields[USER]) + int(fields[SYSTEM])
        return ProcessUse(int(fields[RESIDENT]) * PAGE, cpu_ticks / TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None


def data_bytes(proc: Path = PROC) -> int:
    """Returns how many bytes of this process are counted for its limit RLIMIT_DATA; 0 if unknown."""
    try:
        lines = (proc / "self" / "status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
