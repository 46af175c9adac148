"""Lint: warnings about a valid configuration that probably does not do what its author wants.

Lint runs after everything is wired, since most rules need to know what a plugin is. Lint does not change the configuration.
Warnings about unused plugins are in `epp.config.wiring_checks`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from epp.config.assembly import Assembly
from epp.config.contracts import HOOKS
from epp.config.defaults import DISPLACEMENT
from epp.config.findings import WHOLE, Findings, Place
from epp.config.flow_assembly import unshielded
from epp.config.plugin_instances import kinds_of
from epp.config.written import STANDBY_GATE, Amount, FlowControlEntry, PluginEntry, ProfileEntry, Ref, WrittenConfig
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS, RUNNING, WAITING
from epp.decision.pipeline import WiredProfile
from epp.flow.plan import FlowPlan
from epp.plugin import FairnessPolicy, Picker, SaturationDetector, Scorer
from epp.plugins.producers.tokenizer import Tokens
from epp.quantities import parse_duration

# Columns that grow with every request that is sent to an endpoint. KV usage is not one of them: a waiting request holds no
# blocks, and requests with the same prefix share its blocks.
LOAD = frozenset(key.name for key in (WAITING, RUNNING, INFLIGHT_REQUESTS, INFLIGHT_TOKENS))
PREFIX_SCORERS = frozenset(("prefix-cache-scorer", "multicluster-prefix-cache-scorer"))
PRECISE_TYPES = ("precise-prefix-cache-producer", "precise-prefix-cache-scorer")
RANDOM_PICKER = "random-picker"
STALENESS = "metricsStalenessThreshold"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Holds the settings of flags and the limits of the container, which lint compares with a configuration."""

    scrape_interval_s: float = 0.05
    body_bytes_max: int = 32 << 20
    memory_bytes: int | None = None  # the container's memory limit; None if unlimited or unknown
    leader_election: bool = False


DEFAULT_SURROUNDINGS = Surroundings()


def lint(written: WrittenConfig, assembly: Assembly, findings: Findings, surroundings: Surroundings) -> None:
    """Notes all warnings. If there are errors, notes only those warnings that do not depend on plugins."""
    if written.flow_control is not None:
        _lint_limits(written.flow_control, findings, surroundings)
    if not (written.gates[STANDBY_GATE] or surroundings.leader_election):
        at = written.gate_places[STANDBY_GATE]
        why = f"feature gate '{STANDBY_GATE}' has no effect without leader election"
        findings.warning(at, "no-effect", why, "remove it, or start with --ha-enable-leader-election")
    if findings.errors:
        return
    if written.is_bare:
        # This is no error, because the reference picker starts with such a configuration, too.
        why = "nothing is configured: every request goes to an endpoint picked at random, without queues and prefix affinity"
        findings.warning(WHOLE, "nothing-configured", why, "list plugins; for the built-in configuration, name no file")
        return
    entries = {entry.name: entry for entry in written.profiles}
    for wired in assembly.profiles:
        entry = entries.get(wired.name)
        if entry is not None:
            _lint_weights(entry, wired, findings)
        _lint_random_choice(entry, wired, findings)
        _lint_prefix_weight(entry, wired, findings)
    _lint_tokens(written, assembly, findings)
    _lint_shadow_hooks(entries, assembly, findings)
    _lint_unreachable_profiles(entries, assembly, findings)
    if assembly.flow is not None:
        _lint_flow_isolation(written, assembly.flow, findings)
        _lint_memory(written, assembly.flow, findings, surroundings)
        _lint_saturation_step(assembly.flow, findings)
        _lint_holding(assembly.flow, findings)
    _lint_staleness({entry.name: entry for entry in written.plugins}, assembly, findings, surroundings)


def _lint_weights(entry: ProfileEntry, wired: WiredProfile, findings: Findings) -> None:
    what = f"profile '{entry.name}'"
    plugins = {plugin.name: plugin for plugin, _ in wired.members}
    for ref in entry.members:
        plugin = plugins.get(ref.name)
        if ref.weight is None or plugin is None:
            continue
        if not isinstance(plugin, Scorer):
            why = f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}; only scorers have a weight"
            findings.warning(ref.weight_place, "weight-ignored", why, "remove the weight")
        elif ref.weight == 0:
            why = f"{what}: scorer '{ref.name}' has weight 0, so it has no effect"
            findings.warning(ref.weight_place, "weight-zero", why)
        elif ref.weight < 0:
            why = f"{what}: scorer '{ref.name}' has a negative weight: its best endpoint is picked last"
            findings.warning(ref.weight_place, "weight-negative", why)


def _lint_random_choice(entry: ProfileEntry | None, wired: WiredProfile, findings: Findings) -> None:
    """Warns of a profile without a scorer, because it picks at random. A profile that lists the random picker itself is fine."""
    if any(isinstance(plugin, Scorer) for plugin, _ in wired.members):
        return
    listed = {ref.name for ref in entry.members} if entry is not None else {plugin.name for plugin, _ in wired.members}
    pickers = [plugin for plugin, _ in wired.members if isinstance(plugin, Picker) and plugin.name in listed]
    if any(type(picker).type_name == RANDOM_PICKER for picker in pickers):
        return
    findings.warning(
        entry.place if entry is not None else WHOLE,
        "no-scorer",
        f"profile '{wired.name}' has no scorer: the endpoint is picked at random from those that its filters keep",
        f"add a scorer; if random choice is what you want, list {RANDOM_PICKER}",
    )


def _lint_prefix_weight(entry: ProfileEntry | None, wired: WiredProfile, findings: Findings) -> None:
    scorers = [(plugin, weight) for plugin, weight in wired.members if isinstance(plugin, Scorer)]
    others = [(plugin, weight) for plugin, weight in scorers if type(plugin).type_name not in PREFIX_SCORERS]
    load = {plugin.name: weight for plugin, weight in others if any(key.name in LOAD for key in plugin.consumes)}
    for plugin, weight in scorers:
        if type(plugin).type_name not in PREFIX_SCORERS or weight <= (total := sum(load.values())):
            continue
        heaviest = max(load, key=lambda name: load[name], default="")
        raised = load.get(heaviest, 0) + weight - total
        ref = _member(entry, plugin.name)
        findings.warning(
            (ref.place if ref.weight is None else ref.weight_place) if ref is not None else WHOLE,
            "prefix-outweighs-load",
            f"profile '{wired.name}': '{plugin.name}' has weight {weight:g}, and the scorers of load {max(total, 0):g} "
            f"({_listed(load)}): a full server keeps getting its prefixes. Requests that wait, run or are in flight are load; "
            "KV usage is not, because requests with one prefix share its blocks",
            f"give '{heaviest}' weight {raised:g}" if heaviest else f"add active-request-scorer with weight {weight:g}",
        )


def _lint_tokens(written: WrittenConfig, assembly: Assembly, findings: Findings) -> None:
    places = {entry.name: entry.place for entry in written.plugins}
    precise = [name for name, kind in assembly.types.items() if kind in PRECISE_TYPES and name in assembly.plugins]
    sources = [plugin for plugin in assembly.plugins.values() if isinstance(plugin, Tokens)]
    if precise and sources and not any(source.renders for source in sources):
        why = (
            f"plugin '{precise[0]}' needs the model's tokens, and '{sources[0].name}' only estimates them, so only requests that "
            "bring token ids are matched precisely, and all others approximately"
        )
        hint = "give token-producer the parameters modelName and vllm.url"
        findings.warning(places.get(precise[0], WHOLE), "estimated-tokens", why, hint)


def _member(entry: ProfileEntry | None, name: str) -> Ref | None:
    return next((ref for ref in entry.members if ref.name == name), None) if entry is not None else None


def _lint_shadow_hooks(entries: Mapping[str, ProfileEntry], assembly: Assembly, findings: Findings) -> None:
    deciding = {plugin.name for wired in assembly.profiles if not wired.shadow for plugin, _ in wired.members}
    for wired in (wired for wired in assembly.profiles if wired.shadow):
        for plugin, _ in wired.members:
            if isinstance(plugin, HOOKS) and plugin.name not in deciding:
                ref = _member(entries.get(wired.name), plugin.name)
                findings.warning(
                    ref.place if ref is not None else WHOLE,
                    "shadow-untold",
                    f"profile '{wired.name}' is a shadow, and hooks do not run for shadows: plugin '{plugin.name}' learns nothing "
                    "there and sets no headers",
                    "list it in a profile that decides, too",
                )


def _lint_unreachable_profiles(entries: Mapping[str, ProfileEntry], assembly: Assembly, findings: Findings) -> None:
    handler = assembly.handler
    assert handler is not None  # without a handler there is an error, and `lint` has returned
    deciding = [wired.name for wired in assembly.profiles if not wired.shadow]
    reached = handler.reaches(deciding)
    if reached is None:
        return
    for name in (name for name in deciding if name not in reached):
        findings.warning(
            entries[name].place if name in entries else WHOLE,
            "unreachable-profile",
            f"profile '{name}' is never run: profile handler '{handler.name}' runs {_listed(reached)}",
            "remove it, or add 'shadow: true' to run it as a shadow",
        )


def _lint_flow_isolation(written: WrittenConfig, flow: FlowPlan, findings: Findings) -> None:
    """Warns of bands with the default fairness policy, in which one flow can starve the others. The reference picker has this default."""
    if not (bands := unshielded(written, flow)):
        return
    first, policy = bands[0]
    findings.warning(
        first.place,
        "no-isolation",
        f"{', '.join(band.what for band, _ in bands)}: no fairnessPolicyRef is given, and {policy.name} does not isolate "
        "flows: a flow with many requests keeps the other flows of its band waiting",
        "list token-weighted-fairness-policy or round-robin-fairness-policy in plugins and name it in fairnessPolicyRef; "
        f"to keep the default, name {policy.name}",
    )


def _lint_memory(written: WrittenConfig, flow: FlowPlan, findings: Findings, surroundings: Surroundings) -> None:
    most = flow.max_bytes or max(band.max_bytes for band in flow.all_bands())
    if surroundings.memory_bytes is None or most <= surroundings.memory_bytes:
        return
    limit = written.flow_control.bytes_max if written.flow_control is not None else None
    field = "flowControl.maxBytes" if flow.max_bytes else "flowControl.maxBytes is not given, and a band's maxBytes"
    findings.warning(
        limit.place if limit is not None else WHOLE,
        "limit-above-memory",
        f"{field} {most} is above the container's memory, {surroundings.memory_bytes} bytes: "
        "waiting bodies fill the memory before any request is refused",
        "set flowControl.maxBytes to half of the memory or less",
    )


def _lint_saturation_step(flow: FlowPlan, findings: Findings) -> None:
    detector = flow.detector
    if type(detector).step is SaturationDetector.step:
        findings.warning(
            WHOLE,
            "one-by-one",
            f"saturation detector '{detector.name}' does not say how much one more request adds to the saturation: each worker "
            "dispatches one request, then waits until its endpoint is chosen and the pool is read again",
            "implement the method step",
        )


def _lint_holding(flow: FlowPlan, findings: Findings) -> None:
    policies = dict.fromkeys(band.fairness for band in flow.all_bands())
    for policy in policies:
        if policy.holds and isinstance(policy, SaturationDetector) and policy is not flow.detector:
            why = f"fairness policy '{policy.name}' lets all requests in: it learns the endpoints only as the saturation detector"
            findings.warning(WHOLE, "no-effect", why, "name it in flowControl.saturationDetector.pluginRef, too")
    detector = flow.detector
    if isinstance(detector, FairnessPolicy) and detector.holds and detector not in policies:
        why = f"saturation detector '{detector.name}' lets all requests in: it holds them back only as the fairness policy"
        findings.warning(WHOLE, "no-effect", why, "name it in flowControl.defaultPriorityBand.fairnessPolicyRef, too")


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"


def _lint_staleness(listed: Mapping[str, PluginEntry], assembly: Assembly, findings: Findings, surroundings: Surroundings) -> None:
    intervals = [getattr(scraped.source, "interval_s", None) or surroundings.scrape_interval_s for scraped in assembly.sources]
    interval = max(intervals, default=surroundings.scrape_interval_s)
    for name, threshold, place in _thresholds(listed, assembly):
        if 0 < threshold <= interval:
            findings.warning(
                place,
                "staleness-below-interval",
                f"plugin '{name}': {STALENESS} {threshold:g}s is not above the scrape interval {interval:g}s: "
                "values become stale before the next scrape can renew them",
                "set it to several intervals",
            )


def _thresholds(listed: Mapping[str, PluginEntry], assembly: Assembly) -> Iterator[tuple[str, float, Place]]:
    for name, plugin in assembly.plugins.items():
        for field in msgspec.structs.fields(plugin.params):
            if field.encode_name != STALENESS:
                continue
            seconds = _seconds(getattr(plugin.params, field.name))
            node = listed[name].parameters if name in listed else None
            place = node.keys.get(STALENESS, node.place) if node is not None else WHOLE
            yield name, seconds, place


def _seconds(value: Any) -> float:
    """Returns a duration or a number in seconds; 0 for an invalid value, which the plugin's own check reports."""
    try:
        return parse_duration(value) if isinstance(value, str) else float(value or 0)
    except (TypeError, ValueError):
        return 0.0


def _lint_limits(flow: FlowControlEntry, findings: Findings, surroundings: Surroundings) -> None:
    bounded = any(limit is not None and limit.value > 0 for limit in (flow.bytes_max, flow.requests_max))
    for band in flow.all_bands():
        for limit, total, field in ((band.bytes_max, flow.bytes_max, "maxBytes"), (band.requests_max, flow.requests_max, "maxRequests")):
            if limit is not None and total is not None and 0 < total.value < limit.value:
                why = f"{band.what}.{field} {limit.value:.0f} is above flowControl.{field} {total.value:.0f}"
                findings.warning(limit.place, "limit-above-total", why, f"lower it, or raise flowControl.{field}")
        _lint_body_limit(band.bytes_max, f"{band.what}.maxBytes", findings, surroundings)
        if band.ttl is not None and flow.ttl is not None and 0 < flow.ttl.value < (band.ttl.value or inf):
            why = f"{band.what}.defaultRequestTTL {_ttl(band.ttl)} is above flowControl.defaultRequestTTL {_ttl(flow.ttl)}"
            hint = "lower it, or raise or remove flowControl.defaultRequestTTL"
            findings.warning(band.ttl.place, "limit-above-total", why, hint)
        if band.displacement is not None and band.displacement.name != DISPLACEMENT and not bounded:
            why = f"{band.what}.displacementPolicyRef has no effect: requests give way at a limit over all bands, and there is none"
            findings.warning(band.displacement.place, "no-effect", why, "set flowControl.maxRequests or flowControl.maxBytes")
    _lint_body_limit(flow.bytes_max, "flowControl.maxBytes", findings, surroundings)


def _ttl(limit: Amount) -> str:
    return f"{limit.value:g}s" if limit.value else "0s (no limit)"


def _lint_body_limit(limit: Amount | None, what: str, findings: Findings, surroundings: Surroundings) -> None:
    if limit is not None and 0 < limit.value < surroundings.body_bytes_max:
        why = f"{what} {limit.value:.0f} is below the length that one request body may have, {surroundings.body_bytes_max} bytes"
        findings.warning(limit.place, "limit-below-body", why, "raise it, or lower --body-limit")
