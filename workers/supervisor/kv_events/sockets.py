"""ZeroMQ sockets for one event stream: the subscription, its monitor, and the socket that asks for missed messages.

The kernel probes idle connections (TCP keepalive), and ends a connection on which nothing is acknowledged for UNACKNOWLEDGED_MS. So the
loss of a connection that is cut silently is noticed in 3 seconds. ZeroMQ must send no pings (HEARTBEAT_IVL): while a socket is full, it
reads no answers. If the publisher is lost meanwhile, the next ping aborts the process (https://github.com/zeromq/libzmq/issues/3937).

A message above FRAME_BYTES_MAX ends the connection. ZeroMQ takes the sender for a peer that breaks the protocol, and never connects to this
peer again. It does not report this, but after every other loss it reports at once that it will try again. Such a subscription is replaced
by a new one: connecting the same socket again can abort the process, if messages of the old connection are unread.

Received messages wait in the socket, up to its high-water mark. More messages wait at the publisher, which drops them at its own mark.
Dropped messages show as a gap in the numbers. Each read of a socket is limited in messages and time, so that all publishers get their turn.
"""

import time
from collections.abc import Iterator
from typing import Final

import zmq
import zmq.utils.monitor

from epp.prefix.kv_events import PAYLOAD_BYTES_MAX, REPLAY_END, SEQUENCE_BYTES, sequence_of

RECEIVED_MAX: Final = 256  # limit for messages that wait in a subscription
REPLAYED_MAX: Final = 20_000  # limit for messages that wait in a replay: twice what engines keep
RECONNECT_MS, RECONNECT_MAX_MS = 100, 1000
PROBE_S, UNACKNOWLEDGED_MS = 1, 3000
MESSAGES_PER_TURN: Final = 256
TURN_S: Final = 0.02  # limit for reading one socket in one turn; the last message may take longer
SOCKETS_PER_ENDPOINT: Final = 4  # the subscription, both ends of its monitor, the replay
SOCKETS_OTHER: Final = 16
FRAME_BYTES_MAX: Final = PAYLOAD_BYTES_MAX + 1024
PORT_MAX: Final = 65535
OPENED, LOST = True, False

_REFUSED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | sum(_REFUSED)

Frames = list[bytes]


def context_for(endpoints: int) -> "zmq.Context[zmq.Socket[bytes]]":
    """Creates a context with enough sockets for `endpoints` endpoints. ZeroMQ's default suffices for 340 subscriptions."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    most = int(context.get(zmq.SOCKET_LIMIT))
    context.set(zmq.MAX_SOCKETS, min(most, SOCKETS_PER_ENDPOINT * endpoints + SOCKETS_OTHER))
    return context


class Subscription:
    """A SUB socket that is connected to one publisher, or bound for many publishers. Receives the messages of all topics.

    `given_up`: whether the connection is lost and ZeroMQ has not reported that it will connect again. It may still report this a moment
    later.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, *, bind: bool = False) -> None:
        """Raises zmq.ZMQError if the address cannot be used, or if the process may open no more sockets."""
        self.address = address
        self.errors = 0  # failed handshakes: peers that do not speak ZeroMQ
        self.given_up = False
        self.socket = _opened(context, zmq.SUB, RECEIVED_MAX)
        try:
            for option, value in (
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.TCP_KEEPALIVE_IDLE, PROBE_S),
                (zmq.TCP_KEEPALIVE_INTVL, PROBE_S),
                (zmq.TCP_MAXRT, UNACKNOWLEDGED_MS),
            ):
                self.socket.setsockopt(option, value)
            self.socket.setsockopt(zmq.SUBSCRIBE, b"")
            self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(_EVENTS)
        except zmq.ZMQError:
            self.socket.close(0)
            raise
        try:
            self.socket.bind(address) if bind else self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise

    def changes(self) -> Iterator[bool]:
        """Yields OPENED and LOST for changes of the connection, in their order."""
        for frames in received(self.monitor):
            event = zmq.utils.monitor.parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                yield OPENED
            elif event == zmq.EVENT_DISCONNECTED:
                self.given_up = True
                yield LOST
            elif event == zmq.EVENT_CONNECT_RETRIED:
                self.given_up = False
            else:
                self.errors += 1

    def messages(self) -> Iterator[tuple[bytes, int, bytes]]:
        """Yields topic, number and payload of each message that has arrived. The number is -1 if the message does not have the frames of an
        event message.
        """
        for frames in received(self.socket):
            number = sequence_of(frames[1]) if len(frames) == 3 else None
            yield (frames[0], -1, b"") if number is None else (frames[0], number, frames[2])

    def close(self) -> None:
        """Closes the socket and its monitor."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class ReplayRequest:
    """Asks a publisher for its messages from number `start` on.

    Each request has its own socket, so it never gets a late answer to another.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, start: int) -> None:
        """Raises zmq.ZMQError if the address cannot be used, or if the process may open no more sockets."""
        self.socket = _opened(context, zmq.DEALER, REPLAYED_MAX)
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.socket.send_multipart([b"", start.to_bytes(SEQUENCE_BYTES, "big")], zmq.NOBLOCK)

    def answers(self) -> Iterator[tuple[bytes, int, bytes] | None]:
        """Yields topic, number and payload of each repeated message, and None at the end. The topic is empty for older engines, which send
        none.
        """
        for frames in received(self.socket):
            if len(frames) < 2:
                continue
            sequence, payload = frames[-2:]
            if sequence == REPLAY_END and not payload:
                yield None
                return
            if (number := sequence_of(sequence)) is not None:
                yield frames[-3] if len(frames) > 2 else b"", number, payload

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close(0)


def _opened(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, received_max: int) -> "zmq.Socket[bytes]":
    """Opens a socket that holds at most `received_max` messages. Raises zmq.ZMQError if there are too many sockets."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    for option, value in (
        (zmq.LINGER, 0), (zmq.RCVHWM, received_max), (zmq.MAXMSGSIZE, FRAME_BYTES_MAX), (zmq.IPV6, 1), (zmq.RECONNECT_IVL, RECONNECT_MS),
    ):  # fmt: skip
        socket.setsockopt(option, value)
    return socket


def received(socket: "zmq.Socket[bytes]") -> Iterator[Frames]:
    """Yields the messages that have arrived. Stops after MESSAGES_PER_TURN messages or TURN_S seconds."""
    until = time.monotonic() + TURN_S
    for _ in range(MESSAGES_PER_TURN):
        try:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        frames = [frame.bytes]
        while frame.more:  # the frame knows this; `recv_multipart` asks the socket, which takes longer
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
        yield frames
        if time.monotonic() > until:
            return


def tcp(host: str, port: int) -> str:
    """Returns the ZeroMQ address of a port. Raises ValueError for a port above 65535, because ZeroMQ would silently use another one."""
    if port > PORT_MAX:
        raise ValueError(f"port {port} is above {PORT_MAX}")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
