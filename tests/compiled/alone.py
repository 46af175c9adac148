"""Imports each compiled module first in a process of its own. Prints the modules that cannot be imported, with the exception."""

import importlib
import os

import numpy as np

from compiled.modules import PATHS


def main() -> None:
    assert np.__version__, "imported before the forks, which saves most of their time"
    for path in PATHS:
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        child = os.fork()
        if not child:
            try:
                importlib.import_module(module)
            except Exception as fault:
                print(f"{module}: {fault!r}", flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
