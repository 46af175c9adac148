"""Counts the faults of peers of the ext_proc port by cause, for /metrics, and logs them at a limited rate."""

from collections.abc import Callable

from epp.metrics.series import PEER_FAULTS
from shm.series import SeriesWriter
from workers.host.log import Rarely

SLOW_BODY = "slow_body"


class PeerFaults:
    """Counts the faults of one worker's peers. It is called with the cause of each fault.

    Details may follow the cause after a colon. Only the log shows them.
    """

    def __init__(self, series: SeriesWriter, report: Callable[..., None], now: Callable[[], float]) -> None:
        """`report`: a method of a logger, see `Rarely`. Each cause has a rate limit of its own, so a frequent cause hides no other."""
        self._series = series
        self._report = report
        self._now = now
        self._by_cause: dict[str, Rarely] = {}
        self._at = series.counter_at[PEER_FAULTS.name]

    def __call__(self, cause: str) -> None:
        name = cause.partition(":")[0].replace(" ", "_")
        self._series.words[self._series.block((name,)) + self._at] += 1
        rarely = self._by_cause.get(name)
        if rarely is None:
            rarely = self._by_cause[name] = Rarely("peers' faults", self._report)
        rarely.tell(self._now(), cause)
