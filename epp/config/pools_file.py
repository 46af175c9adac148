"""Reads a pools file: the pools that one picker serves, and which requests go to which pool.

    text ─ read ─▶ PoolsFile ─ choice ─▶ PoolChoice

The structs `…Form` say which fields there are and what they mean; they are never filled. Every error or warning about two pools names the
places of both. Other code reads the files that a pool names, because `epp` opens no file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta

from epp.config import yaml_nodes
from epp.config.findings import WHOLE, ConfigWarning, Findings, Place
from epp.config.node_reader import NodeReader
from epp.config.schema import DIALECT
from epp.config.schema_shape import pointed
from epp.config.yaml_nodes import Node
from epp.endpoints.label_selectors import parse
from epp.request.client_headers import names_objective
from epp.request.pool_choice import ANY, KEPT_CHARS_MAX, KEY, Matched, Pattern, PoolChoice

TITLE: Final = "PoolsFile"
PORT_MAX: Final = 65_535
ENDPOINTS_MAX: Final = 65_536
POOLS_MAX: Final = 1000
TARGET_PORTS_MAX: Final = 8

Text = Annotated[str, Meta(min_length=1)]
Port = Annotated[int, Meta(ge=1, le=PORT_MAX)]
Count = Annotated[int, Meta(ge=1, le=ENDPOINTS_MAX)]


class _Form(msgspec.Struct, forbid_unknown_fields=True, rename="camel", omit_defaults=True):
    """Base class of all parts of the file. Unknown fields are refused."""


class PoolForm(_Form):
    """A pool of model servers."""

    name: Annotated[Text, Meta(description="The name of the pool in metrics, logs and commands.")]
    port: Annotated[Port | None, Meta(description="An ext_proc port of the pool's own.")] = None
    authorities: Annotated[
        list[Text] | None, Meta(description="The `:authority` values with which gateways call the picker for this pool. `*`: any text.")
    ] = None
    models: Annotated[list[Text] | None, Meta(description="The models whose requests belong to the pool. `*`: any text.")] = None
    config_file: Annotated[Text | None, Meta(description="The pool's configuration: a file, relative to this one.")] = None
    config: Annotated[Text | None, Meta(description="The pool's configuration as text, instead of configFile.")] = None
    endpoints: Annotated[list[Text] | None, Meta(description="The model servers, as host:port.")] = None
    max_endpoints: Annotated[Count | None, Meta(description="How many endpoints the pool may have.")] = None
    selector: Annotated[Text | None, Meta(description="In Kubernetes: a label selector of the pods that are endpoints.")] = None
    target_ports: Annotated[
        Annotated[list[Port], Meta(min_length=1, max_length=TARGET_PORTS_MAX)] | None,
        Meta(description="With selector: the ports of the pods."),
    ] = None
    pool_name: Annotated[Text | None, Meta(description="In Kubernetes: the InferencePool that has the endpoints.")] = None
    namespace: Annotated[Text | None, Meta(description="The namespace of the InferencePool or of the pods.")] = None


class DefaultsForm(_Form):
    """Values for pools that do not set these fields."""

    config_file: Annotated[Text | None, Meta(description="The configuration: a file, relative to this one.")] = None
    max_endpoints: Annotated[Count | None, Meta(description="How many endpoints a pool may have.")] = None


class PoolsForm(_Form):
    """The pools that one picker serves: epp serve --pools-file FILE."""

    pools: Annotated[list[PoolForm], Meta(min_length=1, max_length=POOLS_MAX, description="All pools.")]
    defaults: Annotated[DefaultsForm | None, Meta(description="Values for pools that do not set these fields.")] = None


def pools_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a pools file."""
    (root,), parts = msgspec.json.schema_components([PoolsForm], ref_template="#/$defs/{name}")
    for part in parts.values():
        for field in part["properties"].values():
            field.pop("default", None)  # the default null means that the field is not given
    return {"$schema": DIALECT, "title": TITLE, **root, "$defs": dict(sorted(pointed(parts).items()))}


PATTERNS_MAX: Final = 1000  # authorities with a `*` in a file, and as many models: a new name is compared with each
_OBJECT: Final = ("selector", "targetPorts", "poolName", "namespace")  # fields of a pool that has its endpoints from Kubernetes
_ENDPOINT: Final = re.compile(r"(?:\[[^\[\]]+\]|[^\[\]:,\s]+):(\d{1,5})")
_BLANK: Final = re.compile(r"\s")
_NAMESPACE: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


class KubePool(NamedTuple):
    """Where a pool gets its endpoints from in Kubernetes: from the InferencePool `name`, or from the pods that `selector` selects.

    `namespace`: "" for the picker's namespace. `ports`: the ports of the selected pods. `own_port`: the pool's own ext_proc port; 0 if it
    has none.
    """

    namespace: str = ""
    name: str = ""
    selector: str = ""
    ports: tuple[int, ...] = ()
    own_port: int = 0


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """Holds one pool, with the defaults of the file.

    `port`: the pool's own ext_proc port; 0 if it has none. `authorities`: in lower case. `config`: the text of the pool's configuration, if
    the file has it. `config_file`: the path of the pool's configuration as written, or "". `endpoints`: texts of the form host:port.
    `max_endpoints`: 0 if neither the pool nor the defaults give it. `config_place`: where `config` or `config_file` is given. `kube`: None
    if the endpoints do not come from Kubernetes.
    """

    name: str
    port: int
    authorities: tuple[str, ...]
    models: tuple[str, ...]
    config: str | None
    config_file: str
    endpoints: tuple[str, ...]
    max_endpoints: int
    place: Place = WHOLE
    port_place: Place = WHOLE
    config_place: Place = WHOLE
    kube: KubePool | None = None

    @property
    def shares_port(self) -> bool:
        """Whether requests that arrive at the port of several pools may be for this pool."""
        return not self.port or bool(self.authorities or self.models)


@dataclass(frozen=True, slots=True)
class PoolsFile:
    """Holds the pools of a file, at least one. Number `i` of the object that `choice` returns is `pools[i]`."""

    source: str
    pools: tuple[PoolEntry, ...]
    warnings: tuple[ConfigWarning, ...] = ()

    @property
    def shares_port(self) -> bool:
        """Whether the picker needs a port for several pools."""
        return any(pool.shares_port for pool in self.pools)

    def choice(self) -> PoolChoice:
        """Returns the object that finds the pool for each request."""
        return PoolChoice([Matched(pool.name, pool.port, pool.authorities, pool.models) for pool in self.pools])

    def check_ports(self, taken: Mapping[int, str]) -> None:
        """Checks that no pool has a port that the picker uses otherwise. `taken`: such a port -> its flag. Raises ConfigErrors."""
        findings = Findings(self.source)
        for pool in self.pools:
            if pool.port in taken:
                why = f"pool '{pool.name}': port {pool.port} is that of {taken[pool.port]}, too"
                findings.error(pool.port_place, "two-pools", why, f"give the pool or {taken[pool.port]} another port")
        findings.raise_errors()


class _Matcher(NamedTuple):
    """An authority or a model of a pool. `pool`: the name of the pool."""

    text: str
    place: Place
    pool: str

    def __str__(self) -> str:
        return f"'{self.text}' of pool '{self.pool}'"


def are_pools(text: str) -> bool:
    """Returns whether a text is a pools file, and not a configuration."""
    root = yaml_nodes.read(text, Findings(""))
    return root is not None and isinstance(root.value, dict) and "pools" in root.value


def read(text: str, source: str) -> PoolsFile:
    """Reads a pools file. `source` names it in messages. Raises ConfigErrors with all errors."""
    findings = Findings(source)
    reader = NodeReader(findings)
    root = yaml_nodes.read(text, findings)
    if not findings.errors and (root is None or root.value is None):
        findings.error(WHOLE, "no-document", "there is no document: the text is empty or has only comments")
    fields = reader.mapping(root, "the pools file", PoolsForm)
    pools = _Pools(reader, fields.get("defaults"))
    nodes = reader.sequence(fields.get("pools"), "pools")
    if not findings.errors and not nodes:
        place = fields["pools"].place if "pools" in fields else root.place if root is not None else WHOLE
        findings.error(place, "missing-field", "pools: the list is empty", "for a single pool, give --config-file instead of --pools-file")
    if len(nodes) > POOLS_MAX:
        why = f"pools: {len(nodes)} pools; a picker serves at most {POOLS_MAX}"
        findings.error(nodes[POOLS_MAX].place, "too-many-pools", why, "give the others to another picker")
    for index, node in enumerate(nodes[:POOLS_MAX]):
        pools.add(node, f"pools[{index}]")
    pools.check()
    findings.raise_errors()
    return PoolsFile(source, tuple(pools.entries), findings.sorted_warnings())


def _whole(reader: NodeReader, node: Node | None, what: str, most: int) -> int:
    """Returns a whole number from 1 to `most`; 0 if the number is not given."""
    value = int(reader.number(node, what, (int,)) or 0)
    if node is not None and isinstance(node.value, int) and not 1 <= value <= most:
        reader.findings.error(node.place, "bad-pool", f"{what}: {node.value} is not a number from 1 to {most}")
        return 0
    return value


class _Pools:
    def __init__(self, reader: NodeReader, defaults: Node | None) -> None:
        self._reader = reader
        self._findings = reader.findings
        fields = reader.mapping(defaults, "defaults", DefaultsForm)
        self._default_file = fields.get("configFile")
        self._default_path = reader.text(self._default_file, "defaults.configFile")
        self._max_endpoints = _whole(reader, fields.get("maxEndpoints"), "defaults.maxEndpoints", ENDPOINTS_MAX)
        self._first: dict[str | int, PoolEntry] = {}  # the first pool with each name and each port
        self._authorities: list[_Matcher] = []
        self._models: list[_Matcher] = []
        self.entries: list[PoolEntry] = []

    def add(self, node: Node, what: str) -> None:
        """Reads and adds a pool. Notes what is wrong with it."""
        reader, findings = self._reader, self._findings
        fields = reader.mapping(node, what, PoolForm)
        name = reader.text(fields.get("name"), f"{what}.name")
        if not name and (fields["name"].value == "" if "name" in fields else node.value is None or isinstance(node.value, dict)):
            findings.error(node.place, "missing-field", f"{what}: 'name' is required")
        elif name and not names_objective(name):
            why = f"{what}.name: '{name[:128]}' cannot name a pool"
            hint = "a name has lower-case letters, digits, '-' and '.', a letter or digit first and last"
            findings.error(fields["name"].place, "bad-pool", why, hint)
        config, file, config_place = self._config(fields, what)
        port, kube = _whole(reader, fields.get("port"), f"{what}.port", PORT_MAX), self._kube(fields, what)
        entry = PoolEntry(
            name,
            port,
            tuple(self._matchers(fields.get("authorities"), f"{what}.authorities", name, self._authorities)),
            tuple(self._matchers(fields.get("models"), f"{what}.models", name, self._models)),
            config,
            file,
            tuple(self._endpoints(fields.get("endpoints"), f"{what}.endpoints")),
            _whole(reader, fields.get("maxEndpoints"), f"{what}.maxEndpoints", ENDPOINTS_MAX) or self._max_endpoints,
            fields["name"].place if "name" in fields else node.place,
            fields["port"].place if "port" in fields else WHOLE,
            config_place,
            kube._replace(own_port=port) if kube is not None else None,
        )
        self.entries.append(entry)
        if name and (first := self._first.setdefault(name, entry)) is not entry:
            why = f"duplicate pool name '{name}'; first in line {first.place.line}"
            findings.error(entry.place, "duplicate-name", why, "give one of them another name")
        if entry.port and (first := self._first.setdefault(entry.port, entry)) is not entry:
            why = f"pool '{name}' has port {entry.port}, as pool '{first.name}' in line {first.port_place.line}"
            findings.error(entry.port_place, "two-pools", why, "for several pools at one port, give authorities or models instead")

    def _config(self, fields: Mapping[str, Node], what: str) -> tuple[str | None, str, Place]:
        """Returns the text of the configuration or the path of its file, and where it is given."""
        reader, given, named = self._reader, fields.get("config"), fields.get("configFile")
        if given is not None and isinstance(given.value, dict):
            hint = "write config: | and the configuration, indented, below"
            self._findings.error(given.place, "wrong-type", f"{what}.config: expected text, got a mapping", hint)
            return None, "", given.place
        text, file = reader.text(given, f"{what}.config"), reader.text(named, f"{what}.configFile")
        if given is not None and named is not None:
            why = f"{what}: both 'config' and 'configFile' (line {named.place.line}) are given"
            self._findings.error(given.place, "bad-pool", why, "remove one of them")
        if given is not None:
            return text, "", given.place
        where = named or self._default_file
        return None, file or self._default_path, where.place if where is not None else WHOLE

    def _kube(self, fields: Mapping[str, Node], what: str) -> KubePool | None:
        reader, given = self._reader, [key for key in _OBJECT if key in fields]
        if not given:
            return None
        place = fields[given[0]].place
        targets = reader.sequence(fields.get("targetPorts"), f"{what}.targetPorts")
        ports = [_whole(reader, node, f"{what}.targetPorts", PORT_MAX) for node in targets]
        namespace, name, selector = (reader.text(fields.get(key), f"{what}.{key}") for key in ("namespace", "poolName", "selector"))
        if "endpoints" in fields:
            self._findings.error(place, "bad-pool", f"{what}: both '{given[0]}' and 'endpoints' are given", "remove one of them")
        if ("poolName" in fields) == ("selector" in fields):
            hint = "poolName names an InferencePool, selector selects pods"
            self._findings.error(place, "bad-pool", f"{what}: give either 'poolName' or 'selector'", hint)
        if ("selector" in fields) != ("targetPorts" in fields) or len(ports) > TARGET_PORTS_MAX:
            why = f"{what}: a selector needs targetPorts, 1 to {TARGET_PORTS_MAX}; an InferencePool has its own"
            self._findings.error(place, "bad-pool", why)
        for key, text, fits in (
            ("namespace", namespace, not namespace or _NAMESPACE.fullmatch(namespace)),
            ("poolName", name, not name or names_objective(name)),
        ):
            if not fits:
                self._findings.error(fields[key].place, "bad-pool", f"{what}.{key}: '{text[:128]}' names nothing in Kubernetes")
        try:
            parse(selector or "a")
        except ValueError as wrong:
            self._findings.error(fields["selector"].place, "bad-pool", f"{what}.selector: {wrong}")
        return KubePool(namespace, name, selector, tuple(dict.fromkeys(ports)))

    def _matchers(self, node: Node | None, what: str, pool: str, known: list[_Matcher]) -> Sequence[str]:
        """Reads authorities or models of one pool. Adds them to `known`, which collects the matchers of all pools."""
        lower = known is self._authorities
        found: list[str] = []
        for text, place in self._texts(node, what):
            name = text.lower() if lower else text
            if len(name) > KEPT_CHARS_MAX or (lower and ("/" in name or _BLANK.search(name))):
                why = f"{what}: '{name[:128]}' matches no request"
                hint = "write a host, with or without a port" if lower else f"a name has at most {KEPT_CHARS_MAX} characters"
                self._findings.error(place, "bad-pool", why, hint)
                continue
            found.append(name)
            known.append(_Matcher(name, place, pool))
        return found

    def _endpoints(self, node: Node | None, what: str) -> Sequence[str]:
        found: dict[str, Place] = {}
        for text, place in self._texts(node, what):
            match = _ENDPOINT.fullmatch(text)
            if match is None or not 1 <= int(match[1]) <= PORT_MAX:
                hint = "write host:port, or [address]:port for IPv6"
                self._findings.error(place, "bad-pool", f"{what}: '{text[:128]}' is not an endpoint", hint)
            elif text in found:
                self._findings.error(place, "bad-pool", f"{what}: '{text}' is given twice; first in line {found[text].line}")
            else:
                found[text] = place
        return tuple(found)

    def _texts(self, node: Node | None, what: str) -> list[tuple[str, Place]]:
        found: list[tuple[str, Place]] = []
        children = self._reader.sequence(node, what)
        for index, child in enumerate(children):
            text = self._reader.text(child, f"{what}[{index}]")
            if text:
                found.append((text, child.place))
            elif child.value in (None, ""):
                self._findings.error(child.place, "bad-pool", f"{what}[{index}] is empty", "remove it")
        return found

    def check(self) -> None:
        """Checks the matchers of all pools against each other."""
        everything = next((each for each in self._authorities if not each.text.strip(ANY)), None)
        if everything is not None:
            for each in self._models:
                why = f"the model {each} never matches: the authority {everything} in line {everything.place.line} matches all requests"
                self._findings.error(each.place, "never-matched", why, "remove one of them")
        self._check("authority", self._authorities)
        self._check("model", self._models)
        for pool in self.entries:
            if pool.port or pool.authorities or pool.models:
                continue
            if everything is not None:
                why = f"no request reaches pool '{pool.name}': the authority {everything} in line {everything.place.line} matches all"
                self._findings.error(pool.place, "never-matched", why, "give the pool a port or an authority")
                continue
            why = f"pool '{pool.name}' has no port, authority or model: only requests with the metadata {KEY}: {pool.name} reach it"
            self._findings.warning(pool.place, "only-metadata", why, "give it one, unless the gateway sets these metadata")

    def _check(self, kind: str, matchers: Sequence[_Matcher]) -> None:
        """Checks that each matcher can match: no matcher is given twice, and no matcher with `*` covers a later one with `*`."""
        first: dict[str, _Matcher] = {}
        earlier: list[tuple[Pattern, _Matcher]] = []
        for each in matchers:
            known = first.setdefault(each.text, each)
            if known is not each:
                why = f"the {kind} {each} is that of pool '{known.pool}' in line {known.place.line}, too"
                self._findings.error(each.place, "two-pools", why, "remove one of them")
            elif ANY in each.text:
                if len(earlier) == PATTERNS_MAX:
                    why = f"more than {PATTERNS_MAX} of kind {kind} have a '*'"
                    self._findings.error(each.place, "too-many-pools", why, "use names without '*', because more of these are allowed")
                    return
                pattern = Pattern(each.text)
                self._compare(kind, each, pattern, earlier)
                earlier.append((pattern, each))

    def _compare(self, kind: str, each: _Matcher, pattern: Pattern, earlier: Sequence[tuple[Pattern, _Matcher]]) -> None:
        covering = next((other for known, other in earlier if known.fits(each.text)), None)
        if covering is not None:
            line = covering.place.line
            why = f"the {kind} {each} never matches: {covering} in line {line} matches all that it matches, and comes first"
            self._findings.error(each.place, "never-matched", why, f"list it before line {line}, or remove it")
            return
        for known, other in earlier:
            # An author may put a special case before a general one on purpose.
            if other.pool != each.pool and known.meets(pattern) and not pattern.fits(other.text):
                both = f"the {kind} {each} can match what {other} in line {other.place.line} matches"
                why = f"{both}; pool '{other.pool}' then gets the request, because it is listed first"
                self._findings.warning(each.place, "two-matchers", why)
                return
