"""Shows on a terminal how far a long command has got, in one line on stderr that the next text replaces. Without a terminal, only warnings
appear.
"""

import sys
from types import TracebackType
from typing import Final

from workers.cli.output import echo, echo_as_is

CLEAR: Final = "\r\x1b[K"


class Progress:
    """A context manager that leaves the terminal clean."""

    def __init__(self) -> None:
        self._shown = False
        self._is_terminal = sys.stderr.isatty()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._clear()

    def show(self, text: str) -> None:
        """Replaces the line."""
        if self._is_terminal:
            self._clear()
            echo(text[:200], nl=False, err=True)
            self._shown = True

    def note(self, text: str) -> None:
        """Prints a line that stays, also without a terminal."""
        self._clear()
        echo(text, err=True)

    def caution(self, text: str) -> None:
        """Prints a warning that stays."""
        self.note(f"warning: {text}")

    def _clear(self) -> None:
        if self._shown:
            echo_as_is(CLEAR, nl=False, err=True)
            self._shown = False
