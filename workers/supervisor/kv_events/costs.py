"""Measures the cost of the endpoints' events for this process. Names endpoints that cost too much, and decides when the process must end.

ZeroMQ limits the number of messages that wait in a socket, but neither their bytes nor the length of a message. So this process watches its
own memory. Above its limit it ends with a log line, and the parent starts a successor. Otherwise the container could be killed with all its
processes. The limit is the same as for a worker (`workers.host.memory`), or MEMORY_MAX if workers have no limit, plus the shared memory.
"""

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import structlog

from epp.prefix.kv_events import PAYLOAD_BYTES_MAX
from workers.host.memory import trim
from workers.supervisor.kv_events.followed import Followed

MEMORY_MAX: Final = 1 << 30
LOOK_S: Final = 0.25
REPORT_S: Final = 10.0
BUSY_SHARE: Final = 0.5  # share of the time; an endpoint that takes more of it delays the others
# The report names an endpoint with at least this number of gaps and restarts since the last report. Fewer are normal: publishers restart,
# and messages get lost.
TROUBLES_MIN: Final = 3
LARGEST: Final = 3  # the number of peers that the log line about memory names
_INFO_BYTES: Final = 136  # the length of tcp_info up to tcpi_bytes_received (linux/tcp.h)
_RECEIVED_AT: Final = 128

log = structlog.get_logger()


class Costs:
    """Watches the process's memory, and the cost of each endpoint since the last report."""

    def __init__(
        self,
        limit: int,
        over: Callable[[int], int],
        give_back: Callable[[], None] = trim,
        peers: Callable[[], Mapping[str, int]] | None = None,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        """`limit`: bytes. `over(limit)` returns the used bytes if they exceed the limit, else 0. `give_back` returns freed memory to the
        system.

        `peers` returns the addresses that have sent most to this process, with their bytes. `cpu`: CPU seconds of this thread.
        """
        self._limit = limit
        self._over = over
        self._give_back = give_back
        self._peers = peers or largest_peers
        self._cpu = cpu
        self._cpu_at = cpu()
        self._looked = self._reported = 0.0
        # The counts of each endpoint at the last report: seconds, malformed and too long messages, the sum of gaps and restarts.
        self._before: dict[Followed, tuple[float, int, int, int]] = {}

    def too_much(self, now: float) -> bool:
        """Returns whether the process uses too much memory and must end."""
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        if not self._over(self._limit):
            return False
        self._give_back()
        if not (used := self._over(self._limit)):
            return False
        log.error(
            "kv-events: the process ends, because the events take too much memory",
            used_mib=used >> 20,
            limit_mib=self._limit >> 20,
            bytes_from=dict(self._peers()),
        )
        return True

    def report(self, followed: Sequence[Followed], now: float) -> None:
        """Logs endpoints that take most of the time, send malformed events or messages that are too long, or often skip numbers."""
        elapsed = now - self._reported
        if elapsed < REPORT_S:
            return
        self._reported = now
        cpu_at, self._cpu_at = self._cpu_at, self._cpu()
        # An endpoint's time includes time in which this process was frozen or waited for a core. So the process must have been busy, too.
        busy = self._cpu_at - cpu_at > BUSY_SHARE * elapsed
        before, self._before = self._before, {}
        for each in followed:
            seconds, malformed, too_long, troubles = before.get(each, (each.seconds, 0, 0, 0))
            self._before[each] = each.seconds, each.malformed, each.too_long, each.troubles
            if busy and each.seconds - seconds > BUSY_SHARE * elapsed:
                log.warning(
                    "kv-events: the events of one endpoint take most of the time",
                    endpoint=each.endpoint.name,
                    share=round((each.seconds - seconds) / elapsed, 2),
                )
            if each.malformed > malformed:
                log.warning(
                    "kv-events: an endpoint sends malformed events; they are skipped",
                    endpoint=each.endpoint.name,
                    count=each.malformed - malformed,
                )
            if each.too_long > too_long:
                log.warning(
                    "kv-events: a message of an endpoint was longer than the limit and ended its connection; it is followed again, but "
                    "approximate for a while: let the engine publish fewer events at once",
                    endpoint=each.endpoint.name,
                    limit_mib=PAYLOAD_BYTES_MAX >> 20,
                    count=each.too_long - too_long,
                )
            if each.troubles - troubles >= TROUBLES_MIN:
                log.warning(
                    "kv-events: the numbers of an endpoint's messages jump; after each jump it is matched approximately for a while",
                    endpoint=each.endpoint.name,
                    count=each.troubles - troubles,
                )


def largest_peers() -> dict[str, int]:
    """Returns the LARGEST peers that have sent most to this process over TCP: address -> bytes.

    The kernel counts the bytes. Its count includes data that ZeroMQ holds back, such as the parts of an unfinished message.
    """
    found: dict[str, int] = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError, struct.error):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found |= _received_from(number)
    return dict(sorted(found.items(), key=lambda pair: pair[1], reverse=True)[:LARGEST])


def _received_from(number: int) -> dict[str, int]:
    """Returns {peer: bytes that it has sent} for a TCP connection, or {} for any other socket. Raises OSError if the socket is not
    connected.
    """
    with socket.socket(fileno=os.dup(number)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return {}
        host, port, *_ = connection.getpeername()
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        return {f"{host}:{port}": struct.unpack_from("Q", info, _RECEIVED_AT)[0]}
