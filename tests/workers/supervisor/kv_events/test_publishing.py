"""What the kv-events process publishes of the streams."""

import msgspec

from epp.prefix.streams import StreamRecord, StreamsRecord
from shm.documents import DocumentReader
from shm.segment import Region
from tests.workers.supervisor.kv_events.test_holdings import World
from workers.process.kv_memory import STREAMS, KvCounts, KvLayout, KvMemory
from workers.supervisor.kv_events.event_stream import Stream
from workers.supervisor.kv_events.publishing import RARE_SIZE, SIZES_MAX, Publishing


class Nothing:
    """A sink that is never called."""

    def apply(self, payload: bytes) -> None: ...
    def clear(self) -> None: ...
    def ask(self, start: int) -> None: ...
    def stop_asking(self) -> None: ...


class Sized:
    """A followed endpoint with blocks of one size."""

    def __init__(self, slot: int, size: int) -> None:
        self.slot, self.size = slot, size
        self.stream = Stream(Nothing(), replays=False)

    def record(self, now: float) -> StreamRecord:
        return StreamRecord(self.slot, 0, self.slot, True, "", "", self.size, [], 0, "", 0.0)

    def counts(self) -> KvCounts:
        return KvCounts()


def test_only_the_most_frequent_block_sizes_are_precise() -> None:
    layout = KvLayout(1024, 64)
    parts = {name: Region(memoryview(bytearray(schema.bytes))) for name, schema in layout.parts.items()}
    memory = KvMemory(layout, parts)
    sizes = [16, 16, 32, 32, 64, 64, 128, 128, 1]
    followed = [Sized(slot, size) for slot, size in enumerate(sizes)]
    Publishing(memory, memory.positions).publish(followed, World().holdings, KvCounts(), 1.0)
    _, document = DocumentReader(layout.documents, memory.documents).read(STREAMS)
    found = msgspec.msgpack.decode(document, type=StreamsRecord).streams
    assert [record.followed for record in found] == [True] * 2 * SIZES_MAX + [False]
    assert found[-1].why == RARE_SIZE
