"""Follows one endpoint's events: joins its stream, its blocks and its sockets."""

import contextlib
import re
import time
from collections.abc import Container
from typing import Final

import zmq

from epp.candidates import Endpoint
from epp.prefix.kv_events import NAME_CHARS_MAX, is_read
from epp.prefix.streams import NAMELESS, NO_EVENTS, OTHER_TOPIC, PARTLY_REUSED, StreamRecord
from shm.stream_positions import StreamPosition, StreamPositions
from workers.process.kv_memory import KvCounts
from workers.supervisor.kv_events.event_stream import Stream
from workers.supervisor.kv_events.held_state import SavedStream
from workers.supervisor.kv_events.holdings import Holder, Holdings
from workers.supervisor.kv_events.sockets import OPENED, ReplayRequest, Subscription, tcp

AGAIN_S: Final = 1.0  # the time after which a connection that ZeroMQ has given up is replaced
RANK: Final = re.compile(r"-rank-(\d{1,4})$")


def rank_of(endpoint: Endpoint) -> int:
    """Returns the rank in data parallelism with which an endpoint's name ends, or 0 without a rank."""
    found = RANK.search(endpoint.name)
    return int(found[1]) if found else 0


class Followed:
    """One endpoint whose events are followed. Implements `stream.Sink`. `subscription`: None if publishers connect to a socket of the
    picker.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        holdings: Holdings,
        positions: StreamPositions,
        context: "zmq.Context[zmq.Socket[bytes]]",
        *,
        subscription: Subscription | None,
        topic: str,
        replay_address: str,
        kept: SavedStream | None,
    ) -> None:
        """`topic`: the beginning of the topics to read. `kept`: the state of the endpoint from a predecessor or a snapshot, or None."""
        self.endpoint = endpoint
        self.subscription = subscription
        self.replay: ReplayRequest | None = None
        self.messages = self._messages_before = 0
        self.frames_malformed = 0
        self.seconds = 0.0  # the time that the endpoint's messages have taken
        self.losses = 0
        self.too_long = 0  # messages above the limit, each of which has ended the connection
        self._lost_at = 0.0
        self.replay_failure_told = False
        self.left_out = 0  # messages of topics that the picker does not read
        self.other_topic = b""  # the topic of its messages if the picker reads none of them, shortened
        self.heard = 0.0
        self.followed = False
        self.why = ""
        self.since = 0.0
        self._holdings = holdings
        self._positions = positions
        self._context = context
        self._replay_address = replay_address
        self._topic = topic.encode()
        self._reads = False  # whether this connection has had a message that the picker reads
        known = kept or SavedStream([], 0, 0, 0, None, "")
        self.holder = Holder(holdings, known.owners, known.group)
        self.holder.block_tokens = known.block_tokens
        self.stream = Stream(self, replays=bool(replay_address), position=known.position, check=known.check, remark=known.remark)
        if kept is not None:
            before = positions.read(endpoint.slot)
            self.heard, self._messages_before = before.heard, before.messages
            self.publish()

    # Implements `stream.Sink`.

    def apply(self, payload: bytes) -> None:
        self.holder.apply(payload)

    def clear(self) -> None:
        self.holder.clear()

    def ask(self, start: int) -> None:
        self.stop_asking()
        with contextlib.suppress(zmq.ZMQError):  # a failed request for a replay is treated as a replay without an answer
            self.replay = ReplayRequest(self._context, self._replay_address, start)

    def stop_asking(self) -> None:
        if self.replay is not None:
            self.replay.close()
            self.replay = None

    # Methods for the loop.

    @property
    def malformed(self) -> int:
        """Messages and events that were skipped since this process began to follow the endpoint."""
        return self.frames_malformed + self.holder.malformed

    @property
    def troubles(self) -> int:
        """The number of gaps and restarts in the stream since this process began to follow the endpoint."""
        return self.stream.gaps + self.stream.restarts

    def receive(self, now: float, ready: Container[object]) -> bool:
        """Reads what has arrived on the endpoint's own sockets, up to their limits. Returns whether something had arrived.

        `ready`: the sockets of subscriptions that have messages. The socket of a replay is always read.
        """
        begun = time.monotonic()
        busy = self._receive(now, ready)
        if busy:
            self.seconds += time.monotonic() - begun
        return busy

    def _receive(self, now: float, ready: Container[object]) -> bool:
        busy, subscription = False, self.subscription
        if subscription is not None and subscription.monitor in ready:
            for change in subscription.changes():
                busy = True
                if change is OPENED:
                    self._reads, self.other_topic = False, b""
                    self.stream.opened(now)
                else:
                    self.losses += 1
                    self._lost_at = now
                    self.stream.lost(now)
        if subscription is not None and subscription.socket in ready:
            for topic, number, payload in subscription.messages():
                busy = True
                if is_read(topic, self._topic):
                    self.take(number, payload, now)
                else:
                    self._leave_out(topic)
        while (replay := self.replay) is not None:
            answered, again = self._read_replay(replay, now)
            busy |= answered
            if not again:
                break
        return busy

    def take(self, number: int, payload: bytes, now: float) -> None:
        """Handles a live message. `number`: -1 for a message without the frames of an event message."""
        self.messages += 1
        self.heard = now
        self._reads, self.other_topic = True, b""
        if number < 0:
            self.frames_malformed += 1
        else:
            self.stream.message(number, payload, now)

    def _leave_out(self, topic: bytes) -> None:
        """Counts a message of a topic that the picker does not read."""
        self.messages += 1
        self.left_out += 1
        if not self._reads:
            self.other_topic = topic[:NAME_CHARS_MAX]

    def given_up(self, now: float) -> Subscription | None:
        """Returns the subscription if ZeroMQ has given up its connection, so that it needs a successor. Otherwise returns None."""
        subscription = self.subscription
        if subscription is None or not subscription.given_up or now - self._lost_at < AGAIN_S:
            return None
        return subscription

    def follow_again(self, successor: Subscription) -> None:
        """Continues with another subscription instead of one that was given up. The caller closes the old subscription."""
        assert self.subscription is not None
        successor.errors = self.subscription.errors
        self.subscription = successor
        self.too_long += 1

    def publish(self) -> None:
        """Publishes how far the endpoint's stream was read."""
        stream = self.stream
        held = self.holder.held
        self._positions.write(
            self.endpoint.slot,
            StreamPosition(stream.position, stream.check, self.heard, self._messages_before + self.messages, held, stream.dropped),
        )

    def kept(self) -> SavedStream:
        """Returns the state of the endpoint for a snapshot."""
        stream, holder = self.stream, self.holder
        return SavedStream(holder.owners, stream.position, stream.check, holder.block_tokens, holder.group, self.remark)

    @property
    def remark(self) -> str:
        """Why matches of the endpoint's blocks may be wrong, or ""."""
        return self.stream.remark or (PARTLY_REUSED if self.holder.partly_reused else "")

    def counts(self) -> KvCounts:
        """Returns the counts of the endpoint's stream in this process."""
        stream = self.stream
        return KvCounts(
            messages=self.messages,
            malformed=self.frames_malformed + self.too_long,
            reconnections=self.losses,
            gaps=stream.gaps,
            restarts=stream.restarts,
            replays_failed=stream.replays_failed,
            dropped=stream.dropped + self.left_out,
            errors=self.subscription.errors if self.subscription is not None else 0,
        )

    def record(self, now: float) -> StreamRecord:
        """Returns the endpoint's record for the streams document."""
        why = OTHER_TOPIC if self.other_topic else self.stream.why(now)
        if not why:
            why = NAMELESS if self.holder.nameless else "" if self.holder.block_tokens else NO_EVENTS
        if bool(why) is self.followed:
            self.followed, self.since = not why, now
        address = self.subscription.address if self.subscription is not None else ""
        endpoint, holder = self.endpoint, self.holder
        return StreamRecord(
            endpoint.slot, endpoint.generation, endpoint.owner, not why, why, self.remark, holder.block_tokens,
            holder.tiers, holder.speculative, address, self.since, holder.group,
        )  # fmt: skip

    def close(self) -> None:
        """Stops following the endpoint, and drops its known blocks."""
        self.stop_asking()
        if self.subscription is not None:
            self.subscription.close()
        self.holder.leave()

    def _read_replay(self, replay: ReplayRequest, now: float) -> tuple[bool, bool]:
        """Reads the answers to a replay. Returns two values: whether there were answers, and whether the stream has meanwhile asked for
        another replay, on another socket.
        """
        answered = False
        for answer in replay.answers():
            answered = True
            if answer is None:
                self.stop_asking()
                self.stream.replay_ended(now)
            elif is_read(answer[0], self._topic):
                self.stream.replayed(*answer[1:], now)
            else:
                self._leave_out(answer[0])
                self.stop_asking()
                self.stream.replay_ended(now)
            if self.replay is not replay:
                return True, self.replay is not None
        return answered, False


def addresses(endpoint: Endpoint, port: int, replay_port: int) -> tuple[str, str]:
    """Returns two addresses: where the endpoint publishes its events, and where it repeats messages ("" without `replay_port`).

    Raises ValueError for a port above 65535.
    """
    rank = rank_of(endpoint)
    return tcp(endpoint.host, port + rank), tcp(endpoint.host, replay_port + rank) if replay_port else ""
