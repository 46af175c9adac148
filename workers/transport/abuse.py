"""Detects peers that obey HTTP/2 but cost more than they bring: counts their actions by cause, and says when there are too many.

Each cause has a name and a sentence. The counter and the log show the name. The peer gets the sentence as the debug text of GOAWAY with
ENHANCE_YOUR_CALM. Most causes are kinds of frames. Each of these kinds has one token bucket per connection, which starts with a burst of
tokens. Time refills the bucket, and so does `earned`, a growing total of useful work that makes such frames expected (bytes that the peer
has taken, streams that have ended properly). The other causes are limits: a peer must not exceed them even once.

A bucket is created when its first token is taken. Only frames of its kind take tokens, so messages on a stream take none.
Early resets are counted in the same way. But if there are too many, the connection is not closed, only read more slowly
(`Session.reset_early`), because a gateway relays the resets of one client over the connection that all its clients share.

This module does not count streams that are complete and answered. Too many of these are load, which flow control handles.
"""

from collections.abc import Callable, Mapping
from typing import Final

from workers.transport.limits import Limits

# Bytes of DATA sent per earned token: a peer that opens its window byte by byte must not earn a token for each byte.
BYTES_PER_TOKEN: Final = 4

VIOLATION: Final = "violation"  # the peer broke the application's protocol: ends the stream, not the connection

CAUSES: Final[Mapping[str, str]] = {
    # Causes with a bucket.
    "resets": "too many streams reset before they were answered",
    "provoked_resets": "too many streams that had to be reset for errors of the peer",
    "refused_streams": "too many streams beyond the advertised limit",
    "refused_requests": "too many requests for methods or content that this port does not serve",
    "empty_streams": "too many streams that ended without a message",
    "empty_frames": "too many empty DATA frames",
    "pings": "too many PING frames",
    "settings": "too many SETTINGS frames, or too many settings in one",
    "window_updates": "too many WINDOW_UPDATE frames for what was sent",
    "priorities": "too many PRIORITY frames",
    "goaways": "too many GOAWAY frames",
    "stray_frames": "too many frames on streams that have ended",
    "unknown_frames": "too many frames of unknown types",
    "output_stalled": "answers were not read for too long",
    # Causes that are limits.
    "output_limit": "too many bytes of answers are unread on one stream or connection",
    "header_block": "a header block has too many bytes or CONTINUATION frames",
    "header_list": "a header list has too many fields or bytes",
    "header_timeout": "a header block was not finished in time",
    "preface_timeout": "no connection preface came in time",
    "dead_peer": "no answer to a keep-alive PING",
    "connections": "the connection was unused when others were waiting for a place",
}


class Bucket:
    """The tokens of one kind of frame on one connection."""

    __slots__ = ("_earned", "_now", "_tokens", "burst", "per_second")

    def __init__(self, burst: int, per_second: float, now: float) -> None:
        self.burst = float(burst)
        self.per_second = per_second
        self._tokens = self.burst
        self._now = now
        self._earned = 0

    def take(self, now: float, earned: int = 0) -> bool:
        gained = (now - self._now) * self.per_second + (earned - self._earned)
        self._now = now
        self._earned = earned
        self._tokens = max(-1.0, min(self.burst, self._tokens + gained) - 1.0)
        return self._tokens >= 0.0


class Buckets:
    """The buckets of one connection, by cause."""

    __slots__ = ("_buckets", "_limits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, Bucket] = {}

    def take(self, cause: str, now: float, earned: int) -> bool:
        bucket = self._buckets.get(cause)
        if bucket is None:
            limits = self._limits
            burst = _BURST[cause](limits) if cause in _BURST else limits.burst
            bucket = self._buckets[cause] = Bucket(burst, limits.per_second if cause != "output_stalled" else 0.0, now)
        return bucket.take(now, earned)


_BURST: Final[Mapping[str, Callable[[Limits], int]]] = {
    "settings": lambda limits: min(limits.settings_burst, limits.burst),
    "output_stalled": lambda limits: limits.stalls,
}
