"""Writes the effective configuration: a checked configuration with all its defaults.

`as_yaml` writes it as text. Loading that text gives the same configuration again. `with_origins` also says where each line of that text
comes from:

    file      ─ places ───▶ path of a value -> its line
    effective ─ origins ──▶ for each line of the effective text: the line of the file, or DEFAULT

A path names an element of a list by what identifies it (its name, type, reference or priority, or else its first key), because the
effective configuration has further elements. A value that the file gives under an older name is treated as a default.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from epp.config import yaml_nodes
from epp.config.assembly import Assembly, Scraped
from epp.config.defaults import IMPLIED
from epp.config.findings import ConfigWarning, Findings
from epp.config.schema import API_VERSION, KIND
from epp.config.tenants_section import as_section
from epp.config.written import TenantsEntry, WrittenConfig
from epp.config.yaml_nodes import Node
from epp.decision.pipeline import Pipeline
from epp.decision.response_needs import FULL
from epp.flow.plan import BandPlan, FlowPlan
from epp.plugin import Discovery, Plugin, SaturationDetector, Scorer
from epp.request.tenant_keys import Keys

DEFAULT: Final = 0
PLACES_MAX: Final = 4096  # if a file has more values, the further ones show as defaults
IDENTITIES: Final = ("name", "pluginRef", "priority", "type")

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """Holds a checked configuration with all its defaults.

    `sources` (empty if no source is scraped) and `discovery` are the plugins that the supervisor uses; `pipeline.plugins` has them, too.
    `parameters`: the name of a plugin -> the plugin's parameters. `document` is the effective configuration as plain values. `places`: path
    of a value -> its line in the file.
    """

    source: str
    pipeline: Pipeline
    sources: tuple[Scraped, ...]
    discovery: Discovery | None
    parameters: Mapping[str, msgspec.Struct]
    gates: Mapping[str, bool]
    warnings: tuple[ConfigWarning, ...]
    document: Mapping[str, Any]
    response_phase: str = FULL
    saturation: SaturationDetector | None = None  # None only in tests that build this value themselves
    flow: FlowPlan | None = None  # None if flow control is off
    places: Mapping[Path, int] = field(default_factory=dict)
    tenants: TenantsEntry | None = None  # None if clients name their fairness ids
    keys: Mapping[str, Keys] = field(default_factory=dict)  # the keys in the files that `tenants` names, once these files were read

    @property
    def key_texts(self) -> dict[str, str]:
        """Returns the texts of the files of keys, by path."""
        return {path: file.text for path, file in self.keys.items()}

    def as_yaml(self) -> str:
        """Returns the configuration with all defaults, as YAML text."""
        return yaml_nodes.dump(self.document)

    def with_origins(self) -> tuple[str, list[int]]:
        """Returns the text of `as_yaml`. Also returns, for each line of this text, the line of the file that gives it, or DEFAULT."""
        text = self.as_yaml()
        return text, origins(text, self.places)


def as_document(written: WrittenConfig, assembly: Assembly) -> dict[str, Any]:
    """Returns the configuration with all defaults, as plain values. Loading them gives the same configuration again."""
    data_layer: dict[str, Any] = {
        "injectDefaults": written.inject_defaults,
        "sources": [
            {"pluginRef": scraped.source.name, "extractors": [_ref(e.name) for e in scraped.extractors]} for scraped in assembly.sources
        ],
    }
    if assembly.discovery is not None:
        data_layer["discovery"] = {"endpoints": _ref(assembly.discovery.name)}
    effective: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "featureGates": [f"{name}={str(value).lower()}" for name, value in written.gates.items()],
        "plugins": [_plugin(name, assembly) for name in assembly.plugins if name not in IMPLIED],
        "schedulingProfiles": [
            {"name": wired.name, "plugins": [_member(plugin, weight) for plugin, weight in wired.members]}
            | ({"shadow": True} if wired.shadow else {})
            for wired in assembly.profiles
        ],
        "dataLayer": data_layer,
        "requestHandler": {"parsers": [_ref(parser.name) for parser in assembly.parsers], "responsePhase": written.response_phase},
    }
    section = {} if assembly.flow is None else _flow_section(assembly.flow)
    # otherwise the detector is the default, which the file does not list
    if assembly.saturation is not None and assembly.saturation.name in assembly.plugins:
        section = {"saturationDetector": _ref(assembly.saturation.name)} | section
    if section:
        effective["flowControl"] = section
    if written.tenants is not None:
        effective["tenants"] = as_section(written.tenants)
    return effective


def _ref(name: str) -> dict[str, Any]:
    return {"pluginRef": name}


def _member(plugin: Plugin, weight: float) -> dict[str, Any]:
    if not isinstance(plugin, Scorer):
        return _ref(plugin.name)
    return _ref(plugin.name) | {"weight": int(weight) if weight.is_integer() else weight}


def _plugin(name: str, assembly: Assembly) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": name, "type": assembly.types[name]}
    if parameters := msgspec.to_builtins(assembly.plugins[name].params):
        entry["parameters"] = parameters
    return entry


def _flow_section(plan: FlowPlan) -> dict[str, Any]:
    # A global TTL in the configuration also limits all bands' TTLs. So a band has a longer TTL only if the global TTL is the default.
    bounds = all(band.request_ttl_s is None or band.request_ttl_s <= plan.request_ttl_s for band in plan.all_bands())
    section: dict[str, Any] = {
        "maxBytes": plan.max_bytes,
        "maxRequests": plan.max_requests,
        **({"defaultRequestTTL": duration(plan.request_ttl_s)} if bounds else {}),
        "noEndpointRequestTTL": duration(plan.no_endpoint_ttl_s),
        "defaultPriorityBand": _band_section(plan.template),
    }
    if plan.negative_template is not None:
        section["defaultNegativePriorityBand"] = _band_section(plan.negative_template)
    section["priorityBands"] = [{"priority": band.priority} | _band_section(band) for band in plan.bands]
    section["usageLimitPolicyPluginRef"] = plan.usage_limits.name
    section["enableEviction"] = plan.eviction
    return section


def _band_section(band: BandPlan) -> dict[str, Any]:
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
    """Writes seconds as a Go duration. Infinity becomes 0s, which means no limit."""
    return "0s" if math.isinf(seconds) else f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"


def places(root: Node) -> dict[Path, int]:
    """Returns path of a value -> its line in the file, for the first PLACES_MAX values."""
    found: dict[Path, int] = {}
    for path, line in _lines(root, ()):
        if len(found) == PLACES_MAX:
            break
        found.setdefault(path, line)
    return found


def origins(effective: str, written: Mapping[Path, int]) -> list[int]:
    """Returns for each line of the effective text its line in the file, or DEFAULT. `written`: the result of `places`."""
    found = [DEFAULT] * len(effective.splitlines())
    root = yaml_nodes.read(effective, Findings("effective"))
    if root is not None:
        for path, line in _lines(root, ()):
            found[line - 1] = found[line - 1] or written.get(path, DEFAULT)
    return found


def _lines(node: Node, path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the path and the line of each value. The line of a mapping's entry is that of its key."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            place = node.keys.get(key, child.place)
            yield (*path, key), place.line
            yield from _lines(child, (*path, key))
    elif isinstance(node.value, list):
        for child in node.value:
            inner = (*path, f"[{_identity(child)}]")
            yield inner, child.place.line
            yield from _lines(child, inner)


def _identity(element: Node) -> str:
    if isinstance(element.value, dict):
        given = (element.value[key].value for key in IDENTITIES if key in element.value)
        return str(next(given, next(iter(element.value), "")))
    return str(element.value).partition("=")[0]  # a feature gate may be written as name=value
