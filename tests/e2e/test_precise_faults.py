"""Faults of processes and of event streams: no request fails, what is lost comes back, and each fault is counted and logged."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Self

import pytest
import zmq

from epp.prefix.kv_events import BLOCKS_MAX
from loadtest.sim.kv_dialects import payload
from loadtest.sim.kv_publisher import KvPublisher
from tests.e2e.cluster import COMPLETIONS, Cluster, Fleet, ask, completion, eventually
from tests.e2e.test_precise import SERVERS, World, fleet, own_core, prompt
from tests.e2e.test_warm import child_pid

__all__ = ["fleet"]  # a fixture

CLIENTS = 4
PAUSE_S = 0.05  # of a client between two requests: four clients show a failure that lasts 20 ms
LONG_S = 60.0
BUSY_S = 240.0  # without the right to a core, it takes an interval in which other processes leave one
FIRST_APPROXIMATE = {"sim-rank-0": False, "sim-rank-1": True, "sim-rank-2": True}
AT_ONCE = 500  # messages of an endless replay


class Clients:
    """Runs clients that send a request, and the next one PAUSE_S after the answer. `failed`: what went wrong."""

    def __init__(self, world: World) -> None:
        self.answered = 0
        self.failed: list[str] = []
        self._world = world
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(CLIENTS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def more(self, count: int = 20) -> bool:
        """Waits for `count` more answers, for at most LONG_S. Returns whether they came."""
        until = self.answered + count
        return eventually(lambda: self.answered >= until, LONG_S)

    def _ask(self, client: int) -> None:
        number = 0
        while not self._stop.wait(PAUSE_S):
            number += 1
            try:
                status = ask(self._world.gateway, COMPLETIONS, completion(f"{client} {number}", max_tokens=1)).status
            except OSError as lost:
                self.failed.append(str(lost))
                continue
            if status == 200:
                self.answered += 1
            else:
                self.failed.append(str(status))


@pytest.fixture
def world(cluster: Cluster, fleet: Fleet) -> Iterator[World]:
    """Starts a picker that matches every server precisely. Server n holds the prompts n and n + 3."""
    world = World(cluster, fleet, replay=True)
    try:
        for seed in range(2 * SERVERS):
            world.hold(seed % SERVERS, prompt(seed))
        assert eventually(world.all_precise, LONG_S)
        assert eventually(lambda: [world.held(rank) for rank in range(SERVERS)] == [40.0] * SERVERS, LONG_S)
        yield world
    finally:
        world.close()


def follows(world: World) -> bool:
    """Returns whether every request goes to the server that holds its prompt."""
    return [world.target(prompt(seed)) for seed in range(2 * SERVERS)] == [s % SERVERS for s in range(2 * SERVERS)]


def log(world: World, text: str, seconds: float = LONG_S) -> bool:
    return eventually(lambda: text in world.picker.child.text(), seconds)


def test_killed_processes_fail_no_request_of_others_and_affinity_comes_back(world: World) -> None:
    for child in ("kv-events", "supervisor", "worker 0"):
        with Clients(world) as clients:
            assert clients.more()
            before = child_pid(world.picker, child)
            killed = time.monotonic()
            os.kill(before, signal.SIGKILL)
            assert eventually(lambda c=child, b=before: child_pid(world.picker, c) != b, LONG_S)  # type: ignore[misc]
            assert eventually(world.all_precise, LONG_S)
            back = time.monotonic() - killed
            assert clients.more()
        print(f"{child} killed: precise after {back:.2f} s, {len(clients.failed)} of {clients.answered} requests failed")
        assert follows(world)
        # A worker loses the streams that are open on its connections, one per client at most. The others lose none.
        assert len(clients.failed) <= (CLIENTS if child == "worker 0" else 0), clients.failed
    world.hold(2, prompt(9))
    assert eventually(lambda: world.held(2) == 60.0, LONG_S)
    assert world.target(prompt(9)) == 2


def test_a_cut_stream_makes_its_endpoint_approximate_soon_and_only_that_one(world: World) -> None:
    with Clients(world) as clients:
        assert clients.more()
        cut = time.monotonic()
        world.cut(0)
        assert eventually(lambda: not world.precise()["sim-rank-0"], LONG_S)
        print(f"approximate {time.monotonic() - cut:.2f} s after the cut")
        assert eventually(lambda: world.precise() == FIRST_APPROXIMATE, LONG_S)
        assert 'not_precise{reason="the connection to its event socket is lost"} 1' in world.picker.page()
        assert world.picker.counter("kv_cache_events_subscriber_reconnections_total") >= 1
        assert clients.more()
        world.start_again(0)  # a new server: it holds nothing but this prompt
        world.hold(0, prompt(9))
        assert eventually(world.all_precise, LONG_S)
        assert eventually(lambda: world.held(0) == 20.0, LONG_S)
        assert clients.more()
    assert clients.failed == []
    assert world.target(prompt(9)) == 0


@contextlib.contextmanager
def flooded(publisher: KvPublisher) -> Iterator[None]:
    """Publishes more than the picker can apply while the block runs."""
    stopped = threading.Event()
    costly = payload([publisher.dialect.removed([1] * BLOCKS_MAX)])  # small on the wire, milliseconds to apply

    def flood() -> None:
        while not stopped.wait(0.001):
            for _ in range(8):  # a busy machine gives this thread few turns
                publisher.publish_bytes(costly)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def next_report(world: World, garbling: int) -> None:
    """Waits until the picker has reported a malformed event, and so begins a new interval. `garbling`: the server that sends it."""
    world.publishers[garbling].publish_bytes(b"garbage")
    assert log(world, "kv-events: an endpoint sends malformed events")


@pytest.mark.timeout(600)
def test_a_publisher_that_floods_is_named_and_delays_no_other(world: World) -> None:
    before = child_pid(world.picker, "kv-events")
    own_core(before)  # so that it can take most of its time
    received = world.picker.counter("kv_cache_events_messages_received_total")
    next_report(world, 1)
    with Clients(world) as clients:
        with flooded(world.publishers[0]):
            world.hold(1, prompt(9))
            assert eventually(lambda: world.held(1) == 60.0, LONG_S)
            assert eventually(lambda: world.precise().get("sim-rank-1", False), LONG_S)
            assert log(world, "kv-events: the events of one endpoint take most of the time", BUSY_S)
        assert clients.more()
    assert clients.failed == []
    assert world.picker.counter("kv_cache_events_messages_received_total") > received
    assert world.picker.counter("kv_cache_events_removals_skipped_total") >= BLOCKS_MAX
    assert child_pid(world.picker, "kv-events") == before
    assert world.target(prompt(9)) == 1


class Endless(KvPublisher):
    """A publisher whose replays have no end."""

    peer = b""
    number = 0

    def answer_replays(self) -> int:
        assert self._replay is not None
        with contextlib.suppress(zmq.Again):
            self.peer, _, start = self._replay.recv_multipart(zmq.NOBLOCK)
            self.number = int.from_bytes(start, "big")
        for _ in range(AT_ONCE if self.peer else 0):
            self._repeat(self.peer, self.number.to_bytes(8, "big"), payload([]))
            self.number += 1
        return 0


def test_a_replay_without_end_is_given_up_counted_and_named(world: World) -> None:
    before = child_pid(world.picker, "kv-events")
    with Clients(world) as clients:
        world.start_again(0, Endless)
        assert log(world, "kv-events: a replay has no answer or no end")
        assert eventually(lambda: world.picker.counter("kv_cache_events_replays_failed_total") >= 1, LONG_S)
        assert eventually(lambda: world.precise() == FIRST_APPROXIMATE, LONG_S)
        assert clients.more()
    assert clients.failed == []
    assert child_pid(world.picker, "kv-events") == before
    assert [world.target(prompt(seed)) for seed in (1, 2, 4, 5)] == [1, 2, 1, 2]


def test_garbage_and_numbers_that_jump_are_counted_and_named_and_cost_no_other_endpoint(world: World) -> None:
    garbling, jumping = world.publishers[1], world.publishers[0]
    counter = world.picker.counter
    with Clients(world) as clients:
        for number in range(200):
            garbling.publish_bytes(bytes([number]) * number)
            garbling.send_frames([garbling.topic, b"no number", b"x"])
        assert log(world, "kv-events: an endpoint sends malformed events")
        assert eventually(lambda: counter("kv_cache_events_malformed_total") >= 300, LONG_S)
        assert eventually(world.all_precise, LONG_S)
        assert follows(world)

        jumping.forget()  # what is missing cannot be replayed
        for number in range(1_000, 13_000, 1_000):  # more often than replays are tried
            before = counter("kv_cache_events_gaps_total")
            jumping.next = number
            jumping.publish([jumping.dialect.cleared()])
            assert eventually(lambda b=before: counter("kv_cache_events_gaps_total") > b, LONG_S)  # type: ignore[misc]
        assert eventually(lambda: world.precise() == FIRST_APPROXIMATE, LONG_S)
        assert log(world, "kv-events: the numbers of an endpoint's messages jump")
        assert clients.more()
    assert clients.failed == []
    assert [world.target(prompt(seed)) for seed in (1, 2, 4, 5)] == [1, 2, 1, 2]
