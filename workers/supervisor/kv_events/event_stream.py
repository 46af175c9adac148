"""One event stream: decides which messages are applied, when missed ones are asked for, and whether the endpoint's entries are used.

    connecting ─▶ replaying ─▶ whole ─▶ gap, restart or loss ─▶ replaying …
                      └─ no answer ─▶ cooling down ─▶ believed from the live messages on

- A publisher numbers its messages: vLLM from 0, its simulator from 1. A gap in the numbers means that messages were lost. A number that
  falls means that the publisher has restarted with an empty cache.
- If no message was applied yet, the replay begins at the oldest message. Otherwise it begins at the last message that was applied. The CRC
  of that message tells whether the publisher is still the same.
- A live message may arrive after a replay had it, because the two come over different connections. Such a message is skipped: it has a
  number and the CRC of a message in the replay. Otherwise its number, which is lower than expected, would mean a restart.
- The messages in a replay are accepted even if the first ones are missing, because a publisher drops old messages from its buffer. Then the
  endpoint's entries come only from the remaining messages.
- An endpoint is *believed* while its entries are used. If lost messages are not replayed, it is believed again COOL_DOWN_S after the loss,
  from the live messages alone.

This is pure code: it reads no clock and opens nothing. `Sink` applies messages and asks for replays. Every list is bounded.
"""

from collections import deque
from typing import Final, Protocol
from zlib import crc32

from epp.prefix.streams import COOLING, LOST, NO_ANSWER, NO_EVENTS, NOT_CONNECTED, PARTIAL, REPLAYING, UNPROVEN, UNSURE

COOL_DOWN_S: Final = 30.0
# A connection that is lost for longer makes the endpoint approximate. With the delay of the loop, this takes less than a second.
LOST_S: Final = 0.8
REPLAY_IDLE_S: Final = 2.0
REPLAY_MAX_S: Final = 120.0
REPLAY_TRIES: Final = 3  # requests for a replay without progress
REPLAY_MESSAGES_MAX: Final = 100_000  # ten times what engines keep
RESTARTS_MAX: Final = 8  # after this many gaps and restarts within COOL_DOWN_S, there are no replays for COOL_DOWN_S
BACKLOG_MESSAGES_MAX: Final = 10_000
BACKLOG_BYTES_MAX: Final = 64 << 20
FIRST_NUMBER_MAX: Final = 1
# Messages of the last replay that may also arrive live afterwards: more do not wait in a subscription and in its connection.
REPEATED_MAX: Final = 1024


class Sink(Protocol):
    """Receives the actions of a stream: messages to apply, and requests for replays."""

    def apply(self, payload: bytes) -> None: ...
    def clear(self) -> None: ...
    def ask(self, start: int) -> None: ...
    def stop_asking(self) -> None: ...


class _Replay:
    """A replay under way. `verify`: whether its first message must be the last one that was applied before."""

    __slots__ = ("began", "heard", "messages", "progress", "start", "tries", "verify")

    def __init__(self, start: int, verify: bool, now: float) -> None:
        self.start = start
        self.verify = verify
        self.began = self.heard = now
        self.messages = 0
        self.tries = 0
        self.progress = False


class Stream:
    """Decides about the messages of one stream.

    `position`: the number of the last applied message + 1; 0 before the first message. `check`: the CRC of that message. `remark`: why the
    endpoint's entries may be wrong although they are used, or "".
    """

    def __init__(self, sink: Sink, *, replays: bool, position: int = 0, check: int = 0, remark: str = "") -> None:
        self._sink = sink
        self._replays = replays
        self.position = position
        self.check = check
        self.is_open = False
        self.remark = remark
        self.gaps = 0
        self.restarts = 0
        self.dropped = 0  # messages for which the backlog had no room
        self.replays_failed = 0
        self._lost_at: float | None = None
        self._believed = False
        self._unsure = False
        self._has_sent_nothing = False  # whether a replay on this connection has shown that the publisher has sent no message
        self._believe_at: float | None = None
        self._why = NOT_CONNECTED
        self._rest_until = 0.0  # the time until which no replay is asked for
        self._troubles: deque[float] = deque(maxlen=RESTARTS_MAX)
        self._replay: _Replay | None = None
        self._repeated: dict[int, int] = {}  # number -> CRC of the last messages of a replay, until a live message follows them
        self._backlog: deque[tuple[int, bytes]] = deque()
        self._backlog_bytes = 0

    @property
    def waiting(self) -> int:
        """The number of live messages that wait for the end of a replay."""
        return len(self._backlog)

    def why(self, now: float) -> str:
        """Returns why the endpoint's entries are not used, or ""."""
        if not self.is_open and (self._lost_at is None or now - self._lost_at > LOST_S):
            return NOT_CONNECTED if self._lost_at is None else LOST
        if self._replay is not None:
            return REPLAYING
        if self._unsure:
            return UNSURE
        return "" if self._believed else self._why

    def opened(self, now: float) -> None:
        """Handles a new connection: asks for a replay if there is a replay socket."""
        self.is_open, self._lost_at = True, None
        if self._replays:
            self._ask(max(self.position - 1, 0), now, verify=self.position > 0)
        elif self.position:
            self._unsure = True
            # Both values are unset if this process continues the stream of a predecessor or a snapshot.
            if not self._believed and self._believe_at is None:
                self._believed = True
        else:
            self._why = NO_EVENTS

    def lost(self, now: float) -> None:
        """Handles a lost connection. Ends a replay under way."""
        if self.is_open:
            self.is_open, self._lost_at, self._has_sent_nothing = False, now, False
            if self._replay is not None:
                self._stop_replay()
                # The next replay repeats these messages, unless they come from a publisher that is gone.
                self._backlog.clear()
                self._backlog_bytes = 0
                self._believed, self._why = False, LOST

    def message(self, number: int, payload: bytes, now: float) -> None:
        """Handles a live message. Keeps it while a replay is under way."""
        if self._replay is not None:
            self._keep(number, payload)
            return
        expected = self.position
        if expected == 0:
            # A publisher that had sent nothing may begin at 1, or its message 0 was lost: only a replay tells.
            if number and self._has_sent_nothing and self._may_replay(now):
                self._keep(number, payload)
                self._ask(0, now, verify=False)
            else:
                self._begin(number, payload, now)
        elif number == expected:
            if self._unsure:  # only a replay could prove that the publisher is the same
                self._unsure, self.remark = False, self.remark or UNPROVEN
            self._repeated.clear()
            self._apply(number, payload)
        elif number < expected and self._repeated.get(number) == crc32(payload):
            pass
        elif number < expected:
            self.restarts += 1
            self._start_again(number, payload, now)
        else:
            self.gaps += 1
            if self._may_replay(now):
                self._keep(number, payload)
                self._ask(expected, now, verify=False)
            else:
                self._clear()
                self._begin(number, payload, now)

    def replayed(self, number: int, payload: bytes, now: float) -> None:
        """Handles a message of a replay."""
        replay = self._replay
        if replay is None:
            return
        replay.heard = now
        replay.messages += 1
        if replay.messages > REPLAY_MESSAGES_MAX:
            self._replay_failed(now)
            return
        if replay.verify:
            replay.verify = False
            if number == replay.start and crc32(payload) == self.check:
                return
            self._clear()
            if number <= replay.start:
                self.restarts += 1
                self._ask(0, now, verify=False)
                return
        if self.position == 0:
            if number > FIRST_NUMBER_MAX:
                self.remark = PARTIAL
            self._apply_replayed(number, payload)
        elif number == self.position:
            self._apply_replayed(number, payload)
        elif number > self.position:
            self._repeat(number, payload, now)
            return
        replay.progress = True

    def replay_ended(self, now: float) -> None:
        """Handles the end of a replay."""
        replay = self._replay
        if replay is None:
            return
        if replay.verify:  # the publisher does not know the last applied message, so it is another publisher
            self.restarts += 1
            self._clear()
            if replay.start:
                self._ask(0, now, verify=False)
                return
        self._replay = None
        if self._backlog and 0 < self.position < self._backlog[0][0] and not replay.progress:
            self._clear()  # the publisher has dropped the missing messages
            self.position, self.remark = self._backlog[0][0], PARTIAL
        self._believed, self._believe_at, self._unsure = True, None, False
        self._has_sent_nothing = not self.position
        self._take_backlog(now)

    def tick(self, now: float) -> None:
        """Handles time-outs. Call it several times per second."""
        replay = self._replay
        if replay is not None and (now - replay.heard > REPLAY_IDLE_S or now - replay.began > REPLAY_MAX_S):
            self._replay_failed(now)
        if self._believe_at is not None and now >= self._believe_at and self.is_open:
            self._believed, self._believe_at = True, None
            self.remark = PARTIAL

    def _begin(self, number: int, payload: bytes, now: float) -> None:
        """Handles the first message of a stream that was not followed before."""
        self.remark = PARTIAL if number > (FIRST_NUMBER_MAX if self._has_sent_nothing else 0) else ""
        self._has_sent_nothing = False
        if number > FIRST_NUMBER_MAX:
            self._believe_later(now, COOLING)
        else:
            self._believed, self._believe_at = True, None
        self._unsure = False
        self._apply(number, payload)

    def _start_again(self, number: int, payload: bytes, now: float) -> None:
        """Handles a restart of the publisher: drops its blocks and begins again."""
        self._clear()
        if number and self._may_replay(now):
            self._keep(number, payload)
            self._ask(0, now, verify=False)
        else:
            self._begin(number, payload, now)

    def _apply(self, number: int, payload: bytes) -> None:
        self._sink.apply(payload)
        self.position, self.check = number + 1, crc32(payload)

    def _apply_replayed(self, number: int, payload: bytes) -> None:
        self._apply(number, payload)
        self._repeated[number] = self.check
        if len(self._repeated) > REPEATED_MAX:
            del self._repeated[next(iter(self._repeated))]

    def _clear(self) -> None:
        self._sink.clear()
        self._repeated.clear()
        self.position = self.check = 0
        self._believed, self._believe_at, self._unsure, self.remark = False, None, False, ""

    def _believe_later(self, now: float, why: str) -> None:
        self._believed, self._why = False, why
        if self._believe_at is None:
            self._believe_at = now + COOL_DOWN_S

    def _may_replay(self, now: float) -> bool:
        """Returns whether a replay may begin. Counts the attempt: after many attempts within a short time, no replay may begin for a
        while.
        """
        if not self._replays or now < self._rest_until:
            return False
        if len(self._troubles) == RESTARTS_MAX and now - self._troubles[0] < COOL_DOWN_S:
            self._rest_until = now + COOL_DOWN_S
            return False
        self._troubles.append(now)
        return True

    def _ask(self, start: int, now: float, *, verify: bool) -> None:
        self._replay = _Replay(start, verify, now)
        self._sink.ask(start)

    def _repeat(self, number: int, payload: bytes, now: float) -> None:
        """Handles a gap in a replay: asks again from the gap. After REPLAY_TRIES without progress, accepts the messages behind the gap."""
        replay = self._replay
        assert replay is not None
        replay.tries = 1 if replay.progress else replay.tries + 1
        replay.progress = False
        self.gaps += 1
        if replay.tries <= REPLAY_TRIES:
            self._sink.ask(self.position)
            return
        self._clear()
        self.remark = PARTIAL
        self._apply_replayed(number, payload)

    def _replay_failed(self, now: float) -> None:
        self.replays_failed += 1
        self._stop_replay()
        self._rest_until = now + COOL_DOWN_S
        self._clear()  # blocks that were held before the gap may be gone
        self._believe_later(now, NO_ANSWER)
        self._take_backlog(now)
        if not self._believed:
            self._why = NO_ANSWER

    def _stop_replay(self) -> None:
        self._replay = None
        self._sink.stop_asking()

    def _keep(self, number: int, payload: bytes) -> None:
        """Keeps a live message until the replay has ended. If too many messages wait, drops the oldest."""
        self._backlog.append((number, payload))
        self._backlog_bytes += len(payload)
        while len(self._backlog) > BACKLOG_MESSAGES_MAX or self._backlog_bytes > BACKLOG_BYTES_MAX:
            _, oldest = self._backlog.popleft()
            self._backlog_bytes -= len(oldest)
            self.dropped += 1

    def _take_backlog(self, now: float) -> None:
        kept, self._backlog, self._backlog_bytes = self._backlog, deque(), 0
        for number, payload in kept:
            if self._replay is None and number < self.position:
                continue  # the replay already had this message
            self.message(number, payload, now)
