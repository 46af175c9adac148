"""Bills of materials in CycloneDX 1.6 (ECMA-424): what is in the package and in the image, with versions and licences."""

import json
import re
import time
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from release.image.left_out import BUILDS, SITE
from release.image.root import Debian, debian
from release.locked import pins
from release.source import NAME, Source

TESTED: Final = "3.11"  # the Python of the tests
CLASSIFIER: Final = "License :: OSI Approved :: "
NAME_CHARS_MAX: Final = 64  # a longer text in the field License is the licence itself
_COMMON: Final = re.compile(r"/usr/share/common-licenses/([\w.+-]+\w)")
_SHORT: Final = re.compile(r"^License: *(\S.*)$", re.MULTILINE)
_Json = dict[str, Any]


def of_package(source: Source) -> _Json:
    """Returns the bill of the package: the locked versions of its dependencies, with which it was tested."""
    needed = [pin for pin in pins("image") if pin.name not in BUILDS and pin.applies(TESTED)]
    components = [_python(pin.name, pin.version, metadata.metadata(pin.name)) for pin in needed]
    return _bill(source, "library", f"pkg:pypi/{NAME}@{source.version}", components)


def of_image(source: Source, root: Path, architecture: str) -> _Json:
    """Returns the bill of the image of one machine, from its assembled root file system."""
    found = sorted(metadata.distributions(path=[str(root / SITE)]), key=lambda each: each.name)
    components = [_python(each.name, each.version, each.metadata) for each in found]
    components += [_package(root, package) for package in debian(root)]
    return _bill(source, "container", f"pkg:oci/{NAME}@{source.version}?arch={architecture}", components)


def write(bill: _Json, file: Path) -> Path:
    """Writes a bill. Returns its path."""
    file.write_text(json.dumps(bill, indent=1, sort_keys=True) + "\n")
    return file


def licence(about: metadata.PackageMetadata) -> str:
    """Returns the licence of a Python package as its metadata names it, or ""."""
    given = (about[field] for field in ("License-Expression", "License") if field in about)
    for text in given:
        if len(text) <= NAME_CHARS_MAX and "\n" not in text:
            return str(text)
    classifiers = about.get_all("Classifier") or []
    return " AND ".join(each.removeprefix(CLASSIFIER) for each in classifiers if each.startswith(CLASSIFIER))


def debian_licences(root: Path, name: str) -> list[str]:
    """Returns the licences that the copyright file of a Debian package names."""
    file = root / "usr/share/doc" / name / "copyright"
    text = file.read_text(errors="replace") if file.exists() else ""
    return sorted(set(_SHORT.findall(text)) or set(_COMMON.findall(text)))


def _bill(source: Source, kind: str, identity: str, components: Iterable[_Json]) -> _Json:
    listed = sorted(components, key=lambda component: str(component["bom-ref"]))
    itself = {"type": kind, "name": NAME, "version": source.version, "purl": identity, "bom-ref": identity}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{identity}#{source.commit}')}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(source.epoch)),
            "component": {**itself, "licenses": [{"expression": "Apache-2.0"}]},
        },
        "components": listed,
        "dependencies": [{"ref": identity, "dependsOn": [component["bom-ref"] for component in listed]}],
    }


def _python(name: str, version: str, about: metadata.PackageMetadata) -> _Json:
    return _component(name, version, f"pkg:pypi/{name.lower().replace('_', '-')}@{version}", [licence(about)])


def _package(root: Path, package: Debian) -> _Json:
    identity = f"pkg:deb/debian/{package.name}@{package.version.replace('+', '%2B')}?arch={package.architecture}"
    return _component(package.name, package.version, identity, debian_licences(root, package.name))


def _component(name: str, version: str, identity: str, licences: Iterable[str]) -> _Json:
    named = [{"license": {"name": each}} for each in licences if each]
    return {"type": "library", "name": name, "version": version, "purl": identity, "bom-ref": identity, "licenses": named}
