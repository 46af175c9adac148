"""Reads the nodes of an `EndpointPickerConfig` into a `WrittenConfig` and notes every error of form.

This module knows no plugin: references are text, and `parameters` stay a node. Unknown fields are
refused at every level. A null means that the field is not given. Deprecated fields are read as the
fields that replace them, with a warning.
"""

from collections.abc import Mapping

from epp.config import schema, tenants_section
from epp.config.findings import WHOLE, Findings, Place, nearest
from epp.config.node_reader import NodeReader
from epp.config.schema import names
from epp.config.written import (
    FLOW_CONTROL_GATE,
    GATES,
    BandEntry,
    FlowControlEntry,
    PluginEntry,
    ProfileEntry,
    Ref,
    SourceEntry,
    WrittenConfig,
)
from epp.config.yaml_nodes import Node
from epp.decision.response_needs import PHASES
from epp.quantities import parse_bool

GATES_REMOVED = frozenset(("dataLayer", "enableLegacyMetrics", "prepareDataPlugins"))
PRIORITY_END = 1 << 31


def read(root: Node, findings: Findings) -> WrittenConfig:
    """Reads a configuration from its root node. Leaves out what it cannot read and notes an error for it."""
    reader = NodeReader(findings)
    written = WrittenConfig()
    fields = reader.mapping(root, "the configuration", schema.Configuration)
    reader.header(fields)
    written.is_bare = isinstance(root.value, dict) and root.value.keys() <= {"apiVersion", "kind"}
    _gates(reader, fields.get("featureGates"), written)
    for index, node in enumerate(reader.sequence(fields.get("plugins"), "plugins")):
        _plugin(reader, node, f"plugins[{index}]", written)
    for index, node in enumerate(reader.sequence(fields.get("schedulingProfiles"), "schedulingProfiles")):
        _profile(reader, node, f"schedulingProfiles[{index}]", written)
    _data_layer(reader, fields.get("dataLayer"), written)
    _flow_control(reader, fields.get("flowControl"), written, root.keys.get("flowControl", WHOLE))
    handler = reader.mapping(fields.get("requestHandler"), "requestHandler", schema.RequestHandler)
    written.parsers = reader.refs(handler.get("parsers"), "requestHandler.parsers")
    written.response_phase = reader.choice(handler, "responsePhase", PHASES, "requestHandler", "response-phase")
    written.response_phase_place = handler["responsePhase"].place if "responsePhase" in handler else WHOLE
    if (priority := handler.get("propagatePriority")) and reader.boolean(priority, "requestHandler.propagatePriority", False):
        why = "requestHandler.propagatePriority is not supported by this version: bodies keep the priority that they have"
        findings.error(priority.place, "unsupported", why, "remove it; servers then do not reorder what the picker has ordered")
    written.tenants = tenants_section.read(reader, fields.get("tenants"), root.keys.get("tenants", WHOLE))
    tenants_section.check(reader, written)
    _deprecated(reader, root, fields, written)
    return written


def _gates(reader: NodeReader, node: Node | None, written: WrittenConfig) -> None:
    """Reads feature gates of the form `name` or `name=bool`. The last entry for a name wins."""
    for index, entry in enumerate(reader.sequence(node, "featureGates")):
        text = reader.text(entry, f"featureGates[{index}]")
        if not text and entry.value != "":
            continue
        name, equals, setting = text.partition("=")
        value = True
        if equals:
            try:
                value = parse_bool(setting)
            except ValueError as error:
                reader.findings.error(entry.place, "feature-gate", f"feature gate '{name}': {error}")
                continue
        if name in GATES_REMOVED:
            why = f"feature gate '{name}' no longer exists and has no effect"
            reader.findings.warning(entry.place, "removed-gate", why, "remove it")
        elif name not in GATES:
            reader.findings.error(entry.place, "feature-gate", f"unknown feature gate '{name[:128]}'", nearest(name, GATES))
        else:
            written.gates[name] = value
            written.gate_places[name] = entry.place


def _plugin(reader: NodeReader, node: Node, what: str, written: WrittenConfig) -> None:
    fields = reader.mapping(node, what, schema.PluginEntry)
    type_name = reader.text(fields.get("type"), f"{what}.type")
    name = reader.text(fields.get("name"), f"{what}.name") or type_name
    if not type_name:
        written.unread.add(name)
        if isinstance(node.value, dict) and ("type" not in fields or fields["type"].value == ""):
            named = f" '{name}'" if name else ""
            reader.findings.error(node.place, "missing-field", f"{what}: plugin{named} is missing a type")
        elif node.value is None:
            reader.findings.error(node.place, "missing-field", f"{what}: plugin is missing a type")
        return
    first = next((entry for entry in written.plugins if entry.name == name), None)
    if first is not None:
        place = fields["name"].place if "name" in fields else fields["type"].place
        hint = f"first in line {first.place.line}; give one of them another name"
        reader.findings.error(place, "duplicate-name", f"duplicate plugin name '{name}'", hint)
        return
    entry = PluginEntry(name, type_name, fields.get("parameters"), node.place, fields["type"].place)
    written.plugins.append(entry)


def _profile(reader: NodeReader, node: Node, what: str, written: WrittenConfig) -> None:
    fields = reader.mapping(node, what, schema.ProfileEntry)
    name = reader.text(fields.get("name"), f"{what}.name")
    if not name and ("name" not in fields or fields["name"].value == ""):
        reader.findings.error(node.place, "missing-field", f"{what} is missing a name")
    if name and any(profile.name == name for profile in written.profiles):
        why = f"duplicate profile name '{name}'"
        reader.findings.error(fields["name"].place, "duplicate-name", why, "give one of them another name")
        return
    nodes = reader.sequence(fields.get("plugins"), f"{what}.plugins")
    members = (reader.member(child, f"{what}.plugins[{i}]") for i, child in enumerate(nodes))
    shadow = reader.boolean(fields.get("shadow"), f"{what}.shadow", False)
    written.profiles.append(ProfileEntry(name, tuple(m for m in members if m), node.place, shadow))


def _data_layer(reader: NodeReader, node: Node | None, written: WrittenConfig) -> None:
    fields = reader.mapping(node, "dataLayer", schema.DataLayer)
    written.inject_defaults = reader.boolean(fields.get("injectDefaults"), "dataLayer.injectDefaults", True)
    for index, source in enumerate(reader.sequence(fields.get("sources"), "dataLayer.sources")):
        what = f"dataLayer.sources[{index}]"
        members = reader.mapping(source, what, schema.SourceEntry)
        ref = reader.ref_in(members, what, source.place)
        extractors = reader.refs(members.get("extractors"), f"{what}.extractors")
        if ref is not None:
            written.sources.append(SourceEntry(ref, tuple(extractors)))
    _discovery(reader, node, fields, written)
    _cross_replica(reader, node, fields, written)


def _discovery(reader: NodeReader, node: Node | None, fields: Mapping[str, Node], written: WrittenConfig) -> None:
    """Reads how endpoints and peers are found. A field at its current place takes precedence over the same field at its older place."""
    what = "dataLayer.discovery"
    discovery = fields.get("discovery")
    found = reader.mapping(discovery, what, schema.Discovering)
    if discovery is not None and "pluginRef" in found:
        reader.moved(discovery.keys["pluginRef"], f"{what}.pluginRef", f"{what}.endpoints.pluginRef")
        written.discovery = reader.ref_in(found, what, discovery.place)
    elif discovery is not None and isinstance(discovery.value, dict) and not found:
        reader.findings.error(discovery.place, "missing-field", f"{what}: 'endpoints' is required")
    if endpoints := found.get("endpoints"):
        written.discovery = reader.ref(endpoints, f"{what}.endpoints", endpoints.place)
    if (older := fields.get("peerDiscovery")) and node is not None:
        reader.moved(node.keys["peerDiscovery"], "dataLayer.peerDiscovery", f"{what}.peers")
    for peers in (found.get("peers"), older):
        if peers is not None:
            reader.mapping(peers, f"{what}.peers", schema.PluginRef)
            reader.findings.warning(peers.place, "no-effect", f"{what}.peers has no effect", "remove it")


def _cross_replica(reader: NodeReader, node: Node | None, fields: Mapping[str, Node], written: WrittenConfig) -> None:
    """Reads the section `crossReplica`, and its fields under their older names."""
    section = reader.mapping(fields.get("crossReplica"), "dataLayer.crossReplica", schema.CrossReplica)
    for name in names(schema.CrossReplica):
        older = f"crossReplica{name[0].upper()}{name[1:]}"
        if node is not None and older in fields:
            reader.moved(node.keys[older], f"dataLayer.{older}", f"dataLayer.crossReplica.{name}")
            section.setdefault(name, fields[older])
    what = "dataLayer.crossReplica"
    written.syncer = reader.optional_ref(section.get("syncerPluginRef"), f"{what}.syncerPluginRef")
    for name in ("syncInterval", "publishTimeout"):
        if (amount := reader.duration(section.get(name), f"{what}.{name}")) is None:
            continue
        if name == "publishTimeout" and not amount.value:
            why = f"{what}.{name}: it must be above 0"
            reader.findings.error(amount.place, "bad-duration", why, "write for example 2s, or omit it")
        else:
            why = f"{what}.{name} has no effect: replicas of this picker share state through --replica-store"
            reader.findings.warning(amount.place, "no-effect", why, "remove it")


def _flow_control(reader: NodeReader, node: Node | None, written: WrittenConfig, at: Place) -> None:
    """Reads the section `flowControl`. If the feature gate is off, warns of any field but the saturation detector."""
    fields = reader.mapping(node, "flowControl", schema.FlowControl)
    if detector := fields.get("saturationDetector"):
        written.saturation = _detector(reader, detector, "flowControl.saturationDetector")
    if not set(fields) - {"saturationDetector"}:
        return
    usage = "usageLimitPolicyPluginRef"
    written.flow_control = FlowControlEntry(
        place=at,
        bytes_max=reader.quantity(fields.get("maxBytes"), "flowControl.maxBytes"),
        requests_max=reader.quantity(fields.get("maxRequests"), "flowControl.maxRequests"),
        ttl=reader.duration(fields.get("defaultRequestTTL"), "flowControl.defaultRequestTTL"),
        ttl_without_endpoint=reader.duration(fields.get("noEndpointRequestTTL"), "flowControl.noEndpointRequestTTL"),
        default_band=_band(reader, fields.get("defaultPriorityBand"), "flowControl.defaultPriorityBand"),
        negative_band=_band(reader, fields.get("defaultNegativePriorityBand"), "flowControl.defaultNegativePriorityBand"),
        bands=_bands(reader, fields.get("priorityBands")),
        usage_limit=reader.optional_ref(fields.get(usage), f"flowControl.{usage}"),
        eviction=reader.boolean(fields.get("enableEviction"), "flowControl.enableEviction", False),
    )
    misspelt = any(finding.rule == "feature-gate" for finding in reader.findings.errors)
    if not written.gates[FLOW_CONTROL_GATE] and not misspelt:
        why = f"flowControl has no effect without the feature gate '{FLOW_CONTROL_GATE}', except for its saturationDetector"
        reader.findings.warning(at, "gate-missing", why, f"add '{FLOW_CONTROL_GATE}' to featureGates")


def _bands(reader: NodeReader, node: Node | None) -> tuple[BandEntry, ...]:
    bands: list[BandEntry] = []
    # bands without an error; a band with an unreadable priority is not in the list, because its priority 0 would look like a duplicate
    read: list[BandEntry] = []
    for index, child in enumerate(reader.sequence(node, "flowControl.priorityBands")):
        what = f"flowControl.priorityBands[{index}]"
        before = len(reader.findings.errors)
        band = _band(reader, child, what) or BandEntry(what, place=child.place)
        bands.append(band)
        if len(reader.findings.errors) > before:
            continue
        first = next((b for b in read if b.priority == band.priority), None)
        if first is not None:
            twice = f"{what}: priority {band.priority} is given twice; first in line {first.place.line}"
            reader.findings.error(child.place, "duplicate-priority", twice)
        read.append(band)
    return tuple(bands)


def _band(reader: NodeReader, node: Node | None, what: str) -> BandEntry | None:
    if node is None:
        return None
    fields = reader.mapping(node, what, schema.Band)
    return BandEntry(
        what,
        _priority(reader, fields.get("priority"), f"{what}.priority"),
        reader.quantity(fields.get("maxBytes"), f"{what}.maxBytes"),
        reader.quantity(fields.get("maxRequests"), f"{what}.maxRequests"),
        reader.optional_ref(fields.get("fairnessPolicyRef"), f"{what}.fairnessPolicyRef"),
        reader.optional_ref(fields.get("orderingPolicyRef"), f"{what}.orderingPolicyRef"),
        node.place,
        reader.duration(fields.get("defaultRequestTTL"), f"{what}.defaultRequestTTL"),
        reader.optional_ref(fields.get("queueRef"), f"{what}.queueRef"),
        reader.optional_ref(fields.get("displacementPolicyRef"), f"{what}.displacementPolicyRef"),
    )


def _priority(reader: NodeReader, node: Node | None, what: str) -> int:
    """Reads a priority: an integer of 32 bits, as in an InferenceObjective."""
    priority = int(reader.number(node, what, (int,)) or 0)
    if node is not None and not -PRIORITY_END <= priority < PRIORITY_END:
        why = f"{what}: {priority} is out of range; give {-PRIORITY_END} to {PRIORITY_END - 1}"
        reader.findings.error(node.place, "bad-priority", why)
        return 0
    return priority


def _detector(reader: NodeReader, node: Node, what: str) -> Ref | None:
    """Reads a reference to a saturation detector. Its `pluginRef` is optional."""
    fields = reader.mapping(node, what, schema.PluginRef)
    name = reader.text(fields.get("pluginRef"), f"{what}.pluginRef")
    return Ref(name, fields["pluginRef"].place) if name else None


def _deprecated(reader: NodeReader, root: Node, fields: Mapping[str, Node], written: WrittenConfig) -> None:
    """Reads top-level fields that have moved. A field at its current place takes precedence over the same field at its older place."""
    if node := fields.get("saturationDetector"):
        reader.moved(root.keys["saturationDetector"], "saturationDetector", "flowControl.saturationDetector")
        written.saturation = written.saturation or _detector(reader, node, "saturationDetector")
    if node := fields.get("parser"):
        reader.moved(root.keys["parser"], "parser", "requestHandler.parsers")
        ref = reader.ref(node, "parser", node.place)
        written.parsers = written.parsers or ([ref] if ref else [])
