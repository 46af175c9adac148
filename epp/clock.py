"""Time as an argument: whoever needs it takes `now`, monotonic seconds."""

from typing import Protocol


class Clock(Protocol):
    """Gives monotonic seconds; `workers` passes the real one, tests a fake."""

    def now(self) -> float: ...
