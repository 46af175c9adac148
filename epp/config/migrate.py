"""Brings a configuration into the current form: `migrate` changes the plain values, `epp.config.edit` writes them into the text.

`migrate` changes the apiVersion, fields that have moved, plugin types and parameters with newer names, and feature gates that no longer
exist. It leaves a plugin without a current form as it is, and returns a remark that says why. The result means the same as the input,
unless a remark says what changes. Such remarks are about filters of the earliest versions (`epp.config.extension`).
"""

from collections.abc import Mapping
from typing import Any

from epp.config import extension, registry, yaml_nodes
from epp.config.edit import Removed, rewritten
from epp.config.findings import Findings
from epp.config.reader import GATES_REMOVED
from epp.config.schema import API_VERSION, KIND
from epp.plugin import Plugin

Mappings = dict[str, Any]

DISAGG = "disagg-profile-handler"
OLD_HANDLER = "pd-profile-handler"
OLD_HEADERS = ("disagg-headers-handler", "prefill-header-handler")
OLD_LABEL = "by-label"
SELECTOR = "label-selector-filter"
COMPOSITE = "precise-prefix-cache-scorer"
NEWER = {**registry.DEPRECATED_TYPES, **extension.RENAMED}
HANDLER_PARAMETERS = {  # parameter of pd-profile-handler -> (parameter of disagg-profile-handler, old default)
    "decodeProfile": ("profiles.decode", ""),
    "prefillProfile": ("profiles.prefill", ""),
    "deciderPluginName": ("deciders.prefill", "prefix-based-pd-decider"),
    "onNoPrefill": ("onNoPrefill", ""),
}
CROSS_REPLICA = {
    "crossReplicaSyncerPluginRef": "syncerPluginRef",
    "crossReplicaSyncInterval": "syncInterval",
    "crossReplicaPublishTimeout": "publishTimeout",
}


def migrate(text: str, source: str) -> tuple[str, list[str]]:
    """Returns the text of a configuration in its current form, and remarks about what has no current form or another meaning.

    Each remark begins with "not migrated: " or "changed: ". Comments and layout stay wherever nothing changes. Raises ConfigErrors if the
    text is not readable.
    """
    findings = Findings(source)
    root = yaml_nodes.read(text, findings)
    findings.raise_errors()
    document = root.plain() if root is not None else None
    if not isinstance(document, dict):
        return text, ["not migrated: there is nothing to migrate, the text is no mapping"]
    remarks: list[str] = []
    if "apiVersion" not in document:
        document["kind"] = KIND
    document["apiVersion"] = API_VERSION
    _gates(document)
    _moved_sections(document)
    _data_layer(document)
    _plugins(document, remarks)
    return rewritten(text, document), remarks


def _gates(document: Mappings) -> None:
    gates = document.get("featureGates")
    if isinstance(gates, list):
        kept = [Removed if str(gate).partition("=")[0] in GATES_REMOVED else gate for gate in gates]
        document["featureGates"] = kept
        if all(gate is Removed for gate in kept):
            del document["featureGates"]


def _moved_sections(document: Mappings) -> None:
    """Moves `parser` and `saturationDetector` from the root to their current places. A value that is there already takes precedence."""
    if detector := document.pop("saturationDetector", None):
        _section(document, "flowControl").setdefault("saturationDetector", detector)
    if parser := document.pop("parser", None):
        handler = _section(document, "requestHandler")
        handler["parsers"] = handler.get("parsers") or [parser]


def _data_layer(document: Mappings) -> None:
    layer = document.get("dataLayer")
    if not isinstance(layer, dict):
        return
    discovery = layer.get("discovery")
    if isinstance(discovery, dict) and (name := discovery.pop("pluginRef", None)) is not None:
        discovery.setdefault("endpoints", {"pluginRef": name})
    if (peers := layer.pop("peerDiscovery", None)) is not None:
        _section(layer, "discovery").setdefault("peers", peers)
    for old, new in CROSS_REPLICA.items():
        if (value := layer.pop(old, None)) is not None:
            _section(layer, "crossReplica").setdefault(new, value)


def _section(parent: Mappings, name: str) -> Mappings:
    if not isinstance(parent.get(name), dict):
        parent[name] = {}
    section: Mappings = parent[name]
    return section


def _at(parent: Mappings, path: str) -> tuple[Mappings, str]:
    """Returns the mapping that holds the last part of a path such as `a.b`, and the name of this part. Makes missing mappings."""
    *sections, last = path.split(".")
    for section in sections:
        parent = _section(parent, section)
    return parent, last


def _plugins(document: Mappings, remarks: list[str]) -> None:
    entries = document.get("plugins")
    listed = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    for entry in listed:
        older = entry.get("type")
        if why := _entry(entry):
            remarks.append(f"not migrated: plugin type '{older}' stays: {why}")
        elif entry.get("type") != older and "name" not in entry and _names(document, older) > 0:
            entry["name"] = older  # keep the name that other entries use for this plugin
    if not isinstance(entries, list):
        return
    extension.move_cache_parameters(entries, remarks)
    extension.replace_filters(document, entries, remarks)
    if any(entry.get("type") == DISAGG for entry in listed):
        document["plugins"] = [Removed if _superfluous(entry, document) else entry for entry in entries]


def _entry(entry: Mappings) -> str:
    """Brings one entry of `plugins` into its current form. If it has no current form, returns why; else returns an empty text."""
    type_name, parameters = entry.get("type"), entry.get("parameters")
    given: Mappings = parameters if isinstance(parameters, dict) else {}
    if type_name == OLD_HANDLER:
        return _handler(entry, given)
    if type_name == OLD_LABEL:
        return _label(entry, given)
    if type_name == COMPOSITE:
        return f"it is split: list {registry.DEPRECATED_TYPES[COMPOSITE]}"
    if type_name in OLD_HEADERS:
        return ""
    if isinstance(type_name, str) and type_name in extension.SPLIT:
        return f"it is split: list {extension.SPLIT[type_name]}"
    if isinstance(type_name, str) and (newer := NEWER.get(type_name)):
        entry["type"] = newer
    if given:
        _rename(given, _renamed(entry.get("type"), given))
    return ""


def _renamed(type_name: object, given: Mappings) -> Mapping[str, str]:
    try:
        cls: type[Plugin] = registry.find(str(type_name))
    except registry.UnknownType:
        return {}
    return {old: new for old, new in cls.renamed.items() if _holder(given, old) is not None}


def _holder(given: Mappings, path: str) -> Mappings | None:
    """Returns the mapping that holds the last part of a path such as `a.b`, or None if the file does not give this path."""
    *sections, last = path.split(".")
    found: Any = given
    for section in sections:
        found = found.get(section) if isinstance(found, dict) else None
    return found if isinstance(found, dict) and last in found else None


def _taken(given: Mappings, path: str) -> Any:
    """Removes and returns the value at a path. Also removes sections that become empty."""
    *sections, last = path.split(".")
    holder = _holder(given, path)
    assert holder is not None
    value = holder.pop(last)
    if sections and not holder:
        _taken(given, ".".join(sections))
    return value


def _rename(given: Mappings, names: Mapping[str, str]) -> None:
    for old, new in names.items():
        value = _taken(given, old)
        target, last = _at(given, new)
        if value or value is False:
            target.setdefault(last, value)


def _handler(entry: Mappings, given: Mappings) -> str:
    if given.get("primaryPort"):
        return f"{DISAGG} has no primaryPort"
    entry["type"] = DISAGG
    settings: Mappings = {}
    for old, (new, default) in HANDLER_PARAMETERS.items():
        if value := given.get(old) or default:
            target, last = _at(settings, new)
            target[last] = value
    entry["parameters"] = settings
    return ""


def _label(entry: Mappings, given: Mappings) -> str:
    values, unlabelled = list(given.get("validValues") or ()), bool(given.get("allowsNoLabel"))
    if values and (unlabelled or "" in values):
        return f"{SELECTOR} cannot say 'one of these values, or no label'"
    rule = {"operator": "In", "values": values} if values else {"operator": "DoesNotExist"}
    entry["type"] = SELECTOR
    entry["parameters"] = {"matchExpressions": [{"key": given.get("label"), **rule}]}
    return ""


def _superfluous(entry: Any, document: Mappings) -> bool:
    """Returns whether nothing refers to a plugin, and it only sets headers that the current handler sets itself."""
    if not isinstance(entry, dict) or entry.get("type") not in OLD_HEADERS:
        return False
    name = str(entry.get("name") or entry["type"])
    return _names(document, name) <= ("name" in entry)


def _names(value: Any, name: object) -> int:
    """Counts how often a name stands in a document. Types of plugins are not included."""
    if isinstance(value, dict):
        return sum(_names(child, name) for key, child in value.items() if key != "type")
    if isinstance(value, list):
        return sum(_names(child, name) for child in value)
    return int(value == name)
