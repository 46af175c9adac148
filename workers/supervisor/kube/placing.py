"""Decides which InferencePools a picker serves that finds its pools while it runs, and in which place.

An InferencePool is served if its `endpointPickerRef` names the Service of --service-name, or if --pool-name names it, and has the place of
its port. If two have one port, the one that is served already stays, else the first by name. The other one is reported.

The places have fixed ports (--pool-ports), or each gets the first port that an InferencePool names and that no place has, and keeps it.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from workers.process.places import Places
from workers.shared.pool_names import EMPTY, Names, Placed
from workers.supervisor.kube.pool import InferencePool
from workers.supervisor.kube.pool_ports import Ports

UNSERVED: Final = "an InferencePool is not served"
REPORTED_MAX: Final = 4096


class Placing:
    """Places InferencePools. `names`: the present ones. `unserved`: InferencePool -> why it is not served."""

    def __init__(self, places: Places, names: Names, report: Callable[..., None], ports: Ports) -> None:
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
