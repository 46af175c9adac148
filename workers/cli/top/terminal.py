"""Waits between two looks, with or without a terminal.

Signals only write a byte to a pipe, so they never interrupt the drawing. On a terminal, single keys are read without Enter. The
settings of the terminal are restored at the end.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import FrameType
from typing import Any, Self

from workers.cli.output import is_terminal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_KEYS = b"qQ\x03\x04"
KEYS_MAX = 64


class Terminal:
    """Waits until the time is over, a signal arrives, or the user presses q."""

    def __init__(self, *, keys: bool) -> None:
        """`keys`: whether to read keys if the input is a terminal. If False, does not touch the input."""
        self._input = sys.stdin.fileno() if keys and is_terminal(sys.stdin) else None
        self._before: Any = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._ended = False

    def __enter__(self) -> Self:
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if self._input is not None:
            self._before = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._input is not None:
            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self._input, termios.TCSADRAIN, self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._woken)
        os.close(self._wakes)

    def wait(self, seconds: float) -> bool:
        """Waits for `seconds` and returns False. Returns True earlier if the user ends the view."""
        deadline = time.monotonic() + seconds
        while not self._ended and (left := deadline - time.monotonic()) > 0:
            watched = [self._woken, *([] if self._input is None else [self._input])]
            ready, _, _ = select.select(watched, [], [], left)
            if self._input in ready:
                self._read_keys()
        return self._ended

    def _read_keys(self) -> None:
        assert self._input is not None
        try:
            keys = os.read(self._input, KEYS_MAX)
        except OSError:
            keys = b""
        self._ended |= not keys or any(key in END_KEYS for key in keys)  # no bytes: the terminal is gone

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._ended = True
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b"\0")
