"""The pools that a picker starts with, and the places for InferencePools that the picker finds while it runs: one place for each of their
ports.

    configurations, ports ─ create_places ─▶ Instance with an empty place per port
    supervisor: InferencePools ─▶ PlacedPools ─▶ document ─▶ all processes: assigned(instance, PlacedPools)

The memory has room for a pool in each place, with any of the configurations. The port of an InferencePool determines its place, so a stream
finds its place without reading names. The functions are in `workers.process.pool_views`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.config.pools_file import KubePool
from workers.shared.documents import Placed

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.process.generations import Given

DEFAULT: Final = "default"  # the configuration of all pools without a configuration of their name


class Pool(NamedTuple):
    """One pool as read at the start. Pools with the same text share `config`.

    `endpoints`: as in --endpoints; "" if the configuration says where endpoints come from. `max_endpoints`: the limit of their number.
    `kube`: where Kubernetes has the endpoints; None if they do not come from Kubernetes.
    """

    name: str
    given: "Given"
    config: "EffectiveConfig"
    endpoints: str
    max_endpoints: int
    kube: KubePool | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a picker. `configurations`: the configurations by the name of the pool, and the default configuration under DEFAULT.

    `ports`: the ports of the places, in order. A port of 0 is opened when an InferencePool names its number. Either all ports are 0, or
    none. `service`: the Service that the InferencePools name; if it is "", `names` has the names of the InferencePools.
    """

    configurations: Mapping[str, Pool]
    ports: Sequence[int]
    service: str = ""
    names: Sequence[str] = ()

    @property
    def later(self) -> int:
        """Returns the number of ports that are opened while the picker runs."""
        return sum(not port for port in self.ports)

    def pool(self, placed: Placed) -> Pool:
        """Returns the pool in a place. The empty name stands for an empty place."""
        own = self.configurations.get(placed.name) or self.configurations[DEFAULT]
        return own._replace(name=placed.name, kube=KubePool(name=placed.name, own_port=placed.port))
