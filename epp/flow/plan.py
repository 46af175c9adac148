"""The compiled configuration of flow control: immutable, made before the fork, the same in all workers.

It names plugin instances and numbers; defaults are written where the configuration is read, not here. A duration that never
ends is `math.inf`, a limit that does not hold is 0.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from epp.flows import rank
from epp.plugin import (
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FlowQueue,
    OrderingPolicy,
    SaturationDetector,
    UsageLimitPolicy,
)  # fmt: skip

DEFAULT_BAND = 0  # exists always; takes in requests of priorities that have no band of their own


@dataclass(frozen=True, slots=True)
class BandPlan:
    """One band: what it holds at most over all shards, how long one waits, and who decides what."""

    priority: int
    max_requests: int  # > 0: a band is always bounded
    max_bytes: int  # > 0
    request_ttl_s: float | None  # None: the global one; inf: never
    queue: FlowQueue
    ordering: OrderingPolicy
    fairness: FairnessPolicy
    displacement: DisplacementPolicy


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """All of flow control. `bands` are the configured ones; band 0 and provisioned ones are made of the templates."""

    bands: tuple[BandPlan, ...]
    template: BandPlan  # its priority means nothing
    negative_template: BandPlan | None  # for priorities below 0; None: `template`
    max_requests: int  # over all bands and shards; 0: no limit
    max_bytes: int
    request_ttl_s: float  # inf: never
    no_endpoint_ttl_s: float  # while the pool is empty; inf: never
    detector: SaturationDetector
    usage_limits: UsageLimitPolicy
    eviction: bool  # whether requests that are being served may be given up
    eviction_filter: EvictionFilter | None = None  # set where `eviction` is
    eviction_order: EvictionOrder | None = None

    def band(self, priority: int) -> BandPlan:
        """The plan of one band: the configured one, or a template's."""
        for configured in self.bands:
            if configured.priority == priority:
                return configured
        template = (self.negative_template if priority < 0 else None) or self.template
        return replace(template, priority=priority)

    def static(self) -> frozenset[int]:
        """The priorities whose bands exist whatever objectives say."""
        return frozenset(band.priority for band in self.bands) | {DEFAULT_BAND}

    def priorities(self, provisioned: Collection[int] = ()) -> Iterator[int]:
        """All priorities that have a band while objectives name `provisioned`, the most important first."""
        return iter(sorted(self.static() | frozenset(provisioned), key=rank))
