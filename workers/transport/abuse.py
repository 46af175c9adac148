"""Peers that keep the letter of HTTP/2 and cost more than they bring: what is counted against them, and when it is too much.

Each cause has a name, which its counter and the log carry, and a sentence, which the peer gets as the debug text of GOAWAY
with ENHANCE_YOUR_CALM. Most causes are kinds of frames with a bucket each: a burst of tokens, filled again by time and by
`earned`, a growing total of useful work that makes such frames expected (bytes that the peer took, streams that ended as
they should). The others are limits that are met once.

A bucket is made when the first token is taken, and is asked only for frames of its kind: messages of a stream meet none.
What this does not do: look at streams that are whole and answered. Too many of those are load, and flow control's matter.
"""

from collections.abc import Callable, Mapping
from typing import Final

from workers.transport.limits import Limits

BYTES_PER_TOKEN: Final = 4  # that the peer took: a window opened byte by byte isn't paid for by the bytes it lets out

CAUSES: Final[Mapping[str, str]] = {
    # Buckets.
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
    # Limits that are met once.
    "output_limit": "more answers are unread than one stream or connection may leave so",
    "header_block": "a header block has too many bytes or CONTINUATION frames",
    "header_list": "a header list has too many fields or bytes",
    "header_timeout": "a header block was not finished in time",
    "preface_timeout": "no connection preface came in time",
    "dead_peer": "no answer to a keep-alive PING",
    "connections": "the connection was unused when others were waiting for a place",
}


class Bucket:
    """Tokens for one kind of frame."""

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
        self._tokens = min(self.burst, self._tokens + gained) - 1.0
        return self._tokens >= 0.0


class Buckets:
    """Those of one connection."""

    __slots__ = ("_buckets", "_limits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._buckets: dict[str, Bucket] = {}

    def take(self, cause: str, now: float, earned: int) -> bool:
        bucket = self._buckets.get(cause)
        if bucket is None:
            limits = self._limits
            burst = _BURST.get(cause, _usual)(limits)
            bucket = self._buckets[cause] = Bucket(burst, limits.per_second if cause != "output_stalled" else 0.0, now)
        return bucket.take(now, earned)


def _usual(limits: Limits) -> int:
    return limits.burst


_BURST: Final[Mapping[str, Callable[[Limits], int]]] = {
    "settings": lambda limits: min(limits.settings_burst, limits.burst),
    "output_stalled": lambda limits: limits.stalls,
}
