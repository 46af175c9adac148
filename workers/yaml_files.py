"""YAML or JSON files as nodes that know their lines, for what people write and get told about with file and line.

Built from events: PyYAML's own composer recurses in C without limit. Aliases are refused, and so is what is nested too deep.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import yaml

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 16
FAULTS_SHOWN_MAX = 20


class DiscoveryError(Exception):
    """What is wrong with a file or flag, one fault per line."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = list(faults)
        more = len(self.faults) - FAULTS_SHOWN_MAX
        shown = [*self.faults[:FAULTS_SHOWN_MAX], *([f"and {more} more"] if more > 0 else [])]
        super().__init__("\n".join(shown))


class Fault(Exception):
    """Something is wrong in this line."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


class Node(NamedTuple):
    """A piece of the document: text, list or dict, and the line it starts on."""

    line: int
    value: Any
    is_null: bool = False


def read_file(path: str) -> bytes:
    """The file's bytes; DiscoveryError when it cannot be read or is too large."""
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
    """A pipe that nobody writes to would hold up whoever opens it."""
    return os.open(path, flags | os.O_NONBLOCK)


def documents(data: bytes, path: str) -> list[Node]:
    """All documents of a file; DiscoveryError when it cannot be read to its end."""
    try:
        text = data.decode("utf-8-sig")
        if text.lstrip().startswith("{"):
            text = text.replace("\t", " ")  # JSON may indent by tabs, YAML may not
        events = yaml.parse(text, Loader=yaml.CSafeLoader)
        return [build(next(events), events, 0) for event in events if isinstance(event, yaml.DocumentStartEvent)]
    except UnicodeDecodeError as wrong:
        raise DiscoveryError([f"{path}: not UTF-8 at byte {wrong.start}"]) from None
    except yaml.MarkedYAMLError as wrong:
        line = wrong.problem_mark.line + 1 if wrong.problem_mark else 1
        raise DiscoveryError([f"{path}:{line}: neither YAML nor JSON: {wrong.problem}"]) from None
    except yaml.YAMLError as wrong:
        raise DiscoveryError([f"{path}: neither YAML nor JSON: {wrong}"]) from None
    except Fault as fault:
        raise DiscoveryError([f"{path}:{fault.line}: {fault}"]) from None


def build(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Node:
    """The node that begins with this event. Raises `Fault`."""
    line = event.start_mark.line + 1 if event.start_mark else 0
    if isinstance(event, yaml.AliasEvent):
        raise Fault(line, f"alias *{event.anchor}: aliases are not supported; write it out")
    if depth > DEPTH_MAX:
        raise Fault(line, f"nested deeper than {DEPTH_MAX}")
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(build(event, events, depth + 1))
        return Node(line, items)
    if isinstance(event, yaml.MappingStartEvent):
        pairs: dict[str, Node] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := next(events), yaml.MappingEndEvent):
            key = build(event, events, depth + 1)
            value = build(next(events), events, depth + 1)
            if isinstance(key.value, str):
                if key.value in pairs:
                    raise Fault(key.line, f"'{key.value}' is given twice; first in line {lines[key.value]}")
                pairs[key.value], lines[key.value] = value, key.line
        return Node(line, pairs)
    assert isinstance(event, yaml.ScalarEvent)
    return Node(line, event.value, event.implicit[0] and event.value in ("", "~", "null"))
