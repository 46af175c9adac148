"""Turns what becomes of each change of the configuration into an event on the pool (`workers.kube.events`)."""

from collections.abc import Callable
from typing import Final, Protocol

from workers.shared.reload_status import ReloadStatus

LOOK_S: Final = 1.0
RELOADED: Final = "ConfigurationReloaded"
REFUSED: Final = "ConfigurationRefused"
ROLLED_BACK: Final = "ConfigurationRolledBack"
TAKEN_BACK: Final = "error[rolled-back]"


class Teller(Protocol):
    """Takes an event (`workers.kube.events.Events`)."""

    def tell(self, reason: str, message: str, *, warning: bool) -> None: ...


class ReloadEvents:
    """Looks at the state of reloads. The first state is no event: a predecessor has told it, or it is the start."""

    def __init__(self, read: Callable[[], ReloadStatus | None], events: Teller) -> None:
        self._read = read
        self._events = events
        status = read()
        self._finished = status.finished if status is not None else 0

    def look(self) -> None:
        """Tells how the last attempt ended, once."""
        status = self._read()
        if status is None or status.busy or status.finished == self._finished:
            return
        self._finished = status.finished
        generation = f"generation {status.generation} ({status.hash})"
        if status.successful:
            tried = status.tryout
            beside = (
                f"; candidate {tried.generation} ({tried.hash}) is tried {tried.share}" if tried is not None else ""
            )
            self._events.tell(RELOADED, f"{generation} is in force{beside}", warning=False)
            return
        reason = ROLLED_BACK if TAKEN_BACK in status.text else REFUSED
        self._events.tell(reason, f"{generation} is in force: {status.text}", warning=True)
