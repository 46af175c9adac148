"""Reads endpoints as a file or the command line gives them: parses them, and resolves their DNS names.

    text -> entries (host may be a name) -> endpoints (addresses only) -> appeared, changed, gone

- Namespace and name identify an endpoint. If an identity is given twice, the last entry wins and a remark says so. Unknown fields, and one
  server under two names, also get a remark.
- DNS names are resolved at start and every 30 s. An entry with a DNS name gives one endpoint `<name>-<ip>` per address. If resolving
  fails, the last addresses stay. If there are addresses of both families, only IPv4 is used, because both lead to the same server.

This module does not read the file (`endpoints_file` does), scrape, or assign slots.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from epp.config.findings import nearest
from workers.host.yaml_files import DiscoveryError, Fault, Node, brief, documents
from workers.supervisor.endpoints.names import Names, address_of, is_address

FIELDS = ("name", "namespace", "address", "port", "labels")
EXPLAINED = ("values", "inFlight", "inFlightTokens", "cached", "state")  # fields that only `epp explain` reads
PAGE_ADDRESS, PAGE_PORT = "metricsAddress", "metricsPort"  # labels that say where a cluster's metrics page is
LABELS_MAX = 256  # limit per endpoint
ENTRIES_MAX = 65_536
NAME_CHARS_MAX = 512  # limit for a name or namespace, because names stand in metrics, logs and shared memory
HOLD_S = 10.0
RESOLVE_EVERY_S = 30.0
NAMES_S_MAX = 10.0  # limit for resolving all new names; well below the time that the parent gives a first start
SLICE = 500  # entries that become endpoints in one turn of the event loop

_DNS_NAME = re.compile(r"(?=.{1,253}\.?$)([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)*\.?")
_FLAG_ENTRY = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*)):(\d{1,5})")

Labels = tuple[tuple[str, str], ...]
Name = tuple[int, str, str]  # pool, namespace and name: these identify an endpoint


class EndpointSpec(NamedTuple):
    """An endpoint with its address. `host`: an IP address.

    `uid`: an id that distinguishes a server from a later one with the same name and address; "" without such an id. `page`: address and
    port of the metrics page. None means `host` and `port`. `server`: the DNS name from which the address of the metrics page was resolved;
    "" if it was given as an address. `node`: the address of the node on which the server runs; "" if unknown. `pool`: the number of its
    pool. A server that is in two pools is two endpoints.
    """

    namespace: str
    name: str
    host: str
    port: int
    labels: Labels = ()
    uid: str = ""
    page: tuple[str, int] | None = None
    server: str = ""
    node: str = ""
    pool: int = 0

    @property
    def identity(self) -> "Name":
        return self.pool, self.namespace, self.name


class Entry(NamedTuple):
    """An endpoint as written in a file or flag. `host`: an IP address, or a DNS name that may have several addresses.

    `page`: host (IP address or DNS name) and port of the metrics page. None means `host` and `port`.
    """

    namespace: str
    name: str
    host: str
    port: int
    labels: Labels = ()
    page: tuple[str, int] | None = None

    @property
    def is_address(self) -> bool:
        return is_address(self.host)

    @property
    def names(self) -> tuple[str, ...]:
        """The DNS names of the entry that must be resolved."""
        hosts = (self.host,) if self.page is None else (self.host, self.page[0])
        return tuple(host for host in hosts if not is_address(host))

    def at(self, address: str, page: str = "", pool: int = 0) -> EndpointSpec:
        """Returns the endpoint at `address`, one of the addresses of `host`.

        `page`: an address of the DNS name of the metrics page; "" if no address is known, or if the page has no DNS name.
        """
        name = self.name if self.is_address else f"{self.name}-{address}"
        written = self.host if self.page is None else self.page[0]
        spec = EndpointSpec(self.namespace, name, address, self.port, self.labels, pool=pool)
        if self.page is None:
            return spec if is_address(written) else spec._replace(server=written)
        at = (page or written, self.page[1]) if page or is_address(written) else None
        return spec._replace(page=at, server="" if is_address(written) else written)


class Changes(NamedTuple):
    """The difference between two sets of endpoints."""

    appeared: list[EndpointSpec]
    changed: list[tuple[EndpointSpec, EndpointSpec]]
    gone: list[EndpointSpec]


def diff(before: Iterable[EndpointSpec], after: Iterable[EndpointSpec]) -> Changes:
    """Compares two sets of endpoints by their identity. If a set has an identity twice, the last endpoint is used."""
    old = {spec.identity: spec for spec in before}
    new = {spec.identity: spec for spec in after}
    return Changes(
        [spec for identity, spec in new.items() if identity not in old],
        [(old[key], spec) for key, spec in new.items() if key in old and old[key] != spec],
        [spec for identity, spec in old.items() if identity not in new],
    )


class Parsed(NamedTuple):
    """The good entries of a file, the faults of bad entries, and remarks about unusual entries."""

    entries: list[Entry]
    faults: list[str]
    remarks: list[str]


def parse_file(text: bytes, path: str, *, clusters: bool = False) -> Parsed:
    """Parses a YAML or JSON file of endpoints. `path`: its path, for reports. Raises DiscoveryError if the file has no list of endpoints.

    `clusters`: whether each endpoint is a whole cluster, whose labels say where its metrics page is.
    """
    nodes = _endpoint_nodes(text, path)
    entries: dict[tuple[str, str], Entry] = {}
    lines: dict[tuple[str, str], int] = {}
    faults: list[str] = []
    remarks: list[str] = []
    for node in nodes:
        try:
            entry = _entry(node)
            if clusters:
                entry = entry._replace(page=_page_of(node, entry))
        except Fault as fault:
            faults.append(f"{path}:{fault.line}: {fault}")
            continue
        key = entry.namespace, entry.name
        if entries.pop(key, None) is not None:
            remarks.append(
                f"{path}:{node.line}: endpoint '{brief(entry.name)}' is given again, first in line {lines[key]}; the last one wins"
            )
        entries[key], lines[key] = entry, node.line
        remarks += (
            f"{path}:{value.line}: field '{brief(field)}' of endpoint '{brief(entry.name)}' has no effect ({nearest(field, FIELDS)})"
            for field, value in node.value.items()
            if field not in (*FIELDS, *EXPLAINED)
        )
    servers: dict[tuple[str, int], Entry] = {}
    for key, entry in entries.items():
        other = servers.setdefault((entry.host, entry.port), entry)
        if other is not entry:
            remarks.append(
                f"{path}:{lines[key]}: endpoint '{brief(entry.name)}' has the address of '{brief(other.name)}': one server counts as two"
            )
    return Parsed(list(entries.values()), faults, remarks)


def parse_flag(text: str) -> list[Entry]:
    """Parses `--endpoints host:port,...`. The text of each entry is its name. Raises DiscoveryError with all faults."""
    entries: dict[str, Entry] = {}
    faults: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FLAG_ENTRY.fullmatch(part)
        try:
            if match is None:
                raise ValueError("write host:port, or [address]:port for IPv6")
            host = _host(match[1] if match[1] is not None else match[2])
            entry = Entry("default", part, host, _port(match[3]))
            if any((entry.host, entry.port) == (other.host, other.port) for other in entries.values()):
                raise ValueError("is given twice")
            entries[part] = entry
        except ValueError as fault:
            faults.append(f"--endpoints: '{brief(part)}': {fault}")
    if not entries and not faults:
        faults.append("--endpoints: no endpoint given; write host:port, separated by commas")
    if faults:
        raise DiscoveryError(faults)
    return list(entries.values())


def _endpoint_nodes(data: bytes, path: str) -> list[Node]:
    root, *more = [node for node in documents(data, path) if not node.is_null] or [Node(1, None, is_null=True)]
    if more:
        raise DiscoveryError([f"{path}:{more[0].line}: a second document; write all endpoints into one list"])
    listed = root.value.get("endpoints") if isinstance(root.value, dict) else None
    if listed is None or not isinstance(listed.value, list):
        line = (listed or root).line
        raise DiscoveryError([f"{path}:{line}: the list 'endpoints' is missing; write 'endpoints: []' if there are none"])
    if len(listed.value) > ENTRIES_MAX:
        raise DiscoveryError([f"{path}: more than {ENTRIES_MAX} endpoints"])
    return listed.value


def _entry(node: Node) -> Entry:
    if not isinstance(node.value, dict):
        raise Fault(node.line, "an endpoint is a mapping with name, address and port")
    namespace = _text(node, "namespace") or "default"
    entry_line = node.line
    try:
        entry_line = _line(node, "address")
        host = _host(_text(node, "address"))
        entry_line = _line(node, "port")
        port = _port(_text(node, "port"))
    except ValueError as fault:
        raise Fault(entry_line, f"endpoint '{brief(_text(node, 'name'))}': {fault}") from None
    for key in ("namespace", "name"):
        if len(_text(node, key)) > NAME_CHARS_MAX:
            raise Fault(_line(node, key), f"{key} '{brief(_text(node, key))}' is longer than {NAME_CHARS_MAX} characters")
    return Entry(namespace, _text(node, "name"), host, port, _labels(node))


def _page_of(node: Node, entry: Entry) -> tuple[str, int] | None:
    """Returns the host and port of a cluster's metrics page from its labels. Returns None if the page is at the cluster's own address."""
    labels = dict(entry.labels)
    if not labels.get(PAGE_ADDRESS):
        return None
    line = node.value["labels"].line
    try:
        return _host(labels[PAGE_ADDRESS]), _port(labels.get(PAGE_PORT) or str(entry.port))
    except ValueError as fault:
        raise Fault(line, f"endpoint '{entry.name}': labels {PAGE_ADDRESS} and {PAGE_PORT}: {fault}") from None


def _line(node: Node, key: str) -> int:
    return node.value[key].line if key in node.value else node.line


def _text(node: Node, key: str) -> str:
    found: Node | None = node.value.get(key)
    if found is None or found.is_null:
        return ""
    if not isinstance(found.value, str):
        raise Fault(found.line, f"{key} must be a text")
    return found.value


def _labels(node: Node) -> Labels:
    found: Node | None = node.value.get("labels")
    if found is None or found.is_null:
        return ()
    if not isinstance(found.value, dict):
        raise Fault(found.line, "labels must be a mapping of texts")
    if len(found.value) > LABELS_MAX:
        raise Fault(found.line, f"more than {LABELS_MAX} labels")
    return tuple(sorted((key, _text(found, key)) for key in found.value))


def _port(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535:
        return int(text)
    raise ValueError(f"port '{brief(text)}' is not a number from 1 to 65535")


def _host(text: str) -> str:
    if not text:
        raise ValueError("no address; write an IP address or a DNS name")
    address = address_of(text)
    if address is not None:
        return address
    name = text.lower()
    if not _DNS_NAME.fullmatch(name) or name.rstrip(".").rpartition(".")[2].isdigit():
        raise ValueError(f"address '{brief(text)}' is neither an IP address nor a DNS name")
    return name


class EmptyList:
    """Holds back a list that is suddenly empty, because its source may be wrong for a moment, and without endpoints the picker serves no
    request.

    A list from Kubernetes and an endpoints file follow the same rule. The known endpoints stay for HOLD_S; then the empty list is accepted
    if it was empty all this time. `until`: the time before which an empty list is not accepted; None if no list is held back.
    """

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until: float | None = None

    def counts(self, now: float, *, empty: bool, something_known: bool) -> bool:
        """Returns whether the present list is accepted. Times are monotonic seconds. `something_known`: whether an earlier list had
        entries.
        """
        if empty and something_known:
            if self.until is None:
                self.until = now + HOLD_S
            if now < self.until:
                return False
        self.until = None
        return True


class Discovery:
    """Turns entries and the addresses of their names into one set of endpoints, and publishes each new set."""

    def __init__(self, publish: Callable[[set[EndpointSpec]], None], report: Callable[..., None], pool: int = 0) -> None:
        """`pool`: the number of the endpoints' pool."""
        self._publish = publish
        self._pool = pool
        self._report = report
        self._names = Names(report)
        self._entries: list[Entry] = []
        self._published: set[EndpointSpec] | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def complete(self) -> bool:
        """Whether the host of every entry has an address."""
        return all(entry.is_address or self._names.known(entry.host) for entry in self._entries)

    def endpoints(self) -> set[EndpointSpec]:
        """Returns all present endpoints of the entries and the resolved names."""
        return set(self._specs(self._entries).values())

    def resume(self, entries: list[Entry], before: Iterable[EndpointSpec]) -> None:
        """Uses `entries` at once. Until a name is resolved, its addresses are those in `before`, the endpoints of a predecessor."""
        found: dict[tuple[str, str], list[str]] = {}
        for spec in before:
            found.setdefault((spec.namespace, spec.name.removesuffix(f"-{spec.host}")), []).append(spec.host)
        for entry in entries:
            if not entry.is_address:
                self._names.assume(entry.host, found.get((entry.namespace, entry.name), ()))
        self._entries = entries
        self._changed(self.endpoints())

    async def use(self, entries: list[Entry]) -> None:
        """Uses `entries` from now on. Resolves new names first, for at most NAMES_S_MAX.

        Then publishes the endpoints that have an address. The others follow when their names are resolved.
        """
        self._entries = entries
        names = self._to_resolve()
        self._names.keep(names)
        if any(not self._names.known(name) for name in names):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NAMES_S_MAX):
                    await self._names.resolve(names)
        await self._changed_in_slices()

    async def resolve_forever(self) -> None:
        """Resolves all names every RESOLVE_EVERY_S. Runs until its task is cancelled."""
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self.resolve()

    async def resolve(self) -> None:
        """Resolves all names again. Publishes the endpoints if an address has changed."""
        names = self._to_resolve()
        if names and await self._names.resolve(names):
            await self._changed_in_slices()

    def _to_resolve(self) -> set[str]:
        return {name for entry in self._entries for name in entry.names}

    def _page(self, entry: Entry) -> str:
        """Returns the first known address of the DNS name of the entry's metrics page, or ""."""
        return next(iter(self._names.known(entry.page[0])), "") if entry.page is not None else ""

    def _addresses(self, entry: Entry) -> tuple[str, ...]:
        return (entry.host,) if entry.is_address else self._names.known(entry.host)

    def _specs(self, entries: Iterable[Entry]) -> dict[Name, EndpointSpec]:
        """Returns the endpoints of these entries by identity."""
        return {
            spec.identity: spec
            for entry in entries
            for address in self._addresses(entry)
            if (spec := entry.at(address, self._page(entry), self._pool))
        }

    async def _changed_in_slices(self) -> None:
        """Publishes the present endpoints. Computes SLICE of them per turn of the event loop, so that probes are answered meanwhile."""
        async with self._one_at_a_time:
            entries = self._entries
            specs: dict[Name, EndpointSpec] = {}
            for at in range(0, len(entries), SLICE):
                specs |= self._specs(entries[at : at + SLICE])
                await asyncio.sleep(0)
            self._changed(set(specs.values()))

    def _changed(self, endpoints: set[EndpointSpec]) -> None:
        if endpoints != self._published:
            self._published = endpoints
            self._publish(endpoints)
