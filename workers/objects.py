"""Kubernetes objects from a directory: InferenceObjectives as YAML or JSON files, one or more documents each.

    files ─ parse_objects ─▶ objects ─ Folder ─▶ name -> priority        watched by the supervisor

- Read are files `*.yaml`, `*.yml` and `*.json` of the directory itself; names with a dot in front are left out (Kubernetes keeps
  its own files there in mounted directories). A list (`kind: List`, or one of objectives) counts as its items.
- An objective is known by its name. Given by both API groups, that of the newer group counts; twice in one group is a fault.
- `poolRef` is compared with the pool's name where --pool-name gave one; an objective of another pool is left out. Its group and
  kind are not looked at, and the namespace neither: the directory is that of one pool.
- At start a bad file is refused, all faults at once, each with file and line. Later a bad file keeps the objects that were last
  good in it, and each fault is reported when it is new.
- Objects of other kinds are named once per kind.

What this does not do: watch, or know who asks for an objective.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

import yaml

from workers.discovery import DiscoveryError, Fault, Node, build, read_file

SUFFIXES: Final = (".yaml", ".yml", ".json")
FILES_MAX: Final = 1000
OBJECTS_MAX: Final = 4096
DEPTH_MAX: Final = 1  # of lists in lists
GROUPS: Final = ("llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2")  # the newer one first
OBJECTIVE: Final = "InferenceObjective"
PRIORITY_END: Final = 1 << 31
FAULTS_TOLD_MAX: Final = 20
ANY_POOL: Final = ""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}")


class Objective(NamedTuple):
    """How important the requests are that name it."""

    name: str
    priority: int
    group: int  # in GROUPS
    pool: str
    place: str


class Parsed(NamedTuple):
    """The good objects of a file, what is wrong with it, and kinds that nobody here reads."""

    objectives: list[Objective]
    faults: list[str]
    others: list[str]


def parse_objects(text: bytes, path: str) -> Parsed:
    """The objects of one file. A file that is no YAML has one fault and no object."""
    parsed = Parsed([], [], [])
    try:
        for document in _documents(text, path):
            _take(document, path, parsed, 0)
    except DiscoveryError as wrong:
        return Parsed([], wrong.faults, [])
    return parsed


def _documents(text: bytes, path: str) -> Iterator[Node]:
    try:
        decoded = text.decode("utf-8-sig")
        if decoded.lstrip().startswith("{"):
            decoded = decoded.replace("\t", " ")  # JSON may indent by tabs, YAML may not
        events = yaml.parse(decoded, Loader=yaml.CSafeLoader)
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                yield build(next(events), events, 0)
    except UnicodeDecodeError as wrong:
        raise DiscoveryError([f"{path}: not UTF-8 at byte {wrong.start}"]) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise DiscoveryError([f"{path}:{line}: neither YAML nor JSON: {wrong.problem}"]) from None
    except yaml.YAMLError as wrong:
        raise DiscoveryError([f"{path}: neither YAML nor JSON: {wrong}"]) from None
    except Fault as fault:
        raise DiscoveryError([f"{path}:{fault.line}: {fault}"]) from None


def _take(node: Node, path: str, parsed: Parsed, depth: int) -> None:
    """One object, or the items of a list, into `parsed`."""
    if node.is_null:
        return
    try:
        kind = _text(node, "kind", "an object is a mapping with apiVersion, kind, metadata and spec")
        group = _text(node, "apiVersion", "")
        items = _child(node, "items")
        if kind.endswith("List") and items is not None and isinstance(items.value, list) and depth < DEPTH_MAX:
            for item in items.value:
                _take(item, path, parsed, depth + 1)
        elif kind != OBJECTIVE:
            parsed.others.append(f"{kind or 'no kind'} of {group or 'no apiVersion'}")
        else:
            parsed.objectives.append(_objective(node, group, path))
    except Fault as fault:
        parsed.faults.append(f"{path}:{fault.line}: {fault}")


def _objective(node: Node, group: str, path: str) -> Objective:
    if group not in GROUPS:
        raise Fault(_line(node, "apiVersion"), f"apiVersion '{group[:128]}': {OBJECTIVE} is of {' or '.join(GROUPS)}")
    metadata = _child(node, "metadata") or Node(node.line, {})
    name = _text(metadata, "name", "metadata is a mapping with a name")
    if not _NAME.fullmatch(name):
        why = "a name has up to 253 lower-case letters, digits, '-' and '.'"
        raise Fault(_line(metadata, "name"), f"{OBJECTIVE} '{name[:128]}': metadata.name: {why}")
    spec = _child(node, "spec") or Node(node.line, {})
    given = _text(spec, "priority", f"{OBJECTIVE} '{name}': spec is a mapping")
    if given and not (_INTEGER.fullmatch(given) and -PRIORITY_END <= int(given) < PRIORITY_END):
        why = f"'{given[:128]}' is not an integer from {-PRIORITY_END} to {PRIORITY_END - 1}"
        raise Fault(_line(spec, "priority"), f"{OBJECTIVE} '{name}': spec.priority: {why}")
    pool = _child(spec, "poolRef")
    pool_name = _text(pool, "name", f"{OBJECTIVE} '{name}': spec.poolRef is a mapping") if pool is not None else ""
    return Objective(name, int(given or 0), GROUPS.index(group), pool_name, f"{path}:{node.line}")


def _child(node: Node, key: str) -> Node | None:
    found: Node | None = node.value.get(key) if isinstance(node.value, dict) else None
    return None if found is None or found.is_null else found


def _text(node: Node, key: str, form: str) -> str:
    if not isinstance(node.value, dict):
        raise Fault(node.line, form)
    found = _child(node, key)
    if found is None:
        return ""
    if not isinstance(found.value, str):
        raise Fault(found.line, f"{key} is one word, not a list or mapping")
    return found.value


def _line(node: Node, key: str) -> int:
    return node.value[key].line if isinstance(node.value, dict) and key in node.value else node.line


class Folder:
    """A directory over time. `load` is strict, for the start; `reload` keeps what is good."""

    def __init__(self, path: str, report: Callable[[str], None], *, pool: str = ANY_POOL) -> None:
        self.path = path
        self._report = report
        self._pool = pool
        self._texts: dict[str, bytes] = {}
        self._good: dict[str, list[Objective]] = {}
        self._told: frozenset[str] = frozenset()
        self._named: set[str] = set()  # kinds and objects that were said to be left out

    def load(self) -> Mapping[str, int]:
        """Priorities by name; DiscoveryError names every fault."""
        faults: list[str] = []
        for path in self._paths():
            faults += self._read(path)
        priorities = self._priorities(faults)
        if faults:
            raise DiscoveryError(faults)
        return priorities

    def reload(self) -> Mapping[str, int] | None:
        """The same of what is good; None when nothing can be told of the directory as a whole."""
        try:
            paths = self._paths()
        except DiscoveryError as failure:
            self._tell(failure.faults, "the last good objectives stay")
            return None
        for gone in self._texts.keys() - set(paths):
            del self._texts[gone]
            self._good.pop(gone, None)
        faults: list[str] = []
        for path in paths:
            try:
                faults += self._read(path)
            except DiscoveryError as failure:
                faults += failure.faults
        twice: list[str] = []
        priorities = self._priorities(twice)
        self._tell([*faults, *twice], "what was last good there stays")
        return priorities

    def _paths(self) -> list[str]:
        try:
            names = sorted(os.listdir(self.path))
        except OSError as failure:
            raise DiscoveryError([f"{self.path}: cannot be read: {failure.strerror}"]) from failure
        names = [name for name in names if name.endswith(SUFFIXES) and not name.startswith(".")]
        if len(names) > FILES_MAX:
            raise DiscoveryError([f"{self.path}: more than {FILES_MAX} files; put several objects into one"])
        return [os.path.join(self.path, name) for name in names]

    def _read(self, path: str) -> list[str]:
        """Take a file in, if it has changed; its faults, of a file that is as before too."""
        text = read_file(path)
        if text == self._texts.get(path) and path in self._good:
            return []
        self._texts[path] = text
        parsed = parse_objects(text, path)
        for kind in parsed.others:
            self._once(f"{path}: objects of kind {kind} are not read here and have no effect", kind)
        if not parsed.faults:
            self._good[path] = parsed.objectives
        return parsed.faults

    def _priorities(self, faults: list[str]) -> dict[str, int]:
        found: dict[str, Objective] = {}
        for objective in (objective for path in sorted(self._good) for objective in self._good[path]):
            if self._pool and objective.pool and objective.pool != self._pool:
                name, pool = objective.name, objective.pool
                text = f"{OBJECTIVE} '{name}' is for pool '{pool}', this is '{self._pool}': it is left out"
                self._once(f"{objective.place}: {text}", text)
                continue
            other = found.get(objective.name)
            if other is not None and other.group == objective.group:
                faults.append(
                    f"{objective.place}: {OBJECTIVE} '{objective.name}' is given twice; first in {other.place}"
                )
            elif other is None or objective.group < other.group:
                found[objective.name] = objective
        if len(found) > OBJECTS_MAX:
            faults.append(f"{self.path}: more than {OBJECTS_MAX} objectives; those beyond are left out")
        kept = sorted(found.items())[:OBJECTS_MAX]
        return {name: objective.priority for name, objective in kept}

    def _once(self, text: str, key: str) -> None:
        if key not in self._named and len(self._named) < OBJECTS_MAX:
            self._named.add(key)
            self._report(text)

    def _tell(self, faults: list[str], what_follows: str) -> None:
        new = [fault for fault in faults if fault not in self._told]
        for fault in new[:FAULTS_TOLD_MAX]:
            self._report(f"{fault}; {what_follows}")
        if len(new) > FAULTS_TOLD_MAX:
            self._report(f"{self.path}: and {len(new) - FAULTS_TOLD_MAX} more faults")
        self._told = frozenset(faults)
