"""Tests of what a worker reports of latencies."""

import asyncio

from epp.learning import samples
from epp.learning.model import FirstToken, LatencyModel
from shm.documents import DocumentReader, DocumentSchema, DocumentWriter
from shm.prefills import PromptStarts, StartsSchema
from shm.segment import Region
from tests.waiting import until
from workers.worker.plugin_handles import BATCH, SharedLearning

SCHEMA, STARTS = DocumentSchema((64,)), StartsSchema(2, 1)


def learning(sent: list[bytes]) -> SharedLearning:
    memory, rows = (Region(memoryview(bytearray(schema.bytes))) for schema in (SCHEMA, STARTS))
    DocumentWriter(SCHEMA, memory).write(0, b"of another version")
    return SharedLearning(DocumentReader(SCHEMA, memory), PromptStarts(STARTS, rows, 0), sent.append)


def test_samples_are_sent_together_after_a_short_time() -> None:
    async def scenario() -> list[bytes]:
        sent: list[bytes] = []
        worker = learning(sent)
        worker.learn_first(FirstToken(1.0, 0, 0, 100.0, 0.0, 0.0, 1.0, 0.1, 0.1))
        worker.learn_token(1, 0, 1.0, 0.02, 1.0)
        assert not sent
        return await until(lambda: sent)

    (frame,) = asyncio.run(scenario())
    assert samples.learn(LatencyModel(), frame) == 2


def test_many_samples_are_sent_at_once_and_none_twice() -> None:
    async def scenario() -> list[bytes]:
        sent: list[bytes] = []
        worker = learning(sent)
        for _ in range(2 * BATCH + 1):
            worker.learn_token(1, 0, 1.0, 0.02, 1.0)
        assert len(sent) == 2
        worker.flush()
        worker.flush()
        return sent

    assert [samples.learn(LatencyModel(), frame) for frame in asyncio.run(scenario())] == [BATCH, BATCH, 1]


def test_a_model_that_cannot_be_read_is_ignored() -> None:
    worker = learning([])
    assert worker.model().first_token_s(0, 0.0, 0.0, 0.0, 0.0, 0.0) > 0.0
