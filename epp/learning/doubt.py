"""Says when predictions have been poor for so long that somebody should know, and what the likely cause is."""

from typing import Final

from epp.learning.model import LatencyModel

POOR: Final = 0.5  # predictions are poor if `LatencyModel.error` is above this
LONG_S: Final = 300.0
ENOUGH: Final = 200  # observations before predictions can be called poor
ONE: Final = 1.5  # an endpoint stands out if its error is more than so many times that of the model
FOREIGN: Final = 1.5  # servers have other clients if they run more than so many times the picker's requests in flight


class Doubt:
    """Watches one model. `look` returns the likely cause, once each time that the error has been high for LONG_S."""

    def __init__(self) -> None:
        self._poor_since = -1.0
        self._said = False

    def look(self, model: LatencyModel, now: float, running: float, sent: float) -> str:
        """Returns the likely cause, or "". `now`: monotonic seconds. `running`: requests that all servers run. `sent`: requests that
        the picker has in flight at all servers.
        """
        poor = model.error > POOR and sum(each.samples for each in model.endpoints.values()) >= ENOUGH
        if not poor:
            self._poor_since, self._said = -1.0, False
            return ""
        if self._poor_since < 0.0:
            self._poor_since = now
        if self._said or now - self._poor_since < LONG_S:
            return ""
        self._said = True
        return cause(model, running, sent)


def cause(model: LatencyModel, running: float, sent: float) -> str:
    """Returns what most likely makes the predictions poor."""
    if running > FOREIGN * max(1.0, sent):
        return f"the servers run {running:.0f} requests and the picker has sent {sent:.0f}: other clients use them"
    worst = max(model.endpoints.values(), key=lambda each: each.error)
    if len(model.endpoints) > 1 and worst.error > ONE * model.error:
        return "one endpoint answers unlike the others: its hardware, its limits or its load differ from minute to minute"
    return "the time to the first token depends on what the picker does not see: look at batch limits, preemptions, and cached prefixes"
