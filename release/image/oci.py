"""Writes OCI image layouts: content-addressed blobs, one manifest per machine, and an index (OCI Image Format Specification 1.1).

Two layers: the Debian packages, and what is in /usr/local. So a new version of the picker changes the second layer only.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from release.archives import packed, tarred, zipped
from release.image.root import CERTIFICATES, SUITE, USER
from release.pythons import ARCHITECTURES
from release.source import NAME, Source

UPPER: Final = "usr/local"
ANNOTATION: Final = "org.opencontainers.image"
_TYPE: Final = "application/vnd.oci.image"
_Json = dict[str, Any]


class Layout:
    """The folder of an OCI image layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "blobs/sha256").mkdir(parents=True)
        (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, data: bytes, kind: str) -> _Json:
        """Stores a blob. Returns its descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        (self._folder / "blobs/sha256" / digest).write_bytes(data)
        return {"mediaType": f"{_TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(data)}

    def document(self, content: _Json, kind: str) -> _Json:
        """Stores a JSON document. Returns its descriptor."""
        return self.blob(_encoded(content), kind)

    def index(self, content: _Json) -> None:
        """Writes the entry point of the layout."""
        (self._folder / "index.json").write_bytes(_encoded(content))


def archive(source: Source, roots: Mapping[str, Path], into: Path) -> Path:
    """Makes an OCI archive with an image per machine. `roots`: their root file systems, by machine. Returns its path."""
    file = into / f"{NAME}-{source.version}-image.tar"
    folder = source.tree / "image"
    layout = Layout(folder)
    manifests = [_image(layout, source, machine, root) for machine, root in sorted(roots.items())]
    labels = _labels(source)
    index = {"schemaVersion": 2, "mediaType": f"{_TYPE}.index.v1+json", "manifests": manifests, "annotations": labels}
    named = layout.document(index, "index.v1+json") | {"annotations": {f"{ANNOTATION}.ref.name": f"{NAME}:{source.version}"}}
    layout.index({"schemaVersion": 2, "mediaType": f"{_TYPE}.index.v1+json", "manifests": [named]})
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    file.write_bytes(tarred(files, source.epoch))
    return file


def _image(layout: Layout, source: Source, machine: str, root: Path) -> _Json:
    """Stores the image of one machine. Returns the descriptor of its manifest."""
    names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
    upper = [name for name in names if f"{name}/".startswith(f"{UPPER}/")]
    lower = [name for name in names if not f"{name}/".startswith(f"{UPPER}/")]
    layers, plain = [], []
    for part in (lower, upper):
        data = packed(((name, root / name) for name in part), source.epoch)
        plain.append(f"sha256:{hashlib.sha256(data).hexdigest()}")
        layers.append(layout.blob(zipped(data, source.epoch), "layer.v1.tar+gzip"))
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(source.epoch))
    steps = (f"Debian {SUITE} packages", "locked dependencies and the picker")
    config = {
        "created": created,
        "architecture": ARCHITECTURES[machine],
        "os": "linux",
        "config": settings(source),
        "rootfs": {"type": "layers", "diff_ids": plain},
        "history": [{"created": created, "created_by": step} for step in steps],
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
        "config": layout.document(config, "config.v1+json"),
        "layers": layers,
        "annotations": _labels(source),
    }
    platform = {"architecture": ARCHITECTURES[machine], "os": "linux"}
    return layout.document(manifest, "manifest.v1+json") | {"platform": platform}


def settings(source: Source) -> _Json:
    """Returns how a container of the image runs. `deploy/Dockerfile` has the same settings."""
    return {
        "User": f"{USER}:{USER}",
        "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1", f"SSL_CERT_FILE=/{CERTIFICATES}"],
        "Entrypoint": ["epp", "serve"],
        "Cmd": ["--config-file", "/etc/epp/config.yaml"],
        "WorkingDir": "/",
        "ExposedPorts": {"9002/tcp": {}, "9003/tcp": {}, "9090/tcp": {}},
        "StopSignal": "SIGTERM",
        "Labels": _labels(source),
    }


def _labels(source: Source) -> dict[str, str]:
    about = {"title": NAME, "version": source.version, "revision": source.commit, "licenses": "Apache-2.0"}
    return {f"{ANNOTATION}.{name}": value for name, value in about.items()}


def _encoded(content: _Json) -> bytes:
    return json.dumps(content, separators=(",", ":"), sort_keys=True).encode()
