"""Sums up the requests that wait in flow control at this replica, for messages, and writes the sums of other replicas into the remote area.

The limits of bands and of all bands hold over all replicas, because each worker adds the remote area to the areas of the other workers.
Messages name a band by its priority, because its place in the areas differs between replicas.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple

from epp.request.flows import rank
from shm.flow_areas import DISPATCHED, WAITING, FlowAreas
from shm.remote_area import RemoteArea
from workers.replicas.wire import ONLY, Band, Flow, PoolFlow
from workers.shared.objectives import ObjectivesView

REQUESTS_MAX = 1 << 24  # the most requests that can wait in one band of one replica
BYTES_MAX = 1 << 44
PROGRESS_MASK = (1 << 62) - 1
LOOKS_MAX: Final = 64  # the number of quiet pools to check in one turn


class News(NamedTuple):
    """The waiting requests in a message: `flow` for the only pool, `flows` for several pools."""

    flow: Flow | None = None
    flows: Sequence[PoolFlow] = ()

    @property
    def any(self) -> bool:
        return self.flow is not None or bool(self.flows)


class Waiting:
    """Reads the flow areas of this replica, and writes the bands of the remote area."""

    def __init__(self, flow: FlowAreas, objectives: ObjectivesView, remote: RemoteArea) -> None:
        self._flow = flow
        self._objectives = objectives
        self._remote = remote
        self._said: list[Band] = []
        self._progress = 0

    def bands(self, *, whole: bool) -> Flow | None:
        """Returns the waiting requests of this replica by band. Returns None if no band has changed since the last call, unless `whole`."""
        if not whole and not self._said and not self._flow.total(WAITING):
            return None
        self._objectives.look()
        bands = []
        for priority, place in self._objectives.content.places.items():
            cell = self._flow.band(place)
            if cell.requests > 0:
                bands.append(Band(priority, cell.requests, max(cell.bytes, 0)))
        progress = self._flow.total(DISPATCHED) & PROGRESS_MASK
        if bands == self._said and not whole and (not bands or progress == self._progress):
            return None
        self._said, self._progress = bands, progress
        return Flow(bands, progress)

    def show(self, flows: Iterable[Flow]) -> None:
        """Writes the sums of the requests that wait in other replicas, and the most important waiting band."""
        self._objectives.look()
        places = self._objectives.content.places
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


class WaitingInPools:
    """The waiting requests of each pool, by the key of the pool. One turn checks at most LOOKS_MAX pools without waiting requests."""

    def __init__(self, pools: Mapping[int, Waiting]) -> None:
        self._pools = pools
        self._busy: set[int] = set()  # keys of the pools with waiting requests that other replicas know
        self._turn = iter(pools)

    def use(self, pools: Mapping[int, Waiting]) -> None:
        """Switches to other pools."""
        self._pools = pools
        self._busy &= pools.keys()
        self._turn = iter(pools)

    def news(self, *, whole: bool) -> News:
        """Returns the waiting requests for a message: changes, and for a `whole` message also the only pool and all pools with waiting
        requests that other replicas know.
        """
        only, flows = None, []
        for key in {*self._busy, *self._next()}:
            flow = self._pools[key].bands(whole=whole)
            if flow is None:
                continue
            if flow.bands:
                self._busy.add(key)
            elif whole and key not in self._busy and key != ONLY:
                continue
            else:
                self._busy.discard(key)
            if key == ONLY:
                only = flow
            else:
                flows.append(PoolFlow(key, flow))
        return News(only, flows)

    def show(self, pools: Iterable[int], flows: Callable[[int], Iterable[Flow]]) -> None:
        """Writes the requests that wait in other replicas, for those `pools` that this replica has. `flows` returns them by pool key."""
        for key in pools:
            if (waiting := self._pools.get(key)) is not None:
                waiting.show(flows(key))

    def _next(self) -> list[int]:
        keys = list(islice(self._turn, LOOKS_MAX))
        if len(keys) < LOOKS_MAX:
            self._turn = iter(self._pools)
        return keys
