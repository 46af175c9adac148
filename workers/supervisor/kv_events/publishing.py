"""Publishes the streams document of the kv-events process whenever it changes, and counts at intervals."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

import msgspec

from epp.prefix.streams import NOT_CONNECTED, StreamRecord, StreamsRecord
from shm.documents import DocumentReader, DocumentTooLarge, DocumentWriter
from shm.stream_positions import StreamPositions
from workers.process.kv_memory import COUNTS, STREAMS, KvCounts, KvMemory
from workers.supervisor.kv_events.followed import Followed
from workers.supervisor.kv_events.held_state import SavedStream
from workers.supervisor.kv_events.holdings import Holdings

COUNTS_EVERY_S: Final = 0.5
SIZES_MAX: Final = 4
RARE_SIZE: Final = f"the endpoints have more than {SIZES_MAX} block sizes, and few have its own"

_encode = msgspec.msgpack.Encoder().encode
_streams = msgspec.msgpack.Decoder(StreamsRecord)
_counts = msgspec.msgpack.Decoder(KvCounts)


class Publishing:
    """Writes the documents of streams and of counts. Continues the counts of a predecessor."""

    def __init__(self, memory: KvMemory, positions: StreamPositions) -> None:
        self._writer = DocumentWriter(memory.layout.documents, memory.documents)
        self._reader = DocumentReader(memory.layout.documents, memory.documents)
        self._positions = positions
        self._published: StreamsRecord | None = None
        self.adapters: set[int] = set()  # the hash words of adapters that a predecessor has published
        self._counted_at = 0.0
        left = self._reader.read(COUNTS)
        self._before = _counts.decode(left[1]) if left is not None and left[1] else KvCounts()

    def predecessors(self) -> dict[tuple[int, int, int], SavedStream]:
        """Returns the records that a predecessor has published, by the endpoint's identity. Publishes these records again, as not
        precise.
        """
        left = self._reader.read(STREAMS)
        if left is None or not left[1]:
            return {}
        found = _streams.decode(left[1])
        self.adapters = set(found.adapters)
        unsure = [msgspec.structs.replace(record, followed=False, why=NOT_CONNECTED) for record in found.streams]
        self._writer.write(STREAMS, _encode(StreamsRecord(unsure, found.adapters)))
        return {record.identity: self._saved(record) for record in found.streams}

    def _saved(self, record: StreamRecord) -> SavedStream:
        read, owners = self._positions.read(record.slot), [*(tier.owner for tier in record.tiers), record.speculative]
        return SavedStream(owners, read.position, read.check, record.block_tokens, record.group, record.remark)

    def publish(self, followed: Sequence[Followed], holdings: Holdings, others: KvCounts, now: float) -> None:
        """Writes the streams document if it has changed, and the counts every COUNTS_EVERY_S. `others`: counts of ended streams."""
        streams = StreamsRecord(_few_sizes([each.record(now) for each in followed]), sorted(holdings.known_words))
        if self._published is None or streams != self._published:
            self._published = streams
            try:
                self._writer.write(STREAMS, _encode(streams))
            except DocumentTooLarge:  # too large if names and addresses are longer than the layout assumes
                self._writer.write(STREAMS, _encode(StreamsRecord([], [])))
        if now - self._counted_at >= COUNTS_EVERY_S:
            self._counted_at = now
            current = others
            for each in followed:
                current = current.plus(each.counts())
            self._writer.write(COUNTS, _encode(self._before.plus(current.plus(_counted(followed, holdings)))))


def _few_sizes(records: list[StreamRecord]) -> list[StreamRecord]:
    """Marks records with rare block sizes as not followed. The SIZES_MAX most frequent sizes stay. Each size costs every request a chain of
    keys.
    """
    frequent = Counter(record.block_tokens for record in records if record.followed).most_common()
    if len(frequent) <= SIZES_MAX:
        return records
    rare = {size for size, _ in frequent[SIZES_MAX:]}
    return [
        msgspec.structs.replace(record, followed=False, why=RARE_SIZE) if record.followed and record.block_tokens in rare else record
        for record in records
    ]


def _counted(followed: Sequence[Followed], holdings: Holdings) -> KvCounts:
    """Returns the counts that are not kept per stream."""
    counts, writer = holdings.counts, holdings.writer
    return KvCounts(
        malformed=counts.malformed_batches + counts.malformed_events,
        stored=counts.stored,
        removed=counts.removed,
        stores_skipped=counts.stores_skipped + counts.links_refused,
        removals_skipped=counts.removals_skipped,
        suppressed=counts.repeats_suppressed,
        forwarded=counts.removals_forwarded,
        evictions=writer.evictions,
        waiting=sum(each.stream.waiting for each in followed),
        subscribers=sum(each.stream.is_open for each in followed),
        entries=writer.size(),
        links=writer.links.size,
    )
