"""Tests of the bus over real packet pipes. Most tests call `drain` themselves instead of waiting for the reader's timer."""

import asyncio
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from epp.learning import samples
from epp.learning.model import LatencyModel
from epp.prefix.updates import FORGET, FRAME_BYTES_MAX, LEARN, frames
from tests.waiting import until
from workers.process.resources import PIPE_BYTES, PIPE_BYTES_MIN, Pipe, packet_pipe
from workers.shared.bus import AGE_TICKS, FLUSH_S, PENDING_BYTES_MAX, POLL_S, BusReader, BusWriter, Rhythm


class Index:
    """Records all calls."""

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
    new_pipe = packet_pipe()
    yield new_pipe
    os.close(new_pipe.reader)
    os.close(new_pipe.writer)


def blocks(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def in_loop(scenario) -> None:
    async def run() -> None:
        await scenario(asyncio.get_running_loop())

    asyncio.run(run())


def test_updates_within_a_short_time_share_one_frame_and_one_insert(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, sent = Index(), []
        writer = BusWriter(pipe.writer, pytest.fail, lambda: sent.append(1))
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 77.9)
        writer.learn(blocks(1, 2), 5)
        writer.learn(blocks(3), 6)
        assert not sent
        await until(lambda: sent)
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


def test_reported_tokens_arrive_with_their_owner(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, cached = Index(), []
        writer = BusWriter(pipe.writer, pytest.fail)
        writer.cached(65_535, 1 << 32)
        writer.cached(3, 700)
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 0.0, on_cached=lambda owner, tokens: cached.append((owner, tokens)))
        reader.drain()
        assert cached == [(65_535, 1 << 32), (3, 700)]
        assert not index.batches and not index.forgotten and not reader.corrupt

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


def test_a_forget_frame_takes_effect_after_earlier_learn_frames(pipe: Pipe) -> None:
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


def test_the_size_of_pending_updates_is_bounded(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        sent: list[int] = []
        writer = BusWriter(pipe.writer, lambda: None, lambda: sent.append(1))
        writer.learn(np.zeros(PENDING_BYTES_MAX // 8 + 1, dtype=np.uint64), 1)
        assert sent
        sent.clear()
        writer.forget(np.zeros(PENDING_BYTES_MAX // 8 + 1, dtype=np.uint64), 1)
        assert not writer._taken_back

    in_loop(scenario)


def test_a_running_reader_collects_frames_inserts_them_and_continues(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index = Index()
        writer = BusWriter(pipe.writer, pytest.fail)
        reader = BusReader(loop, [pipe.reader], index, now=lambda: 0.0)
        reader.start()
        for value in range(3):
            writer.learn(blocks(value), 1)
            await until(lambda wanted=value: len(index.batches) > wanted)
        reader.close()
        assert index.batches == [[(1, 0)], [(1, 1)], [(1, 2)]]

    in_loop(scenario)


def test_forget_frames_are_sent_after_learn_frames(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        index, sent = Index(), []
        writer = BusWriter(pipe.writer, pytest.fail, lambda: sent.append(1))
        writer.forget(blocks(2), 1)
        writer.learn(blocks(1, 2), 1)
        writer.forget(blocks(7, 8), 3)
        await until(lambda: sent)
        BusReader(loop, [pipe.reader], index, now=lambda: 0.0).drain()
        assert len(sent) == 2
        assert index.batches == [[(1, 1), (1, 2)]]
        assert index.forgotten == [(1, 2), (3, 7), (3, 8)]

    in_loop(scenario)


class FakeLoop:
    """A loop with the time of the test. It keeps timers, calls and descriptors, and runs nothing."""

    def __init__(self) -> None:
        self.now = 50.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.soon: list[Callable[[], None]] = []
        self.listening: set[int] = set()

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self.soon.append(call)

    def call_later(self, delay: float, call: Callable[[], None]) -> None:
        self.timers.append((delay, call))

    def add_reader(self, descriptor: int, call: Callable[[int], None], argument: int) -> None:
        self.listening.add(descriptor)
        self.readable = lambda: call(argument)

    def remove_reader(self, descriptor: int) -> None:
        self.listening.discard(descriptor)

    def turn(self) -> None:
        calls, self.soon = self.soon, []
        for call in calls:
            call()


def test_a_reader_needs_no_timer_for_rare_frames_and_reads_at_intervals_under_load(pipe: Pipe) -> None:
    index, loop = Index(), FakeLoop()
    reader = BusReader(loop, [pipe.reader], index, now=loop.time)  # type: ignore[arg-type]
    reader.start()

    def send(value: int) -> None:
        for frame in frames(LEARN, [(1, blocks(value).tobytes())]):
            os.write(pipe.writer, frame)

    for value in range(3):  # rare
        send(value)
        loop.readable()
        assert (len(index.batches), loop.listening, loop.timers) == (value + 1, {pipe.reader}, [])
        loop.now += 1.25 * POLL_S
    loop.now -= POLL_S  # frequent
    for value in range(3, 7):
        send(value)
        if value == 3:
            loop.readable()
        else:
            assert not loop.listening
            ((delay, look),) = loop.timers
            assert delay == POLL_S
            loop.timers.clear()
            look()
        assert len(index.batches) == value + 1
        loop.now += POLL_S
    ((_, look),) = loop.timers
    loop.timers.clear()
    look()
    assert loop.listening == {pipe.reader} and not loop.timers


def test_a_writer_sends_a_rare_update_in_this_turn_of_the_loop_and_collects_frequent_ones(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, sent = FakeLoop(), []
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    writer = BusWriter(pipe.writer, pytest.fail, lambda: sent.append(loop.now))
    for _ in range(3):  # rare
        writer.learn(blocks(1), 1)
        loop.turn()
        loop.now += 1.25 * FLUSH_S
    assert (len(sent), loop.timers) == (3, [])
    loop.now -= FLUSH_S  # frequent
    for _ in range(4):
        for value in range(10):
            writer.learn(blocks(value), 1)
        assert not loop.soon
        ((delay, flush),) = loop.timers
        assert delay == FLUSH_S
        loop.timers.clear()
        loop.now += FLUSH_S
        flush()
        loop.now += FLUSH_S / 4
    assert len(sent) == 7


def test_a_pipe_is_as_large_as_the_machine_allows() -> None:
    import fcntl

    new_pipe = packet_pipe(PIPE_BYTES)
    assert fcntl.fcntl(new_pipe.writer, fcntl.F_GETPIPE_SZ) >= PIPE_BYTES_MIN
    os.close(new_pipe.reader)
    os.close(new_pipe.writer)


def test_a_worker_without_supervisor_and_parent_drops_frames_and_continues() -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        new_pipe, dropped = packet_pipe(), []
        os.close(new_pipe.reader)
        writer = BusWriter(new_pipe.writer, lambda: dropped.append(1))
        writer.learn(blocks(1), 1)
        writer.flush()
        os.close(new_pipe.writer)
        assert dropped == [1]

    in_loop(scenario)


def test_samples_reach_their_reader_and_bad_ones_are_counted(pipe: Pipe) -> None:
    async def scenario(loop: asyncio.AbstractEventLoop) -> None:
        model = LatencyModel()
        writer = BusWriter(pipe.writer, pytest.fail)
        reader = BusReader(loop, [pipe.reader], Index(), now=lambda: 0.0, on_samples=lambda frame: samples.learn(model, frame))
        good = samples.frame([samples.per_token(1, 0, 2.0, 0.03, 1.0)])
        for frame in (good, good[:-1], good):
            writer.send(frame)
        assert reader.drain() == 3
        assert (model.endpoints[1].token_speed.samples, reader.corrupt) == (2, 1)

    in_loop(scenario)


def test_a_patient_reader_calls_after_each_read_and_stops_after_several_that_found_nothing(pipe: Pipe) -> None:
    index, loop, reads = Index(), FakeLoop(), list[int]()
    rhythm = Rhythm(lambda: reads.append(len(loop.timers)), 0.01, patience=3)
    reader = BusReader(loop, [pipe.reader], index, now=loop.time, rhythm=rhythm)  # type: ignore[arg-type]
    reader.start()

    def send() -> None:
        for frame in frames(LEARN, [(1, blocks(1).tobytes())]):
            os.write(pipe.writer, frame)

    def look() -> None:
        loop.now += 0.01
        ((delay, call),) = loop.timers
        assert delay == 0.01
        loop.timers.clear()
        call()

    send()
    loop.readable()
    assert (len(reads), loop.timers) == (1, [])
    loop.now += 0.025
    send()
    loop.readable()
    look()
    send()
    for _ in range(3):
        look()
        assert not loop.listening
    look()
    assert len(index.batches) == 3, "one at once, two at intervals"
    assert reads == [0, 1, 1, 1, 1, 1, 0], "the timer for the next read is set before the call"
    assert (loop.listening, loop.timers) == ({pipe.reader}, [])
