"""The shape of an `EndpointPickerConfig`: nodes -> frozen values with places, every error noted.

Nothing here knows a plugin: references are text, `parameters` stay a node. Unknown fields are
refused at every level; a null means that the field is not given. Deprecated fields are moved to
where they belong now, with a warning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from epp import schema
from epp.findings import WHOLE, Findings, Place, nearest
from epp.quantities import parse_bool, parse_duration, parse_quantity
from epp.response_phase import FULL, PHASES
from epp.schema import API_VERSION, API_VERSION_DEPRECATED, KIND, names
from epp.yaml_nodes import Node

GATES: Mapping[str, bool] = {"flowControl": False, "haPopulateNonLeaderDatastore": True}
GATES_REMOVED = frozenset(("dataLayer", "enableLegacyMetrics", "prepareDataPlugins"))
FLOW_CONTROL_GATE, STANDBY_GATE = GATES
PRIORITY_END = 1 << 31

_ROOT = names(schema.Configuration)
_DATA_LAYER = names(schema.DataLayer)
_FLOW_CONTROL = names(schema.FlowControl)
_BAND = names(schema.Band)
_PLUGIN = names(schema.PluginEntry)
_PROFILE = names(schema.ProfileEntry)
_MEMBER = names(schema.ProfileMember)
_SOURCE = names(schema.SourceEntry)
_HANDLER = names(schema.RequestHandler)
_REF = names(schema.PluginRef)


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a plugin by name; `weight` is of a scheduling profile's member, None where not given."""

    name: str
    place: Place = WHOLE
    weight: float | None = None
    weight_place: Place = WHOLE


@dataclass(frozen=True, slots=True)
class PluginEntry:
    """One of `plugins`."""

    name: str
    type: str
    parameters: Node | None = None
    place: Place = WHOLE
    type_place: Place = WHOLE


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    """One of `schedulingProfiles`."""

    name: str
    members: tuple[Ref, ...]
    place: Place = WHOLE
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class SourceEntry:
    """One of `dataLayer.sources`."""

    source: Ref
    extractors: tuple[Ref, ...]


class Amount(NamedTuple):
    """A quantity, or a duration in seconds, with its place."""

    value: float
    place: Place


@dataclass(frozen=True, slots=True)
class BandEntry:
    """One band of `flowControl`; None and "" where nothing is given."""

    what: str  # its path in the file
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
    """The section `flowControl`, without the saturation detector; None where nothing is given."""

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
        """Those of a priority, and the templates."""
        return [*self.bands, *(band for band in (self.default_band, self.negative_band) if band is not None)]


@dataclass(slots=True)
class Document:
    """What a configuration says, before any default."""

    gates: dict[str, bool] = field(default_factory=lambda: dict(GATES))
    gate_places: dict[str, Place] = field(default_factory=dict)  # of those that are given
    plugins: list[PluginEntry] = field(default_factory=list)
    profiles: list[ProfileEntry] = field(default_factory=list)
    inject_defaults: bool = True
    sources: list[SourceEntry] = field(default_factory=list)
    discovery: Ref | None = None
    parsers: list[Ref] = field(default_factory=list)
    response_phase: str = FULL
    response_phase_place: Place = WHOLE
    flow_control: FlowControlEntry | None = None
    saturation: Ref | None = None


def read(root: Node, findings: Findings) -> Document:
    """The document of a root node; what cannot be read is left out, with an error."""
    reader = _Reader(findings)
    document = Document()
    fields = reader.mapping(root, "the configuration", _ROOT)
    reader.header(fields)
    _gates(reader, fields.get("featureGates"), document)
    for index, node in enumerate(reader.sequence(fields.get("plugins"), "plugins")):
        _plugin(reader, node, f"plugins[{index}]", document)
    for index, node in enumerate(reader.sequence(fields.get("schedulingProfiles"), "schedulingProfiles")):
        _profile(reader, node, f"schedulingProfiles[{index}]", document)
    _data_layer(reader, fields.get("dataLayer"), document)
    _flow_control(reader, fields.get("flowControl"), document, root.keys.get("flowControl", WHOLE))
    handler = reader.mapping(fields.get("requestHandler"), "requestHandler", _HANDLER)
    document.parsers = reader.refs(handler.get("parsers"), "requestHandler.parsers")
    _response_phase(reader, handler.get("responsePhase"), document)
    _deprecated(reader, root, fields, document)
    return document


class _Reader:
    """Values of nodes, by type; a wrong one is noted and treated as not given."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    def mapping(self, node: Node | None, what: str, known: Sequence[str]) -> dict[str, Node]:
        """The given fields. Unknown ones are noted."""
        value = self._typed(node, what, dict, "a mapping")
        if node is None or value is None:
            return {}
        for name in value:
            if name not in known:
                self.findings.error(
                    node.keys[name], "unknown-field", f"{what}: unknown field '{name[:128]}'", nearest(name, known)
                )
        return {name: child for name, child in value.items() if name in known and child.value is not None}

    def sequence(self, node: Node | None, what: str) -> list[Node]:
        return self._typed(node, what, list, "a list") or []

    def text(self, node: Node | None, what: str) -> str:
        """The text, or '' where it is not given."""
        return self._typed(node, what, str, "text") or ""

    def boolean(self, node: Node | None, what: str, default: bool) -> bool:
        value = self._typed(node, what, bool, "true or false")
        return default if value is None else bool(value)

    def number(self, node: Node | None, what: str, kinds: tuple[type, ...] = (int, float)) -> float | None:
        value = self._typed(node, what, kinds, "an integer" if float not in kinds else "a number")
        return None if value is None else float(value)

    def ref(self, node: Node | None, what: str, at: Place) -> Ref | None:
        """A mapping with a `pluginRef`."""
        if node is None:
            return None
        fields = self.mapping(node, what, _REF)
        return self.ref_in(fields, what, at) if isinstance(node.value, dict) else None

    def refs(self, node: Node | None, what: str) -> list[Ref]:
        found = (self.ref(n, f"{what}[{i}]", n.place) for i, n in enumerate(self.sequence(node, what)))
        return [ref for ref in found if ref is not None]

    def ref_in(self, fields: Mapping[str, Node], what: str, at: Place) -> Ref | None:
        name = self.text(fields.get("pluginRef"), f"{what}.pluginRef")
        if not name:
            if "pluginRef" not in fields or fields["pluginRef"].value == "":
                self.findings.error(at, "missing-field", f"{what}: 'pluginRef' is required")
            return None
        return Ref(name, fields["pluginRef"].place)

    def member(self, node: Node, what: str) -> Ref | None:
        """A profile's member: a reference with a weight."""
        fields = self.mapping(node, what, _MEMBER)
        if not isinstance(node.value, dict):
            if node.value is None:
                self.findings.error(node.place, "missing-field", f"{what}: 'pluginRef' is required")
            return None
        weight = self.number(fields.get("weight"), f"{what}.weight")
        ref = self.ref_in(fields, what, node.place)
        if ref is None or weight is None:
            return ref
        return Ref(ref.name, ref.place, weight, fields["weight"].place)

    def quantity(self, node: Node | None, what: str) -> Amount | None:
        """A Kubernetes quantity of 0 or more, as text or number."""
        value = self._typed(node, what, (str, int, float), "a quantity such as 500M or 1Gi")
        return self._parsed(node, what, "bad-quantity", parse_quantity, None if value is None else _digits(value))

    def duration(self, node: Node | None, what: str) -> Amount | None:
        """A Go duration of 0 or more."""
        value = self._typed(node, what, str, "a duration such as 200ms or 1m30s")
        return self._parsed(node, what, "bad-duration", parse_duration, value)

    def _parsed(
        self, node: Node | None, what: str, rule: str, parse: Callable[[str], float], text: str | None
    ) -> Amount | None:
        if node is None or text is None:
            return None
        try:
            amount = parse(text)
        except ValueError as error:
            self.findings.error(node.place, rule, f"{what}: {error}")
            return None
        if amount < 0:
            self.findings.error(node.place, rule, f"{what}: '{text}' is negative; it is 0 or more")
            return None
        return Amount(amount, node.place)

    def optional_ref(self, node: Node | None, what: str) -> Ref | None:
        """A name that stands without a mapping around it."""
        name = self.text(node, what)
        return Ref(name, node.place) if node is not None and name else None

    def _typed(self, node: Node | None, what: str, kind: Any, word: str) -> Any:
        if node is None or node.value is None:
            return None
        wrong = isinstance(node.value, bool) and kind is not bool
        if wrong or not isinstance(node.value, kind):
            quote = "put it in quotes" if word == "text" and not isinstance(node.value, (dict, list)) else ""
            self.findings.error(node.place, "wrong-type", f"{what}: expected {word}, got {node.kind()}", quote)
            return None
        return node.value

    def header(self, fields: Mapping[str, Node]) -> None:
        """`apiVersion` and `kind`; both may be left out."""
        version, kind = fields.get("apiVersion"), fields.get("kind")
        given = self.text(version, "apiVersion")
        if version and given == API_VERSION_DEPRECATED:
            self.findings.warning(
                version.place, "deprecated-version", f"apiVersion '{given}' is deprecated", f"write '{API_VERSION}'"
            )
        elif version and given and given != API_VERSION:
            self.findings.error(
                version.place,
                "api-version",
                f"apiVersion '{given[:128]}' is not supported",
                nearest(given, (API_VERSION,)),
            )
        given = self.text(kind, "kind")
        if kind and given and given != KIND:
            self.findings.error(kind.place, "kind", f"kind '{given[:128]}' is not supported", nearest(given, (KIND,)))


def _digits(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e18 else repr(value)


def _gates(reader: _Reader, node: Node | None, document: Document) -> None:
    """`name` or `name=bool`; the last one of a name wins."""
    for index, entry in enumerate(reader.sequence(node, "featureGates")):
        text = reader.text(entry, f"featureGates[{index}]")
        if not text and entry.value != "":
            continue
        name, equals, given = text.partition("=")
        value = True
        if equals:
            try:
                value = parse_bool(given)
            except ValueError as error:
                reader.findings.error(entry.place, "feature-gate", f"feature gate '{name}': {error}")
                continue
        if name in GATES_REMOVED:
            reader.findings.warning(entry.place, "removed-gate", f"feature gate '{name}' was removed and has no effect")
        elif name not in GATES:
            reader.findings.error(
                entry.place, "feature-gate", f"unknown feature gate '{name[:128]}'", nearest(name, GATES)
            )
        else:
            document.gates[name] = value
            document.gate_places[name] = entry.place


def _plugin(reader: _Reader, node: Node, what: str, document: Document) -> None:
    fields = reader.mapping(node, what, _PLUGIN)
    type_name = reader.text(fields.get("type"), f"{what}.type")
    name = reader.text(fields.get("name"), f"{what}.name") or type_name
    if not type_name:
        if isinstance(node.value, dict) and ("type" not in fields or fields["type"].value == ""):
            named = f" '{name}'" if name else ""
            reader.findings.error(node.place, "missing-field", f"{what}: plugin{named} is missing a type")
        elif node.value is None:
            reader.findings.error(node.place, "missing-field", f"{what}: plugin is missing a type")
        return
    first = next((entry for entry in document.plugins if entry.name == name), None)
    if first is not None:
        place = fields["name"].place if "name" in fields else fields["type"].place
        hint = f"first in line {first.place.line}; give one of them another name"
        reader.findings.error(place, "duplicate-name", f"duplicate plugin name '{name}'", hint)
        return
    entry = PluginEntry(name, type_name, fields.get("parameters"), node.place, fields["type"].place)
    document.plugins.append(entry)


def _profile(reader: _Reader, node: Node, what: str, document: Document) -> None:
    fields = reader.mapping(node, what, _PROFILE)
    name = reader.text(fields.get("name"), f"{what}.name")
    if not name and ("name" not in fields or fields["name"].value == ""):
        reader.findings.error(node.place, "missing-field", f"{what} is missing a name")
    if name and any(profile.name == name for profile in document.profiles):
        reader.findings.error(fields["name"].place, "duplicate-name", f"duplicate profile name '{name}'")
        return
    nodes = reader.sequence(fields.get("plugins"), f"{what}.plugins")
    members = (reader.member(child, f"{what}.plugins[{i}]") for i, child in enumerate(nodes))
    shadow = reader.boolean(fields.get("shadow"), f"{what}.shadow", False)
    document.profiles.append(ProfileEntry(name, tuple(m for m in members if m), node.place, shadow))


def _data_layer(reader: _Reader, node: Node | None, document: Document) -> None:
    fields = reader.mapping(node, "dataLayer", _DATA_LAYER)
    document.inject_defaults = reader.boolean(fields.get("injectDefaults"), "dataLayer.injectDefaults", True)
    for index, source in enumerate(reader.sequence(fields.get("sources"), "dataLayer.sources")):
        what = f"dataLayer.sources[{index}]"
        given = reader.mapping(source, what, _SOURCE)
        ref = reader.ref_in(given, what, source.place)
        extractors = reader.refs(given.get("extractors"), f"{what}.extractors")
        if ref is not None:
            document.sources.append(SourceEntry(ref, tuple(extractors)))
    if discovery := fields.get("discovery"):
        document.discovery = reader.ref(discovery, "dataLayer.discovery", discovery.place)
    if peers := fields.get("peerDiscovery"):
        reader.mapping(peers, "dataLayer.peerDiscovery", _REF)
        reader.findings.warning(peers.place, "no-effect", "dataLayer.peerDiscovery has no effect", "remove it")
    if syncer := reader.optional_ref(
        fields.get("crossReplicaSyncerPluginRef"), "dataLayer.crossReplicaSyncerPluginRef"
    ):
        why = "dataLayer.crossReplicaSyncerPluginRef is not supported by this version"
        reader.findings.error(syncer.place, "unsupported", why, "remove it")
    if interval := fields.get("crossReplicaSyncInterval"):
        reader.duration(interval, "dataLayer.crossReplicaSyncInterval")
        reader.findings.warning(
            interval.place, "no-effect", "dataLayer.crossReplicaSyncInterval has no effect without a syncer"
        )


def _flow_control(reader: _Reader, node: Node | None, document: Document, at: Place) -> None:
    """Used for the saturation detector only, without the gate."""
    fields = reader.mapping(node, "flowControl", _FLOW_CONTROL)
    if detector := fields.get("saturationDetector"):
        document.saturation = _detector(reader, detector, "flowControl.saturationDetector")
    if not set(fields) - {"saturationDetector"}:
        return
    usage = "usageLimitPolicyPluginRef"
    document.flow_control = FlowControlEntry(
        place=at,
        bytes_max=reader.quantity(fields.get("maxBytes"), "flowControl.maxBytes"),
        requests_max=reader.quantity(fields.get("maxRequests"), "flowControl.maxRequests"),
        ttl=reader.duration(fields.get("defaultRequestTTL"), "flowControl.defaultRequestTTL"),
        ttl_without_endpoint=reader.duration(fields.get("noEndpointRequestTTL"), "flowControl.noEndpointRequestTTL"),
        default_band=_band(reader, fields.get("defaultPriorityBand"), "flowControl.defaultPriorityBand"),
        negative_band=_band(
            reader, fields.get("defaultNegativePriorityBand"), "flowControl.defaultNegativePriorityBand"
        ),
        bands=_bands(reader, fields.get("priorityBands")),
        usage_limit=reader.optional_ref(fields.get(usage), f"flowControl.{usage}"),
        eviction=reader.boolean(fields.get("enableEviction"), "flowControl.enableEviction", False),
    )
    if not document.gates[FLOW_CONTROL_GATE]:
        hint = "its settings other than saturationDetector are ignored"
        reader.findings.warning(
            at, "gate-missing", f"flowControl has no effect without the feature gate '{FLOW_CONTROL_GATE}'", hint
        )


def _response_phase(reader: _Reader, node: Node | None, document: Document) -> None:
    what = "requestHandler.responsePhase"
    given = reader.text(node, what)
    if node is None or not given:
        return
    if given not in PHASES:
        reader.findings.error(
            node.place, "response-phase", f"{what}: '{given[:128]}' is not known", nearest(given, PHASES)
        )
        return
    document.response_phase, document.response_phase_place = given, node.place


def _bands(reader: _Reader, node: Node | None) -> tuple[BandEntry, ...]:
    bands: list[BandEntry] = []
    read: list[BandEntry] = []  # whole: where something is wrong, a 0 may stand in for the priority
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


def _band(reader: _Reader, node: Node | None, what: str) -> BandEntry | None:
    if node is None:
        return None
    fields = reader.mapping(node, what, _BAND)
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


def _priority(reader: _Reader, node: Node | None, what: str) -> int:
    """As wide as that of an InferenceObjective."""
    priority = int(reader.number(node, what, (int,)) or 0)
    if node is not None and not -PRIORITY_END <= priority < PRIORITY_END:
        why = f"{what}: {priority} is not from {-PRIORITY_END} to {PRIORITY_END - 1}"
        reader.findings.error(node.place, "bad-priority", why)
        return 0
    return priority


def _detector(reader: _Reader, node: Node, what: str) -> Ref | None:
    """`pluginRef` may be left out here."""
    fields = reader.mapping(node, what, _REF)
    name = reader.text(fields.get("pluginRef"), f"{what}.pluginRef")
    return Ref(name, fields["pluginRef"].place) if name else None


def _deprecated(reader: _Reader, root: Node, fields: Mapping[str, Node], document: Document) -> None:
    """Top-level fields that have moved; the new place wins."""
    moved = {"saturationDetector": "flowControl.saturationDetector", "parser": "requestHandler.parsers"}
    for old, new in moved.items():
        if node := fields.get(old):
            reader.findings.warning(
                root.keys[old],
                "deprecated-field",
                f"the field '{old}' is deprecated",
                f"use {new}; if both are set, that one is used",
            )
            if old == "parser":
                ref = reader.ref(node, old, node.place)
                document.parsers = document.parsers or ([ref] if ref else [])
            else:
                document.saturation = document.saturation or _detector(reader, node, old)
