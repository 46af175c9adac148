"""Imports each compiled module first in a process of its own. Prints the modules that cannot be imported, with the exception."""

import importlib
import os
import sys
from collections.abc import Callable

from compiled.finder import choose, module_name
from compiled.modules import PATHS

OURS = ("compiled", "epp", "shm", "tests", "workers")
MODULES = [*map(module_name, PATHS)]


def in_a_child(act: Callable[[], str]) -> str:
    """Returns what the function returns in a new process, or the exception that it raises there."""
    reading, writing = os.pipe()
    if not os.fork():
        try:
            said = act()
        except Exception as fault:
            said = repr(fault)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.wait()
    return said


def of_others() -> str:
    """Returns the modules of Python and of third parties that the compiled modules import."""
    for name in MODULES:
        importlib.import_module(name)
    return " ".join(name for name in sys.modules if name.partition(".")[0] not in OURS)


def imported(name: str) -> str:
    importlib.import_module(name)
    return ""


def main() -> None:
    choose()
    for name in in_a_child(of_others).split():  # before the forks, which saves most of their time
        importlib.import_module(name)
    for name in MODULES:
        if fault := in_a_child(lambda name=name: imported(name)):  # type: ignore[misc]
            print(f"{name}: {fault}", flush=True)


if __name__ == "__main__":
    main()
