"""Names model servers that report more tokens than their answers can have: in a counter, and in the log at a limited rate."""

from collections.abc import Callable
from typing import Final

from epp.candidates import Endpoint
from epp.decision.decision import Usage
from epp.metrics.series import USAGE_BEYOND_BOUNDS
from shm.series import SeriesWriter
from workers.host.log import Rarely

SERVERS_MAX: Final = 1024


class UsageDoubts:
    """Counts the reports of one worker's answers that `epp.protocol.usage_bounds` finds implausible."""

    def __init__(self, series: SeriesWriter, report: Callable[..., None], now: Callable[[], float]) -> None:
        """`series`: of the group PREDICTION. `report`: a method of a logger, see `Rarely`. Each server has a rate limit of its own."""
        self._series = series
        self._report = report
        self._now = now
        self._by_server: dict[Endpoint, Rarely] = {}
        self._at = series.counter_at[USAGE_BEYOND_BOUNDS.name]

    def __call__(self, server: Endpoint, reported: Usage, within: Usage) -> None:
        """Counts a report. `within`: the same report within its bounds, which is what counts."""
        series = self._series
        series.words[series.block((server.name, server.namespace, str(server.port))) + self._at] += 1
        rarely = self._by_server.get(server)
        if rarely is None:
            if len(self._by_server) >= SERVERS_MAX:
                self._by_server.clear()
            rarely = self._by_server[server] = Rarely("a server reports more tokens than its answers can have", self._report)
        rarely.tell(
            self._now(),
            f"{server.namespace}/{server.name} ({server.address}): {reported.prompt} prompt and {reported.completion} completion tokens "
            f"reported, {within.prompt} and {within.completion} possible",
        )
