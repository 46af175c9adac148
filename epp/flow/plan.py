"""The compiled configuration of flow control: immutable, created before the fork, the same in all workers.

It contains plugin instances and numbers. The code that reads the configuration sets the defaults. `math.inf` means an endless duration, and
0 means no limit.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from epp import plugin as points
from epp.request.flows import rank

DEFAULT_BAND = 0  # this band always exists; it accepts the requests whose priority has no band


@dataclass(frozen=True, slots=True)
class BandPlan:
    """Configures one band: its limits over all shards, its TTL (seconds) and its policies."""

    priority: int
    max_requests: int  # > 0, because a band always has a limit
    max_bytes: int  # > 0
    request_ttl_s: float | None  # None for the global TTL; inf if requests never expire
    queue: points.FlowQueue
    ordering: points.OrderingPolicy
    fairness: points.FairnessPolicy
    displacement: points.DisplacementPolicy


@dataclass(frozen=True, slots=True)
class FlowPlan:
    """Configures flow control as a whole.

    `bands` are the configured bands. The templates apply to band 0 and to bands that are created for objectives.
    """

    bands: tuple[BandPlan, ...]
    template: BandPlan  # for other bands; the template's own priority is ignored
    negative_template: BandPlan | None  # for priorities below 0; if None, `template` serves for these, too
    max_requests: int  # over all bands and shards; 0 without a limit
    max_bytes: int
    request_ttl_s: float  # inf if requests never expire
    no_endpoint_ttl_s: float  # the TTL while the pool is empty; inf if requests never expire
    detector: points.SaturationDetector
    usage_limits: points.UsageLimitPolicy
    eviction: bool  # whether requests in flight may be evicted
    eviction_filter: points.EvictionFilter | None = None  # set if `eviction` is true
    eviction_order: points.EvictionOrder | None = None
    further: tuple[int, ...] = ()  # priorities of bands made from the templates that always exist, too

    def band(self, priority: int) -> BandPlan:
        """Returns the plan of one band: the configured one, or a copy of the template."""
        for configured in self.bands:
            if configured.priority == priority:
                return configured
        template = (self.negative_template if priority < 0 else None) or self.template
        return replace(template, priority=priority)

    def all_bands(self) -> tuple[BandPlan, ...]:
        """Returns the plans of the configured bands, then the templates."""
        return (*self.bands, self.template, *([self.negative_template] if self.negative_template is not None else ()))

    def static(self) -> frozenset[int]:
        """Returns the priorities whose bands exist independently of objectives."""
        return frozenset(band.priority for band in self.bands) | {DEFAULT_BAND, *self.further}

    def priorities(self, provisioned: Collection[int] = ()) -> Iterator[int]:
        """Yields all priorities that have a band while objectives name `provisioned`, the most important first."""
        return iter(sorted(self.static() | frozenset(provisioned), key=rank))
