"""Finds parameters that a configuration gives although the value of another parameter switches them off (`Plugin.counts_with`)."""

from typing import Any, NamedTuple

import msgspec

from epp.config.findings import Place
from epp.config.yaml_nodes import Node
from epp.plugin import Plugin


class Ignored(NamedTuple):
    """One parameter without effect. `hint` says what would make it count."""

    place: Place
    why: str
    hint: str


def ignored(plugin: Plugin, parameters: Node | None) -> list[Ignored]:
    """Returns the parameters that have no effect, of those in the text. `parameters`: what the text gives.

    If the text also gives the parameter that decides, a default value is no mistake: the effective configuration has all values.
    """
    found = []
    for path, (deciding, values) in plugin.counts_with.items():
        place = place_of(parameters, path)
        if place is None:
            continue
        value, default = _value(plugin.params, path)
        chosen, _ = _value(plugin.params, deciding)
        given = place_of(parameters, deciding) is not None
        if chosen in values or (given and value == default):
            continue
        why = f"{path}: has no effect with {deciding} {_shown(chosen)}{'' if given else ', the default'}"
        needed = " or ".join(_shown(value) for value in values if value != "")
        hint = f"set {deciding} to {needed}, or remove it" if needed else f"remove it, or {deciding}"
        found.append(Ignored(place, why, hint))
    return found


def place_of(parameters: Node | None, path: str) -> Place | None:
    """Returns where the text gives a parameter; None: it does not. `path`: names of the parameter and those around it, joined by `.`."""
    node, place = parameters, None
    for step in path.split("."):
        if node is None or not isinstance(node.value, dict) or step not in node.value:
            return None
        node, place = node.value[step], node.keys[step]
    return place


def _value(params: Any, path: str) -> tuple[Any, Any]:
    """Returns the value of a parameter and its default; (None, None) if a parameter around it is null."""
    value: Any = params
    default: Any = None
    for step in path.split("."):
        if value is None:
            return None, None
        field = next(field for field in msgspec.structs.fields(value) if field.encode_name == step)
        value = getattr(value, field.name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return value, default


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"'{value}'"
