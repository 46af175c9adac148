"""Sums up what waits in flow control here, for messages to other replicas, and writes the sums of the others into the remote lane.

The limits of bands and of all bands hold over all replicas, because each worker adds the remote lane to what it sees of the other
workers. A band is named by its priority, since its place in the lanes differs between replicas.
"""

from collections.abc import Iterable

from epp.request.flows import rank
from shm.flow_lanes import DISPATCHED, WAITING, FlowLanes
from shm.remote_lane import RemoteLane
from workers.replicas.wire import Band, Flow
from workers.shared.objectives import ObjectivesView

REQUESTS_MAX = 1 << 24  # that wait in one band of one replica
BYTES_MAX = 1 << 44
PROGRESS_MASK = (1 << 62) - 1


class Waiting:
    """Reads the flow lanes of this replica, and writes the bands of the remote lane."""

    def __init__(self, flow: FlowLanes, objectives: ObjectivesView, remote: RemoteLane) -> None:
        self._flow = flow
        self._objectives = objectives
        self._remote = remote
        self._said: list[Band] = []
        self._progress = 0

    def bands(self, *, whole: bool) -> Flow | None:
        """Returns what waits here, by band; None if nothing changed since the last call and `whole` is false."""
        if not whole and not self._said and not self._flow.total(WAITING):
            return None
        self._objectives.look()
        bands = []
        for priority, place in self._objectives.places.items():
            cell = self._flow.band(place)
            if cell.requests > 0:
                bands.append(Band(priority, cell.requests, max(cell.bytes, 0)))
        progress = self._flow.total(DISPATCHED) & PROGRESS_MASK
        if bands == self._said and not whole and (not bands or progress == self._progress):
            return None
        self._said, self._progress = bands, progress
        return Flow(bands, progress)

    def show(self, flows: Iterable[Flow]) -> None:
        """Writes the sums of what waits in other replicas, and where the most important of it waits."""
        self._objectives.look()
        places = self._objectives.places
        sums: dict[int, list[int]] = {place: [0, 0] for place in range(self._remote.schema.bands)}
        first, progress = None, 0
        for flow in flows:
            own = None  # the most important band of this replica
            for band in flow.bands:
                place = places.get(band.priority)
                if place is None or place not in sums:
                    continue
                sums[place][0] += min(band.requests, REQUESTS_MAX)
                sums[place][1] += min(band.bytes, BYTES_MAX)
                if band.requests and (own is None or rank(band.priority) < rank(own)):
                    own = band.priority
            if own is not None and (first is None or rank(own) <= rank(first)):
                progress = flow.progress if own != first else progress + flow.progress
                first = own
        for place, (requests, size) in sums.items():
            self._remote.set_band(place, requests, size)
        self._remote.set_waiting(sum(requests for requests, _ in sums.values()), sum(size for _, size in sums.values()))
        self._remote.set_head(None if first is None else places[first], progress & PROGRESS_MASK)
