"""Decodes a plugin's `parameters` into its `Params` struct and notes every error at its line.

msgspec stops at its first error. So the code removes the value that the error names and decodes the rest again, at most TRIES_MAX times. If
a field does not accept null, a null there is removed without an error: null means the default, as in the reference picker. This module
knows no plugin.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from epp.config.findings import Findings, Place, nearest
from epp.config.yaml_nodes import Node

TRIES_MAX = 64
NO_HINTS: Mapping[str, str] = {}

_PATH = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.([^.\[]+)")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]*)`(?P<rest>.*?)(?:, got `(?P<got>[^`]*)`)?", re.DOTALL)
_WORDS = {
    "str": "text",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}

Step = str | int


def decode(
    cls: type[msgspec.Struct], node: Node | None, owner: str, place: Place, findings: Findings, hints: Mapping[str, str] = NO_HINTS
) -> msgspec.Struct | None:
    """Returns the parameters as an instance of `cls`. Notes errors and returns None if there are any. `owner`: the plugin in messages.

    `hints`: unknown field -> what to do instead, for fields that have moved elsewhere.
    """
    root = node if node is not None and node.value is not None else Node(place, {})
    if not isinstance(root.value, dict):
        findings.error(root.place, "wrong-type", f"parameters of {owner}: expected a mapping, got {root.kind()}")
        return None
    attempt = _Attempt(cls, _copy(root), owner, findings, hints)
    for _ in range(TRIES_MAX):
        try:
            params = msgspec.convert(attempt.root.plain(), cls)
        except msgspec.ValidationError as error:
            if not attempt.remove_cause(str(error)):
                return None
        else:
            return None if attempt.failed else params
    return None


def _copy(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node(node.place, {key: _copy(child) for key, child in node.value.items()}, node.keys)
    if isinstance(node.value, list):
        return Node(node.place, [_copy(child) for child in node.value])
    return node


@dataclass(slots=True)
class _Attempt:
    """Holds the parameters that are still to be decoded. A field in `removed` has an error already, so it is not reported as missing."""

    cls: Any
    root: Node
    owner: str
    findings: Findings
    hints: Mapping[str, str]
    failed: bool = False
    removed: set[tuple[int, str]] = field(default_factory=set)

    def remove_cause(self, error: str) -> bool:
        """Notes one error of msgspec and removes the value that causes it. Returns whether it was removed, so that a new try helps."""
        match = _PATH.fullmatch(error)
        assert match is not None
        nodes, steps = self._follow(match["path"] or "", error)
        node, what = nodes[-1], match["what"]
        if unknown := _UNKNOWN.fullmatch(what):
            self._unknown(nodes, steps, unknown[1])
            return self._remove(node, unknown[1])
        if (missing := _MISSING.fullmatch(what)) and (id(node), missing[1]) not in self.removed:
            self._note(nodes, steps, "missing-field", f"'{missing[1]}' is required")
        elif not missing and not (node.value is None and steps):
            self._note(nodes, steps, "bad-parameter", *_in_words(what, node, _type_at(self.cls, steps)))
        return bool(steps) and self._remove(nodes[-2], steps[-1])

    def _note(self, nodes: list[Node], steps: list[Step], rule: str, message: str, hint: str = "") -> None:
        self.failed = True
        place = nodes[-1].place
        if steps and isinstance(steps[-1], str):
            place = nodes[-2].keys.get(steps[-1], place)
        self.findings.error(place, rule, f"{_dotted(steps)} of {self.owner}: {message}", hint)

    def _unknown(self, nodes: list[Node], steps: list[Step], name: str) -> None:
        self.failed = True
        place = nodes[-1].keys.get(name, nodes[-1].place)
        known = [each.encode_name for each in getattr(_type_at(self.cls, steps), "fields", ())]
        message = f"{_dotted(steps)} of {self.owner}: unknown field '{name}'"
        moved = self.hints.get(name, "") if not steps else ""
        hint = f"{moved}; epp config check --migrate moves it" if moved else nearest(name, known) or "it takes no parameters"
        self.findings.error(place, "unknown-field", message, hint)

    def _remove(self, parent: Node, step: Step) -> bool:
        if isinstance(parent.value, dict) and isinstance(step, str):
            child = parent.value.pop(step, None)
            if child is not None and child.value is not None:
                self.removed.add((id(parent), step))
            return child is not None
        assert isinstance(parent.value, list)
        assert isinstance(step, int)
        del parent.value[step]
        return True

    def _follow(self, path: str, error: str) -> tuple[list[Node], list[Step]]:
        """Follows a path such as `.a[0].b`. Returns the nodes from the root on, and the steps between the nodes.

        msgspec writes `[...]` for the key of a mapping.
        """
        nodes, steps = [self.root], list[Step]()
        for match in _STEP.finditer(path):
            value = nodes[-1].value
            if isinstance(value, list) and match[1]:
                nodes.append(value[int(match[1])])
                steps.append(int(match[1]))
            elif isinstance(value, dict) and (key := match[2] or self._culprit(nodes[-1], error)) in value:
                nodes.append(value[key])
                steps.append(key)
            else:
                break
        return nodes, steps

    def _culprit(self, mapping: Node, error: str) -> str:
        """Finds the key whose value causes this error, by decoding each entry alone. Returns '' if no single entry causes the error."""
        assert isinstance(mapping.value, dict)
        entries = mapping.value
        try:
            for key, child in entries.items():
                mapping.value = {key: child}
                try:
                    msgspec.convert(self.root.plain(), self.cls)
                except msgspec.ValidationError as again:
                    if str(again) == error:
                        return key
        finally:
            mapping.value = entries
        return ""


def _dotted(steps: list[Step]) -> str:
    return "parameters" + "".join(f".{step}" if isinstance(step, str) else "[]" for step in steps)


def _in_words(what: str, node: Node, kind: Any) -> tuple[str, str]:
    """Puts msgspec's message into YAML's terms. Returns the message with a hint."""
    match = _EXPECTED.fullmatch(what)
    if match is None:
        values = getattr(kind, "values", ())
        return what[:1].lower() + what[1:].replace("`", "'"), nearest(str(node.value), map(str, values))
    types = [_WORDS.get(name, name) for name in match["types"].split(" | ") if name != "null"]
    scalar = isinstance(node.value, (int, float, bool))
    hint = "put it in quotes" if types == ["text"] and scalar else ""
    return f"expected {' or '.join(types)}{match['rest'].replace('`', '')}, got {node.kind()}", hint


def _type_at(cls: Any, steps: list[Step]) -> Any:
    """Returns the declared type at a path, as `msgspec.inspect` describes it."""
    kind: Any = msgspec.inspect.type_info(cls)
    for step in steps:
        kind = _bare(_child(kind, step))
    return kind


def _bare(kind: Any) -> Any:
    """Returns the struct or container inside an annotated or optional type."""
    while isinstance(kind, msgspec.inspect.Metadata):
        kind = kind.type
    if isinstance(kind, msgspec.inspect.UnionType):
        some = (t for t in kind.types if not isinstance(t, msgspec.inspect.NoneType))
        return next(some, kind)
    return kind


def _child(kind: Any, step: Step) -> Any:
    if isinstance(kind, msgspec.inspect.StructType):
        return next((f.type for f in kind.fields if f.encode_name == step), None)
    return getattr(kind, "value_type", None) or getattr(kind, "item_type", None)
