"""Measures the cost of many publishers: a picker follows 100 simulated servers that publish 100 messages a second each.

    publishers (one process) ──▶ kv-events process          its CPU time
    requests ──▶ Envoy ──▶ picker                           their times, with and without events

The publishers take the machine's time, too. So the same is measured while a process that discards everything reads the messages instead
of the picker. The difference is the picker's.

The process of the publishers is this module: `python -m tests.bench.kv_publishers PORT COUNT RATE`. With a RATE of 0 it is the process
that reads and discards. Both run until they are ended.
"""

import os
import random
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from loadtest.demo.children import Child, command_name, cpu_seconds, descendants, python
from loadtest.demo.ports import free_row
from loadtest.demo.stack import LOOPBACK
from loadtest.sim.kv_dialects import Dialect, payload
from loadtest.sim.kv_publisher import KvPublisher
from tests.e2e.cluster import COMPLETIONS, Cluster, Picker, ask, completion, eventually
from tests.e2e.precise_world import CONFIG

PUBLISHERS, RATE = 100, 100
BLOCKS = 4  # that a message stores; the oldest leave with the same message
KEPT_PROMPTS = 40
BLOCK = 16
SECONDS, SMOKE_SECONDS = 10.0, 2.0
SMOKE_PUBLISHERS = 10
CORES_MAX = 0.5
SLOWER_MAX = 1.10
REQUESTS, SMOKE_REQUESTS = 1_500, 100
ROUNDS = 3
TRIES_MAX = 20
ELSEWHERE = (("publishers elsewhere", RATE), ("reader elsewhere", 0))


def run(port: int, count: int, rate: float) -> None:
    """Publishes at this rate, until the process is ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publishers = [KvPublisher(context, f"tcp://{LOOPBACK}:{port + n}") for n in range(count)]
    messages = [_messages(random.Random(n)) for n in range(count)]
    due, at = time.monotonic(), 0
    while True:
        publishers[at % count].publish_bytes(next(messages[at % count]))
        at += 1
        if at % 20 == 0:
            due += 20 / (count * rate)
            time.sleep(max(0.0, due - time.monotonic()))


def discard(port: int, count: int) -> None:
    """Reads what the publishers send, until the process is ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"")
    for n in range(count):
        reader.connect(f"tcp://{LOOPBACK}:{port + n}")
    while True:
        reader.recv_multipart()


def _messages(rng: random.Random) -> Iterator[bytes]:
    """Yields payloads without end. Each stores the blocks of a new prompt. If there are more than KEPT_PROMPTS, it removes the oldest."""
    dialect = Dialect("vllm")
    prompts: list[list[int]] = []
    while True:
        hashes = [rng.getrandbits(63) | 1 for _ in range(BLOCKS)]
        tokens = [rng.randrange(150_000) for _ in range(BLOCKS * BLOCK)]
        events = [dialect.stored(hashes, None, tokens, BLOCK)]
        prompts.append(hashes)
        if len(prompts) > KEPT_PROMPTS:
            events.append(dialect.removed(prompts.pop(0)))
        yield payload(events)


def publish(smoke: bool) -> Iterator[tuple[str, float, float, bool]]:
    """Runs the benchmark. Yields figures in the form that `tests.bench.kv_events` prints."""
    count = SMOKE_PUBLISHERS if smoke else PUBLISHERS
    requests = SMOKE_REQUESTS if smoke else REQUESTS
    with Cluster() as cluster:
        port = free_row(2 * count)
        fleet = cluster.fleet(count, "--prefill-us-per-token", "1", "--decode-ms", "1")
        endpoints = re.sub(r'name: "sim-(\d+)"', r'name: "sim-rank-\1"', fleet.file.read_text())
        file = cluster.directory / "named.yaml"
        file.write_text(endpoints)
        config = CONFIG.format(endpoints=file, render="127.0.0.1:9", port=port, replay="")
        picker = cluster.picker(Path("unused"), workers=2, config_text=config)
        gateway = cluster.envoy(picker)
        quiet, loaded, discarded, cores = [], [], [], []
        for number in range(1 if smoke else ROUNDS):
            quiet.append(_times(gateway, requests, number))
            child = _start(cluster, f"publishers {number}", port, count, RATE)
            assert eventually(lambda: _counter(picker, "active_subscribers") == count, 30.0)
            cores.append(_cores(picker, SMOKE_SECONDS if smoke else SECONDS, count))
            loaded.append(_times(gateway, requests, number))
            _end(cluster, child)
            others = [_start(cluster, f"{name} {number}", port + count, count, rate) for name, rate in ELSEWHERE]
            discarded.append(_times(gateway, requests, number))
            for other in others:
                _end(cluster, other)
        yield f"kv-events process, {count} publishers, {RATE} messages/s each, cores", min(cores), CORES_MAX, True
        yield "p99 of requests with events / without", _p99(loaded) / _p99(quiet), SLOWER_MAX, True
        yield ("p99 with events / with events that another process reads", _p99(loaded) / _p99(discarded), SLOWER_MAX, True)


def _start(cluster: Cluster, name: str, port: int, count: int, rate: int) -> Child:
    return cluster.children.start(name, python("tests.bench.kv_publishers", str(port), str(count), str(rate)))


def _end(cluster: Cluster, child: Child) -> None:
    child.kill_group()
    child.process.wait()
    cluster.forget(child)


def _cores(picker: Picker, seconds: float, count: int) -> float:
    """Returns the CPU seconds per second of the kv-events process. Prints the rate of messages, too."""
    pid = next(p for p in descendants(picker.child.pid) if "kv-events" in command_name(p))
    received = _counter(picker, "messages_received_total")
    began, spent = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    elapsed, cores = time.monotonic() - began, cpu_seconds(pid) - spent
    rate = (_counter(picker, "messages_received_total") - received) / elapsed
    print(f"  {rate:,.0f} messages/s received from {count} publishers; gaps", end=" ")
    print(f"{_counter(picker, 'gaps_total'):.0f}", flush=True)
    return cores / elapsed * max(1.0, count * RATE / max(rate, 1.0))  # as if all had come


def _counter(picker: Picker, name: str) -> float:
    """Returns a value of the metrics page. Asks again if the page is late, as on a busy machine."""
    for _ in range(TRIES_MAX):
        if found := re.search(rf"^llm_d_epp_kv_cache_events_{name} (\S+)$", picker.page(), re.MULTILINE):
            return float(found[1])
    raise AssertionError(f"{name} is not on the metrics page")


def _times(gateway: int, requests: int, seed: int) -> list[float]:
    times = []
    for number in range(requests):
        body = completion(f"{seed} {number} " * 20, max_tokens=1)
        began = time.perf_counter()
        assert ask(gateway, COMPLETIONS, body).status == 200
        times.append(time.perf_counter() - began)
    return times


def _p99(rounds: list[list[float]]) -> float:
    """Returns the lowest 99th percentile of the rounds: that of the round that other processes disturbed least."""
    return min(statistics.quantiles(times, n=100)[98] for times in rounds)


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    first, publishers, messages_per_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    if messages_per_s:
        run(first, publishers, messages_per_s)
    else:
        discard(first, publishers)
