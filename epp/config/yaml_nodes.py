"""Parses YAML or JSON text into a tree of `Node`s with their places; the only module of epp that uses PyYAML.

Scalars mean what they mean to the reference picker (go-yaml v2, then JSON): `1e8` and `010` are
numbers, `yes`, `on` and `y` are booleans, dates are text, infinities and NaN do not exist. A number
without a fraction is an integer in any notation, because Helm templates turn 1000000 into 1e+06.
Keys are text as written. Anchors, aliases and merge keys work. An alias has the value of its anchor.

Limits: TEXT_MAX characters, DEPTH_MAX levels, NODES_MAX nodes after aliases are expanded, one
document (a last `---` with nothing after it starts no second document). Duplicate keys are refused
at every level. This module knows no field of the configuration.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from epp.config.findings import Findings, Place

TEXT_MAX = 1 << 20
DEPTH_MAX = 64
NODES_MAX = 100_000

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Node] | dict[str, Node]"

_TAG = "tag:yaml.org,2002:"
_PLAIN = "plain"  # our own tag for a scalar that is neither quoted nor tagged
_TYPES = {"bool": bool, "int": int, "float": float, "null": type(None)}
_TRUE = ("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON")
_FALSE = ("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF")
_NULL = ("", "~", "null", "Null", "NULL")
_INT = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F_]+|0[bB][01_]+|0[oO][0-7_]+|0[0-7_]*|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(?:\._*[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INT_DIGITS_MAX = 80


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader without its rules for plain scalars; `_resolved` has our rules. The key None is PyYAML's wildcard."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        "<": [(_TAG + "merge", re.compile("<<$"))],
        None: [(_TAG + _PLAIN, re.compile(""))],
    }


@dataclass(slots=True, eq=False)
class Node:
    """Holds a value with its place. `keys` has the places of a mapping's keys."""

    place: Place
    value: "Value"
    keys: Mapping[str, Place] = field(default_factory=dict)

    def plain(self) -> Any:
        """Returns the value as plain Python types."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def kind(self) -> str:
        """Describes the value for a message."""
        value = self.value
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list):
            return "a list"
        if isinstance(value, bool):
            return f"the boolean {str(value).lower()}"
        if isinstance(value, (int, float)):
            return f"the number {value}"
        return "nothing" if value is None else f"the text '{value[:40]}'"


def read(text: str, findings: Findings) -> Node | None:
    """Returns the root of the document. Returns None if the text is empty, or if it is not readable and an error was noted."""
    if len(text) > TEXT_MAX:
        findings.error(Place(1, 1), "too-large", f"the text has more than {TEXT_MAX} characters")
        return None
    try:
        if not _within_limits(text, findings):
            return None
        # Composing one document is enough, because `_within_limits` has checked that no second document follows.
        root = next(yaml.compose_all(text, _Loader), None)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        findings.error(place, "yaml-syntax", error.problem or error.context or "this is not YAML")
        return None
    except (yaml.YAMLError, UnicodeError) as error:
        findings.error(Place(1, 1), "yaml-syntax", str(error).replace("\n", " "))
        return None
    return None if root is None else _Converter(findings).root(root)


def _within_limits(text: str, findings: Findings) -> bool:
    """Checks, before recursive code sees the text, that it has one document and is not nested too deeply."""
    depth = documents = 0
    for count, event in enumerate(yaml.parse(text, _Loader)):
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            began = event
        elif documents > 1 and isinstance(event, yaml.NodeEvent) and not _is_empty(event):
            hint = "remove this '---' and everything after it"
            findings.error(_place(began), "one-document", "a configuration must be a single YAML document", hint)
            return False
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEPTH_MAX or count > 3 * NODES_MAX:
            findings.error(_place(event), "too-large", _TOO_LARGE)
            return False
    return True


def _is_empty(event: yaml.NodeEvent) -> bool:
    """Returns whether this event is the one that the parser emits for a document without a value."""
    return isinstance(event, yaml.ScalarEvent) and not event.value and not event.style and event.tag is None


_TOO_LARGE = f"the text has more than {DEPTH_MAX} levels or {NODES_MAX} values; an alias counts as the values that it stands for"


def _place(marked: Any) -> Place:
    return Place(marked.start_mark.line + 1, marked.start_mark.column + 1)


class _TooLarge(Exception):
    """Stops a conversion that would make too many nodes."""


class _Converter:
    """Converts PyYAML's nodes to ours. Counts the nodes that it makes, because nested aliases could multiply without end."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.count = 0

    def root(self, node: Any) -> Node | None:
        try:
            return self.node(node, 0)
        except _TooLarge:
            self.findings.error(_place(node), "too-large", _TOO_LARGE)
            return None

    def node(self, node: Any, depth: int) -> Node:
        self.count += 1
        if self.count > NODES_MAX or depth > DEPTH_MAX:
            raise _TooLarge
        if isinstance(node, yaml.ScalarNode):
            return Node(_place(node), self.scalar(node))
        tag = node.tag.removeprefix(_TAG)
        if tag != ("map" if isinstance(node, yaml.MappingNode) else "seq"):
            self.findings.error(_place(node), "yaml-tag", f"the tag '{node.tag}' is not supported", "remove it")
        if isinstance(node, yaml.SequenceNode):
            return Node(_place(node), [self.node(child, depth + 1) for child in node.value])
        return self.mapping(node, depth)

    def mapping(self, node: Any, depth: int) -> Node:
        value: dict[str, Node] = {}
        keys: dict[str, Place] = {}
        merges: list[Any] = []
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.findings.error(_place(key), "yaml-key", "a key must be a single word or text")
            elif key.tag == _TAG + "merge":
                merges.append(child)
            elif key.value in value:
                first = keys[key.value].line
                self.findings.error(_place(key), "duplicate-key", f"'{key.value}' is given twice; first in line {first}")
            else:
                value[key.value] = self.node(child, depth + 1)
                keys[key.value] = _place(key)
        for source in self.merged(merges, depth):
            for name, child in source.value.items() if isinstance(source.value, dict) else ():
                if value.setdefault(name, child) is child:
                    keys.setdefault(name, source.keys[name])
        return Node(_place(node), value, keys)

    def merged(self, merges: list[Any], depth: int) -> Iterator[Node]:
        """Yields the mappings that `<<` names, in order. If several have the same key, the first one wins."""
        for merge in merges:
            sources = merge.value if isinstance(merge, yaml.SequenceNode) else [merge]
            for source in sources:
                if isinstance(source, yaml.MappingNode):
                    yield self.node(source, depth + 1)
                else:
                    self.findings.error(_place(source), "yaml-merge", "'<<' takes a mapping or a list of mappings")

    def scalar(self, node: Any) -> Scalar:
        tag = node.tag.removeprefix(_TAG)
        text: str = node.value
        if tag in ("str", "merge"):
            return text
        if tag != _PLAIN and tag not in _TYPES:
            self.findings.error(_place(node), "yaml-tag", f"the tag '{node.tag}' is not supported", "remove it")
            return text
        value = _resolved(text)
        if isinstance(value, float) and not math.isfinite(value):
            self.findings.error(_place(node), "yaml-number", f"'{text[:40]}' is not a finite number")
            return 0.0
        if tag == "float" and type(value) is int:
            return float(value)
        if tag != _PLAIN and type(value) is not _TYPES[tag]:
            self.findings.error(_place(node), "yaml-tag", f"'{text[:40]}' does not fit its tag !!{tag}")
        return value


def _resolved(text: str) -> Scalar:
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text) and len(text) <= _INT_DIGITS_MAX and (number := _integer(text)) is not None:
        return number
    if _FLOAT.fullmatch(text):
        real = float(text.replace("_", ""))
        return int(real) if real.is_integer() and _fits(int(real)) else real
    if _NO_NUMBER.fullmatch(text):
        return math.inf
    return text


def _integer(text: str) -> int | None:
    """Parses an integer as Go does: a leading 0 means octal. Returns None if it is no integer or does not fit 64 bits."""
    digits = text.replace("_", "")
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    if not digits:
        return None
    if len(digits) > 1 and digits[0] == "0" and digits[1] in "01234567":
        digits = "0o" + digits[1:]
    try:
        number = sign * int(digits, 0)
    except ValueError:
        return None
    return number if _fits(number) else None


def _fits(number: int) -> bool:
    """Returns whether a 64-bit integer type of Go can hold the number."""
    return -(2**63) <= number < 2**64


class _Dumper(yaml.SafeDumper):
    """Quotes text that PyYAML or `_resolved` would read as another type. Never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """Escapes all characters that are not ASCII. Only text that could control a terminal, or that a terminal would hide, is written so
        (see `_text`).
        """
        self.allow_unicode = False
        super().write_double_quoted(text, split)
        self.allow_unicode = True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if not text.isprintable():  # only double-quoted text has escapes; the other styles fold line breaks
        style = '"'
    elif not isinstance(_resolved(text), str):
        style = "'"
    return dumper.represent_scalar(_TAG + "str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Any) -> str:
    """Writes plain values as YAML. `read` returns the same values again."""
    text: str = yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def dump_flow(value: Any) -> str:
    """Writes plain values as YAML in one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf, default_flow_style=True)
    return text.removesuffix("\n").removesuffix("...").rstrip("\n")


def composed(text: str) -> Any:
    """Returns PyYAML's nodes of a text that `read` accepts. They say where values end, which `epp.config.edit` needs and a `Node` does not.

    Returns None if the text is empty or has anchors, because with an anchor one place of the text stands for several values.
    """
    if any(getattr(event, "anchor", None) for event in yaml.parse(text, _Loader)):
        return None
    return next(yaml.compose_all(text, _Loader), None)


def plain_node(node: Any) -> Any:
    """Returns the value of a PyYAML node (`composed`) as plain Python types."""
    return _Converter(Findings("")).node(node, 0).plain()


def plain(text: str) -> Any:
    """Returns the value of a YAML text as plain Python types; None if the text is empty or not readable."""
    root = read(text, Findings(""))
    return None if root is None else root.plain()
