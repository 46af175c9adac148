"""Reads YAML or JSON files into nodes with line numbers, so that error messages can name file and line.

Endpoints files and objects files are read here. Anchors, aliases and merge keys work as in the configuration, which
`epp.config.yaml_nodes` reads into typed values. The nodes are built from parser events, because PyYAML's composer recurses in C without
limit.

Limits: FILE_BYTES_MAX per file, DEPTH_MAX levels, and EXPANDED_MAX values that the aliases of a document stand for, because nested
aliases multiply.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 16
EXPANDED_MAX = 100_000
MERGE = "<<"
FAULTS_SHOWN_MAX = 20
TEXT_CHARS_MAX = 80

_AFTER_PATH = re.compile(r"(?P<name>.*?)(?::(?P<line>\d+))?: (?P<reason>.*)", re.DOTALL)


class DiscoveryError(Exception):
    """The faults of a file or a flag, one per line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = list(faults)
        more = len(self.faults) - FAULTS_SHOWN_MAX
        shown = [*self.faults[:FAULTS_SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n".join(shown))


class Fault(Exception):
    """A fault in one line of a file. `line` counts from 1; 0 means that the line is unknown."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


def brief(text: str) -> str:
    """Shortens a text from a file, so that a report can repeat it."""
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}… ({len(text)} characters)"


def log_fields(fault: str, path: str) -> dict[str, Any]:
    """Splits a fault of the form `path:line: reason` into log fields: file, line if known, reason. `path`: the file or its directory."""
    found = _AFTER_PATH.fullmatch(fault, len(path)) if fault.startswith(path) else None
    if found is None:
        return {"file": path, "reason": fault}
    line = {"line": int(found["line"])} if int(found["line"] or 0) else {}
    return {"file": path + found["name"], **line, "reason": found["reason"]}


class Node(NamedTuple):
    """A part of a document: a text, list or dict, and the line where it starts."""

    line: int
    value: Any
    is_null: bool = False


def read_file(path: str) -> bytes:
    """Returns the contents of a file. Raises DiscoveryError if it cannot be read, is too large, or is not a regular file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DiscoveryError([f"{path}: is a pipe or a device; it is read again and again, so give a file"])
            text = file.read(FILE_BYTES_MAX + 1)
    except OSError as failure:
        raise DiscoveryError([f"{path}: cannot be read: {failure.strerror}"]) from failure
    if len(text) > FILE_BYTES_MAX:
        raise DiscoveryError([f"{path}: larger than {FILE_BYTES_MAX} bytes; split the pool"])
    return text


def _without_waiting(path: str, flags: int) -> int:
    """Opens a file without blocking. Otherwise the open of a pipe without a writer would never return."""
    return os.open(path, flags | os.O_NONBLOCK)


def documents(data: bytes, path: str) -> list[Node]:
    """Returns all documents of a file. Raises DiscoveryError for the first fault."""
    try:
        text = data.decode("utf-8-sig")
        if text.lstrip().startswith("{"):
            text = text.replace("\t", " ")  # JSON allows tabs for indentation, YAML does not
        events = yaml.parse(text, Loader=yaml.CSafeLoader)
        starts = (event for event in events if isinstance(event, yaml.DocumentStartEvent))
        return [_Builder(events).build(next(events), 0).node for _ in starts]
    except UnicodeDecodeError as wrong:
        raise DiscoveryError([f"{path}: not UTF-8 at byte {wrong.start}"]) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise DiscoveryError([f"{path}:{line}: neither YAML nor JSON: {wrong.problem}"]) from None
    except yaml.YAMLError as wrong:
        raise DiscoveryError([f"{path}: neither YAML nor JSON: {wrong}"]) from None
    except Fault as fault:
        raise DiscoveryError([f"{path}:{fault.line}: {fault}"]) from None


class _Built(NamedTuple):
    """A node, the number of values in it, and how many levels it has below itself."""

    node: Node
    size: int
    levels: int


class _Builder:
    """Builds the nodes of one document. An alias shares the node of its anchor, but the values in that node are counted again."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self._events = events
        self._anchors: dict[str, _Built] = {}
        self._expanded = 0  # values for which the aliases so far stand

    def build(self, event: yaml.Event, depth: int) -> _Built:
        """Builds the node that starts with this event. `depth`: its level in the document, 0 at the top. Raises Fault."""
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event.anchor or "", line, depth)
        if depth > DEPTH_MAX:
            raise Fault(line, f"nested deeper than {DEPTH_MAX}")
        if isinstance(event, yaml.SequenceStartEvent):
            built = self._sequence(line, depth)
        elif isinstance(event, yaml.MappingStartEvent):
            built = self._mapping(line, depth)
        else:
            assert isinstance(event, yaml.ScalarEvent)
            is_null = event.implicit[0] and event.value in ("", "~", "null")
            built = _Built(Node(line, event.value, is_null), 1, 0)
        if event.anchor is not None:
            self._anchors[event.anchor] = built
        return built

    def _alias(self, anchor: str, line: int, depth: int) -> _Built:
        built = self._anchors.get(anchor)
        if built is None:
            raise Fault(line, f"alias *{anchor}: no value before it has the anchor &{anchor}")
        self._expanded += built.size
        if self._expanded > EXPANDED_MAX:
            raise Fault(line, f"alias *{anchor}: aliases stand for more than {EXPANDED_MAX} values; write less of them")
        if depth + built.levels > DEPTH_MAX:
            raise Fault(line, f"nested deeper than {DEPTH_MAX}")
        return built._replace(node=built.node._replace(line=line))

    def _sequence(self, line: int, depth: int) -> _Built:
        items: list[Node] = []
        count, levels = 1, 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            item = self.build(event, depth + 1)
            items.append(item.node)
            count, levels = count + item.size, max(levels, item.levels + 1)
        return _Built(Node(line, items), count, levels)

    def _mapping(self, line: int, depth: int) -> _Built:
        pairs: dict[str, Node] = {}
        lines: dict[str, int] = {}
        merged: list[Node] = []
        count, levels = 1, 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            merges = isinstance(event, yaml.ScalarEvent) and event.value == MERGE and event.implicit[0]
            key = self.build(event, depth + 1).node
            value = self.build(next(self._events), depth + 1)
            count, levels = count + 1 + value.size, max(levels, value.levels + 1)
            if merges:
                merged.append(value.node)
            elif isinstance(key.value, str):
                if key.value in pairs:
                    raise Fault(key.line, f"'{brief(key.value)}' is given twice; first in line {lines[key.value]}")
                pairs[key.value], lines[key.value] = value.node, key.line
        for source in merged:
            _merge(pairs, source)
        return _Built(Node(line, pairs), count, levels)


def _merge(pairs: dict[str, Node], source: Node) -> None:
    """Adds the pairs of `source`, which the merge key `<<` names: a mapping, or a list of mappings.

    A key that the mapping has already keeps its value, and so earlier sources win. Raises Fault.
    """
    for mapping in source.value if isinstance(source.value, list) else (source,):
        if not isinstance(mapping.value, dict):
            raise Fault(mapping.line, "'<<' takes a mapping or a list of mappings")
        for key, value in mapping.value.items():
            pairs.setdefault(key, value)
