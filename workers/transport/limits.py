"""What one connection may cost: sizes, times and rates, each with its reason, and the counters that hold peers to them.

All times are seconds of a monotonic clock that is handed in. A limit that a well-behaved Envoy, grpc-go or grpcio meets
under load is a bug of this file; the rates therefore grow with the useful work that the peer lets us do.

What a peer can make us keep adds up: per stream `message` (one that is unfinished), what its handler keeps, and
`stream_output`; per connection `connection_held` for all of these together, `header_block` and the header table; per process
`Budget` for all connections, of which there are at most `CONNECTIONS_MAX`.
"""

from dataclasses import dataclass

MIB = 1 << 20

CONNECTIONS_MAX = 512  # of a worker; an Envoy brings one per thread of its own, or a few
CONNECTIONS_MIN = 16  # however few files may be open: fewer would serve nobody
DESCRIPTORS_SPARE = 0.2  # of the open files allowed: for /metrics, calls of plugins and what is being closed
HANDSHAKE_SECONDS = 10.0  # for TLS: a peer far away with a slow link needs two round trips
SLOW_HANDSHAKE_SECONDS = 1.0  # at the limit of connections, a handshake that takes longer makes room
UNUSED_SECONDS = 0.25  # at the limit of connections, one that has opened no stream for so long makes room
IDLE_SECONDS = 1.0  # the same, in peace, for one that has had streams: its gateway can open another, who waits has none
BUDGET_MAX = 1024 * MIB  # of all peers of a process: 32 bodies of 32 MiB


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection; the defaults suit an Envoy beside us."""

    streams_first: int = 8  # advertised at first: Envoy opens another connection when one is full
    streams_max: int = 1024  # a gRPC library queues on its only connection, so this is what one gateway can have open
    message: int = 4 * MIB  # what gRPC libraries take by default
    stream_output: int = 64 * MIB  # queued because the peer doesn't take it: twice the largest body that is echoed
    connection_held: int = 256 * MIB  # queued output, unfinished messages and what handlers keep, together
    hoard: int = 32 * MIB  # of queued output, the largest body: a peer that leaves more than one unread has to read on:
    hoard_read: int = MIB  # so much
    hoard_seconds: float = 0.25  # in this time, if it has not read as much ever before;
    hoard_busy_seconds: float = 5.0  # else in this: an Envoy busy with large bodies has read nothing for a second
    stall_seconds: float = 30.0  # output of which nothing could be sent for so long: gateways read at once or never
    stalls: int = 16  # streams given up for that before the connection is
    header_block: int = 16 * 1024  # on the wire; gateways send less than 1 KiB
    header_fields: int = 128  # each costs time, and 1 byte on the wire
    header_field: int = 8 * 1024  # name and value: a long token, not a document
    header_list: int = 64 * 1024  # names and values and 32 per field, as HPACK counts: 1 byte may stand for 4 KiB
    continuations: int = 8  # per block: 16 KiB fit into two frames, and nobody cuts them much smaller
    header_seconds: float = 5.0  # from the first frame of a header block to its last: peers send them in one write
    preface_seconds: float = 10.0  # a client speaks first; this is for the slowest link
    drain_ping_seconds: float = 1.0  # a peer that doesn't answer the ping of a graceful shutdown gets no longer
    keepalive_seconds: float = 60.0  # so long without a byte from the peer, it is asked whether it lives
    keepalive_ack_seconds: float = 20.0  # for its answer: gRPC's own figure
    streams_at_once: int = 32  # begun by one read; others on the loop have their turn before the rest of it
    young_stream_seconds: float = 1.0  # resets of older streams are a client's patience, not an attack
    settings_entries: int = 64  # per frame; HTTP/2 knows 8 of them
    settings_burst: int = 100  # each may change the windows of all streams; clients send one, or one per doubling
    burst: int = 1000  # of each other kind of frame that costs more than it brings: one for each stream there may be
    per_second: float = 33.0  # after the burst, besides those that useful work has earned

    def __post_init__(self) -> None:
        if self.message < 16 * 1024:
            raise ValueError(
                f"message limit of {self.message} bytes is smaller than one HTTP/2 frame: set it to 16384 or more"
            )
        if not 1 <= self.streams_first <= self.streams_max:
            raise ValueError(
                f"stream limits {self.streams_first} (first) and {self.streams_max} (most): need 1 <= first <= most"
            )


class Budget:
    """Bytes held in memory for all peers of a process together that don't take or don't finish something."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int = BUDGET_MAX) -> None:
        self.limit = limit
        self.used = 0


def connections_allowed(files_max: int, files_open: int) -> int:
    """How many connections a process may hold, given how many files it may have open and has now."""
    room = int(files_max * (1 - DESCRIPTORS_SPARE)) - files_open
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, room))
