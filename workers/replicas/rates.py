"""How much of what one replica sends is read: a bound per second, so that a sender that lies cannot occupy the supervisor.

A replica sends at most a message per half tick (200 a second) and drops its backlog beyond 1 MiB.
"""

from typing import Final

MESSAGES_MAX: Final = 400  # per second
BYTES_MAX: Final = 8 << 20


class Rate:
    """Counts the messages and bytes of one sender in the current second."""

    __slots__ = ("_bytes", "_messages", "_since")

    def __init__(self, now: float) -> None:
        self._since = now
        self._messages = self._bytes = 0

    def exceeded(self, size: int, now: float) -> bool:
        """Counts a message of `size` bytes. Returns whether it is beyond the bound."""
        if now - self._since >= 1.0:
            self._since = now
            self._messages = self._bytes = 0
        self._messages += 1
        self._bytes += size
        return self._messages > MESSAGES_MAX or self._bytes > BYTES_MAX
