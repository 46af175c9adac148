"""Reports how each change of the configuration ended, as an event on the pool (`workers.supervisor.kube.events`)."""

from collections.abc import Callable
from typing import Final, Protocol

from workers.shared.reload_status import ReloadStatus

LOOK_S: Final = 1.0
RELOADED: Final = "ConfigurationReloaded"
REFUSED: Final = "ConfigurationRefused"
ROLLED_BACK: Final = "ConfigurationRolledBack"
TAKEN_BACK: Final = "error[rolled-back]"


class Teller(Protocol):
    """Takes an event (`workers.supervisor.kube.events.Events`)."""

    def tell(self, reason: str, message: str, *, warning: bool) -> None: ...


class ReloadEvents:
    """Tells how each reload ended, once.

    The state that it finds when it is created causes no event: a predecessor has told it already, or nothing was reloaded yet.
    """

    def __init__(self, read: Callable[[], ReloadStatus | None], events: Teller) -> None:
        self._read = read
        self._events = events
        status = read()
        self._finished = status.finished if status is not None else 0

    def look(self) -> None:
        """Tells how the last attempt ended, if it has ended since the last call."""
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
