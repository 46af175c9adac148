"""Runs a picker as on a starved CPU: each module that a child imports takes some time. Lists those that hold up an event loop.

    python -m tests.faults.slow_imports LIST SECONDS python -m workers serve ...

LIST: the file to which every child that has reported ready appends the modules that its event loop imports. SECONDS: what each import takes
in a child. Imports before the fork take no longer than usual: the start of a picker has no deadline there.
"""

import os
import runpy
import sys
import threading
import time
from typing import Any


class Slow:
    """A finder that finds nothing, but is asked first."""

    def __init__(self, listed: str, seconds: float) -> None:
        self._listed = os.open(listed, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._seconds = seconds
        self._parent = os.getpid()
        self._ready = False
        os.register_at_fork(after_in_child=self._watch)

    def _watch(self) -> None:
        from workers.process.reports import Reports

        told = Reports.ready

        def ready(reports: Reports, ordinal: int) -> None:
            told(reports, ordinal)
            self._ready = True

        Reports.ready = ready  # type: ignore[method-assign]

    def find_spec(self, name: str, *_: Any) -> None:
        if os.getpid() == self._parent:
            return
        if self._ready and threading.current_thread() is threading.main_thread():
            os.write(self._listed, f"{name}\n".encode())
        time.sleep(self._seconds)


def main() -> None:
    listed, seconds, *command = sys.argv[1:]
    sys.meta_path.insert(0, Slow(listed, float(seconds)))  # type: ignore[arg-type]
    module = command.index("-m") + 1
    sys.argv = ["epp", *command[module + 1 :]]
    runpy.run_module(command[module], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
