"""Reads the lock files, which pin every dependency by version and hash."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from packaging.markers import Marker

from release.source import ROOT

ENTRY = re.compile(r"^(?P<name>[a-z0-9-]+)(\[[a-z,]+\])?==(?P<version>\S+)(?: ; (?P<marker>[^\\]+?))?(?: \\)?\n(?:    .*\n)*", re.MULTILINE)


class Pin(NamedTuple):
    """A pinned dependency. `text`: its lines with the hashes, without the marker: `applies` asks that of any version of Python."""

    name: str
    version: str
    marker: str
    text: str

    def applies(self, version: str) -> bool:
        """Says whether a Linux installation with this Python needs it. `version`: such as "3.13"."""
        python = {"python_version": version, "python_full_version": f"{version}.5", "sys_platform": "linux"}
        return not self.marker or Marker(self.marker).evaluate(python | {"implementation_name": "cpython"})


def pins(lock: str) -> Iterator[Pin]:
    """Yields the pins of a lock file. `lock`: "image", "dev" or "demo"."""
    for entry in ENTRY.finditer((ROOT / f"requirements-{lock}.txt").read_text()):
        marker = entry["marker"] or ""
        yield Pin(entry["name"], entry["version"], marker, entry[0].replace(f" ; {marker}", "") if marker else entry[0])
