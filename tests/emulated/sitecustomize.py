"""Python imports this at its start if its folder is in PYTHONPATH: `tests/arm.py` has pickers start so under the emulator.

The emulator adds a thread of its own to every process. No fork of the emulated program copies its locks, so the picker must not count it.
"""

from workers.process import fork

threads = fork.threads
fork.threads = lambda: threads() - 1  # type: ignore[assignment]
