"""What a worker's plugins get: randomness, the load lane, the prefix index and the handles of their metrics."""

import random
from collections.abc import Callable, Mapping

from epp.candidates import Endpoint
from epp.metrics import Metric
from epp.plugin import Hashes, Plugin
from shm.lanes import Lane
from shm.prefix_index import IndexReader
from workers.bus import BusWriter


class LaneLoad:
    """Tokens in flight, in this worker's lane."""

    def __init__(self, lane: Lane) -> None:
        self._tokens = lane.tokens

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        self._tokens[endpoint.slot] += tokens


class SharedPrefixIndex:
    """Matches against shared memory, learns over the bus."""

    def __init__(self, reader: IndexReader, bus: BusWriter) -> None:
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.learn: Callable[[Hashes, int], None] = bus.learn


class LaneMeasure:
    """One histogram of this worker's lane."""

    __slots__ = ("_index", "_lane")

    def __init__(self, lane: Lane, index: int) -> None:
        self._lane = lane
        self._index = index

    def observe(self, value: float) -> None:
        self._lane.observe(self._index, value)


class WorkerServices:
    """Implements `epp.plugin.Services`."""

    def __init__(
        self,
        lane: Lane,
        index: IndexReader,
        bus: BusWriter,
        *,
        prefix_seed: int,
        rng: random.Random,
        measures: Mapping[tuple[str, str], int],
    ) -> None:
        self.rng = rng
        self.load = LaneLoad(lane)
        self.prefix_index = SharedPrefixIndex(index, bus)
        self.prefix_seed = prefix_seed
        self._lane = lane
        self._measures = measures

    def measure(self, plugin: Plugin, metric: Metric) -> LaneMeasure:
        return LaneMeasure(self._lane, self._measures[plugin.name, metric.name])
