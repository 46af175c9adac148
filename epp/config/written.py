"""Holds the content of a configuration's text as values with places, before any default is added.

`epp.config.reader` makes these values; the assembler and lint read them. A reference is only text here, because the plugin that it names
has not been looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from epp.config.findings import WHOLE, Place
from epp.config.yaml_nodes import Node
from epp.decision.response_needs import FULL

GATES: Mapping[str, bool] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
FLOW_CONTROL_GATE, STANDBY_GATE = GATES


@dataclass(frozen=True, slots=True)
class Ref:
    """Refers to a plugin by name. Only members of a scheduling profile have a `weight`; None without a weight."""

    name: str
    place: Place = WHOLE
    weight: float | None = None
    weight_place: Place = WHOLE


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """Holds one entry of `plugins`."""

    name: str
    type: str
    parameters: Node | None = None
    place: Place = WHOLE
    type_place: Place = WHOLE


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """Holds one entry of `schedulingProfiles`."""

    name: str
    members: tuple[Ref, ...]
    place: Place = WHOLE
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """Holds one entry of `dataLayer.sources`."""

    source: Ref
    extractors: tuple[Ref, ...]


class Amount(NamedTuple):
    """Holds a quantity, or a duration in seconds, with its place."""

    value: float
    place: Place


@dataclass(frozen=True, slots=True)
class BandEntry:
    """Holds one band of `flowControl`. A field that is not given is None."""

    what: str  # the path of the band in the file, for messages
    priority: int = 0
    bytes_max: Amount | None = None
    requests_max: Amount | None = None
    fairness: Ref | None = None
    ordering: Ref | None = None
    place: Place = WHOLE
    ttl: Amount | None = None
    queue: Ref | None = None
    displacement: Ref | None = None


@dataclass(slots=True)
class FlowControlEntry:
    """Holds the section `flowControl`, without the saturation detector. A field that is not given is None."""

    place: Place = WHOLE
    bytes_max: Amount | None = None
    requests_max: Amount | None = None
    ttl: Amount | None = None
    ttl_without_endpoint: Amount | None = None
    default_band: BandEntry | None = None
    negative_band: BandEntry | None = None
    bands: tuple[BandEntry, ...] = ()
    usage_limit: Ref | None = None
    eviction: bool = False

    def all_bands(self) -> list[BandEntry]:
        """Returns the bands that have one priority, then the templates."""
        return [*self.bands, *(band for band in (self.default_band, self.negative_band) if band is not None)]


@dataclass(frozen=True, slots=True)
class MetadataSource:
    """Says which value in the gateway's metadata names the tenant."""

    namespace: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeaderSource:
    """Says which header names the tenant. `passed_on`: whether model servers get the header, too."""

    header: str
    passed_on: bool


@dataclass(frozen=True, slots=True)
class KeySource:
    """Says which header has an API key, and which file lists all keys. `place`: where the configuration names that file."""

    header: str
    file: str
    passed_on: bool
    place: Place = WHOLE


TenantSource = MetadataSource | HeaderSource | KeySource


@dataclass(frozen=True, slots=True)
class BudgetEntry:
    """Holds a tenant's limits; 0 means no limit. `burst` is 0 if `tokens` is 0. `queue_place`: where the mode `queue` is given."""

    tokens: float = 0.0  # per minute
    burst: float = 0.0
    requests: float = 0.0  # per minute
    concurrent: int = 0
    cached_price: float = 1.0
    queue_place: Place | None = None
    place: Place = WHOLE


NO_BUDGET = BudgetEntry()


@dataclass(frozen=True, slots=True)
class OneTenantEntry:
    """Holds what differs for one tenant. Without objectives or a budget, those of the section apply. NO_BUDGET means no limits.

    `group`: the tenants of one group share a cache salt; "" if the tenant has its own salt.
    """

    objectives: tuple[str, ...] = ()
    budget: BudgetEntry | None = None
    group: str = ""


@dataclass(frozen=True, slots=True)
class TenantsEntry:
    """Holds the section `tenants`. `shares`: whether all requests without a known tenant share one tenant.

    `salt_place`: where the configuration gives each tenant its own cache salt; None if tenants have no salts.
    """

    sources: tuple[TenantSource, ...]
    shares: bool = False
    objectives: tuple[str, ...] = ()
    per_tenant: Mapping[str, OneTenantEntry] = field(default_factory=dict)
    salt_place: Place | None = None
    budget: BudgetEntry | None = None

    @property
    def budgets(self) -> tuple[BudgetEntry, ...]:
        """Returns all budgets that the section gives."""
        return tuple(entry for entry in (self.budget, *(one.budget for one in self.per_tenant.values())) if entry)


@dataclass(slots=True)
class WrittenConfig:
    """Holds a whole configuration as it is written."""

    gates: dict[str, bool] = field(default_factory=lambda: dict(GATES))
    gate_places: dict[str, Place] = field(default_factory=dict)  # places of the gates that the file gives
    plugins: list[PluginEntry] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)  # names of entries in `plugins` that could not be read
    is_bare: bool = False  # whether it has no field except apiVersion and kind
    profiles: list[ProfileEntry] = field(default_factory=list)
    inject_defaults: bool = True
    sources: list[SourceEntry] = field(default_factory=list)
    discovery: Ref | None = None
    syncer: Ref | None = None
    parsers: list[Ref] = field(default_factory=list)
    response_phase: str = FULL
    response_phase_place: Place = WHOLE
    flow_control: FlowControlEntry | None = None
    saturation: Ref | None = None
    tenants: TenantsEntry | None = None
