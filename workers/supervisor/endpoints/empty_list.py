"""Holds back a list that is suddenly empty: a source of endpoints may be wrong for a moment, and without endpoints no request is served.

A list from Kubernetes and an endpoints file follow the same rule. What was known stays for HOLD_S; an empty list counts if it was empty
all that time.
"""

from typing import Final

HOLD_S: Final = 10.0


class EmptyList:
    """Decides whether a list counts. `until`: a list that is empty does not count before this time; None: no list is held back."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until: float | None = None

    def counts(self, now: float, *, empty: bool, something_known: bool) -> bool:
        """Returns whether the present list counts. Times are monotonic seconds. `something_known`: whether an earlier list had entries."""
        if empty and something_known:
            if self.until is None:
                self.until = now + HOLD_S
            if now < self.until:
                return False
        self.until = None
        return True
