"""The objects with which a worker's plugins use shared memory: load, prefix index, latency model, histograms, counters and gauges."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Final

from compiled.calls import follow, increase, raise_to
from epp.candidates import Endpoint
from epp.learning import samples
from epp.learning.model import FirstToken, Floats, LatencyModel
from epp.learning.state import UnusableModel, decode
from epp.metrics import Metric
from epp.metrics.catalogue import GAUGE_PARTS, WEIGHT
from epp.plugin import Hashes, Plugin, PrefixIndex
from shm.areas import Area
from shm.documents import DocumentReader
from shm.prefills import PromptStarts
from shm.prefix_index import IndexReader
from shm.prefix_writer import SPAN, in_tier
from shm.series import FIRST_BLOCK, SeriesWriter
from workers.shared.bus import BusWriter

GAUGE_MAX: Final = 1e11  # limit of a value, so that the sum over all workers fits into a word
FLUSH_S: Final = 0.02  # how long a sample of the latency model waits for further samples
BATCH: Final = 32

assert BATCH <= samples.SAMPLES_MAX


class AreaLoad:
    """Counts the tokens in flight, in this worker's area."""

    def __init__(self, area: Area) -> None:
        self._tokens = area.tokens

    def add_tokens(self, endpoint: Endpoint, tokens: int) -> None:
        increase(self._tokens, endpoint.slot, tokens)


class SharedPrefixIndex:
    """Matches prefixes in the index in shared memory. Adds to the index through the bus."""

    def __init__(self, reader: IndexReader, bus: BusWriter) -> None:
        self.match: Callable[[Hashes], Mapping[int, int]] = reader.match
        self.learn: Callable[[Hashes, int], None] = bus.learn
        self.forget: Callable[[Hashes, int], None] = bus.forget


class AreaMeasure:
    """Observes values of one histogram in this worker's area."""

    __slots__ = ("_area", "_index")

    def __init__(self, area: Area, index: int) -> None:
        self._area = area
        self._index = index

    def observe(self, value: float) -> None:
        self._area.observe(self._index, value)


class SeriesCount:
    """Increments one counter that a plugin declares, in this worker's series."""

    __slots__ = ("_at", "_fixed", "_rest", "_series")

    def __init__(self, series: SeriesWriter, plugin: Plugin, metric: Metric) -> None:
        self._series = series
        self._fixed = (plugin.name, plugin.type_name)
        # The labels that a spare table has beyond those of the metric stay empty.
        self._rest = ("",) * (len(series.schema.labels) - len(self._fixed) - len(metric.labels))
        self._at = series.counter_at[metric.name]

    def add(self, *labels: str, n: int = 1) -> None:
        series = self._series
        series.words[series.block((*self._fixed, *labels, *self._rest)) + self._at] += n


class SeriesGauge:
    """Sets one gauge that a plugin declares, in this worker's series."""

    __slots__ = ("_at", "_fixed", "_rest", "_series", "_weight_at")

    def __init__(self, series: SeriesWriter, plugin: Plugin, metric: Metric) -> None:
        self._series = series
        self._fixed = (plugin.name, plugin.type_name)
        # The labels that a spare table has beyond those of the metric stay empty.
        self._rest = ("",) * (len(series.schema.labels) - len(self._fixed) - len(metric.labels))
        self._at = series.gauge_at[metric.name]
        self._weight_at = series.gauge_at.get(metric.name + WEIGHT, -1)

    def set(self, value: float, *labels: str, weight: float = 1.0) -> None:
        series = self._series
        block = series.block((*self._fixed, *labels, *self._rest))
        if block == FIRST_BLOCK:  # the table has no room, and a sum of several gauges has no meaning
            return
        if self._weight_at >= 0:
            value *= weight
            series.words[block + self._weight_at] = parts_of(weight)
        series.words[block + self._at] = parts_of(value)


def parts_of(value: float) -> int:
    """Converts a gauge's value to an integer in units of 1 / GAUGE_PARTS. Limits its size. NaN becomes 0."""
    return round(min(max(value, -GAUGE_MAX), GAUGE_MAX) * GAUGE_PARTS) if value == value else 0


class IndexTier:
    """Implements `epp.plugin.PrefixIndex` for one tier. An owner's id in the first tier stands for the owner."""

    def __init__(self, index: PrefixIndex, tier: int) -> None:
        self._index = index
        self._tier = tier

    def match(self, hashes: Hashes) -> Mapping[int, int]:
        found = self._index.match(hashes)
        return {owner % SPAN: depth for owner, depth in found.items() if owner // SPAN == self._tier}

    def learn(self, hashes: Hashes, owner: int) -> None:
        self._index.learn(hashes, in_tier(owner, self._tier))

    def forget(self, hashes: Hashes, owner: int) -> None:
        self._index.forget(hashes, in_tier(owner, self._tier))


class SharedLearning:
    """Implements `epp.plugin.Learning`: predicts with the model that the supervisor publishes, and sends observations to the supervisor.

    Needs a running event loop for `learn_first` and `learn_token`.
    """

    def __init__(self, published: DocumentReader, starts: PromptStarts, send: Callable[[bytes], object], pool: int = 0) -> None:
        """`published`: the document with the model of each pool. `send`: passes a frame on to the supervisor, without waiting."""
        self._published = published
        self._pool = pool
        self._words, self._at = published.version_word(pool)
        self._starts = starts
        self._send = send
        self._version = 0
        self._model = LatencyModel()
        self._pending: list[bytes] = []

    def model(self) -> LatencyModel:
        version = self._words[self._at]
        if version != self._version:
            self._version = version
            found = self._published.read(self._pool)
            if found is not None:
                with contextlib.suppress(UnusableModel):  # the model is of another version: keep the last one
                    self._model = decode(found[1])
        return self._model

    def starts(self) -> Floats:
        return self._starts.rows

    def begins(self, slot: int, now: float) -> None:
        raise_to(self._starts.own, slot, now)

    def follows(self, slot: int, tokens: float) -> None:
        follow(self._starts.rows, self._starts.index, slot, tokens)

    def counts(self, slot: int, prompts: int) -> None:
        self._starts.prompts[slot] += prompts

    def learn_first(self, seen: FirstToken) -> None:
        self._learn(samples.first_token(seen))

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        self._learn(samples.per_token(slot, generation, load, observed, lasted))

    def flush(self) -> None:
        """Sends the waiting samples."""
        pending, self._pending = self._pending, []
        if pending:
            self._send(samples.frame(pending))

    def _learn(self, sample: bytes) -> None:
        pending = self._pending
        pending.append(sample)
        if len(pending) >= BATCH:
            self.flush()
        elif len(pending) == 1:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
