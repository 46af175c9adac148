"""The delay until all workers see an update of one worker, and the supervisor's cost of it.

    python -m tests.bench.visibility [--rate 6000] [--workers 2] [--blocks 5] [--seconds 4]

Processes: workers that learn at an even rate, each in its event loop; one index writer with the real bus reader; an observer that looks
for marked prompts in shared memory every 0.1 ms. The output has the time from `learn` in a worker to the first `match` in the observer,
and the writer's CPU time and wake-ups per request.
"""

import argparse
import asyncio
import mmap
import multiprocessing
import os
import resource
import time

import numpy as np
import uvloop

from shm.prefix_index import IndexReader, IndexSchema
from shm.prefix_writer import IndexWriter
from shm.segment import Region
from workers.process.resources import PIPE_BYTES, packet_pipe
from workers.shared.bus import BusReader, BusWriter

SCHEMA = IndexSchema(1 << 19)
MARK_EVERY_S = 0.0073
MARKS_MAX = 4096
OWNERS = 8


def mark(number: int) -> np.ndarray:
    return np.random.default_rng(10**6 + number).integers(1, 2**64, 3, dtype=np.uint64)


def worker(descriptor: int, rate: float, blocks: int, seconds: float, sent: np.ndarray | None) -> None:
    rng = np.random.default_rng(os.getpid())

    async def run() -> None:
        loop = asyncio.get_running_loop()
        bus = BusWriter(descriptor, lambda: None)
        begin, learned, marked = loop.time(), 0, 0
        while (elapsed := loop.time() - begin) < seconds:
            while learned < elapsed * rate:
                bus.learn(rng.integers(1, 2**64, blocks, dtype=np.uint64), 2 + learned % OWNERS)
                learned += 1
            if sent is not None and marked < elapsed / MARK_EVERY_S and marked < MARKS_MAX:
                sent[marked] = time.monotonic()
                bus.learn(mark(marked), 2)
                marked += 1
            await asyncio.sleep(0.0005)
        bus.flush()

    uvloop.run(run())


def writer(region: Region, descriptors: list[int], seconds: float, requests: float) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        index = IndexWriter(SCHEMA, region)
        for _ in range(OWNERS):
            index.limit(index.new_owner(), 30_000)
        reader = BusReader(loop, descriptors, index, now=time.monotonic)
        reader.start()
        begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF)
        await asyncio.sleep(seconds)
        spent, after = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF)
        wakes = (after.ru_nvcsw - before.ru_nvcsw) / seconds
        print(
            f"supervisor: {1e6 * spent / requests:.2f} us CPU per request, {wakes:.0f} wake-ups/s, "
            f"{reader.frames / seconds:.0f} frames/s, {index.freed()}"
        )
        reader.close()

    uvloop.run(run())


def observe(region: Region, sent: np.ndarray, seconds: float) -> None:
    reader = IndexReader(SCHEMA, region)
    took: list[float] = []
    end = time.monotonic() + seconds
    number, wanted = 0, mark(0)
    while time.monotonic() < end and number < MARKS_MAX:
        if len(reader.match(wanted)) and sent[number]:
            took.append(time.monotonic() - sent[number])
            number, wanted = number + 1, mark(number + 1)
        else:
            time.sleep(0.0001)
    low, half, high = np.quantile(took, [0.05, 0.5, 0.99]) * 1e3
    print(f"visible after: p5 {low:.2f}, median {half:.2f}, p99 {high:.2f} ms ({len(took)} marks)")


def main() -> None:
    line = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    line.add_argument("--rate", type=float, default=6000)
    line.add_argument("--workers", type=int, default=2)
    line.add_argument("--blocks", type=int, default=5)
    line.add_argument("--seconds", type=float, default=4)
    options = line.parse_args()
    region = Region(memoryview(mmap.mmap(-1, SCHEMA.bytes)))
    sent = np.frombuffer(mmap.mmap(-1, 8 * MARKS_MAX), dtype=np.float64)
    pipes = [packet_pipe(PIPE_BYTES) for _ in range(options.workers)]
    context = multiprocessing.get_context("fork")
    rate = options.rate / options.workers
    processes = [
        context.Process(
            target=writer, args=(region, [pipe.reader for pipe in pipes], options.seconds + 0.5, options.rate * options.seconds)
        ),
        context.Process(target=observe, args=(region, sent, options.seconds + 0.6)),
        *(
            context.Process(target=worker, args=(pipe.writer, rate, options.blocks, options.seconds, None if n else sent))
            for n, pipe in enumerate(pipes)
        ),
    ]
    for process in processes:
        process.start()
        time.sleep(0.05)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
