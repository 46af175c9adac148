"""Wheels: their tags say what they need, and their list of files is right."""

import base64
import hashlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from compiled.finder import REASON, decided
from release import wheels
from release.errors import Missing
from release.source import ROOT, Source, version

MACHINE = platform.machine()
VERSION = version(ROOT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist and the pure wheel of this tree."""
    tree, into = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "compiled", "epp", "shm", "workers", "loadtest", "release", "deploy"):
        path = ROOT / name
        copied = shutil.ignore_patterns("__pycache__", "built")
        shutil.copytree(path, tree / name, ignore=copied) if path.is_dir() else shutil.copy(path, tree / name)
    return wheels.distributions(Source(tree, VERSION, "c" * 40, 1_700_000_000), into)


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def shared_library(tmp_path: Path, code: str, *flags: str) -> Path:
    (tmp_path / "a.c").write_text(code)
    library = tmp_path / "a.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(tmp_path / "a.c"), "-o", str(library), *flags], check=True)
    return library


def check_record(files: dict[str, bytes]) -> None:
    (record,) = [name for name in files if name.endswith("/RECORD")]
    lines = [line.split(",") for line in files[record].decode().splitlines()]
    assert [line[0] for line in lines] == list(files)
    for name, digest, size in lines[:-1]:
        raw = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={raw}", str(len(files[name])))


def test_the_pure_wheel_knows_its_commit_and_says_why_it_is_interpreted(made: tuple[Path, Path]) -> None:
    files = content(made[1])
    assert files["workers/host/commit.txt"].decode() == "c" * 40 + "\n"
    assert files[f"compiled/built/{REASON}"].decode() == wheels.NOTE
    check_record(files)


def test_a_wheel_of_the_sdist_is_the_pure_wheel(made: tuple[Path, Path], tmp_path: Path) -> None:
    sdist, pure = made
    subprocess.run(["tar", "-xf", str(sdist), "-C", str(tmp_path)], check=True)
    (tree,) = tmp_path.iterdir()
    (tmp_path / "dist").mkdir()
    _, again = wheels.distributions(Source(tree, VERSION, "d" * 40, 1_700_000_000), tmp_path / "dist")
    assert again.read_bytes() == pure.read_bytes()  # with the commit of the sdist


def test_a_compiled_wheel_has_the_libraries_and_its_tag_and_no_reason(made: tuple[Path, Path], tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheels._rewrite(made[1], wheel, {"compiled/built/key/a.so": b"elf"}, "cp311-cp311-manylinux_2_17_x86_64")
    files = content(wheel)
    check_record(files)
    (meta,) = [text.decode() for name, text in files.items() if name.endswith("/WHEEL")]
    assert re.findall(r"^(?:Tag|Root-Is-Purelib): .*$", meta, re.MULTILINE) == [
        "Root-Is-Purelib: false",
        "Tag: cp311-cp311-manylinux_2_17_x86_64",
    ]
    assert f"compiled/built/{REASON}" not in files
    assert files["compiled/built/key/a.so"] == b"elf"


def test_an_installed_pure_wheel_shows_the_reason(made: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(made[1]) as archive:
        archive.extractall(tmp_path)
    mode, _ = decided(None, tmp_path / "compiled/built", tmp_path)
    assert str(mode) == f"interpreted ({wheels.NOTE})"
    command = [sys.executable, "-P", "-m", "workers", "--version"]
    said = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert f"({'c' * 12}), interpreted" in said.stdout


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_tag_follows_from_the_versions_of_the_symbols(tmp_path: Path) -> None:
    plain = shared_library(tmp_path, "int f(void) { return 1; }")
    assert wheels.platform_tag([plain], MACHINE) == f"manylinux_2_17_{MACHINE}"
    newer = shared_library(tmp_path, "#include <threads.h>\nint f(void) { return thrd_sleep(0, 0); }")
    assert wheels.platform_tag([plain, newer], MACHINE) in (f"manylinux_2_28_{MACHINE}", f"manylinux_2_34_{MACHINE}")


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_library_that_not_every_linux_has_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    other = shared_library(folder, "int g(void) { return 1; }", "-Wl,-soname,libother.so.1")
    needy = shared_library(tmp_path, "int g(void); int f(void) { return g(); }", "-Wl,--no-as-needed", str(other))
    with pytest.raises(Missing, match=r"a\.so needs libother\.so\.1, which not every Linux has"):
        wheels.platform_tag([needy], MACHINE)
