"""Which worker accepts, and when the limit of a full connection rises. The loop and the sockets are fakes."""

import errno
import heapq
import itertools
import socket

import pytest

from tests.reports import Reports
from workers.transport import accept
from workers.transport.accept import AT_ONCE, LONG_QUEUE, QUEUE_SHARE, FullConnections, Gate
from workers.transport.headers import ClientKind

LOOPBACK = "127.0.0.1"


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
        """Runs one turn of the loop: due timers, then readable sockets."""
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
        self.failures = Reports()
        self.fleet = fleet
        fleet.append(self)
        self.gate = Gate(
            self.loop, listening, lambda: self.load, self.others, self.take, room, self.failures, queued=lambda listening: listening.waiting
        )
        self.gate.open()

    def others(self):
        return [(w.serving, w.load, w.age) for w in self.fleet if w is not self]

    def take(self, accepted):
        self.taken += 1
        self.load += 8

    def turn(self, seconds=0.001):
        self.loop.turn([self.listening], seconds)


def test_a_long_queue_is_accepted_by_all_workers_several_connections_per_turn():
    listening, fleet = FakeListening(10 * LONG_QUEUE), []
    for _ in range(2):
        Worker(listening, fleet)
    fleet[0].load = 1000  # it would not accept while the other one has less load
    fleet[0].turn()
    assert fleet[0].taken == AT_ONCE
    left = listening.waiting
    fleet[1].turn()
    assert fleet[1].taken == min(left // QUEUE_SHARE, AT_ONCE)
    while listening.waiting >= LONG_QUEUE:
        fleet[0].turn()
    taken = fleet[0].taken
    fleet[0].turn()
    assert fleet[0].taken == taken  # the queue is short again


def test_a_long_queue_fills_no_more_than_the_room():
    listening, fleet = FakeListening(10 * LONG_QUEUE), []
    places = 3
    worker = Worker(listening, fleet, room=lambda: int(worker.taken < places))
    for _ in range(5):
        worker.turn()
    assert worker.taken == places


def test_the_kernel_tells_how_many_connections_wait():
    with socket.create_server((LOOPBACK, 0), backlog=LONG_QUEUE) as listening:
        listening.setblocking(False)
        assert accept._queued(listening) == 0
        clients = [socket.create_connection(listening.getsockname()) for _ in range(5)]
        assert accept._queued(listening) == 5
        for client in clients:
            listening.accept()[0].close()
            client.close()
        assert accept._queued(listening) == 0


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
def test_a_worker_does_not_wait_for_others_that_do_not_serve_or_have_no_fresh_heartbeat(serving, age):
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


def test_the_wait_of_20_ms_starts_again_with_each_connection():
    listening, fleet = FakeListening(1), []
    busy, other = Worker(listening, fleet), Worker(listening, fleet)
    busy.load = 100
    busy.turn()
    other.turn()  # accepts it
    for _ in range(10):
        busy.turn(0.1)
    listening.waiting, other.load = 1, 0
    busy.turn()
    assert busy.taken == 0


def test_a_connection_that_another_worker_accepted_is_no_error():
    listening, fleet = FakeListening(1), []
    worker = Worker(listening, fleet)
    listening.waiting = 0
    worker.loop.readers[5]()
    assert worker.taken == 0


def test_without_descriptors_the_gate_backs_off_and_logs_at_a_limited_rate():
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


def test_unexpected_errors_are_raised():
    listening, fleet = FakeListening(1), []
    worker = Worker(listening, fleet)
    listening.error = errno.EBADF
    with pytest.raises(OSError, match="too many"):
        worker.turn()


def test_without_room_the_gate_accepts_nothing_and_does_not_spin():
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


def test_a_gate_that_was_closed_during_a_pause_accepts_no_more():
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
        self.last = False

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


def test_the_limit_of_a_connection_that_stays_full_is_raised():
    full, connection = FullConnections(Accepts()), FakeConnection(1.0)
    assert full.note(connection)
    assert not full.note(connection)
    assert full.check(1.01, [connection])
    assert connection.raised == 0
    assert not full.check(1.02, [connection])
    assert connection.raised == 1


def test_no_limit_is_raised_while_new_connections_arrive():
    accepts = Accepts()
    full, connection = FullConnections(accepts), FakeConnection(1.0)
    full.note(connection)
    accepts.count = 1
    assert full.check(1.02, [connection])
    assert connection.raised == 0
    assert not full.check(1.04, [connection])
    assert connection.raised == 1


def test_a_connection_that_has_room_again_or_was_lost_is_forgotten():
    full = FullConnections(Accepts())
    relaxed, lost = FakeConnection(1.0), FakeConnection(1.0)
    full.note(relaxed)
    full.note(lost)
    relaxed.since = None
    full.forget(lost)
    assert not full.check(1.02, [relaxed])
    assert (relaxed.raised, lost.raised) == (0, 0)


@pytest.mark.parametrize(
    ("client", "host", "last", "raised"),
    [
        (ClientKind.QUEUES, "a", False, 1),
        (ClientKind.UNKNOWN, "a", False, 0),
        (ClientKind.UNKNOWN, "b", False, 1),
        (ClientKind.POOLS, "b", False, 0),
        (ClientKind.POOLS, "b", True, 1),
    ],
)
def test_only_the_limit_of_a_client_that_can_only_wait_is_raised(client, host, last, raised):
    full, connection = FullConnections(Accepts()), FakeConnection(1.0, "a", client)
    connection.last = last
    full.note(connection)
    full.check(1.02, [connection, FakeConnection(None, host)])
    assert connection.raised == raised
