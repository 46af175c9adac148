"""What waits in flow control: this replica's sums for messages, and the sums of others for the remote lane.

The limits of bands and of all bands hold over all replicas, because each worker adds the remote lane to what it sees of the other
workers. A band is named by its priority, since its place in the lanes differs between replicas.
"""

from collections.abc import Iterable

from shm.flow_lanes import FlowLanes
from shm.remote_lane import RemoteLane
from workers.endpoints.replicas.wire import Band, Flow
from workers.shared.objectives import ObjectivesView

REQUESTS_MAX = 1 << 24  # that wait in one band of one replica
BYTES_MAX = 1 << 44


class Waiting:
    """Reads the flow lanes of this replica, and writes the bands of the remote lane."""

    def __init__(self, flow: FlowLanes, objectives: ObjectivesView, remote: RemoteLane) -> None:
        self._flow = flow
        self._objectives = objectives
        self._remote = remote
        self._said: list[Band] = []

    def bands(self, *, whole: bool) -> Flow | None:
        """Returns what waits here, by band; None if nothing changed since the last call and `whole` is false."""
        self._objectives.look()
        bands = []
        for priority, place in self._objectives.places.items():
            cell = self._flow.band(place)
            if cell.requests > 0:
                bands.append(Band(priority, cell.requests, max(cell.bytes, 0)))
        if bands == self._said and not whole:
            return None
        self._said = bands
        return Flow(bands)

    def show(self, flows: Iterable[Flow]) -> None:
        """Writes the sums of what waits in other replicas."""
        sums: dict[int, list[int]] = {place: [0, 0] for place in range(self._remote.schema.bands)}
        for flow in flows:
            for band in flow.bands:
                place = self._objectives.places.get(band.priority)
                if place is not None and place in sums:
                    sums[place][0] += min(band.requests, REQUESTS_MAX)
                    sums[place][1] += min(band.bytes, BYTES_MAX)
        for place, (requests, size) in sums.items():
            self._remote.set_band(place, requests, size)
