"""The section `flowControl` -> `FlowPlan`: defaults, policies by name, and a queue for each band that can do what its policies need.

Only with the feature gate; the saturation detector is wired without it too (`epp.assembly`). A band that is not configured is
made of a template: `defaultPriorityBand`, or for priorities below 0 `defaultNegativePriorityBand` where that is given. What a
band does not say has the default that is written here, whatever the templates say.

What this does not do: read text, or make bands.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeVar

from epp import registry
from epp.document import FLOW_CONTROL_GATE, Amount, BandEntry, Document, FlowControlEntry, Ref
from epp.findings import Findings
from epp.flow.plan import DEFAULT_BAND, BandPlan, FlowPlan
from epp.flows import Capability
from epp.plugin import (
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    FairnessPolicy,
    FlowQueue,
    OrderingPolicy,
    Plugin,
    SaturationDetector,
    UsageLimitPolicy,
)  # fmt: skip
from epp.stock import Stock

BANDS_MAX: Final = 64  # as many as have a place in the lanes
BAND_BYTES: Final = 1_000_000_000
BAND_REQUESTS: Final = 5000
TTL_S: Final = 60.0
ORDERING: Final = "fcfs-ordering-policy"
FAIRNESS: Final = "global-strict-fairness-policy"
DISPLACEMENT: Final = "newest-displacement-policy"
USAGE_LIMIT: Final = "static-usage-limit-policy"
EVICTION_FILTER: Final = "sheddable-eviction-filter"
EVICTION_ORDER: Final = "priority-then-time-eviction-order-policy"
QUEUES: Final = ("fifo-queue", "priority-queue")  # in the order in which they are tried
DEFAULTS: Final = frozenset((ORDERING, FAIRNESS, DISPLACEMENT, USAGE_LIMIT, *QUEUES))
IMPLIED: Final = frozenset(
    (EVICTION_FILTER, EVICTION_ORDER)
)  # experimental by themselves, so they are not written down
POLICIES: Final = (
    FlowQueue, OrderingPolicy, FairnessPolicy, DisplacementPolicy, UsageLimitPolicy, EvictionFilter, EvictionOrder,
)  # fmt: skip
FLOW: Final = "flowControl"

K = TypeVar("K", bound=Plugin)


def plan(document: Document, stock: Stock, findings: Findings, detector: SaturationDetector | None) -> FlowPlan | None:
    """None: the gate is off, or there is an error."""
    if not document.gates[FLOW_CONTROL_GATE]:
        return None
    return _Planner(document.flow_control or FlowControlEntry(), stock, findings).plan(detector)


def plugins_of(made: FlowPlan | None) -> Iterator[Plugin]:
    """All plugins of a plan; some more than once."""
    if made is None:
        return
    yield made.detector
    yield made.usage_limits
    for band in (*made.bands, made.template, *((made.negative_template,) if made.negative_template else ())):
        yield from (band.queue, band.ordering, band.fairness, band.displacement)
    yield from (plugin for plugin in (made.eviction_filter, made.eviction_order) if plugin is not None)


def unshielded(document: Document, made: FlowPlan) -> list[tuple[BandEntry, FairnessPolicy]]:
    """The bands that name no fairness policy, with the default they have: it lets one flow starve the others."""
    entry = document.flow_control or FlowControlEntry()
    pairs = [
        *zip(entry.bands, made.bands, strict=True),
        (entry.default_band or BandEntry(f"{FLOW}.defaultPriorityBand", place=entry.place), made.template),
    ]
    if entry.negative_band is not None and made.negative_template is not None:
        pairs.append((entry.negative_band, made.negative_template))
    return [(asked, band.fairness) for asked, band in pairs if asked.fairness is None and not band.fairness.isolates]


def as_document(made: FlowPlan) -> dict[str, Any]:
    """The section with all defaults written out; reading it gives the same plan."""
    section: dict[str, Any] = {
        "maxBytes": made.max_bytes,
        "maxRequests": made.max_requests,
        "defaultRequestTTL": duration(made.request_ttl_s),
        "noEndpointRequestTTL": duration(made.no_endpoint_ttl_s),
        "defaultPriorityBand": _band_document(made.template),
    }
    if made.negative_template is not None:
        section["defaultNegativePriorityBand"] = _band_document(made.negative_template)
    section["priorityBands"] = [{"priority": band.priority} | _band_document(band) for band in made.bands]
    section["usageLimitPolicyPluginRef"] = made.usage_limits.name
    section["enableEviction"] = made.eviction
    return section


def _band_document(band: BandPlan) -> dict[str, Any]:
    ttl = {} if band.request_ttl_s is None else {"defaultRequestTTL": duration(band.request_ttl_s)}
    return {
        "maxBytes": band.max_bytes,
        "maxRequests": band.max_requests,
        **ttl,
        "fairnessPolicyRef": band.fairness.name,
        "orderingPolicyRef": band.ordering.name,
        "queueRef": band.queue.name,
        "displacementPolicyRef": band.displacement.name,
    }


def duration(seconds: float) -> str:
    """As a configuration has it; without an end it is 0s."""
    return "0s" if math.isinf(seconds) else f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


class _Planner:
    """The work on one plan; it goes on after an error, so that all are seen."""

    def __init__(self, entry: FlowControlEntry, stock: Stock, findings: Findings) -> None:
        self.entry = entry
        self.stock = stock
        self.findings = findings
        self.complete = True

    def plan(self, detector: SaturationDetector | None) -> FlowPlan | None:
        entry = self.entry
        bands = tuple(made for band in entry.bands if (made := self.band(band)) is not None)
        template = self.band(entry.default_band or BandEntry(f"{FLOW}.defaultPriorityBand", place=entry.place))
        negative = self.band(entry.negative_band) if entry.negative_band is not None else None
        usage = self.policy(entry.usage_limit, USAGE_LIMIT, UsageLimitPolicy, f"{FLOW}.usageLimitPolicyPluginRef")
        chosen, order = self.eviction()
        self.count_bands()
        if not self.complete or template is None or usage is None or detector is None:
            return None
        return FlowPlan(
            bands=bands,
            template=template,
            negative_template=negative,
            max_requests=int(entry.requests_max.value) if entry.requests_max else 0,
            max_bytes=int(entry.bytes_max.value) if entry.bytes_max else 0,
            request_ttl_s=_ttl(entry.ttl, TTL_S),
            no_endpoint_ttl_s=_ttl(entry.ttl_without_endpoint or entry.ttl, TTL_S),
            detector=detector,
            usage_limits=usage,
            eviction=entry.eviction,
            eviction_filter=chosen,
            eviction_order=order,
        )

    def band(self, entry: BandEntry) -> BandPlan | None:
        what = entry.what
        ordering = self.policy(entry.ordering, ORDERING, OrderingPolicy, f"{what}.orderingPolicyRef")
        fairness = self.policy(entry.fairness, FAIRNESS, FairnessPolicy, f"{what}.fairnessPolicyRef")
        displacement = self.policy(
            entry.displacement, DISPLACEMENT, DisplacementPolicy, f"{what}.displacementPolicyRef"
        )
        if ordering is None or fairness is None or displacement is None:
            return None
        queue = self.queue(entry, {p.name: p.queue_needs for p in (ordering, fairness, displacement)})
        if queue is None:
            self.complete = False
            return None
        return BandPlan(
            priority=entry.priority,
            max_requests=_limit(entry.requests_max, BAND_REQUESTS),
            max_bytes=_limit(entry.bytes_max, BAND_BYTES),
            request_ttl_s=_ttl(entry.ttl, TTL_S) if entry.ttl is not None else None,
            queue=queue,
            ordering=ordering,
            fairness=fairness,
            displacement=displacement,
        )

    def queue(self, entry: BandEntry, needs: Mapping[str, Capability]) -> FlowQueue | None:
        """The one that is named, if it can do what is needed; else the first one that can."""
        if entry.queue is not None:
            named = self.policy(entry.queue, "", FlowQueue, f"{entry.what}.queueRef")
            return named if named is None or self.can(entry, named, needs) else None
        needed = Capability(0)
        for capabilities in needs.values():
            needed |= capabilities
        for listed in self.stock.of_kind(FlowQueue):
            if listed.name in self.stock.entries and needed in listed.capabilities:
                return listed
        for name in QUEUES:
            if needed in getattr(registry.find(name), "capabilities", Capability(0)):
                return self.default(name, FlowQueue)
        why = f"{entry.what}: no queue can do all that its policies need: {words(needed)}"
        self.findings.error(
            entry.place, "queue-mismatch", why, "name other policies, or a queue of your own by queueRef"
        )
        return None

    def can(self, entry: BandEntry, queue: FlowQueue, needs: Mapping[str, Capability]) -> bool:
        """Notes what a named queue lacks."""
        assert entry.queue is not None
        fits = True
        for policy, needed in needs.items():
            if lacking := needed & ~queue.capabilities:
                fits = False
                why = (
                    f"{entry.what}: policy '{policy}' needs {words(lacking)}, which queue '{queue.name}' does not have"
                )
                hint = "leave queueRef out to have one that fits"
                self.findings.error(entry.queue.place, "queue-mismatch", why, hint)
        return fits

    def policy(self, ref: Ref | None, default: str, kind: type[K], what: str) -> K | None:
        """The plugin that is named, or the default; None is an error that is noted."""
        if ref is None:
            found = self.default(default, kind)
        else:
            if ref.name in DEFAULTS:  # they may be named without being listed
                self.default(ref.name, Plugin)
            found = self.stock.resolve(ref, kind, what)
        if found is None:
            self.complete = False
        return found

    def default(self, name: str, kind: type[K]) -> K | None:
        """The one instance of a default, made once."""
        made = self.stock.plugins.get(name)
        if not isinstance(made, kind):
            made = self.stock.add(name, experimental=True)
        return made if isinstance(made, kind) else None

    def eviction(self) -> tuple[EvictionFilter | None, EvictionOrder | None]:
        """The first ones that are listed, or the defaults."""
        if not self.entry.eviction:
            return None, None
        filters, orders = self.stock.of_kind(EvictionFilter), self.stock.of_kind(EvictionOrder)
        return (
            filters[0] if filters else self.default(EVICTION_FILTER, EvictionFilter),
            orders[0] if orders else self.default(EVICTION_ORDER, EvictionOrder),
        )

    def count_bands(self) -> None:
        priorities = {band.priority for band in self.entry.bands} | {DEFAULT_BAND}
        if len(priorities) > BANDS_MAX:
            self.complete = False
            why = f"{FLOW}.priorityBands has {len(priorities)} bands, band {DEFAULT_BAND} included; {BANDS_MAX} are possible"
            self.findings.error(self.entry.bands[-1].place, "too-many-bands", why)


def _limit(amount: Amount | None, default: int) -> int:
    return int(amount.value) if amount is not None and amount.value >= 1 else default


def _ttl(amount: Amount | None, default: float) -> float:
    if amount is None:
        return default
    return amount.value or math.inf


def words(capabilities: Capability) -> str:
    """As messages and listings have them: head, tail, priority order, scan."""
    return ", ".join(str(member.name).lower().replace("_", " ") for member in Capability if member in capabilities)
