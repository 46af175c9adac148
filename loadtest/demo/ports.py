"""Finds ports on which a process of the demo, of a test or of a benchmark can listen.

Several such processes may look for ports at the same time, on the same machine. So a port that was found is leased: its finder binds a
socket of the name `epp-port-<port>` in Linux's abstract namespace, where a name exists once, and every other finder passes over the port.
The kernel ends a lease with its process. A process keeps only its last LEASES_MAX leases, because a listener has used older ports by then.
"""

import collections
import errno
import random
import socket

PORTS = (20_000, 32_000)
PORT_TRIES_MAX = 1_000
LEASES_MAX = 128

_leases: collections.deque[socket.socket] = collections.deque()


def free_ports(count: int) -> list[int]:
    """Returns different ports on which no process listens now, and leases them. Raises OSError if there are too few.

    The ports are outside the range for outgoing connections, from which a connection of another process could take a port at any time.
    """
    ports: list[int] = []
    for _ in range(PORT_TRIES_MAX):
        if len(ports) == count:
            return ports
        port = random.SystemRandom().randrange(*PORTS)
        if _lease(port):
            ports.append(port)
    raise OSError(f"fewer than {count} free ports found from {PORTS[0]} to {PORTS[1]} in {PORT_TRIES_MAX} tries")


def free_row(count: int) -> int:
    """Returns the first of `count` ports in a row on which no process listens now, and leases them. Raises OSError if there are none."""
    for _ in range(PORT_TRIES_MAX):
        first = random.SystemRandom().randrange(PORTS[0], PORTS[1] - count)
        if all(_lease(port) for port in range(first, first + count)):
            return first
    raise OSError(f"no {count} free ports in a row found from {PORTS[0]} to {PORTS[1]} in {PORT_TRIES_MAX} tries")


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Returns whether a process could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _lease(port: int) -> bool:
    """Leases a port on which no process listens. Returns False if another process uses the port, or has leased it."""
    lease = socket.socket(socket.AF_UNIX)
    try:
        lease.bind(f"\0epp-port-{port}")
    except OSError as failure:
        lease.close()
        if failure.errno != errno.EADDRINUSE:
            raise
        return False
    if not is_free(port, "0.0.0.0"):
        lease.close()
        return False
    if len(_leases) == LEASES_MAX:
        _leases.popleft().close()
    _leases.append(lease)
    return True
