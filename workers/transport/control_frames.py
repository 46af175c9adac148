"""Handles frames that carry no part of a request: SETTINGS, WINDOW_UPDATE, RST_STREAM, PING, PRIORITY and GOAWAY.

A peer could send any of them as a flood, so `Session.charge` counts them. All methods raise ConnectionFault for malformed frames.
"""

from typing import Final

from workers.transport.frames import (
    ACK,
    INITIAL_WINDOW,
    MAX_FRAME,
    PING,
    SETTING,
    SETTINGS,
    WINDOW_MAX,
    WORD,
    ConnectionFault,
    Error,
    read_settings,
)
from workers.transport.session import DRAIN_PING, Session

# The most bytes of payload in a frame that we send, even if the peer accepts more, because streams take turns frame by frame.
SENT_FRAME_MAX: Final = 65536


class ControlFrames:
    """Handles the control frames of one connection."""

    __slots__ = ("_session",)

    def __init__(self, session: Session) -> None:
        self._session = session

    def settings(self, flags: int, number: int, data: bytes) -> None:
        session = self._session
        if number:
            raise ConnectionFault(Error.PROTOCOL, "SETTINGS on a stream")
        if flags & ACK:
            if data:
                raise ConnectionFault(Error.FRAME_SIZE, "SETTINGS acknowledgement with a payload")
            session.limit_known = True
            return
        if not session.charge("settings"):
            return
        if len(data) > session.limits.settings_entries * SETTING.size:
            session.abuse("settings", Error.CALM)
            return
        settings = read_settings(data)
        if INITIAL_WINDOW in settings:
            session.change_initial_window(settings[INITIAL_WINDOW])
        if MAX_FRAME in settings:
            session.frame_max = min(settings[MAX_FRAME], SENT_FRAME_MAX)
            session.room = session.frame_max if session.room else 0
        session.send_frame(SETTINGS, ACK, 0, b"")
        session.pump()

    def window_update(self, number: int, data: bytes, start: int, end: int) -> None:
        if end - start != 4:
            raise ConnectionFault(Error.FRAME_SIZE, "WINDOW_UPDATE of a wrong size")
        increment: int = WORD.unpack_from(data, start)[0] & WINDOW_MAX
        session = self._session
        if not session.charge_reading("window_updates"):
            return
        if not number:
            if not increment:
                raise ConnectionFault(Error.PROTOCOL, "WINDOW_UPDATE of 0")
            session.window += increment
            session.granted += increment
            if session.window > WINDOW_MAX:
                raise ConnectionFault(Error.FLOW_CONTROL, "connection window above 2^31-1")
            if session.ring:
                session.pump()
            return
        stream = session.streams.get(number)
        if stream is None:
            if number > session.last_opened and not session.is_late(number):
                raise ConnectionFault(Error.PROTOCOL, "WINDOW_UPDATE on an idle stream")
        elif not increment:
            session.reset(stream, Error.PROTOCOL)
        elif stream.window + increment > WINDOW_MAX:
            session.reset(stream, Error.FLOW_CONTROL)
        else:
            stream.window += increment
            if stream.queued:
                stream.enter_ring()
                session.pump()

    def rst_stream(self, number: int, length: int) -> None:
        if length != 4:
            raise ConnectionFault(Error.FRAME_SIZE, "RST_STREAM of a wrong size")
        session = self._session
        stream = session.streams.get(number)
        if stream is None:
            if not number or (number > session.last_opened and not session.is_late(number)):
                raise ConnectionFault(Error.PROTOCOL, f"RST_STREAM on idle stream {number}")
            session.charge_stray()
            return
        unanswered = not stream.opened and session.now - stream.born < session.limits.young_stream_seconds
        session.discard(stream, False)
        if unanswered:  # a rapid-reset attack consists of such streams
            session.reset_early()

    def ping(self, flags: int, number: int, data: bytes) -> None:
        if number:
            raise ConnectionFault(Error.PROTOCOL, "PING on a stream")
        if len(data) != 8:
            raise ConnectionFault(Error.FRAME_SIZE, "PING of a wrong size")
        session = self._session
        if flags & ACK:
            if data == DRAIN_PING and session.drain_until is not None:
                session.last_goaway()
        elif session.charge_reading("pings"):
            session.send_frame(PING, ACK, 0, data)

    def priority(self, number: int, data: bytes, start: int, end: int) -> None:
        """Checks a PRIORITY frame. We do not use priorities, but a malformed frame is an error."""
        if not number:
            raise ConnectionFault(Error.PROTOCOL, "PRIORITY on stream 0")
        session = self._session
        wrong = Error.NONE
        if end - start != 5:
            wrong = Error.FRAME_SIZE
        elif WORD.unpack_from(data, start)[0] & WINDOW_MAX == number:
            wrong = Error.PROTOCOL
        stream = session.streams.get(number)
        if wrong and stream is not None:
            session.reset(stream, wrong)
        elif wrong:
            raise ConnectionFault(wrong, "bad PRIORITY")
        else:
            session.charge("priorities")

    def goaway(self, number: int, length: int) -> None:
        if number or length < 8:
            raise ConnectionFault(Error.PROTOCOL if number else Error.FRAME_SIZE, "bad GOAWAY")
        session = self._session
        if session.charge("goaways"):
            session.peer_leaves()
