"""What one connection may cost: sizes, times and rates, and the two counters that hold peers to them.

All times are seconds of a monotonic clock that is handed in. A limit that a well-behaved Envoy, grpc-go or grpcio meets
under load is a bug of this file; the rates therefore grow with the useful work that the peer lets us do.
"""

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection; the defaults suit an Envoy beside us."""

    streams_first: int = 8  # advertised at first: Envoy opens another connection when one is full
    streams_max: int = 1024
    message: int = 4 * MIB
    stream_output: int = 64 * MIB  # queued because the peer doesn't take it
    connection_held: int = 256 * MIB  # queued output and unfinished messages together
    stall_seconds: float = 30.0  # queued output of which nothing could be sent for so long: reset
    header_block: int = 16 * 1024
    header_fields: int = 128
    header_list: int = 64 * 1024  # names and values and 32 per field, as HPACK counts
    continuations: int = 8
    header_seconds: float = 5.0  # from the first frame of a header block to its last
    preface_seconds: float = 10.0
    drain_ping_seconds: float = 1.0  # a peer that doesn't answer the ping of a graceful shutdown gets no longer
    young_stream_seconds: float = 1.0  # resets of older streams are a client's patience, not an attack
    burst: int = 1000
    per_second: float = 33.0

    def __post_init__(self) -> None:
        if self.message < 16 * 1024:
            raise ValueError(
                f"message limit of {self.message} bytes is smaller than one HTTP/2 frame: set it to 16384 or more"
            )
        if not 1 <= self.streams_first <= self.streams_max:
            raise ValueError(
                f"stream limits {self.streams_first} (first) and {self.streams_max} (most): need 1 <= first <= most"
            )


class Bucket:
    """Tokens for one kind of frame that costs us more than it costs the peer.

    Filled by time and by `earned`, a growing total of useful work that makes such frames expected."""

    __slots__ = ("_earned", "_now", "_tokens", "burst", "per_second")

    def __init__(self, limits: Limits, now: float) -> None:
        self.burst = float(limits.burst)
        self.per_second = limits.per_second
        self._tokens = self.burst
        self._now = now
        self._earned = 0

    def take(self, now: float, earned: int = 0) -> bool:
        gained = (now - self._now) * self.per_second + (earned - self._earned)
        self._now = now
        self._earned = earned
        self._tokens = min(self.burst, self._tokens + gained) - 1.0
        return self._tokens >= 0.0


class Budget:
    """Bytes held in memory for all peers of a process together that don't take or don't finish something."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int = 1024 * MIB) -> None:
        self.limit = limit
        self.used = 0
