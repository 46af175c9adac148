"""Reads the values of YAML nodes by type: mappings, lists, texts, numbers, quantities, durations and references.

A null means that the field is not given. Unknown fields are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from epp.config import schema
from epp.config.findings import Findings, Place, nearest
from epp.config.schema import API_VERSION, API_VERSIONS_DEPRECATED, KIND, names
from epp.config.written import Amount, Ref
from epp.config.yaml_nodes import Node
from epp.quantities import parse_duration, parse_quantity


class NodeReader:
    """Reads the values of nodes by type. Notes an error for a wrong value and treats the value as not given."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.version = ""  # the apiVersion that the file names; empty if it names no apiVersion

    def moved(self, place: Place, old: str, new: str) -> None:
        """Notes that a field has moved: an error if the file has the current apiVersion, which lacks the `old` field; else a warning."""
        what = f"the field '{old}'"
        if self.version == API_VERSION:
            why = f"{what} is not part of {API_VERSION}"
            self.findings.error(place, "unknown-field", why, f"write '{new}'; epp config check --migrate does it")
        else:
            self.findings.deprecated(place, what, f"'{new}'")

    def mapping(self, node: Node | None, what: str, form: type[msgspec.Struct]) -> dict[str, Node]:
        """Returns the fields of a form that are given. Notes an error for each unknown field."""
        known = names(form)
        value = self._typed(node, what, dict, "a mapping")
        if node is None or value is None:
            return {}
        for name in value:
            if name not in known:
                self.findings.error(node.keys[name], "unknown-field", f"{what}: unknown field '{name[:128]}'", nearest(name, known))
        return {name: child for name, child in value.items() if name in known and child.value is not None}

    def entries(self, node: Node | None, what: str) -> dict[str, Node]:
        """Returns the entries of a mapping with any keys."""
        return self._typed(node, what, dict, "a mapping") or {}

    def sequence(self, node: Node | None, what: str) -> list[Node]:
        return self._typed(node, what, list, "a list") or []

    def text(self, node: Node | None, what: str) -> str:
        """Returns the text, or '' if it is not given."""
        return self._typed(node, what, str, "text") or ""

    def choice(self, fields: Mapping[str, Node], name: str, known: Sequence[str], what: str, rule: str) -> str:
        """Returns the value of a field, which must be one of `known`; by default the first of these. `what`: the path of the mapping."""
        value = self.text(fields.get(name), f"{what}.{name}") or known[0]
        if value not in known:
            self.findings.error(fields[name].place, rule, f"{what}.{name}: '{value[:128]}' is not known", nearest(value, known))
        return value

    def boolean(self, node: Node | None, what: str, default: bool) -> bool:
        value = self._typed(node, what, bool, "true or false")
        return default if value is None else bool(value)

    def number(self, node: Node | None, what: str, kinds: tuple[type, ...] = (int, float)) -> float | None:
        value = self._typed(node, what, kinds, "an integer" if float not in kinds else "a number")
        return None if value is None else float(value)

    def ref(self, node: Node | None, what: str, at: Place) -> Ref | None:
        """Reads a mapping with a `pluginRef`."""
        if node is None:
            return None
        fields = self.mapping(node, what, schema.PluginRef)
        return self.ref_in(fields, what, at) if isinstance(node.value, dict) else None

    def refs(self, node: Node | None, what: str) -> list[Ref]:
        refs = (self.ref(n, f"{what}[{i}]", n.place) for i, n in enumerate(self.sequence(node, what)))
        return [ref for ref in refs if ref is not None]

    def ref_in(self, fields: Mapping[str, Node], what: str, at: Place) -> Ref | None:
        name = self.text(fields.get("pluginRef"), f"{what}.pluginRef")
        if not name:
            if "pluginRef" not in fields or fields["pluginRef"].value == "":
                self.findings.error(at, "missing-field", f"{what}: 'pluginRef' is required")
            return None
        return Ref(name, fields["pluginRef"].place)

    def member(self, node: Node, what: str) -> Ref | None:
        """Reads a member of a profile: a reference with an optional weight."""
        fields = self.mapping(node, what, schema.ProfileMember)
        if not isinstance(node.value, dict):
            if node.value is None:
                self.findings.error(node.place, "missing-field", f"{what}: 'pluginRef' is required")
            return None
        weight = self.number(fields.get("weight"), f"{what}.weight")
        ref = self.ref_in(fields, what, node.place)
        if ref is None or weight is None:
            return ref
        return Ref(ref.name, ref.place, weight, fields["weight"].place)

    def quantity(self, node: Node | None, what: str) -> Amount | None:
        """Reads a Kubernetes quantity of 0 or more, as text or number."""
        value = self._typed(node, what, (str, int, float), "a quantity such as 500M or 1Gi")
        return self._parsed(node, what, "bad-quantity", parse_quantity, None if value is None else _digits(value))

    def duration(self, node: Node | None, what: str) -> Amount | None:
        """Reads a Go duration of 0 or more, in seconds."""
        value = self._typed(node, what, str, "a duration such as 200ms or 1m30s")
        return self._parsed(node, what, "bad-duration", parse_duration, value)

    def _parsed(self, node: Node | None, what: str, rule: str, parse: Callable[[str], float], text: str | None) -> Amount | None:
        if node is None or text is None:
            return None
        try:
            amount = parse(text)
        except ValueError as error:
            self.findings.error(node.place, rule, f"{what}: {error}")
            return None
        if amount < 0:
            self.findings.error(node.place, rule, f"{what}: '{text}' is negative; give 0 or more")
            return None
        return Amount(amount, node.place)

    def optional_ref(self, node: Node | None, what: str) -> Ref | None:
        """Reads a reference that is a plain name, without a mapping around it."""
        name = self.text(node, what)
        return Ref(name, node.place) if node is not None and name else None

    def _typed(self, node: Node | None, what: str, kind: Any, expected: str) -> Any:
        if node is None or node.value is None:
            return None
        wrong = isinstance(node.value, bool) and kind is not bool
        if wrong or not isinstance(node.value, kind):
            quote = "put it in quotes" if expected == "text" and not isinstance(node.value, (dict, list)) else ""
            self.findings.error(node.place, "wrong-type", f"{what}: expected {expected}, got {node.kind()}", quote)
            return None
        return node.value

    def header(self, fields: Mapping[str, Node]) -> None:
        """Checks `apiVersion` and `kind`. Both are optional."""
        version, kind = fields.get("apiVersion"), fields.get("kind")
        text = self.version = self.text(version, "apiVersion")
        if version and text in API_VERSIONS_DEPRECATED:
            self.findings.deprecated(version.place, f"apiVersion '{text}'", f"'{API_VERSION}'")
        elif version and text and text != API_VERSION:
            self.findings.error(version.place, "api-version", f"apiVersion '{text[:128]}' is not supported", nearest(text, (API_VERSION,)))
        text = self.text(kind, "kind")
        if kind and text and text != KIND:
            self.findings.error(kind.place, "kind", f"kind '{text[:128]}' is not supported", nearest(text, (KIND,)))


def _digits(value: str | float) -> str:
    if isinstance(value, str):
        return value
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e18 else repr(value)
