"""What peers of the ext_proc port did wrong: counted by cause for /metrics, and told to the log now and then."""

from collections.abc import Callable

from epp.metrics import PEER_FAULTS
from shm.series import SeriesWriter
from workers.log import Rarely

SLOW_BODY = "slow_body"


class PeerFaults:
    """One worker's; called with the cause, and what the log may know besides after a colon."""

    def __init__(self, series: SeriesWriter, rarely: Rarely, now: Callable[[], float]) -> None:
        self._series = series
        self._rarely = rarely
        self._now = now
        self._at = series.counter_at[PEER_FAULTS.name]

    def __call__(self, cause: str) -> None:
        name = cause.partition(":")[0].replace(" ", "_")
        self._series.words[self._series.block((name,)) + self._at] += 1
        self._rarely.tell(self._now(), cause)
