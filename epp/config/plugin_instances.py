"""Makes the plugin instances of one configuration, by name: the plugins that it lists and the defaults that it needs.

This module resolves references and notes errors. A plugin that could not be made is `broken`. A name is `unresolved` if it refers to no
plugin, or to a plugin of the wrong kind. Later checks skip broken plugins and unresolved names, so that one mistake is reported once.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from epp import plugin as points
from epp.config import extension, registry
from epp.config.findings import WHOLE, Findings, Place, nearest, similar
from epp.config.parameters import decode
from epp.config.schema_shape import field_texts
from epp.config.written import PluginEntry, Ref
from epp.config.yaml_nodes import Node
from epp.plugin import NoParams, Plugin, foreign

_KIND_WORDS: Mapping[type[Plugin], str] = {
    points.Parser: "a parser", points.RequestHeader: "a request-header plugin", points.Screener: "a screener",
    points.Admitter: "an admitter", points.Decider: "a decider", points.DataProducer: "a data producer",
    points.ProfileHandler: "a profile handler", points.Filter: "a filter", points.Scorer: "a scorer", points.Picker: "a picker",
    points.DataSource: "a data source", points.Extractor: "an extractor", points.Discovery: "a discovery plugin",
    points.Syncer: "a syncer", points.SaturationDetector: "a saturation detector", points.FlowQueue: "a queue",
    points.OrderingPolicy: "an ordering policy", points.FairnessPolicy: "a fairness policy",
    points.DisplacementPolicy: "a displacement policy", points.UsageLimitPolicy: "a usage-limit policy",
    points.EvictionFilter: "an eviction filter", points.EvictionOrder: "an eviction order",
}  # fmt: skip
NO_EFFECT = "Accepted, without effect"  # so begins the description of a parameter that is accepted for compatibility only
_FIELD = re.compile(r"([A-Za-z]\w*(?:\[\d+\]|\.\w+)*):")

K = TypeVar("K", bound=Plugin)


class Ignored(NamedTuple):
    """Describes one parameter that has no effect. `hint` says what would give it an effect."""

    place: Place
    why: str
    hint: str


def ignored(plugin: Plugin, parameters: Node | None) -> list[Ignored]:
    """Returns those parameters in the text that have no effect. `parameters`: the parameters that the text gives.

    If another parameter decides whether a parameter has an effect, and the text gives both, a default value is no mistake, because the
    effective configuration gives all values.
    """
    found = []
    for path, (deciding, values) in plugin.counts_with.items():
        place = place_of(parameters, path)
        if place is None:
            continue
        value, default = _value(plugin.params, path)
        chosen, _ = _value(plugin.params, deciding)
        given = place_of(parameters, deciding) is not None
        if chosen in values or (given and value == default):
            continue
        why = f"{path}: has no effect with {deciding} {_shown(chosen)}{'' if given else ', the default'}"
        needed = " or ".join(_shown(value) for value in values if value != "")
        hint = f"set {deciding} to {needed}, or remove it" if needed else f"remove it, or {deciding}"
        found.append(Ignored(place, why, hint))
    return found


def without_effect(params: msgspec.Struct, around: str = "") -> Iterator[str]:
    """Yields a remark about each parameter with a value other than its default, if its description says that it has no effect."""
    _, texts = field_texts(type(params))
    for field in msgspec.structs.fields(params):
        path, value, text = around + field.encode_name, getattr(params, field.name), texts.get(field.name, "")
        if text.startswith(NO_EFFECT) and value != _default(field):
            yield f"{path}: has no effect here{text.removeprefix(NO_EFFECT).rstrip('.')}"
        elif isinstance(value, msgspec.Struct):
            yield from without_effect(value, f"{path}.")


def place_of(parameters: Node | None, path: str) -> Place | None:
    """Returns where the text gives a parameter, or None. `path`: names of the parameter and of those around it, joined by `.`."""
    node, place = parameters, None
    for step in path.split("."):
        if node is None or not isinstance(node.value, dict) or step not in node.value:
            return None
        node, place = node.value[step], node.keys[step]
    return place


def _value(params: Any, path: str) -> tuple[Any, Any]:
    """Returns the value of a parameter and its default; (None, None) if a parameter around it is null."""
    value: Any = params
    default: Any = None
    for step in path.split("."):
        if value is None:
            return None, None
        field = next(field for field in msgspec.structs.fields(value) if field.encode_name == step)
        value = getattr(value, field.name)
        default = _default(field)
    return value, default


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"


class PluginInstances:
    """Makes and finds plugin instances.

    `plugins` has them by name, in the order in which they were made. `types` has their types, by the names that a configuration should use.
    """

    def __init__(
        self, entries: Sequence[PluginEntry], findings: Findings, *, allow_experimental: bool, unread: Collection[str] = ()
    ) -> None:
        self.findings = findings
        self.entries = {entry.name: entry for entry in entries}
        self.plugins: dict[str, Plugin] = {}
        self.listed: tuple[Plugin, ...] = ()  # the plugins that the configuration lists
        self.types: dict[str, str] = {}
        self.broken: set[str] = set(unread)
        self.misspelt: set[str] = set()  # unknown types, and the known names that their author probably meant
        self.unresolved: set[str] = set()
        self.allow_experimental = allow_experimental

    def make(self) -> None:
        """Makes all plugins that the configuration lists."""
        for entry in self.entries.values():
            plugin = self._made(entry)
            if plugin is None:
                self.broken.add(entry.name)
                continue
            self.plugins[entry.name] = plugin
            for remark in (*plugin.without_effect, *without_effect(plugin.params)):
                place = _place_in(entry, remark)
                self.findings.warning(place, "without-effect", f"plugin '{entry.name}': {remark}")
            for place, why, hint in ignored(plugin, entry.parameters):
                self.findings.warning(place, "without-effect", f"plugin '{entry.name}': {why}", hint)
            for old, current in plugin.deprecated.items():
                place = _place_in(entry, f"{old}:")
                self.findings.deprecated(place, f"parameter '{old}' of plugin '{entry.name}'", f"'{current}'")
        self.listed = tuple(self.plugins.values())

    def _made(self, entry: PluginEntry) -> Plugin | None:
        """Makes a plugin that the configuration lists. Notes an error and returns None if that is not possible."""
        try:
            cls = registry.find(entry.type)
        except registry.UnknownType as unknown:
            self.findings.error(entry.type_place, unknown.rule, str(unknown), unknown.hint)
            if entry.name == entry.type:
                self.misspelt |= {entry.type, *similar(entry.type, registry.names())}
            return None
        self.types[entry.name] = entry.type if ":" in entry.type else cls.type_name
        if replacement := registry.DEPRECATED_TYPES.get(entry.type):
            self.findings.deprecated(entry.type_place, f"plugin type '{entry.type}'", f"'{replacement}'")
        # Check the registered name, because the file may give an alias.
        if not self.allowed(cls.type_name or entry.type, entry.type_place) or (params := self.params(cls, entry)) is None:
            return None
        try:
            return registry.made(entry.name, cls, params)
        except ValueError as problem:
            place = _place_in(entry, str(problem))
            self.findings.error(place, "bad-parameter", f"plugin '{entry.name}': {problem}")
            return None

    def allowed(self, type_name: str, place: Place) -> bool:
        """Returns whether this configuration may use a type. Notes an error if not."""
        if self.allow_experimental or type_name not in registry.EXPERIMENTAL_TYPES:
            return True
        why = f"plugin type '{type_name}' is experimental"
        self.findings.error(place, "experimental-type", why, "start with --allow-experimental-plugins")
        return False

    def params(self, cls: type[Plugin], entry: PluginEntry) -> msgspec.Struct | None:
        node = entry.parameters
        if cls.Params is NoParams and node is not None and isinstance(node.value, dict) and node.value:
            self.findings.warning(
                node.place,
                "parameters-ignored",
                f"plugin '{entry.name}': type '{entry.type}' takes no parameters; they are ignored",
                "remove them",
            )
            node = None
        hints = extension.moved(cls.type_name)
        return decode(cls.Params, node, f"plugin '{entry.name}'", entry.place, self.findings, hints)

    def add(self, type_name: str, *, experimental: bool = False) -> Plugin | None:
        """Adds a default plugin with the name of its type and without parameters. Returns None if that is not possible.

        `experimental` allows an experimental type without the flag, for a feature that the configuration turns on.
        """
        if type_name in self.broken or type_name not in registry.names():
            return None
        if type_name in self.plugins:
            entry = self.entries.get(type_name)
            self.findings.error(
                entry.place if entry else WHOLE,
                "name-taken",
                f"plugin '{type_name}' of type '{self.types[type_name]}' has the name of a default plugin that is needed",
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
            return None  # it has required parameters, so it cannot be a default
        self.types[type_name] = type_name
        try:
            added = self.plugins[type_name] = registry.made(type_name, cls, params)
        except ValueError as problem:
            self.findings.error(WHOLE, "bad-parameter", f"default plugin '{type_name}': {problem}")
            return None
        self.call_foreign(added, added.meet, self.listed)
        return added

    def call_foreign(self, plugin: Plugin, call: Callable[..., object], *arguments: object) -> None:
        """Calls a method of a plugin. Any exception of a foreign plugin, and any ValueError, becomes an error of the configuration.

        If a ValueError has the text `parameter: reason`, the error is noted at the parameter's place in the file.
        """
        try:
            call(*arguments)
        except ValueError as problem:
            place = self.place_of(plugin.name, str(problem).partition(":")[0])
            self.findings.error(place, "bad-parameter", f"plugin '{plugin.name}': {problem}")
        except Exception as problem:
            if not foreign(type(plugin)):
                raise
            why = f"plugin '{plugin.name}': {type(problem).__name__}: {problem}"
            self.findings.error(self.place(plugin.name), "bad-parameter", why)

    def discard(self, name: str) -> None:
        """Removes a default that is not used."""
        del self.plugins[name], self.types[name]

    def resolve(self, ref: Ref, kind: type[K], what: str) -> K | None:
        """Returns the plugin that a reference names, if it is of that kind. Notes an error if not."""
        plugin = self.lookup(ref, what)
        if plugin is None or isinstance(plugin, kind):
            return plugin
        self.unresolved.add(ref.name)
        self.findings.error(ref.place, "wrong-kind", f"{what}: plugin '{ref.name}' is {kinds_of(plugin)}, not {_KIND_WORDS[kind]}")
        return None

    def lookup(self, ref: Ref, what: str) -> Plugin | None:
        """Returns the plugin that a reference names, of any kind. Notes an error if there is none."""
        plugin = self.plugins.get(ref.name)
        if plugin is None and ref.name in self.misspelt:
            self.unresolved.add(ref.name)
        elif plugin is None and ref.name not in self.broken:
            hint = nearest(ref.name, self.entries) or "list it in plugins"
            if ref.name in registry.names():
                hint = f"add '- type: {ref.name}' to plugins"
            self.unresolved.add(ref.name)
            self.findings.error(ref.place, "unknown-ref", f"{what} references undefined plugin '{ref.name[:128]}'", hint)
        return plugin

    def of_kind(self, kind: type[K]) -> list[K]:
        return [plugin for plugin in self.plugins.values() if isinstance(plugin, kind)]

    def place_of(self, name: str, parameter: str) -> Place:
        """Returns the place of a plugin's parameter, or of the plugin if the parameter is not given."""
        entry = self.entries.get(name)
        return _place_in(entry, f"{parameter}: ") if entry else WHOLE

    def place(self, name: str) -> Place:
        """Returns the place of a plugin in the file, or WHOLE for a default plugin."""
        return self.entries[name].place if name in self.entries else WHOLE


def kinds_of(plugin: Plugin) -> str:
    """Names the kinds of a plugin in words, such as `a filter and a scorer`."""
    words = [word for kind, word in _KIND_WORDS.items() if isinstance(plugin, kind)]
    return " and ".join(words) or "a request hook"


def _place_in(entry: PluginEntry, why: str) -> Place:
    """Returns the place of the parameter that a message (`a.b[0].c: ...`) names at its start, or else the place of the plugin."""
    match = _FIELD.match(why)
    node, place = entry.parameters, entry.place
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
