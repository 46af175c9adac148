"""Reads the published figures of the kv-events process, for the metrics page and for `epp top`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from epp.candidates import Endpoint
from epp.metrics import Metric
from epp.metrics import kv_events as names
from epp.metrics.computed import Figures
from epp.prefix.streams import HEARTBEAT_S_MAX, NO_READER, NO_STREAM, StreamRecord, StreamsRecord, of_ranks
from shm.documents import DocumentReader
from shm.stream_positions import StreamPositions
from workers.process.instance import Instance
from workers.process.kv_memory import COUNTS, STREAMS, KvCounts

_streams = msgspec.msgpack.Decoder(StreamsRecord)
_counts = msgspec.msgpack.Decoder(KvCounts)

TOTALS: Final[Mapping[Metric, str]] = {
    names.SUBSCRIBERS: "subscribers",
    names.RECONNECTIONS: "reconnections",
    names.MESSAGES: "messages",
    names.MALFORMED: "malformed",
    names.DROPPED: "dropped",
    names.GAPS: "gaps",
    names.RESTARTS: "restarts",
    names.REPLAYS_FAILED: "replays_failed",
    names.STORES_SKIPPED: "stores_skipped",
    names.REMOVALS_SKIPPED: "removals_skipped",
    names.SUPPRESSED: "suppressed",
    names.FORWARDED: "forwarded",
    names.ERRORS: "errors",
    names.QUEUE_DEPTH: "waiting",
}
INDEX_TOTALS: Final[Mapping[Metric, str]] = {names.ADMISSIONS: "stored", names.OVERWRITTEN: "evictions", names.ENTRIES: "entries"}


class StreamFigures(NamedTuple):
    """The state of one endpoint's event stream. `age_s`: seconds since the last message, or None before the first message.

    `why`: why the endpoint's prefix matches are not precise, or "". `held`: the number of blocks that the endpoint holds.
    """

    why: str
    age_s: float | None
    held: int


NOT_FOLLOWED: Final = StreamFigures(NO_STREAM, None, 0)


class KvFigures:
    """Reads the memory of the kv-events process. `pools`: the numbers of the pools with endpoints that it follows."""

    def __init__(
        self, documents: DocumentReader, positions: StreamPositions, *, index_metrics: bool = True, pools: frozenset[int] = frozenset((0,))
    ) -> None:
        self.pools = pools
        self._index_metrics = index_metrics
        self._documents = documents
        self._positions = positions

    def streams(self, now: float) -> dict[int, StreamFigures]:
        """Returns slot -> stream of the endpoint."""
        left = self._documents.read(STREAMS)
        records: list[StreamRecord] = _streams.decode(left[1]).streams if left is not None and left[1] else []
        dead = NO_READER if now - self._positions.last_heartbeat > HEARTBEAT_S_MAX else ""
        found = {}
        for record in records:
            read = self._positions.read(record.slot)
            age_s = now - read.heard if read.heard else None
            found[record.slot] = StreamFigures(dead or record.why or record.remark, age_s, read.held)
        return found

    def replays_failed(self) -> int:
        """Returns how many replays had no answer or no end."""
        return self._totals().replays_failed

    def _totals(self) -> KvCounts:
        left = self._documents.read(COUNTS)
        return _counts.decode(left[1]) if left is not None and left[1] else KvCounts()

    def totals(self) -> Iterator[Figures]:
        """Yields the metrics of all streams together, and the metrics of the index if the configuration enables them."""
        counts = self._totals()
        for metric, field in (*TOTALS.items(), *(INDEX_TOTALS.items() if self._index_metrics else ())):
            yield metric, (), [((), float(getattr(counts, field)))]
        yield names.CAPACITY, (), [((), 1.0)]
        if self._index_metrics:
            yield names.EVICTIONS, (), [((), float(counts.removed + counts.evictions))]

    def of_endpoints(self, pool: str, endpoints: Sequence[tuple[Endpoint, float]], now: float) -> Iterator[Figures]:
        """Yields the metrics of the endpoints of one pool. `endpoints`: each with its data-parallel ranks, or NaN if not known."""
        streams = self.streams(now)
        found = [(endpoint.name, streams.get(endpoint.slot, NOT_FOLLOWED)) for endpoint, _ in endpoints]
        whys = [(e.name, streams.get(e.slot, NOT_FOLLOWED).why or of_ranks(ranks)) for e, ranks in endpoints]
        labels = ("name", "pod_identifier")
        yield names.PRECISE, labels, [((pool, name), float(not why)) for name, why in whys]
        ages = [(name, stream.age_s) for name, stream in found]
        yield names.STREAM_AGE, labels, [((pool, name), age) for name, age in ages if age is not None]
        yield names.HELD, labels, [((pool, name), float(stream.held)) for name, stream in found]
        reasons = Counter(why for _, why in whys if why)
        yield names.NOT_PRECISE, names.NOT_PRECISE.labels, [((why,), float(n)) for why, n in sorted(reasons.items())]


def kv_figures_of(instance: Instance) -> KvFigures | None:
    """Returns the figures of an instance, or None if it has no kv-events process."""
    memory, settings = instance.memory.kv_events, instance.layout.kv_settings
    if memory is None or settings is None:
        return None
    pools = frozenset(number for number, pool in enumerate(instance.every) if instance.layout.kv_of(pool.options.pool_name) is not None)
    documents = DocumentReader(memory.layout.documents, memory.documents)
    return KvFigures(documents, memory.positions, index_metrics=settings.index_metrics, pools=pools)
