"""Says where each line of an effective configuration comes from: a line of the file, or a default.

    file      ─ places ───▶ path of a value -> its line
    effective ─ origins ──▶ for each line of the effective text: the line of the file, or DEFAULT

A path names an element of a list by what identifies it (its name, type, reference or priority, or else its first key), because the
effective configuration has further elements. A value that the file gives under an older name counts as a default.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from epp.config import yaml_nodes
from epp.config.findings import Findings
from epp.config.yaml_nodes import Node

DEFAULT: Final = 0
PLACES_MAX: Final = 4096  # what a file has beyond these shows as a default
IDENTITIES: Final = ("name", "pluginRef", "priority", "type")

Path = tuple[str, ...]


def places(root: Node) -> dict[Path, int]:
    """Returns path of a value -> its line in the file, for the first PLACES_MAX values."""
    found: dict[Path, int] = {}
    for path, line in _lines(root, ()):
        if len(found) == PLACES_MAX:
            break
        found.setdefault(path, line)
    return found


def origins(effective: str, written: Mapping[Path, int]) -> list[int]:
    """Returns for each line of the effective text its line in the file, or DEFAULT. `written`: the result of `places`."""
    found = [DEFAULT] * len(effective.splitlines())
    root = yaml_nodes.read(effective, Findings("effective"))
    if root is not None:
        for path, line in _lines(root, ()):
            found[line - 1] = found[line - 1] or written.get(path, DEFAULT)
    return found


def _lines(node: Node, path: Path) -> Iterator[tuple[Path, int]]:
    """Yields the path and the line of each value. The line of a mapping's entry is that of its key."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            place = node.keys.get(key, child.place)
            yield (*path, key), place.line
            yield from _lines(child, (*path, key))
    elif isinstance(node.value, list):
        for child in node.value:
            inner = (*path, f"[{_identity(child)}]")
            yield inner, child.place.line
            yield from _lines(child, inner)


def _identity(element: Node) -> str:
    if isinstance(element.value, dict):
        given = (element.value[key].value for key in IDENTITIES if key in element.value)
        return str(next(given, next(iter(element.value), "")))
    return str(element.value).partition("=")[0]  # a feature gate may have the form name=value
