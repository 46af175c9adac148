"""Rules of meaning: what a valid configuration says that its author can hardly have wanted. Warnings only.

Read after everything is wired, since most of it needs to know what a plugin is. Nothing here changes the configuration; what is
left out for want of a reader is `epp.assembly`'s to say.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from epp.assembly import Assembly
from epp.contracts import HOOKS
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, RUNNING, WAITING
from epp.document import STANDBY_GATE, Amount, Document, FlowControlEntry, PluginEntry, ProfileEntry, Ref
from epp.findings import WHOLE, Findings, Place
from epp.flow.plan import FlowPlan
from epp.flow_assembly import DISPLACEMENT, unshielded
from epp.pipeline import WiredProfile
from epp.plugin import Picker, Plugin, SaturationDetector, Scorer
from epp.quantities import parse_duration
from epp.stock import kinds_of

# What grows with every request that is sent there. KV usage does not: who waits holds no blocks, and a shared prefix is held once.
LOAD = frozenset(key.name for key in (WAITING, RUNNING, INFLIGHT_REQUESTS, INFLIGHT_TOKENS))
PREFIX_SCORERS = frozenset(("prefix-cache-scorer", "multicluster-prefix-cache-scorer"))
RANDOM_PICKER = "random-picker"
STALENESS = "metricsStalenessThreshold"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What flags say that a configuration is measured against."""

    scrape_interval_s: float = 0.05
    body_bytes_max: int = 32 << 20
    memory_bytes: int | None = None  # of the container; None: unlimited, or not known
    leader_election: bool = False


DEFAULT_SURROUNDINGS = Surroundings()


def advise(document: Document, assembly: Assembly, findings: Findings, around: Surroundings) -> None:
    """Notes all warnings. With an error, only what does not depend on plugins is said."""
    if document.flow_control is not None:
        _limits(document.flow_control, findings, around)
    if not (document.gates[STANDBY_GATE] or around.leader_election):
        at = document.gate_places[STANDBY_GATE]
        findings.warning(at, "no-effect", f"feature gate '{STANDBY_GATE}' has no effect without leader election")
    if findings.errors:
        return
    entries = {entry.name: entry for entry in document.profiles}
    for wired in assembly.profiles:
        entry = entries.get(wired.name)
        if entry is not None:
            _weights(entry, wired, findings)
        _random(entry, wired, findings)
        _prefix(entry, wired, findings)
    _untold(entries, assembly, findings)
    _unreachable(entries, assembly, findings)
    if assembly.flow is not None:
        _isolation(document, assembly.flow, findings)
        _memory(document, assembly.flow, findings, around)
        _one_by_one(assembly.flow, findings)
    _staleness({entry.name: entry for entry in document.plugins}, assembly, findings, around)


def _weights(entry: ProfileEntry, wired: WiredProfile, findings: Findings) -> None:
    what = f"profile '{entry.name}'"
    plugins = {plugin.name: plugin for plugin, _ in wired.members}
    for ref in entry.members:
        plugin = plugins.get(ref.name)
        if ref.weight is None or plugin is None:
            continue
        if not isinstance(plugin, Scorer):
            why = f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}; only scorers have a weight"
            findings.warning(ref.weight_place, "weight-ignored", why)
        elif ref.weight == 0:
            why = f"{what}: scorer '{ref.name}' has weight 0 and no effect"
            findings.warning(ref.weight_place, "weight-zero", why)
        elif ref.weight < 0:
            why = f"{what}: scorer '{ref.name}' has a negative weight: its best endpoint is the last to be picked"
            findings.warning(ref.weight_place, "weight-negative", why)


def _random(entry: ProfileEntry | None, wired: WiredProfile, findings: Findings) -> None:
    """A profile without a scorer, unless it names the random picker itself."""
    if any(isinstance(plugin, Scorer) for plugin, _ in wired.members):
        return
    listed = {ref.name for ref in entry.members} if entry is not None else {plugin.name for plugin, _ in wired.members}
    pickers = [plugin for plugin, _ in wired.members if isinstance(plugin, Picker) and plugin.name in listed]
    if any(type(picker).type_name == RANDOM_PICKER for picker in pickers):
        return
    findings.warning(
        entry.place if entry is not None else WHOLE,
        "no-scorer",
        f"profile '{wired.name}' has no scorer: what its filters leave is picked at random",
        f"add a scorer, or say so with {RANDOM_PICKER}",
    )


def _prefix(entry: ProfileEntry | None, wired: WiredProfile, findings: Findings) -> None:
    """With a larger weight than all that count requests, the server with the prefix wins however many wait for it."""
    scorers = [(plugin, weight) for plugin, weight in wired.members if isinstance(plugin, Scorer)]
    load = sum(weight for plugin, weight in scorers if _reads_load(plugin))
    for plugin, weight in scorers:
        if type(plugin).type_name in PREFIX_SCORERS and weight > load:
            ref = _member(entry, plugin.name)
            findings.warning(
                (ref.place if ref.weight is None else ref.weight_place) if ref is not None else WHOLE,
                "prefix-outweighs-load",
                f"profile '{wired.name}': scorer '{plugin.name}' weighs {weight:g}, all that count requests or tokens there together "
                f"{max(load, 0):g}: the server that holds the prefix is picked however long its queue is",
                "give those at least its weight together, for example with active-request-scorer",
            )


def _reads_load(plugin: Plugin) -> bool:
    return type(plugin).type_name not in PREFIX_SCORERS and any(key.name in LOAD for key in plugin.consumes)


def _member(entry: ProfileEntry | None, name: str) -> Ref | None:
    return next((ref for ref in entry.members if ref.name == name), None) if entry is not None else None


def _untold(entries: Mapping[str, ProfileEntry], assembly: Assembly, findings: Findings) -> None:
    """What a shadow's plugins would do before a request is sent or after it is answered, they do not do for a shadow."""
    deciding = {plugin.name for wired in assembly.profiles if not wired.shadow for plugin, _ in wired.members}
    for wired in (wired for wired in assembly.profiles if wired.shadow):
        for plugin, _ in wired.members:
            if isinstance(plugin, HOOKS) and plugin.name not in deciding:
                ref = _member(entries.get(wired.name), plugin.name)
                findings.warning(
                    ref.place if ref is not None else WHOLE,
                    "shadow-untold",
                    f"profile '{wired.name}' is a shadow: '{plugin.name}' is not told there of what is sent and answered, "
                    "so it learns nothing and sets no headers",
                )


def _unreachable(entries: Mapping[str, ProfileEntry], assembly: Assembly, findings: Findings) -> None:
    handler = assembly.handler
    assert handler is not None  # else there is an error
    deciding = [wired.name for wired in assembly.profiles if not wired.shadow]
    reached = handler.reaches(deciding)
    if reached is None:
        return
    for name in (name for name in deciding if name not in reached):
        findings.warning(
            entries[name].place if name in entries else WHOLE,
            "unreachable-profile",
            f"profile '{name}' is never run: profile handler '{handler.name}' runs {_listed(reached)}",
            "remove it, or let it run as a shadow by 'shadow: true'",
        )


def _isolation(document: Document, flow: FlowPlan, findings: Findings) -> None:
    """Whoever switches flow control on and says nothing of fairness has the field's default, which has none."""
    if not (bands := unshielded(document, flow)):
        return
    first, policy = bands[0]
    findings.warning(
        first.place,
        "no-isolation",
        f"{', '.join(band.what for band, _ in bands)}: no fairnessPolicyRef is given, and {policy.name} isolates nobody: "
        "a flow with many requests keeps the others of its band waiting",
        "list token-weighted-fairness-policy or round-robin-fairness-policy in plugins and name it, or say so with "
        + policy.name,
    )


def _memory(document: Document, flow: FlowPlan, findings: Findings, around: Surroundings) -> None:
    """A waiting request's body stays in memory: before the limits are reached the container is killed."""
    bands = (*flow.bands, flow.template, *((flow.negative_template,) if flow.negative_template is not None else ()))
    most = flow.max_bytes or max(band.max_bytes for band in bands)
    if around.memory_bytes is None or most <= around.memory_bytes:
        return
    limit = document.flow_control.bytes_max if document.flow_control is not None else None
    said = "flowControl.maxBytes" if flow.max_bytes else "flowControl.maxBytes is not given, a band's maxBytes"
    findings.warning(
        limit.place if limit is not None else WHOLE,
        "limit-above-memory",
        f"{said} {most} is above the container's memory, {around.memory_bytes} bytes: "
        "bodies that wait fill it before anybody is turned away",
        "let flowControl.maxBytes be half of the memory or less",
    )


def _one_by_one(flow: FlowPlan, findings: Findings) -> None:
    """Correct, and slower than its author may expect."""
    detector = flow.detector
    if type(detector).step is SaturationDetector.step:
        findings.warning(
            WHOLE,
            "one-by-one",
            f"saturation detector '{detector.name}' does not say what one request more adds: each worker lets one through at a "
            "time, the next when an endpoint is chosen for it and the pool is read again",
            "give it the method step",
        )


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"


def _staleness(listed: Mapping[str, PluginEntry], assembly: Assembly, findings: Findings, around: Surroundings) -> None:
    """A plugin's own threshold below the period in which values are renewed: they are stale most of the time."""
    interval = max((_interval(s.source, around) for s in assembly.sources), default=around.scrape_interval_s)
    for name, threshold, place in _thresholds(listed, assembly):
        if 0 < threshold <= interval:
            findings.warning(
                place,
                "staleness-below-interval",
                f"plugin '{name}': {STALENESS} {threshold:g}s is not above the scrape interval {interval:g}s: "
                "values count as stale before the next scrape can renew them",
                "let it be several intervals",
            )


def _interval(source: Plugin, around: Surroundings) -> float:
    own: float | None = getattr(source, "interval_s", None)
    return own or around.scrape_interval_s


def _thresholds(listed: Mapping[str, PluginEntry], assembly: Assembly) -> Iterator[tuple[str, float, Place]]:
    for name, plugin in assembly.plugins.items():
        for field in msgspec.structs.fields(plugin.params):
            if field.encode_name != STALENESS:
                continue
            seconds = _seconds(getattr(plugin.params, field.name))
            given = listed[name].parameters if name in listed else None
            place = given.keys.get(STALENESS, given.place) if given is not None else WHOLE
            yield name, seconds, place


def _seconds(value: Any) -> float:
    """Of a duration or a number; 0 for what the plugin's own check should have refused."""
    try:
        return parse_duration(value) if isinstance(value, str) else float(value or 0)
    except (TypeError, ValueError):
        return 0.0


def _limits(flow: FlowControlEntry, findings: Findings, around: Surroundings) -> None:
    bounded = any(limit is not None and limit.value > 0 for limit in (flow.bytes_max, flow.requests_max))
    for band in flow.all_bands():
        for limit, total, field in (
            (band.bytes_max, flow.bytes_max, "maxBytes"),
            (band.requests_max, flow.requests_max, "maxRequests"),
        ):
            if limit is not None and total is not None and 0 < total.value < limit.value:
                why = f"{band.what}.{field} {limit.value:.0f} is above flowControl.{field} {total.value:.0f}"
                findings.warning(limit.place, "limit-above-total", why, "lower it, or raise that")
        _holds_a_body(band.bytes_max, f"{band.what}.maxBytes", findings, around)
        if band.displacement is not None and band.displacement.name != DISPLACEMENT and not bounded:
            why = f"{band.what}.displacementPolicyRef has no effect: nobody gives way while flowControl has no limit over all bands"
            findings.warning(
                band.displacement.place, "no-effect", why, "set flowControl.maxRequests or flowControl.maxBytes"
            )
    _holds_a_body(flow.bytes_max, "flowControl.maxBytes", findings, around)


def _holds_a_body(limit: Amount | None, what: str, findings: Findings, around: Surroundings) -> None:
    if limit is not None and 0 < limit.value < around.body_bytes_max:
        why = f"{what} {limit.value:.0f} is less than one request body may have, {around.body_bytes_max} bytes"
        findings.warning(limit.place, "limit-below-body", why, "raise it, or lower --body-limit")
