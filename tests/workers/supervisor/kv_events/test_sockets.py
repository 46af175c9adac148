"""The sockets of event streams: enough for many endpoints, and what cannot be opened leaves nothing open."""

import pytest
import zmq

from workers.supervisor.kv_events.sockets import ReplayRequest, Subscription, context_for, tcp

ENDPOINTS = 400  # more than ZeroMQ's default allows
NOWHERE = "tcp://127.0.0.1:1"


def test_there_are_sockets_for_a_subscription_and_a_replay_of_every_endpoint() -> None:
    context = context_for(ENDPOINTS)
    opened = [Subscription(context, NOWHERE) for _ in range(ENDPOINTS)]
    opened += [ReplayRequest(context, NOWHERE, 0) for _ in range(ENDPOINTS)]
    for each in opened:
        each.close()
    context.term()  # would wait for a socket that is open


@pytest.mark.parametrize("address", ["tcp://no host:5", "tcp://127.0.0.1"])
def test_an_address_that_cannot_be_used_leaves_no_socket_open(address: str) -> None:
    context = context_for(1)
    for _ in range(50):
        with pytest.raises(zmq.ZMQError):
            Subscription(context, address)
        with pytest.raises(zmq.ZMQError):
            ReplayRequest(context, address, 0)
    context.term()


def test_beyond_the_limit_of_sockets_a_subscription_fails_and_leaves_none_open() -> None:
    context = context_for(1)
    opened = []
    with pytest.raises(zmq.ZMQError):
        for _ in range(100):
            opened.append(Subscription(context, NOWHERE))
    for each in opened:
        each.close()
    context.term()


def test_a_port_that_does_not_exist_is_refused() -> None:
    assert tcp("::1", 65535) == "tcp://[::1]:65535"
    with pytest.raises(ValueError, match="port 65536"):
        tcp("127.0.0.1", 65536)
