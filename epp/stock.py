"""The instances of one configuration by name: those that it lists, and defaults that it needs.

References are resolved here. What is wrong is noted; a plugin that could not be made is `broken`,
and a reference that names none, or one of the wrong kind, `unresolved`, so that what follows from
them is not reported too.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from epp import registry
from epp.document import PluginEntry, Ref
from epp.findings import WHOLE, Findings, Place, nearest
from epp.parameters import decode
from epp.plugin import (
    Admitter,
    DataProducer,
    DataSource,
    Decider,
    Discovery,
    DisplacementPolicy,
    EvictionFilter,
    EvictionOrder,
    Extractor,
    FairnessPolicy,
    Filter,
    FlowQueue,
    NoParams,
    OrderingPolicy,
    Parser,
    Picker,
    Plugin,
    ProfileHandler,
    RequestHeader,
    SaturationDetector,
    Scorer,
    Screener,
    UsageLimitPolicy,
)  # fmt: skip
from epp.yaml_nodes import Node

_KIND_WORDS: Mapping[type[Plugin], str] = {
    Parser: "a parser", RequestHeader: "a request-header plugin", Screener: "a screener", Admitter: "an admitter",
    Decider: "a decider", DataProducer: "a data producer", ProfileHandler: "a profile handler", Filter: "a filter",
    Scorer: "a scorer", Picker: "a picker", DataSource: "a data source", Extractor: "an extractor",
    Discovery: "a discovery plugin", SaturationDetector: "a saturation detector", FlowQueue: "a queue",
    OrderingPolicy: "an ordering policy", FairnessPolicy: "a fairness policy", DisplacementPolicy: "a displacement policy",
    UsageLimitPolicy: "a usage-limit policy", EvictionFilter: "an eviction filter", EvictionOrder: "an eviction order",
}  # fmt: skip
_FIELD = re.compile(r"([A-Za-z]\w*(?:\[\d+\]|\.\w+)*):")

K = TypeVar("K", bound=Plugin)


class Stock:
    """`types` are the plugins' types as a configuration is to name them."""

    def __init__(self, entries: Sequence[PluginEntry], findings: Findings, *, allow_experimental: bool) -> None:
        self.findings = findings
        self.entries = {entry.name: entry for entry in entries}
        self.plugins: dict[str, Plugin] = {}
        self.types: dict[str, str] = {}
        self.broken: set[str] = set()
        self.unresolved: set[str] = set()
        self.allow_experimental = allow_experimental

    def make(self) -> None:
        """All plugins that the document lists."""
        specs = [spec for entry in self.entries.values() if (spec := self.spec(entry))]
        made, failed = registry.instances(specs)
        for name, why in failed:
            entry = self.entries[name]
            self.findings.error(
                _place_in(entry.parameters, why, entry.place), "bad-parameter", f"plugin '{name}': {why}"
            )
        for name, plugin in made.items():
            entry = self.entries[name]
            for rule, remarks in (("without-effect", plugin.without_effect), ("deprecated-field", plugin.deprecated)):
                for remark in remarks:
                    place = _place_in(entry.parameters, remark, entry.place)
                    self.findings.warning(place, rule, f"plugin '{name}': {remark}")
        self.plugins.update(made)
        self.broken.update(self.entries.keys() - made.keys())

    def spec(self, entry: PluginEntry) -> registry.Spec | None:
        try:
            cls = registry.find(entry.type)
        except registry.UnknownType as unknown:
            self.findings.error(entry.type_place, unknown.rule, str(unknown), unknown.hint)
            return None
        self.types[entry.name] = entry.type if ":" in entry.type else cls.type_name
        if replacement := registry.DEPRECATED_TYPES.get(entry.type):
            self.findings.warning(
                entry.type_place, "deprecated-type", f"plugin type '{entry.type}' is deprecated", f"use '{replacement}'"
            )
        if not self.allowed(cls.type_name or entry.type, entry.type_place):  # whatever alias it is written by
            return None
        params = self.params(cls, entry)
        return registry.Spec(entry.name, cls, params) if params is not None else None

    def allowed(self, type_name: str, place: Place) -> bool:
        """Whether a type may be used; notes an error if not."""
        if self.allow_experimental or type_name not in registry.EXPERIMENTAL_TYPES:
            return True
        why = f"plugin type '{type_name}' is experimental"
        self.findings.error(place, "experimental-type", why, "start with --allow-experimental-plugins")
        return False

    def params(self, cls: type[Plugin], entry: PluginEntry) -> msgspec.Struct | None:
        given = entry.parameters
        if cls.Params is NoParams and given is not None and isinstance(given.value, dict) and given.value:
            self.findings.warning(
                given.place,
                "parameters-ignored",
                f"plugin '{entry.name}': type '{entry.type}' takes no parameters; they are ignored",
            )
            given = None
        return decode(cls.Params, given, f"plugin '{entry.name}'", entry.place, self.findings)

    def add(self, type_name: str, *, experimental: bool = False) -> Plugin | None:
        """A default plugin, named as its type and without parameters; None if this version has none of that type.

        `experimental`: it is part of something that was asked for, so nobody need allow it.
        """
        if type_name in self.broken or type_name not in registry.known():
            return None
        if type_name in self.plugins:
            entry = self.entries.get(type_name)
            given = f"of type '{self.types[type_name]}'"
            self.findings.error(
                entry.place if entry else WHOLE,
                "name-taken",
                f"plugin '{type_name}' {given} has the name of a default plugin that is needed",
                "give it another name",
            )
            return None
        if not experimental and not self.allowed(type_name, WHOLE):
            self.broken.add(type_name)
            return None
        cls = registry.find(type_name)
        try:
            params = msgspec.convert({}, cls.Params)
        except msgspec.ValidationError:
            return None  # it cannot be a default: somebody must say its parameters
        made, failed = registry.instances([registry.Spec(type_name, cls, params)])
        for name, why in failed:
            self.findings.error(WHOLE, "bad-parameter", f"default plugin '{name}': {why}")
        self.plugins.update(made)
        self.types[type_name] = type_name
        return made.get(type_name)

    def discard(self, name: str) -> None:
        """A default turned out not to be needed."""
        del self.plugins[name], self.types[name]

    def resolve(self, ref: Ref, kind: type[K], what: str) -> K | None:
        """The plugin of a reference, if it exists and is of that kind."""
        plugin = self.lookup(ref, what)
        if plugin is None or isinstance(plugin, kind):
            return plugin
        self.unresolved.add(ref.name)
        self.findings.error(
            ref.place, "wrong-kind", f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}, not {_KIND_WORDS[kind]}"
        )
        return None

    def lookup(self, ref: Ref, what: str) -> Plugin | None:
        plugin = self.plugins.get(ref.name)
        if plugin is None and ref.name not in self.broken:
            hint = nearest(ref.name, self.entries)
            if ref.name in registry.known():
                hint = f"add '- type: {ref.name}' to plugins"
            self.unresolved.add(ref.name)
            self.findings.error(
                ref.place, "unknown-ref", f"{what} references undefined plugin '{ref.name[:128]}'", hint
            )
        return plugin

    def of_kind(self, kind: type[K]) -> list[K]:
        return [plugin for plugin in self.plugins.values() if isinstance(plugin, kind)]

    def place_of(self, name: str, parameter: str) -> Place:
        """Where a parameter of a plugin stands, or the plugin."""
        entry = self.entries.get(name)
        return _place_in(entry.parameters, f"{parameter}: ", entry.place) if entry else WHOLE

    def place(self, name: str) -> Place:
        """Where a plugin stands; defaults stand nowhere."""
        return self.entries[name].place if name in self.entries else WHOLE


def kinds_of(plugin: Plugin) -> str:
    """What a plugin is, in words: `a filter and a scorer`."""
    words = [word for kind, word in _KIND_WORDS.items() if isinstance(plugin, kind)]
    return " and ".join(words) or "a request hook"


def _place_in(parameters: Node | None, why: str, default: Place) -> Place:
    """Where the parameter stands with whose path a constructor's message starts (`a.b[0].c: ...`)."""
    match = _FIELD.match(why)
    node, place = parameters, default
    for step in re.findall(r"\w+", match[1]) if match else ():
        value = node.value if node else None
        if node and isinstance(value, dict) and step in value:
            node, place = value[step], node.keys[step]
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            node = value[int(step)]
            place = node.place
        else:
            break
    return place
