"""Kubernetes objects from a directory: InferenceObjectives and InferenceModelRewrites as YAML or JSON files, one or more documents each.

    files ─ parse_objects ─▶ objects ─ Folder ─▶ Found        watched by the supervisor

- Read are files `*.yaml`, `*.yml` and `*.json` of the directory itself; names with a dot in front are left out (Kubernetes keeps
  its own files there in mounted directories). A list (`kind: List`, or one of these objects) counts as its items.
- What objects say, and which of them count, is the same as for those of an API server (`object_kinds`). An object that is given
  twice in one group is a fault. The namespace is not looked at: the directory is that of one pool.
- At start a bad file is refused, all faults at once, each with file and line. Later a bad file keeps the objects that were last
  good in it, and each fault is reported when it is new.
- Objects of other kinds are named once per kind.

What this does not do: watch, or know who asks for an objective or a model.
"""

import os
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.object_kinds import KINDS, Found, Object, Once, PoolName, by_name, child, read, text
from workers.yaml_files import DiscoveryError, Fault, Node, documents, read_file

SUFFIXES: Final = (".yaml", ".yml", ".json")
FILES_MAX: Final = 1000
DEPTH_MAX: Final = 1  # of lists in lists
FAULTS_TOLD_MAX: Final = 20
ANY_POOL: Final = PoolName()


class Parsed(NamedTuple):
    """The good objects of a file, what is wrong with it, and kinds that nobody here reads."""

    objects: list[Object]
    faults: list[str]
    others: list[str]


def parse_objects(data: bytes, path: str) -> Parsed:
    """The objects of one file. A file that is no YAML has one fault and no object."""
    parsed = Parsed([], [], [])
    try:
        for document in documents(data, path):
            _take(document, path, parsed, 0)
    except DiscoveryError as wrong:
        return Parsed([], wrong.faults, [])
    return parsed


def _take(node: Node, path: str, parsed: Parsed, depth: int) -> None:
    """One object, or the items of a list, into `parsed`."""
    if node.is_null:
        return
    try:
        if not isinstance(node.value, dict):
            raise Fault(node.line, "an object is a mapping with apiVersion, kind, metadata and spec")
        kind, version = text(node, "kind"), text(node, "apiVersion")
        items = child(node, "items")
        if kind.endswith("List") and items is not None and isinstance(items.value, list) and depth < DEPTH_MAX:
            for item in items.value:
                _take(item, path, parsed, depth + 1)
        elif kind not in KINDS:
            parsed.others.append(f"{kind or 'no kind'} of {version or 'no apiVersion'}")
        else:
            parsed.objects.append(read(node, kind, version, f"{path}:{node.line}"))
    except Fault as fault:
        parsed.faults.append(f"{path}:{fault.line}: {fault}")


class Folder:
    """A directory over time. `load` is strict, for the start; `reload` keeps what is good."""

    def __init__(self, path: str, report: Callable[[str], None], *, pool: PoolName = ANY_POOL) -> None:
        self.path = path
        self._report = report
        self._pool = pool
        self._texts: dict[str, bytes] = {}
        self._good: dict[str, list[Object]] = {}
        self._told: frozenset[str] = frozenset()
        self._once = Once(report)

    def load(self) -> Found:
        """What all files say; DiscoveryError names every fault."""
        faults: list[str] = []
        for path in self._paths():
            faults += self._read(path)
        found = self._found(faults)
        if faults:
            raise DiscoveryError(faults)
        return found

    def reload(self) -> Found | None:
        """The same of what is good; None when nothing can be told of the directory as a whole."""
        try:
            paths = self._paths()
        except DiscoveryError as failure:
            self._tell(failure.faults, "the last good objects stay")
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
        found = self._found(twice)
        self._tell([*faults, *twice], "what was last good there stays")
        return found

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
        data = read_file(path)
        if data == self._texts.get(path) and path in self._good:
            return []
        self._texts[path] = data
        parsed = parse_objects(data, path)
        for kind in parsed.others:
            self._once(f"{path}: objects of kind {kind} are not read here and have no effect", kind)
        if not parsed.faults:
            self._good[path] = parsed.objects
        return parsed.faults

    def _found(self, faults: list[str]) -> Found:
        objects = (each for path in sorted(self._good) for each in self._good[path])
        return by_name(objects, self._pool, once=self._once, faults=faults)

    def _tell(self, faults: list[str], what_follows: str) -> None:
        new = [fault for fault in faults if fault not in self._told]
        for fault in new[:FAULTS_TOLD_MAX]:
            self._report(f"{fault}; {what_follows}")
        if len(new) > FAULTS_TOLD_MAX:
            self._report(f"{self.path}: and {len(new) - FAULTS_TOLD_MAX} more faults")
        self._told = frozenset(faults)
