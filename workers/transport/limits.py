"""Limits what one connection may cost: sizes, times and rates, each with its reason.

All times are in seconds. If a well-behaved Envoy, grpc-go or grpcio reaches a limit under load, that is a bug in this file. So the rates
grow with the useful work that the peer lets us do.

What a peer can make us keep in memory is bounded by:

    per stream      `message` (one unfinished message), the bytes that its handler keeps, `stream_output`
    per connection  `connection_held` for the three together, `header_block`, the header table
    per process     `Budget` for all connections; the number of connections is at most `CONNECTIONS_MAX`
"""

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.transport.interface import Handler

MIB = 1 << 20

CONNECTIONS_MAX = 512  # per worker; an Envoy opens one per thread, or a few
CONNECTIONS_MIN = 16  # allowed even with a low limit of open files, because a worker with fewer connections is useless
# Share of the allowed open files that is left for /metrics, calls of plugins and sockets that are closing.
DESCRIPTORS_SPARE = 0.2
HANDSHAKE_SECONDS = 10.0  # for TLS: a distant peer on a slow link needs two round trips
LINGER_SECONDS = 0.2  # how long a connection stays open for a peer that still sends when we close it
SLOW_HANDSHAKE_SECONDS = 1.0  # at the limit of connections, a handshake that has taken longer is cancelled
UNUSED_SECONDS = 0.25  # at the limit of connections, a connection that has opened no stream for this long is closed
# At the limit of connections, one that had streams and has none for this long may be drained: its gateway can open another one later.
IDLE_SECONDS = 1.0
# The limit `resets_per_second` for all connections of a process together. A reset costs 60 us.
RESETS_OF_ALL_PER_SECOND = 3000.0
SLOW_SLACK = 0.02  # seconds by which a connection may be ahead of its rate of early resets
BUDGET_MAX = 1024 * MIB  # for all peers of a process together: 32 bodies of 32 MiB


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one connection. Sizes are in bytes. The defaults suit an Envoy on the same host or network."""

    streams_first: int = 8  # the first limit that we send; when a connection is full, Envoy opens another one
    # A gRPC library queues on its only connection, so a gateway that uses one may have this many open.
    streams_max: int = 1024
    message: int = 4 * MIB  # the default of gRPC libraries
    # Bytes queued because the peer does not take them: twice the largest body that is sent back.
    stream_output: int = 64 * MIB
    connection_held: int = 256 * MIB  # queued output, unfinished messages and bytes that handlers keep, together
    # A peer that leaves more than `hoard` bytes of answers unread (the largest body) must read `hoard_read` bytes in time. A peer that has
    # read fewer so far has `hoard_seconds` for it. Any other peer has `hoard_busy_seconds`, because an Envoy that was busy with large
    # bodies read no byte for a second.
    hoard: int = 32 * MIB
    hoard_read: int = MIB
    hoard_seconds: float = 0.25
    hoard_busy_seconds: float = 5.0
    # A stream that could send nothing for this long is reset, because a gateway reads either at once or never.
    stall_seconds: float = 30.0
    stalls: int = 16  # a connection on which more streams were reset for that reason is closed
    header_block: int = 16 * 1024  # bytes on the wire; gateways send less than 1 KiB
    header_fields: int = 128  # each costs time, even if it takes only 1 byte on the wire
    header_field: int = 8 * 1024  # name and value together: a long token fits, a document does not
    # Names, values and 32 per field, as HPACK counts; 1 byte on the wire may stand for 4 KiB.
    header_list: int = 64 * 1024
    continuations: int = 8  # per header block, of at most 16 KiB: these fit into two frames, and clients use few more
    header_seconds: float = 5.0  # limit from the first to the last frame of a header block; peers send these in one write
    preface_seconds: float = 10.0  # a client sends its preface first; this suffices for the slowest link
    drain_ping_seconds: float = 1.0  # how long a graceful shutdown waits for the answer to its PING
    keepalive_seconds: float = 60.0  # when the peer has sent no byte for this long, we send a PING
    keepalive_ack_seconds: float = 20.0  # limit for its answer: the default of gRPC
    # The number of streams that one read may begin. The rest of the read waits for the next turn of the loop.
    streams_at_once: int = 32
    # A client that resets an older stream has only lost its patience, so this is no attack.
    young_stream_seconds: float = 1.0
    settings_entries: int = 64  # settings per frame; HTTP/2 defines 8
    # Each may change the windows of all streams; clients send one, or one per doubling of a window.
    settings_burst: int = 100
    burst: int = 1000  # limit for each other kind of frame that costs more than it brings; about one per possible stream
    per_second: float = 33.0  # in addition to the burst and to what useful work has earned
    resets_per_second: float = 1000.0  # early resets; a connection with more of them is read more slowly

    def __post_init__(self) -> None:
        if self.message < 16 * 1024:
            raise ValueError(f"message limit of {self.message} bytes is smaller than one HTTP/2 frame: set it to 16384 or more")
        if not 1 <= self.streams_first <= self.streams_max:
            raise ValueError(f"stream limits {self.streams_first} (first) and {self.streams_max} (most): need 1 <= first <= most")


# Called with (handlers, bytes): gives up unfinished requests until this number of bytes is free. Chooses among the streams of these
# handlers; None instead of handlers means all streams.
Relief = Callable[[Sequence[Handler] | None, int], None]


class Budget:
    """Counts the bytes that a process holds for all its peers: answers that they do not read, and messages that they do not finish.

    `relieve` is called when unfinished messages exceed the limit of a connection or of the process. It may end any stream.
    `slow_until`: until then, connections with many early resets must wait, because all of them together have caused too much work.
    """

    __slots__ = ("limit", "relieve", "slow_until", "used")

    def __init__(self, limit: int = BUDGET_MAX) -> None:
        self.limit = limit
        self.used = 0
        self.relieve: Relief = _no_relief
        self.slow_until = 0.0


def _no_relief(among: Sequence[Handler] | None, excess: int) -> None:
    """Gives up no request."""


def connections_allowed(files_max: int, files_open: int) -> int:
    """Returns how many connections a process may have. `files_max`: how many files it may open. `files_open`: how many files are open."""
    room = int(files_max * (1 - DESCRIPTORS_SPARE)) - files_open
    return min(CONNECTIONS_MAX, max(CONNECTIONS_MIN, room))


def connections_max_here() -> int:
    """Returns how many connections this process may have, by its limit of open files."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return connections_allowed(files_max, len(os.listdir("/proc/self/fd")))
