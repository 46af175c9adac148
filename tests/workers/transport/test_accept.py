"""Whose turn it is to accept, and when a full connection may carry more; with a loop and sockets that are made up."""

import errno
import heapq
import itertools

import pytest

from workers.transport.accept import FullConnections, Gate
from workers.transport.headers import ClientKind


class FakeLoop:
    def __init__(self):
        self.now = 0.0
        self.readers = {}
        self.timers = []
        self._order = itertools.count()

    def time(self):
        return self.now

    def add_reader(self, fd, callback):
        self.readers[fd] = callback

    def remove_reader(self, fd):
        return self.readers.pop(fd, None) is not None

    def call_later(self, delay, callback):
        timer = Timer(callback)
        heapq.heappush(self.timers, (self.now + delay, next(self._order), timer))
        return timer

    def turn(self, sockets, seconds=0.001):
        """One turn of the loop: due timers, then readable sockets."""
        self.now += seconds
        while self.timers and self.timers[0][0] <= self.now:
            timer = heapq.heappop(self.timers)[2]
            if timer.callback is not None:
                timer.callback()
        for listening in sockets:
            if listening.waiting and listening.fileno() in self.readers:
                self.readers[listening.fileno()]()


class Timer:
    def __init__(self, callback):
        self.callback = callback

    def cancel(self):
        self.callback = None


class Accepted:
    def setblocking(self, flag):
        assert flag is False


class FakeListening:
    def __init__(self, waiting=0):
        self.waiting = waiting
        self.error = None
        self.calls = 0

    def fileno(self):
        return 5

    def accept(self):
        self.calls += 1
        if self.error is not None:
            raise OSError(self.error, "too many")
        if not self.waiting:
            raise BlockingIOError
        self.waiting -= 1
        return Accepted(), None


class Worker:
    def __init__(self, listening, fleet, room=lambda: True):
        self.loop = FakeLoop()
        self.listening = listening
        self.load = 0
        self.serving = True
        self.age = 0.0
        self.taken = 0
        self.failures = []
        self.fleet = fleet
        fleet.append(self)
        self.gate = Gate(self.loop, listening, lambda: self.load, self.others, self.take, room, self.failures.append)
        self.gate.open()

    def others(self):
        return [(w.serving, w.load, w.age) for w in self.fleet if w is not self]

    def take(self, accepted):
        self.taken += 1
        self.load += 8

    def turn(self, seconds=0.001):
        self.loop.turn([self.listening], seconds)


@pytest.mark.parametrize(("workers", "connections"), [(4, 17), (2, 5), (8, 40)])
def test_a_burst_of_connections_is_spread_evenly(workers, connections):
    listening, fleet = FakeListening(connections), []
    for _ in range(workers):
        Worker(listening, fleet)
    for _ in range(40):
        for worker in fleet:
            worker.turn()
    taken = [worker.taken for worker in fleet]
    assert sum(taken) == connections
    assert max(taken) - min(taken) <= 1


def test_a_worker_leaves_connections_to_one_with_less_load():
    listening, fleet = FakeListening(1), []
    busy, idle = Worker(listening, fleet), Worker(listening, fleet)
    busy.load = 1
    busy.turn()
    assert busy.taken == 0
    idle.turn()
    assert idle.taken == 1


@pytest.mark.parametrize(("serving", "age"), [(False, 0.0), (True, 0.3)])
def test_workers_that_do_not_serve_or_show_no_heartbeat_are_not_waited_for(serving, age):
    listening, fleet = FakeListening(1), []
    busy, other = Worker(listening, fleet), Worker(listening, fleet)
    busy.load, other.serving, other.age = 100, serving, age
    busy.turn()
    assert busy.taken == 1


def test_a_stopped_worker_cannot_starve_connections_longer_than_20_ms():
    listening, fleet = FakeListening(1), []
    busy, _stopped = Worker(listening, fleet), Worker(listening, fleet)
    busy.load = 100
    for _ in range(19):
        busy.turn()
    assert busy.taken == 0
    for _ in range(4):
        busy.turn()
    assert busy.taken == 1


def test_patience_starts_anew_with_each_connection():
    listening, fleet = FakeListening(1), []
    busy, other = Worker(listening, fleet), Worker(listening, fleet)
    busy.load = 100
    busy.turn()
    other.turn()  # took it
    for _ in range(10):
        busy.turn(0.1)
    listening.waiting, other.load = 1, 0
    busy.turn()
    assert busy.taken == 0


def test_a_connection_that_another_took_is_no_error():
    listening, fleet = FakeListening(1), []
    worker = Worker(listening, fleet)
    listening.waiting = 0
    worker.loop.readers[5]()
    assert worker.taken == 0


def test_out_of_descriptors_backs_off_and_logs_now_and_then():
    listening, fleet = FakeListening(1), []
    worker = Worker(listening, fleet)
    listening.error = errno.EMFILE
    for _ in range(1000):
        worker.turn()
    assert listening.calls <= 11
    assert len(worker.failures) == 1
    assert "open files" in worker.failures[0]
    for _ in range(100):
        worker.turn(0.1)
    assert len(worker.failures) == 2
    listening.error = None
    for _ in range(2):
        worker.turn(0.1)
    assert worker.taken == 1


def test_errors_nobody_expects_are_raised():
    listening, fleet = FakeListening(1), []
    worker = Worker(listening, fleet)
    listening.error = errno.EBADF
    with pytest.raises(OSError, match="too many"):
        worker.turn()


def test_without_room_nothing_is_accepted_and_nothing_spins():
    listening, fleet = FakeListening(1), []
    room = [False]
    worker = Worker(listening, fleet, lambda: room[0])
    for _ in range(100):
        worker.turn()
    assert listening.calls == 0
    room[0] = True
    for _ in range(60):
        worker.turn()
    assert worker.taken == 1


def test_a_closed_gate_accepts_no_more_even_while_it_was_pausing():
    listening, fleet = FakeListening(1), []
    busy, _idle = Worker(listening, fleet), Worker(listening, fleet)
    busy.load = 5
    busy.turn()
    busy.gate.close()
    busy.gate.close()
    for _ in range(100):
        busy.turn()
    assert busy.taken == 0
    busy.gate.open()
    for _ in range(100):
        busy.turn()
    assert busy.taken == 1


class FakeConnection:
    def __init__(self, since=None, host="a", client=ClientKind.QUEUES):
        self.since, self.host, self.client = since, host, client
        self.raised = 0

    def full(self):
        return self.since

    def raise_limit(self):
        self.raised += 1
        self.since = None


class Accepts:
    """A counter over all workers."""

    count = 0

    def __call__(self):
        return self.count


def test_a_connection_that_stays_full_may_carry_more():
    full, connection = FullConnections(Accepts()), FakeConnection(1.0)
    assert full.note(connection)
    assert not full.note(connection)
    assert full.check(1.01, [connection], True)
    assert connection.raised == 0
    assert not full.check(1.02, [connection], True)
    assert connection.raised == 1


def test_a_connection_is_not_raised_while_new_ones_arrive():
    accepts = Accepts()
    full, connection = FullConnections(accepts), FakeConnection(1.0)
    full.note(connection)
    accepts.count = 1
    assert full.check(1.02, [connection], True)
    assert connection.raised == 0
    assert not full.check(1.04, [connection], True)
    assert connection.raised == 1


def test_a_connection_that_got_room_or_was_lost_is_forgotten():
    full = FullConnections(Accepts())
    relaxed, lost = FakeConnection(1.0), FakeConnection(1.0)
    full.note(relaxed)
    full.note(lost)
    relaxed.since = None
    full.forget(lost)
    assert not full.check(1.02, [relaxed], True)
    assert (relaxed.raised, lost.raised) == (0, 0)


@pytest.mark.parametrize(
    ("client", "host", "more", "raised"),
    [
        (ClientKind.QUEUES, "a", True, 1),
        (ClientKind.UNKNOWN, "a", True, 0),
        (ClientKind.UNKNOWN, "b", True, 1),
        (ClientKind.POOLS, "b", True, 0),
        (ClientKind.POOLS, "b", False, 1),
    ],
)
def test_only_a_client_that_has_nowhere_else_to_go_is_raised(client, host, more, raised):
    full, connection = FullConnections(Accepts()), FakeConnection(1.0, "a", client)
    full.note(connection)
    full.check(1.02, [connection, FakeConnection(None, host)], more)
    assert connection.raised == raised
