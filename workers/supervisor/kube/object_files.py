"""Reads InferenceObjectives and InferenceModelRewrites from a directory of YAML and JSON files, each with one or more documents.

    files ─ parse_objects ─▶ objects ─ Folder ─▶ Found        watched by the supervisor

- Reads the files `*.yaml`, `*.yml` and `*.json` of the directory, not of its subdirectories. Names that begin with a dot are skipped:
  Kubernetes keeps its own files there in mounted directories. A list (`kind: List`, or a list of these kinds) is replaced by its items.
- Objects have the same meaning as those of an API server (`object_kinds`). An object that is given twice in one API group is a fault. The
  namespace is ignored, because the directory is for this picker alone.
- A picker of several pools gets the objects of each pool.
- At start, a bad file is refused with all faults at once, each with file and line. Later, the last good objects of a bad file stay, and
  each new fault is reported.
- Objects of other kinds are reported once per kind.

This module does not watch the directory, and does not apply objectives and rewrites to requests.
"""

import os
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from workers.host.yaml_files import DiscoveryError, Fault, Node, documents, log_fields, read_file
from workers.process.loading import names_in
from workers.supervisor.kube.object_kinds import KINDS, Found, Object, Once, PoolName, Remark, by_name, by_pool, child, read, text

SUFFIXES: Final = (".yaml", ".yml", ".json")
FILES_MAX: Final = 1000
DEPTH_MAX: Final = 1  # how many levels of lists (`kind: List`) are read
FAULTS_REPORTED_MAX: Final = 20
ANY_POOL: Final = PoolName()


class ParsedObjects(NamedTuple):
    """The good objects of a file, the texts of its faults, and the kinds of objects that the picker does not use."""

    objects: list[Object]
    faults: list[str]
    other_kinds: list[str]


def parse_objects(data: bytes, path: str) -> ParsedObjects:
    """Parses one file. `path`: its name in faults. A file that is not YAML has one fault and no object. Raises nothing."""
    parsed = ParsedObjects([], [], [])
    try:
        for document in documents(data, path):
            _take(document, path, parsed, 0)
    except DiscoveryError as wrong:
        return ParsedObjects([], wrong.faults, [])
    return parsed


def _take(node: Node, path: str, parsed: ParsedObjects, depth: int) -> None:
    """Adds one object, or the items of a list, to `parsed`."""
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
            parsed.other_kinds.append(f"{kind or 'no kind'} of {version or 'no apiVersion'}")
        else:
            parsed.objects.append(read(node, kind, version, f"{path}:{node.line}"))
    except Fault as fault:
        parsed.faults.append(f"{path}:{fault.line}: {fault}")


class Folder:
    """Reads the directory. `load` is for the start and raises every fault; `reload` keeps the last good objects of a bad file.

    Both return the objects of each pool. `reload` may run in a thread while another calls `split`.
    """

    def __init__(
        self, path: str, report: Callable[..., None], pools: Sequence[PoolName] | None = None, *, only: PoolName = ANY_POOL
    ) -> None:
        """`pools`: the names of several pools. `only`: the name of the only pool, if `pools` is None."""
        self.path = path
        self.pools = pools
        self._only = only
        self._report = report
        self._objects: Sequence[Object] = ()  # the good objects of the last reading
        self._texts: dict[str, bytes] = {}
        self._good: dict[str, list[Object]] = {}
        self._reported: frozenset[str] = frozenset()
        self._once = Once(report)

    def load(self) -> Sequence[Found]:
        """Returns the objects of all files. Raises DiscoveryError with every fault."""
        faults: list[str] = []
        for path in self._paths():
            faults += self._read(path)
        found = self._found(faults)
        if faults:
            raise DiscoveryError(faults)
        return found

    def reload(self) -> Sequence[Found] | None:
        """Returns the good objects, or None if the directory cannot be read. Reports new faults."""
        try:
            paths = self._paths()
        except DiscoveryError as failure:
            self._report_new(failure.faults, "the last good objects stay")
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
        self._report_new([*faults, *twice], "the last good objects of this file stay")
        return found

    def split(self, pools: Sequence[PoolName]) -> Sequence[Found]:
        """Switches to other pools, and returns their objects from the last reading of the directory."""
        self.pools = pools
        return self._by_pool([])

    def _paths(self) -> list[str]:
        try:
            names = names_in(self.path, SUFFIXES)
        except OSError as failure:
            raise DiscoveryError([f"{self.path}: cannot be read: {failure.strerror}"]) from failure
        if len(names) > FILES_MAX:
            raise DiscoveryError([f"{self.path}: more than {FILES_MAX} files; put several objects into one file"])
        return [os.path.join(self.path, name) for name in names]

    def _read(self, path: str) -> list[str]:
        """Reads a file, and parses it unless it is good and unchanged. Returns its faults. Raises DiscoveryError."""
        data = read_file(path)
        if data == self._texts.get(path) and path in self._good:
            return []
        if not data.strip() and self._good.get(path):
            return [f"{path}: is empty now, as after a write that was cut off; remove the file to remove its objects"]
        self._texts[path] = data
        parsed = parse_objects(data, path)
        for kind in parsed.other_kinds:
            self._once(Remark(path, f"objects of kind {kind} are not read here and have no effect"))
        if not parsed.faults:
            self._good[path] = parsed.objects
        return parsed.faults

    def _found(self, faults: list[str]) -> Sequence[Found]:
        self._objects = [each for path in sorted(self._good) for each in self._good[path]]
        return self._by_pool(faults)

    def _by_pool(self, faults: list[str]) -> Sequence[Found]:
        """Returns the objects of each pool. Adds conflicts between objects to `faults`."""
        twice: list[Remark] = []
        if self.pools is None:
            found = [by_name(self._objects, self._only, once=self._once, faults=twice)]
        else:
            found = by_pool(self._objects, self.pools, once=self._once, faults=twice)
        faults += dict.fromkeys(map(str, twice))  # pools share objects, and so their faults
        return found

    def _report_new(self, faults: list[str], consequence: str) -> None:
        new = [fault for fault in faults if fault not in self._reported]
        for fault in new[:FAULTS_REPORTED_MAX]:
            self._report("fault in an objects file", **log_fields(f"{fault}; {consequence}", self.path))
        if len(new) > FAULTS_REPORTED_MAX:
            self._report("more faults in objects files", directory=self.path, count=len(new) - FAULTS_REPORTED_MAX)
        self._reported = frozenset(faults)
