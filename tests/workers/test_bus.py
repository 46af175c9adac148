"""The bus over real packet pipes; time is the reader's only wait, so `drain` is called by hand."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest

from epp.prefix.updates import FORGET, FRAME_BYTES_MAX, frames
from workers.bus import AGE_TICKS, PENDING_BYTES_MAX, POLL_S, BusReader, BusWriter
from workers.instance import PIPE_BYTES, PIPE_BYTES_MIN, Pipe, packet_pipe


class Index:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int]]] = []
        self.forgotten: list[tuple[int, int]] = []
        self.ages: list[int] = []

    def insert(self, hashes: np.ndarray, owners: np.ndarray, age: int) -> None:
        self.batches.append(list(zip(owners.tolist(), hashes.tolist(), strict=True)))
        self.ages.append(age)

    def forget(self, hashes: np.ndarray, owner: int) -> None:
        self.forgotten += [(owner, value) for value in hashes.tolist()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = packet_pipe()
    yield made
    os.close(made.reader)
    os.close(made.writer)


def blocks(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def in_loop(scenario) -> None:
    async def run() -> None:
        await scenario(asyncio.get_running_loop())

    asyncio.run(run())


def test_what_is_learned_within_a_moment_goes_in_one_frame_and_one_insert(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, sent = Index(), []
        writer = BusWriter(pipe.writer, pytest.fail, lambda: sent.append(1))
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 77.9)
        writer.learn(blocks(1, 2), 5)
        writer.learn(blocks(3), 6)
        assert not sent
        async with asyncio.timeout(5):
            while not sent:
                await asyncio.sleep(0.001)
        reader.drain()
        assert (len(sent), reader.frames) == (1, 1)
        assert index.batches == [[(5, 1), (5, 2), (6, 3)]]
        assert index.ages == [int(77.9 * AGE_TICKS)]

    in_loop(scenario)


def test_frames_of_several_workers_become_one_insert(pipe: Pipe) -> None:
    other = packet_pipe()

    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        for descriptor, owner in ((pipe.writer, 1), (other.writer, 2)):
            writer = BusWriter(descriptor, pytest.fail)
            writer.learn(blocks(owner * 10), owner)
            writer.flush()
        BusReader(loop, [pipe.reader, other.reader], index, now=lambda: 0.0).drain()
        assert index.batches == [[(1, 10), (2, 20)]]

    in_loop(scenario)
    os.close(other.reader)
    os.close(other.writer)


def test_a_long_update_arrives_whole_and_in_order(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        writer = BusWriter(pipe.writer, pytest.fail)
        writer.learn(np.arange(5000, dtype=np.uint64), 3)
        writer.flush()
        BusReader(loop, [pipe.reader], index, now=lambda: 0.0).drain()
        assert index.batches == [[(3, value) for value in range(5000)]]

    in_loop(scenario)


def test_a_full_pipe_drops_and_counts_and_never_waits(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, dropped, sent = Index(), [], []
        writer = BusWriter(pipe.writer, lambda: dropped.append(1), lambda: sent.append(1))
        for value in range(1000):
            writer.learn(blocks(value), 1)
            writer.flush()
        assert len(dropped) + len(sent) == 1000
        assert dropped
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 0.0)
        reader.drain()
        assert reader.frames == len(sent)
        writer.learn(blocks(4242), 1)
        writer.flush()
        reader.drain()
        assert index.batches[-1] == [(1, 4242)]

    in_loop(scenario)


def test_corrupt_frames_are_counted_and_dropped_alone(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        writer = BusWriter(pipe.writer, pytest.fail)
        writer.learn(blocks(1), 1)
        writer.flush()
        os.write(pipe.writer, b"nonsense")
        os.write(pipe.writer, bytes(FRAME_BYTES_MAX))
        writer.learn(blocks(2), 1)
        writer.flush()
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 0.0)
        reader.drain()
        assert reader.corrupt == 2
        assert index.batches == [[(1, 1), (1, 2)]]

    in_loop(scenario)


def test_forgetting_comes_after_what_was_learned_before_it(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        writer = BusWriter(pipe.writer, pytest.fail)
        writer.learn(blocks(1, 2), 1)
        writer.flush()
        for frame in frames(FORGET, [(1, blocks(2).tobytes()), (4, blocks(9).tobytes())]):
            os.write(pipe.writer, frame)
        writer.learn(blocks(3), 1)
        writer.flush()
        BusReader(loop, [pipe.reader], index, now=lambda: 0.0).drain()
        assert index.batches == [[(1, 1), (1, 2)], [(1, 3)]]
        assert index.forgotten == [(1, 2), (4, 9)]

    in_loop(scenario)


def test_what_waits_for_the_turns_end_is_bounded(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        sent: list[int] = []
        writer = BusWriter(pipe.writer, lambda: None, lambda: sent.append(1))
        writer.learn(np.zeros(PENDING_BYTES_MAX // 8 + 1, dtype=np.uint64), 1)
        assert sent
        sent.clear()
        writer.forget(np.zeros(PENDING_BYTES_MAX // 8 + 1, dtype=np.uint64), 1)
        assert not writer._taken_back

    in_loop(scenario)


def test_a_running_reader_gathers_then_inserts_and_goes_on(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        writer = BusWriter(pipe.writer, pytest.fail)
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 0.0)
        reader.start()
        for value in range(3):
            writer.learn(blocks(value), 1)
            async with asyncio.timeout(5):
                while len(index.batches) <= value:
                    await asyncio.sleep(0.001)
        reader.close()
        assert index.batches == [[(1, 0)], [(1, 1)], [(1, 2)]]

    in_loop(scenario)


def test_what_a_worker_takes_back_is_sent_behind_what_it_learned(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, sent = Index(), []
        writer = BusWriter(pipe.writer, pytest.fail, lambda: sent.append(1))
        writer.forget(blocks(2), 1)
        writer.learn(blocks(1, 2), 1)
        writer.forget(blocks(7, 8), 3)
        async with asyncio.timeout(5):
            while not sent:
                await asyncio.sleep(0.001)
        BusReader(loop, [pipe.reader], index, now=lambda: 0.0).drain()
        assert len(sent) == 2
        assert index.batches == [[(1, 1), (1, 2)]]
        assert index.forgotten == [(1, 2), (3, 7), (3, 8)]

    in_loop(scenario)


def test_a_reader_listens_while_nothing_comes_and_looks_by_the_clock_while_something_does(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, now = Index(), 0.0
        timers: list[tuple[float, object]] = []
        listening: set[int] = set()

        class Loop:
            def call_later(self, delay: float, call):
                timers.append((delay, call))
                return loop.call_later(3600, lambda: None)

            def add_reader(self, descriptor: int, call) -> None:
                listening.add(descriptor)

            def remove_reader(self, descriptor: int) -> None:
                listening.discard(descriptor)

        reader = BusReader(Loop(), [pipe.reader], index, now=lambda: now)  # type: ignore[arg-type]
        writer = BusWriter(pipe.writer, pytest.fail)
        reader.start()
        for value in range(3):
            writer.learn(blocks(value), 1)
            writer.flush()
            if value == 0:
                reader._readable()
            else:
                assert not listening
                (_, look) = timers.pop()
                look()  # type: ignore[operator]
            assert len(index.batches) == value + 1
        (delay, look) = timers.pop()
        assert delay == POLL_S
        look()  # type: ignore[operator]
        assert listening == {pipe.reader} and not timers

    in_loop(scenario)


def test_a_pipe_is_as_large_as_the_machine_allows() -> None:
    import fcntl

    made = packet_pipe(PIPE_BYTES)
    assert fcntl.fcntl(made.writer, fcntl.F_GETPIPE_SZ) >= PIPE_BYTES_MIN
    os.close(made.reader)
    os.close(made.writer)


def test_a_worker_whose_supervisor_and_parent_are_gone_drops_and_goes_on() -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        made, dropped = packet_pipe(), []
        os.close(made.reader)
        writer = BusWriter(made.writer, lambda: dropped.append(1))
        writer.learn(blocks(1), 1)
        writer.flush()
        os.close(made.writer)
        assert dropped == [1]

    in_loop(scenario)
