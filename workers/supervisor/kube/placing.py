"""For a picker that finds its pools while it runs, decides which InferencePools it serves, and in which places.

An InferencePool is served if its `endpointPickerRef` names the Service of --service-name, or if --pool-name names it, and if it has the
place of its port. If two InferencePools have one port, the pool that is served already stays, or else the first by name. The other pool is
reported.

The places have fixed ports (--pool-ports), or each place gets, and keeps, the first port that an InferencePool names and that no place has.
The socket of such a port was created before the fork, so all processes share it: when the supervisor binds it, it listens in all present
and later workers. A port stays open, because other processes may be about to accept its connections; without a pool, requests to this port
get 404.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final

import structlog

from workers.process.places import Places
from workers.process.sockets import listens, open_at
from workers.shared.documents import EMPTY, Placed, PlacedPools
from workers.supervisor.kube.pool import InferencePool

UNSERVED: Final = "an InferencePool is not served"
REPORTED_MAX: Final = 4096

log = structlog.get_logger()


class Ports:
    """Knows the number of the place of each port."""

    def __init__(self, fixed: Sequence[int], later: Sequence[socket.socket] = (), served: int = 0) -> None:
        """`fixed`: the ports of the places, or 0 for places of `later`. `served`: a port at which the picker listens anyway."""
        self._later = later
        self._served = served
        self._numbers = {port: number for number, port in enumerate(fixed) if port}
        self._numbers |= {each.getsockname()[1]: number for number, each in enumerate(later) if listens(each)}

    def take(self, port: int, number: int) -> None:
        """Notes that a predecessor has given the place this port."""
        self._numbers[port] = number

    def of(self, port: int) -> int | None:
        """Returns the place of a port, or None."""
        return self._numbers.get(port)

    def opened(self, port: int) -> tuple[int | None, str]:
        """Returns the place of a port, and opens the port if it has no place. If this is impossible, returns None and the reason."""
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


class Placing:
    """Places InferencePools. `names`: the placed InferencePools. `unserved`: InferencePool -> why it is not served."""

    def __init__(self, places: Places, names: PlacedPools, report: Callable[..., None], ports: Ports) -> None:
        self.names = names
        self._places = places
        self._ports = ports
        self._report = report
        self.unserved: Mapping[str, str] = {}

    def place(self, known: Mapping[str, InferencePool]) -> bool:
        """Takes the InferencePools of the namespace, by name. Returns whether `names` has changed."""
        wanted = {name: pool for name, pool in known.items() if self._is_wanted(name, pool)}
        chosen: dict[int, Placed] = {}
        unserved = {name: "there is none, or it cannot be read" for name in self._places.names if name not in known}

        def order(name: str) -> tuple[bool, str]:
            return self.names.get(self._ports.of(wanted[name].port) or 0, EMPTY).name != name, name

        for name in sorted(wanted, key=order):
            port = wanted[name].port
            number, why = self._ports.opened(port) if port else (None, "its endpointPickerRef names no port of a Service")
            if number is None:
                unserved[name] = why
            elif number in chosen:
                other = chosen[number].name
                unserved[name] = f"its endpointPickerRef has port {port}, as that of InferencePool '{other}'; give it another port"
            else:
                chosen[number] = Placed(name, port)
        self._tell(unserved)
        changed, self.names = chosen != self.names, chosen
        return changed

    def _is_wanted(self, name: str, pool: InferencePool) -> bool:
        return pool.service == self._places.service if self._places.service else name in self._places.names

    def _tell(self, unserved: Mapping[str, str]) -> None:
        for name in sorted(unserved):
            if self.unserved.get(name) != unserved[name] and len(self.unserved) < REPORTED_MAX:
                self._report(UNSERVED, name=name, reason=unserved[name])
        self.unserved = dict(islice(unserved.items(), REPORTED_MAX))
