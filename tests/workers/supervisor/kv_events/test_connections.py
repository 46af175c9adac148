"""The connection of an event stream: when it counts as lost."""

import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest
import zmq

from epp.prefix.kv_events import SEQUENCE_BYTES
from loadtest.sim.kv_publisher import KvPublisher
from workers.supervisor.kv_events import sockets
from workers.supervisor.kv_events.sockets import FRAME_BYTES_MAX, LOST, OPENED, Subscription

HOST = "tcp://127.0.0.1"
LONG = bytes(FRAME_BYTES_MAX + 1)
SILENT_MS = 1500
GREETING = b"\xff" + bytes(8) + b"\x7f\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB"
MESSAGE = b"\1\0" + b"\1\x08" + bytes(SEQUENCE_BYTES) + b"\0\1x"  # an empty topic, a number, and a payload
RESET = struct.pack("ii", 1, 0)  # the value of SO_LINGER with which `close` resets the connection


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def opened(subscription: Subscription) -> bool:
    subscription.monitor.poll(5_000)
    return list(subscription.changes()) == [OPENED]


def test_a_full_socket_keeps_its_connection(context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "RECEIVED_MAX", 1)
    publisher = KvPublisher(context, f"{HOST}:*")
    address = publisher.address
    subscription = Subscription(context, address)
    assert opened(subscription)
    while not subscription.socket.poll(20):  # until the publisher knows of the subscription
        publisher.publish_bytes(b"first")
    for _ in range(2_000):
        publisher.publish_bytes(bytes(10_000))
    assert subscription.monitor.poll(SILENT_MS) == 0  # no change
    received = 0
    while subscription.socket.poll(200):
        received += sum(1 for _ in subscription.messages())
    assert received > 100
    assert list(subscription.changes()) == []
    subscription.close()
    publisher.close()


def test_a_closed_publisher_is_noticed(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    publisher = KvPublisher(context, f"{HOST}:*")
    subscription = Subscription(context, publisher.address)
    assert opened(subscription)
    publisher.close()
    assert subscription.monitor.poll(5_000)
    assert LOST in list(subscription.changes())
    subscription.close()


def lose_while_full() -> None:
    """Loses a publisher while its messages fill the subscription, and reads them later."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        subscription = Subscription(context, f"{HOST}:{server.getsockname()[1]}")
        peer = server.accept()[0]
        peer.sendall(GREETING + READY)
        assert opened(subscription)
        peer.settimeout(0.5)
        try:
            while True:  # until all buffers are full
                peer.sendall(MESSAGE * 1000)
        except TimeoutError:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            peer.close()
    subscription.monitor.poll(SILENT_MS)
    news = zmq.Poller()
    for waits in (subscription.socket, subscription.monitor):
        news.register(waits, zmq.POLLIN)
    while LOST not in subscription.changes():
        assert news.poll(5_000)
        for _ in subscription.messages():
            pass
    subscription.close()
    context.destroy(0)


def test_a_publisher_that_is_lost_while_its_messages_wait_does_not_abort_the_process() -> None:
    code = f"from {__name__} import lose_while_full; lose_while_full()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def changed(subscription: Subscription) -> list[bool]:
    """The next changes of the connection, and those that follow at once."""
    changes: list[bool] = []
    while not changes or subscription.monitor.poll(200):
        assert subscription.monitor.poll(5_000)
        changes += subscription.changes()
    return changes


def test_zeromq_gives_up_after_a_message_above_the_limit(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    publisher = KvPublisher(context, f"{HOST}:*")
    subscription = Subscription(context, publisher.address)
    assert opened(subscription)
    while not subscription.socket.poll(20):  # until the publisher knows of the subscription
        publisher.publish_bytes(b"first")
    publisher.publish_bytes(LONG)
    assert changed(subscription) == [LOST]
    assert subscription.given_up
    subscription.close()
    publisher.close()


def test_a_connection_that_ends_otherwise_is_not_given_up(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    publisher = KvPublisher(context, f"{HOST}:*")
    subscription = Subscription(context, publisher.address)
    assert opened(subscription)
    publisher.close()
    assert LOST in changed(subscription)
    assert not subscription.given_up
    subscription.close()
