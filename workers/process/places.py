"""The pools of a picker as it starts, and the places for InferencePools that it finds while it runs: one for each port that they have.

    configurations, ports ─ create_places ─▶ Instance with an empty place per port
    supervisor: InferencePools ─▶ PlacedPools ─▶ document ─▶ all processes: assigned(instance, PlacedPools)

The memory has room for a pool in each place, with any of the configurations. The place of an InferencePool is that of its port, so a stream
finds its place without a look at the names. The functions are in `workers.process.pool_views`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from epp.config.pools_file import KubePool
from workers.shared.documents import Placed

if TYPE_CHECKING:
    from epp.config.effective import EffectiveConfig
    from workers.process.generations import Given

DEFAULT: Final = "default"  # the configuration of the pools that have none of their own name


class Pool(NamedTuple):
    """One pool as the start has read it. Pools with the same text share `config`.

    `endpoints`: as in --endpoints; "": the configuration says where they come from. `max_endpoints`: their limit.
    `kube`: where the endpoints are in Kubernetes; None: they are not there.
    """

    name: str
    given: "Given"
    config: "EffectiveConfig"
    endpoints: str
    max_endpoints: int
    kube: KubePool | None = None


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a picker. `configurations`: by the name of the pool, and that under DEFAULT.

    `ports`: of the places, in their order; 0: the port is opened when an InferencePool names it. Either all are 0, or none is.
    `service`: the Service that InferencePools name; "": `names` are the InferencePools.
    """

    configurations: Mapping[str, Pool]
    ports: Sequence[int]
    service: str = ""
    names: Sequence[str] = ()

    @property
    def later(self) -> int:
        """How many ports are opened while the picker runs."""
        return sum(not port for port in self.ports)

    def pool(self, placed: Placed) -> Pool:
        """Returns the pool in a place. An empty name stands for an empty place."""
        own = self.configurations.get(placed.name) or self.configurations[DEFAULT]
        return own._replace(name=placed.name, kube=KubePool(name=placed.name, own_port=placed.port))
