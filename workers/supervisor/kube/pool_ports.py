"""The ports of the places for InferencePools: fixed ones, or opened when an InferencePool names them.

A socket that gets its port later was created before the fork, so all processes share it: when the supervisor binds it, it listens in every
worker, and in those that start later. A port stays open, because other processes may be about to accept there; without a pool, requests
there get 404.
"""

import socket
from collections.abc import Sequence

import structlog

from workers.process.sockets import listens, open_at

log = structlog.get_logger()


class Ports:
    """Knows the number of the place of each port."""

    def __init__(self, fixed: Sequence[int], later: Sequence[socket.socket] = (), served: int = 0) -> None:
        """`fixed`: the ports of the places; 0 for those of `later`. `served`: a port at which the picker listens anyway."""
        self._later = later
        self._served = served
        self._numbers = {port: number for number, port in enumerate(fixed) if port}
        self._numbers |= {each.getsockname()[1]: number for number, each in enumerate(later) if listens(each)}

    def take(self, port: int, number: int) -> None:
        """Takes that a predecessor has given the place this port."""
        self._numbers[port] = number

    def of(self, port: int) -> int | None:
        """Returns the place of a port; None if it has none."""
        return self._numbers.get(port)

    def opened(self, port: int) -> tuple[int | None, str]:
        """Returns the place of a port, which is opened if it has none. If that is impossible, returns None and why."""
        if (number := self._numbers.get(port)) is not None:
            return number, ""
        if not self._later:
            return None, f"its endpointPickerRef has port {port}, which --pool-ports does not have"
        free = [number for number in range(len(self._later)) if number not in self._numbers.values()]
        if not free:
            return None, (
                f"its endpointPickerRef has port {port}, and all {len(self._later)} places for ports are taken since the start; "
                "restart the picker, or name all ports with --pool-ports"
            )
        if port != self._served and (why := open_at(self._later[free[0]], port)):
            return None, why
        log.info("port of an InferencePool is open", port=port)
        self._numbers[port] = free[0]
        return free[0], ""
