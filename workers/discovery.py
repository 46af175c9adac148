"""Endpoints from a file or the command line: what there is now, and how it changes.

    text -> entries (host may be a name) -> endpoints (addresses only) -> appeared, changed, gone

- An endpoint is known by namespace/name; given twice, the last counts. That, one server under two names, and fields that nobody
  knows are said.
- At start a bad file, or one bad entry, is refused, all faults at once, each with file and line.
  Later a bad file leaves the last good set, and a bad entry is left out; each fault is reported
  when it is new, not at every reload of the same text.
- The *directory* is watched, so a file renamed into place and a swapped symlink are seen; a look
  every few seconds finds what the watch missed.
- A name is resolved at start and every 30 s; each of its addresses is an endpoint `name-<ip>`. If
  resolving fails, the last addresses stay. Of a name with both families only IPv4 is used: the
  two would be the same server twice.

What this does not do: scrape, or hand out slots.
"""

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import watchfiles

from epp.findings import nearest
from workers.yaml_files import FAULTS_SHOWN_MAX, DiscoveryError, Fault, Node, documents, read_file

FIELDS = ("name", "namespace", "address", "port", "labels")
EXPLAINED = ("values", "inFlight", "inFlightTokens", "cached", "state")  # what `epp explain` reads beside them
LABELS_MAX = 256  # of one endpoint
ENTRIES_MAX = 65_536
ADDRESSES_MAX = 1024  # of one name
RESOLVE_EVERY_S = 30.0
RESOLVE_S_MAX = 5.0
RESOLVES_AT_ONCE = 4
NAMES_S_MAX = 10.0  # for all that are new; well within the time that the parent gives a first start
LOOK_EVERY_S = 5.0
WATCH_STEP_MS = 20
WATCH_DEBOUNCE_MS = 200

_DNS_NAME = re.compile(
    r"(?=.{1,253}\.?$)([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)(\.[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?)*\.?"
)
_FLAG_ENTRY = re.compile(r"(?:\[([^\[\]]*)\]|([^\[\]:]*)):(\d{1,5})")

Labels = tuple[tuple[str, str], ...]


class EndpointSpec(NamedTuple):
    """An endpoint as discovery knows it; `host` is an IP address, where its metrics are too.

    `uid` tells a server from another one that has its name and address later; "" where nothing does.
    """

    namespace: str
    name: str
    host: str
    port: int
    labels: Labels = ()
    uid: str = ""

    @property
    def identity(self) -> tuple[str, str]:
        return self.namespace, self.name


class Entry(NamedTuple):
    """An endpoint as it is written down; `host` is an address, or a name that has several."""

    namespace: str
    name: str
    host: str
    port: int
    labels: Labels = ()

    @property
    def is_address(self) -> bool:
        return _address(self.host) is not None

    def at(self, address: str) -> EndpointSpec:
        name = self.name if self.is_address else f"{self.name}-{address}"
        return EndpointSpec(self.namespace, name, address, self.port, self.labels)


class Changes(NamedTuple):
    """From one set of endpoints to the next."""

    appeared: list[EndpointSpec]
    changed: list[tuple[EndpointSpec, EndpointSpec]]
    gone: list[EndpointSpec]


def diff(before: Iterable[EndpointSpec], after: Iterable[EndpointSpec]) -> Changes:
    """Compare by identity; of an identity that is given twice the last counts."""
    old = {spec.identity: spec for spec in before}
    new = {spec.identity: spec for spec in after}
    return Changes(
        [spec for identity, spec in new.items() if identity not in old],
        [(old[key], spec) for key, spec in new.items() if key in old and old[key] != spec],
        [spec for identity, spec in old.items() if identity not in new],
    )


class Parsed(NamedTuple):
    """The good entries of a file, what is wrong with the others, and what is odd."""

    entries: list[Entry]
    faults: list[str]
    remarks: list[str]


def parse_file(text: bytes, path: str) -> Parsed:
    """Endpoints of a YAML or JSON file; DiscoveryError when the file as a whole is no such list."""
    nodes = _endpoint_nodes(text, path)
    entries: dict[tuple[str, str], Entry] = {}
    lines: dict[tuple[str, str], int] = {}
    faults: list[str] = []
    remarks: list[str] = []
    for node in nodes:
        try:
            entry = _entry(node)
        except Fault as fault:
            faults.append(f"{path}:{fault.line}: {fault}")
            continue
        key = entry.namespace, entry.name
        if entries.pop(key, None) is not None:
            remarks.append(
                f"{path}:{node.line}: endpoint '{entry.name}' is given again, first in line {lines[key]}; the last counts"
            )
        entries[key], lines[key] = entry, node.line
        remarks += (
            f"{path}:{value.line}: field '{field}' of endpoint '{entry.name}' has no effect ({nearest(field, FIELDS)})"
            for field, value in node.value.items()
            if field not in (*FIELDS, *EXPLAINED)
        )
    servers: dict[tuple[str, int], Entry] = {}
    for key, entry in entries.items():
        other = servers.setdefault((entry.host, entry.port), entry)
        if other is not entry:
            remarks.append(
                f"{path}:{lines[key]}: endpoint '{entry.name}' is where '{other.name}' is: one server counts as two"
            )
    return Parsed(list(entries.values()), faults, remarks)


def parse_flag(text: str) -> list[Entry]:
    """`--endpoints host:port,...`; each entry is named by its own text."""
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
        except ValueError as wrong:
            faults.append(f"--endpoints: '{part}': {wrong}")
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
        raise DiscoveryError([f"{path}:{line}: no list 'endpoints'; write 'endpoints: []' if there are none"])
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
    except ValueError as wrong:
        raise Fault(entry_line, f"endpoint '{_text(node, 'name')}': {wrong}") from None
    return Entry(namespace, _text(node, "name"), host, port, _labels(node))


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
    raise ValueError(f"port '{text}' is not a number from 1 to 65535")


def _host(text: str) -> str:
    if not text:
        raise ValueError("no address; give an IP address or a DNS name")
    address = _address(text)
    if address is not None:
        return address
    name = text.lower()
    if not _DNS_NAME.fullmatch(name) or name.rstrip(".").rpartition(".")[2].isdigit():
        raise ValueError(f"address '{text}' is neither an IP address nor a DNS name")
    return name


def _address(text: str) -> str | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else str(address)


class Names:
    """The addresses of names; what is known stays when resolving fails."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._known: dict[str, tuple[str, ...]] = {}
        self._failing: set[str] = set()

    def known(self, name: str) -> tuple[str, ...]:
        """The last addresses found; none before the first success."""
        return self._known.get(name, ())

    def assume(self, name: str, addresses: Iterable[str]) -> None:
        """Where it was found by somebody else; what was found here counts more."""
        if assumed := tuple(sorted(addresses)):
            self._known.setdefault(name, assumed)

    async def resolve(self, names: Collection[str]) -> bool:
        """Look all of them up; True when an address came or went."""
        before = dict(self._known)
        gate = asyncio.Semaphore(RESOLVES_AT_ONCE)

        async def one(name: str) -> None:
            async with gate:
                await self._look_up(name)

        await asyncio.gather(*map(one, names))
        return self._known != before

    def keep(self, names: Collection[str]) -> None:
        """Forget all others."""
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        self._failing &= set(names)

    async def _look_up(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_S_MAX):
                found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as failure:  # TimeoutError is an OSError
            if name not in self._failing:
                self._failing.add(name)
                kept = len(self.known(name))
                why = str(failure) or f"no answer within {RESOLVE_S_MAX:g} s"
                self._report(f"name '{name}' cannot be resolved ({why}); {kept} addresses kept")
            return
        self._failing.discard(name)
        four = {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET}
        six = {str(entry[4][0]) for entry in found if entry[0] == socket.AF_INET6}
        addresses = sorted(address for address in four or six if _address(address))
        if addresses:
            self._known[name] = tuple(addresses[:ADDRESSES_MAX])


class Discovery:
    """Entries and the addresses of their names -> one set of endpoints; tells when it changes."""

    def __init__(self, tell: Callable[[set[EndpointSpec]], None], report: Callable[[str], None]) -> None:
        self._tell = tell
        self._report = report
        self._names = Names(report)
        self._entries: list[Entry] = []
        self._told: set[EndpointSpec] | None = None

    @property
    def complete(self) -> bool:
        """Has every name been resolved at least once?"""
        return all(entry.is_address or self._names.known(entry.host) for entry in self._entries)

    def endpoints(self) -> set[EndpointSpec]:
        """What there is now."""
        specs = {spec.identity: spec for entry in self._entries for spec in map(entry.at, self._addresses(entry))}
        return set(specs.values())

    def resume(self, entries: list[Entry], before: Iterable[EndpointSpec]) -> None:
        """The entries are these, and their names are where a predecessor found them until they are looked up again."""
        found: dict[tuple[str, str], list[str]] = {}
        for spec in before:
            found.setdefault((spec.namespace, spec.name.removesuffix(f"-{spec.host}")), []).append(spec.host)
        for entry in entries:
            if not entry.is_address:
                self._names.assume(entry.host, found.get((entry.namespace, entry.name), ()))
        self._entries = entries
        self._changed()

    async def use(self, entries: list[Entry]) -> None:
        """The entries are these from now on. New names are looked up before they count.

        A resolver that hangs holds up nobody else for long: then count addresses, and the names that are known by now."""
        self._entries = entries
        names = self._to_resolve()
        self._names.keep(names)
        if any(not self._names.known(name) for name in names):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NAMES_S_MAX):
                    await self._names.resolve(names)
        self._changed()

    async def resolve_forever(self) -> None:
        """Follow the names' addresses; ends when cancelled."""
        while True:
            await asyncio.sleep(RESOLVE_EVERY_S)
            await self.resolve()

    async def resolve(self) -> None:
        """Look all names up again."""
        names = self._to_resolve()
        if names and await self._names.resolve(names):
            self._changed()

    def _to_resolve(self) -> set[str]:
        return {entry.host for entry in self._entries if not entry.is_address}

    def _addresses(self, entry: Entry) -> tuple[str, ...]:
        return (entry.host,) if entry.is_address else self._names.known(entry.host)

    def _changed(self) -> None:
        endpoints = self.endpoints()
        if endpoints != self._told:
            self._told = endpoints
            self._tell(endpoints)


class File:
    """A discovery file over time. `load` is strict, for the start; `reload` keeps what is good."""

    def __init__(self, path: str, report: Callable[[str], None]) -> None:
        self.path = path
        self.directory = os.path.dirname(os.path.abspath(path))
        self._report = report
        self._text: bytes | None = None
        self._told: frozenset[str] = frozenset()

    def load(self) -> list[Entry]:
        """All entries; DiscoveryError names every fault."""
        text = read_file(self.path)
        parsed = parse_file(text, self.path)
        if parsed.faults:
            raise DiscoveryError(parsed.faults)
        self._text = text
        self._tell(parsed.remarks)
        return parsed.entries

    def reload(self) -> list[Entry] | None:
        """The good entries; None when the file is as before, or bad as a whole."""
        try:
            text = read_file(self.path)
            if text == self._text:
                return None
            self._text = text
            parsed = parse_file(text, self.path)
        except DiscoveryError as failure:
            self._tell([f"{fault}; the last good endpoints stay" for fault in failure.faults])
            return None
        self._tell([*(f"{fault}; this endpoint is left out" for fault in parsed.faults), *parsed.remarks])
        return parsed.entries

    def _tell(self, findings: list[str]) -> None:
        new = [finding for finding in findings if finding not in self._told]
        for finding in new[:FAULTS_SHOWN_MAX]:
            self._report(finding)
        if len(new) > FAULTS_SHOWN_MAX:
            self._report(f"{self.path}: and {len(new) - FAULTS_SHOWN_MAX} more of this kind")
        self._told = frozenset(findings)


async def follow(file: File, use: Callable[[list[Entry]], Any]) -> None:
    """Await `use(entries)` after every change of the file; ends when cancelled."""
    moved = asyncio.Event()
    watching = asyncio.create_task(watch(file.directory, moved))
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await moved.wait()
            moved.clear()
            entries = file.reload()
            if entries is not None:
                await use(entries)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def watch(directory: str, moved: asyncio.Event) -> None:
    """Sets `moved` when something in the directory moved; where that cannot be had, ends."""
    with contextlib.suppress(OSError, RuntimeError):
        async for _ in watchfiles.awatch(
            directory,
            watch_filter=None,
            recursive=False,
            step=WATCH_STEP_MS,
            debounce=WATCH_DEBOUNCE_MS,
            rust_timeout=1000,
        ):
            moved.set()
