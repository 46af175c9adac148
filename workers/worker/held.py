"""Shows plugins of a worker which blocks the model servers report as cached. Reads the shared memory of the kv-events process."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec
import numpy as np

from epp.candidates import EndpointList
from epp.plugin import Hashes, HeldBlocks, HeldView, Measure
from epp.prefix.streams import HEARTBEAT_S_MAX, NO_READER, NO_STREAM, PARTIAL, WEIGHT_ONE, StreamRecord, StreamsRecord
from shm.areas import Area
from shm.documents import DocumentReader
from shm.held_blocks import HeldReader, Owners
from workers.process.instance import Instance
from workers.process.kv_memory import STREAMS, KvMemory
from workers.shared.bus import BusWriter

_streams = msgspec.msgpack.Decoder(StreamsRecord)
_NOTHING = StreamsRecord([], [])


class SharedHeldBlocks:
    """Implements `epp.plugin.HeldBlocks`.

    `expect(keys, owner)` tells the kv-events process that an endpoint will hold these blocks; None if the kv-events process needs no such
    reports.
    """

    def __init__(self, memory: KvMemory, expect: Callable[[Hashes, int], None] | None) -> None:
        self._reader = HeldReader(memory.layout.index, memory.index)
        self._documents = DocumentReader(memory.layout.documents, memory.documents)
        self._positions = memory.positions
        self._send = expect
        self._version = -1
        self._streams = _NOTHING
        self._endpoint_list: EndpointList | None = None
        self._latency: Measure | None = None
        self._views: tuple[HeldView, HeldView] | None = None  # (while the kv-events process runs, while it does not)
        self._owners: dict[int, Owners] = {}  # block size -> owners of endpoints with that size
        self._sizes: dict[int, int] = {}  # an endpoint's owner id -> its block size

    def view(self, endpoint_list: EndpointList, now: float) -> HeldView:
        if self._documents.version(STREAMS) != self._version or endpoint_list is not self._endpoint_list or self._views is None:
            self._look(endpoint_list)
        assert self._views is not None
        return self._views[now - self._positions.last_heartbeat > HEARTBEAT_S_MAX]

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        if self._latency is None:
            return self._reader.held(hashes, self._owners[block_tokens])
        began = time.perf_counter()
        found = self._reader.held(hashes, self._owners[block_tokens])
        self._latency.observe(time.perf_counter() - began)
        return found

    def measure(self, latency: Measure) -> None:
        self._latency = latency

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        if self._send is not None and self._sizes.get(owner) == block_tokens:
            self._send(hashes, owner)

    def _look(self, endpoint_list: EndpointList) -> None:
        """Reads the streams document again if it has changed, and makes the views for this endpoint list."""
        document = self._documents.read(STREAMS)
        if document is not None and document[0] != self._version:
            self._version = document[0]
            self._streams = _streams.decode(document[1]) if document[1] else _NOTHING
        self._endpoint_list = endpoint_list
        by_identity = {record.identity: record for record in self._streams.streams}
        records = [by_identity.get((each.slot, each.generation, each.owner)) for each in endpoint_list.endpoints]
        usable = [record is not None and record.followed for record in records]
        sizes = Counter(record.block_tokens for record, use in zip(records, usable, strict=True) if record and use)
        self._owners = {size: Owners(len(records)) for size in sizes}
        self._sizes = {}
        for row, (record, use) in enumerate(zip(records, usable, strict=True)):
            if record is not None and use:
                self._sizes[record.endpoint] = record.block_tokens
                self._add(self._owners[record.block_tokens], row, record)
        whole = [bool(record and use and record.remark != PARTIAL) for record, use in zip(records, usable, strict=True)]
        adapters = frozenset(self._streams.adapters)
        blocks = tuple(record.block_tokens if record is not None else 0 for record in records)
        self._views = (
            HeldView(
                tuple(s for s, _ in sizes.most_common()),
                np.array(usable, dtype=bool),
                np.array(whole, dtype=bool),
                blocks,
                tuple(NO_STREAM if record is None else record.why or record.remark for record in records),
                adapters,
            ),
            _unread(blocks, adapters),
        )

    def _add(self, owners: Owners, row: int, record: StreamRecord) -> None:
        for tier in record.tiers:
            if tier.weight:
                owners.add(tier.owner, row, tier.weight)
        owners.add(record.speculative, row, WEIGHT_ONE)


def held_blocks(instance: Instance, worker: int, area: Area) -> HeldBlocks:
    """Returns the view of a worker's plugins on the model servers' caches. `worker`: the worker's number, from 0. `area`: the worker's
    area.
    """
    memory = instance.memory.kv_events
    if memory is None or instance.sources.kv_events is None:
        return NoHeldBlocks()
    if not instance.pipes.kv_bus:
        return SharedHeldBlocks(memory, None)
    drops = partial(area.add, area.schema.counter["bus_drops_total"])
    return SharedHeldBlocks(memory, BusWriter(instance.pipes.kv_bus[worker].writer, drops).learn)


class NoHeldBlocks:
    """Implements `epp.plugin.HeldBlocks` for a picker without a kv-events process: no endpoint holds any block."""

    def view(self, endpoint_list: EndpointList, now: float) -> HeldView:
        return _unread((0,) * len(endpoint_list.endpoints), frozenset())

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        size = len(view.why)
        return [0] * size, [0] * size

    def measure(self, latency: Measure) -> None:
        """Does nothing."""

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        """Does nothing."""


def _unread(block_tokens: tuple[int, ...], adapters: frozenset[int]) -> HeldView:
    none = np.zeros(len(block_tokens), dtype=bool)
    return HeldView((), none, none, block_tokens, (NO_READER,) * len(block_tokens), adapters)
