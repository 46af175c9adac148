"""Assembles the section `flowControl` into a `FlowPlan`: defaults, policies by name, and a suitable queue for each band.

A queue is suitable if it can do what the policies of the band need. A plan exists only with the feature gate `flowControl`. The
saturation detector is wired without the gate, too (`epp.config.assembler`). A band that is not configured is made from a template:
`defaultPriorityBand`, or `defaultNegativePriorityBand` for priorities below 0 if that is given. A field that a configured band leaves
out gets the default of `epp.config.defaults`, not the template's value.

This module reads no text and makes no bands.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Final, TypeVar

from epp import plugin as points
from epp.config import registry
from epp.config.defaults import (
    BAND_BYTES,
    BAND_REQUESTS,
    DEFAULTS,
    DISPLACEMENT,
    EVICTION_FILTER,
    EVICTION_ORDER,
    FAIRNESS,
    ORDERING,
    QUEUES,
    TTL_S,
    USAGE_LIMIT,
)  # fmt: skip
from epp.config.plugin_instances import PluginInstances
from epp.config.written import FLOW_CONTROL_GATE, Amount, BandEntry, FlowControlEntry, Ref, WrittenConfig
from epp.flow.plan import DEFAULT_BAND, BandPlan, FlowPlan
from epp.plugin import Plugin
from epp.request.budget import BEHIND
from epp.request.flows import Capability

BANDS_MAX: Final = 64  # each flow area has places for this many bands
POLICIES: Final = (
    points.FlowQueue, points.OrderingPolicy, points.FairnessPolicy, points.DisplacementPolicy,
    points.UsageLimitPolicy, points.EvictionFilter, points.EvictionOrder,
)  # fmt: skip
FLOW: Final = "flowControl"

K = TypeVar("K", bound=Plugin)


def plan(written: WrittenConfig, instances: PluginInstances, detector: points.SaturationDetector | None) -> FlowPlan | None:
    """Builds the plan from the section `flowControl`. Returns None if the gate is off or there is an error."""
    if not written.gates[FLOW_CONTROL_GATE]:
        return None
    behind = written.tenants is not None and any(budget.queue_place is not None for budget in written.tenants.budgets)
    return _Planner(written.flow_control or FlowControlEntry(), instances).plan(detector, (BEHIND,) if behind else ())


def plugins_of(flow: FlowPlan | None) -> Iterator[Plugin]:
    """Yields all plugins of a plan. A plugin may come more than once."""
    if flow is None:
        return
    yield flow.detector
    yield flow.usage_limits
    for band in flow.all_bands():
        yield from (band.queue, band.ordering, band.fairness, band.displacement)
    yield from (plugin for plugin in (flow.eviction_filter, flow.eviction_order) if plugin is not None)


def unshielded(written: WrittenConfig, flow: FlowPlan) -> list[tuple[BandEntry, points.FairnessPolicy]]:
    """Finds the bands that name no fairness policy and whose default policy lets one flow starve the others.

    Returns these bands with their default policy.
    """
    entry = written.flow_control or FlowControlEntry()
    pairs = [
        *zip(entry.bands, flow.bands, strict=True),
        (entry.default_band or BandEntry(f"{FLOW}.defaultPriorityBand", place=entry.place), flow.template),
    ]
    if entry.negative_band is not None and flow.negative_template is not None:
        pairs.append((entry.negative_band, flow.negative_template))
    return [(given, band.fairness) for given, band in pairs if given.fairness is None and not band.fairness.isolates]


class _Planner:
    """Builds one plan. Continues after an error, so that one run shows all errors."""

    def __init__(self, entry: FlowControlEntry, instances: PluginInstances) -> None:
        self.entry = entry
        self.instances = instances
        self.findings = instances.findings
        self.complete = True

    def plan(self, detector: points.SaturationDetector | None, further: tuple[int, ...]) -> FlowPlan | None:
        entry = self.entry
        bands = tuple(plan for band in entry.bands if (plan := self.band(band)) is not None)
        template = self.band(entry.default_band or BandEntry(f"{FLOW}.defaultPriorityBand", place=entry.place))
        negative = self.band(entry.negative_band) if entry.negative_band is not None else None
        usage = self.policy(entry.usage_limit, USAGE_LIMIT, points.UsageLimitPolicy, f"{FLOW}.usageLimitPolicyPluginRef")
        eviction_filter, eviction_order = self.eviction()
        self.count_bands(further)
        no_endpoint_ttl = entry.ttl_without_endpoint or entry.ttl
        if not self.complete or template is None or usage is None or detector is None:
            return None
        return FlowPlan(
            bands=bands,
            template=template,
            negative_template=negative,
            max_requests=int(entry.requests_max.value) if entry.requests_max else 0,
            max_bytes=int(entry.bytes_max.value) if entry.bytes_max else 0,
            request_ttl_s=TTL_S if entry.ttl is None else _ttl(entry.ttl),
            no_endpoint_ttl_s=TTL_S if no_endpoint_ttl is None else _ttl(no_endpoint_ttl),
            detector=detector,
            usage_limits=usage,
            eviction=entry.eviction,
            eviction_filter=eviction_filter,
            eviction_order=eviction_order,
            further=further,
        )

    def band(self, entry: BandEntry) -> BandPlan | None:
        what = entry.what
        ordering = self.policy(entry.ordering, ORDERING, points.OrderingPolicy, f"{what}.orderingPolicyRef")
        fairness = self.policy(entry.fairness, FAIRNESS, points.FairnessPolicy, f"{what}.fairnessPolicyRef")
        displacement = self.policy(entry.displacement, DISPLACEMENT, points.DisplacementPolicy, f"{what}.displacementPolicyRef")
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
            request_ttl_s=min(_ttl(entry.ttl), _ttl(self.entry.ttl)) if entry.ttl is not None else None,
            queue=queue,
            ordering=ordering,
            fairness=fairness,
            displacement=displacement,
        )

    def queue(self, entry: BandEntry, needs: Mapping[str, Capability]) -> points.FlowQueue | None:
        """Returns the named queue if it can do what the policies need. If the band names none, returns the first queue that can."""
        if entry.queue is not None:
            named = self.policy(entry.queue, "", points.FlowQueue, f"{entry.what}.queueRef")
            return named if named is None or self.can(entry, named, needs) else None
        needed = Capability(0)
        for capabilities in needs.values():
            needed |= capabilities
        for listed in self.instances.of_kind(points.FlowQueue):
            if listed.name in self.instances.entries and needed in listed.capabilities:
                return listed
        for name in QUEUES:
            if needed in getattr(registry.find(name), "capabilities", Capability(0)):
                return self.default(name, points.FlowQueue)
        why = f"{entry.what}: no queue has all that its policies need: {words(needed)}"
        hint = "use other policies, or name a queue of your own in queueRef"
        self.findings.error(entry.place, "queue-mismatch", why, hint)
        return None

    def can(self, entry: BandEntry, queue: points.FlowQueue, needs: Mapping[str, Capability]) -> bool:
        """Returns whether a named queue can do what the policies need. Notes an error for each policy whose needs the queue cannot meet."""
        assert entry.queue is not None
        fits = True
        for policy, needed in needs.items():
            if lacking := needed & ~queue.capabilities:
                fits = False
                why = f"{entry.what}: policy '{policy}' needs {words(lacking)}, which queue '{queue.name}' does not have"
                hint = "leave out queueRef to get a queue that fits"
                self.findings.error(entry.queue.place, "queue-mismatch", why, hint)
        return fits

    def policy(self, ref: Ref | None, default: str, kind: type[K], what: str) -> K | None:
        """Returns the plugin that `ref` names, or the default. Notes an error and returns None if that is not possible."""
        if ref is None:
            plugin = self.default(default, kind)
        else:
            if ref.name in DEFAULTS:  # a configuration may name a default without listing it
                self.default(ref.name, Plugin)
            plugin = self.instances.resolve(ref, kind, what)
        if plugin is None:
            self.complete = False
        return plugin

    def default(self, name: str, kind: type[K]) -> K | None:
        """Returns the instance of a default plugin. Makes it at the first call."""
        plugin = self.instances.plugins.get(name)
        if not isinstance(plugin, kind):
            plugin = self.instances.add(name, experimental=True)
        return plugin if isinstance(plugin, kind) else None

    def eviction(self) -> tuple[points.EvictionFilter | None, points.EvictionOrder | None]:
        """Returns the first eviction filter and the first eviction order that the configuration lists, or the defaults. Both are None if
        eviction is off.
        """
        if not self.entry.eviction:
            return None, None
        filters, orders = self.instances.of_kind(points.EvictionFilter), self.instances.of_kind(points.EvictionOrder)
        return (
            filters[0] if filters else self.default(EVICTION_FILTER, points.EvictionFilter),
            orders[0] if orders else self.default(EVICTION_ORDER, points.EvictionOrder),
        )

    def count_bands(self, further: tuple[int, ...]) -> None:
        priorities = {band.priority for band in self.entry.bands} | {DEFAULT_BAND, *further}
        if len(priorities) > BANDS_MAX:
            self.complete = False
            why = f"{FLOW}.priorityBands has {len(priorities)} bands, band {DEFAULT_BAND} included; at most {BANDS_MAX} are possible"
            self.findings.error(self.entry.bands[-1].place, "too-many-bands", why)


def _limit(amount: Amount | None, default: int) -> int:
    return int(amount.value) if amount is not None and amount.value >= 1 else default


def _ttl(amount: Amount | None) -> float:
    """Returns a TTL in seconds; infinite (no limit) if the TTL is 0 or not given."""
    return (amount.value if amount is not None else 0.0) or math.inf


def words(capabilities: Capability) -> str:
    """Names capabilities of a queue in words for messages and listings: head, tail, priority order, scan."""
    return ", ".join(str(member.name).lower().replace("_", " ") for member in Capability if member in capabilities)
