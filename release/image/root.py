"""Assembles the root file system of the image. `deploy/Dockerfile` and `make release` both run this module.

    Debian packages, unpacked ─┐
    locked dependencies ───────┼─▶ prune ─▶ bytecode ─▶ settings
    wheel ─────────────────────┘

    python -m release.image.root --wheel FILE --root FOLDER

Nothing of the image runs while it is assembled, so the image of another machine needs no emulation. It has no shell, no package manager, no
compiler and no pip. Python's library and the dependencies are there as bytecode without source; the picker has both. `left_out` lists what
is removed.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from compiled.modules import PATHS
from release.errors import Missing
from release.image import left_out
from release.image.left_out import LIBRARY, PYTHON, SITE
from release.locked import Pin, pins
from release.pythons import ARCHITECTURES, MACHINES, Interpreter
from release.source import ROOT

SUITE: Final = "trixie"
GLIBC: Final = 41  # 2.41 there
PACKAGES: Final = ("base-files", "busybox", "ca-certificates", "libstdc++6", "netbase", f"python{PYTHON}")
USER: Final = 65532
CERTIFICATES: Final = "etc/ssl/certs/ca-certificates.crt"
OWN: Final = ("compiled", "epp", "loadtest", "shm", "workers")  # keep their source: it decides which compiled modules fit
LISTED: Final = "usr/share/epp/debian-packages.txt"


class Debian(NamedTuple):
    """A Debian package in the image."""

    name: str
    version: str
    architecture: str


def assemble(root: Path, wheel: Path, machine: str, python: Interpreter | None = None) -> None:
    """Makes the root file system in the folder `root`, which must not exist. `machine`: one of MACHINES; `wheel`: the picker for it.

    `python`: an interpreter of version PYTHON, which compiles to bytecode; None: that of the root, which must be for this machine.
    Raises Missing and CalledProcessError.
    """
    unpack(root, machine)
    install(root, wheel, machine)
    certificates(root)
    prune(root)
    strip(root, machine)
    compile_all(root, python or inside(root))
    settings(root)


def unpack(root: Path, machine: str) -> None:
    """Unpacks the Debian packages, and writes their list. Runs no script of theirs."""
    if shutil.which("mmdebstrap") is None:
        raise Missing("there is no mmdebstrap (on Debian: apt install mmdebstrap)")
    root.parent.mkdir(parents=True, exist_ok=True)
    listed = root.with_suffix(".debs")
    hook = f'ls "$1/var/cache/apt/archives" > {listed}'
    mode = "root" if os.getuid() == 0 else "unshare"
    command = ["mmdebstrap", "--quiet", "--variant=extract", f"--mode={mode}", f"--architectures={ARCHITECTURES[machine]}"]
    done = subprocess.run(
        [*command, f"--include={','.join(PACKAGES)}", f"--extract-hook={hook}", SUITE, str(root)], capture_output=True, text=True
    )
    if done.returncode:
        raise Missing(f"mmdebstrap failed: {done.stderr[-600:].strip()}")
    names = sorted(line.removesuffix(".deb").replace("%3a", ":") for line in listed.read_text().split() if line.endswith(".deb"))
    (root / LISTED).parent.mkdir(parents=True)
    (root / LISTED).write_text("".join(f"{name}\n" for name in names))
    listed.unlink()


def debian(root: Path) -> Iterator[Debian]:
    """Yields the Debian packages of an assembled root of which something is left."""
    packages = (Debian(*line.split("_")) for line in (root / LISTED).read_text().split())
    yield from (package for package in packages if package.name not in left_out.DEBIAN)


def dependencies() -> list[Pin]:
    """Returns the pinned Python packages in the image."""
    unneeded = left_out.BUILDS | left_out.OF_ITS_COMMAND | left_out.OF_CFFI
    return [pin for pin in pins("image") if pin.name not in unneeded and pin.applies(PYTHON)]


def inside(root: Path) -> Interpreter:
    """Returns the root's own Python, started so that it finds its libraries in the root. The root must be for this machine."""
    libraries = root / "usr/lib" / f"{platform.machine()}-linux-gnu"
    (loader,) = (root / "usr").glob("lib*/ld-linux-*.so.*")
    command = root.with_suffix(".python")
    command.write_text(
        f'#!/bin/sh\nexport PYTHONHOME={root}/usr\nexec {loader} --library-path {libraries} {root}/usr/bin/python{PYTHON} "$@"\n'
    )
    command.chmod(0o755)
    return Interpreter(command, None)


def install(root: Path, wheel: Path, machine: str) -> None:
    """Installs the locked dependencies and the wheel from wheels for that machine, without running anything of them."""
    site = root / SITE
    site.mkdir(parents=True)
    listed = root / "requirements.txt"
    listed.write_text("".join(pin.text for pin in dependencies()))
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC, 16, -1)]
    tags += [
        f"manylinux2014_{machine}",
        f"linux_{machine}",  # what pip builds from source
        *(["manylinux2010_x86_64", "manylinux_2_5_x86_64"] if machine == "x86_64" else []),
    ]
    command = [
        sys.executable,  # of any version: the flags below name that of the image
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON, "--target", str(site)]
    command.append("--ignore-requires-python")  # which is that of the running version; the pins are those of PYTHON
    command += [f"--platform={tag}" for tag in tags]
    for what in (["--require-hashes", "-r", str(listed)], ["--no-index", str(wheel)]):
        done = subprocess.run([*command, *what], capture_output=True, text=True)
        if done.returncode:
            raise Missing(f"pip failed: {done.stderr[-600:].strip()}")
    listed.unlink()


def certificates(root: Path) -> None:
    """Joins the certificates of authorities into one file, as update-ca-certificates does. All libraries read this file."""
    bundle = root / CERTIFICATES
    bundle.parent.mkdir(parents=True, exist_ok=True)
    parts = sorted((root / "usr/share/ca-certificates/mozilla").glob("*.crt"))
    bundle.write_text("".join(part.read_text() for part in parts))
    shutil.rmtree(root / "usr/share/ca-certificates")
    for name in left_out.AUTHORITIES:
        (root / SITE / name).unlink()
        (root / SITE / name).symlink_to(f"/{CERTIFICATES}")


def prune(root: Path) -> None:
    """Removes what serving does not need. Keeps all licences."""
    for pattern in left_out.PATHS:
        for path in list(root.glob(pattern)):
            _remove(path)
    for path in list((root / "usr/share/doc").rglob("*")):
        if not path.is_dir() and path.name != "copyright":
            path.unlink()
    site = root / SITE
    for path in list(site.rglob("*")):
        inside = path.relative_to(site).parts[0]
        if inside not in OWN and (path.suffix in left_out.SOURCES or (path.is_dir() and path.name in ("tests", "test"))):
            _remove(path)


def strip(root: Path, machine: str) -> None:
    """Removes symbols for debuggers from programs and libraries."""
    command = "strip" if machine == platform.machine() else f"{machine}-linux-gnu-strip"
    if shutil.which(command) is None:
        raise Missing(f"there is no {command} (on Debian: apt install binutils-{machine.replace('_', '-')}-linux-gnu)")
    libraries = sorted(str(path) for path in (root / SITE).rglob("*.so*") if path.is_file())
    subprocess.run([command, "--strip-unneeded", *libraries], check=True, capture_output=True)


def compile_all(root: Path, python: Interpreter) -> None:
    """Compiles all modules to bytecode that is never checked against its source, and removes the source that the picker does not need.

    Bytecode without source stands in the place of the source (PEP 3147).
    """
    base = [str(python.python), "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", str(root), "-p", "/"]
    environment = python.environment({**os.environ, "PYTHONHASHSEED": "0"})
    own = [str(root / SITE / name) for name in OWN]
    subprocess.run([*base, *own], env=environment, check=True)
    for path in PATHS if list((root / SITE / "compiled/built").glob("*/*.so")) else ():
        source = root / SITE / path
        for unused in (source.parent / "__pycache__").glob(f"{source.stem}.*.pyc"):
            unused.unlink()  # the compiled module is imported in its place
    others = [root / LIBRARY, *(path for path in sorted((root / SITE).iterdir()) if path.name not in OWN)]
    subprocess.run([*base, "-b", *map(str, others)], env=environment, check=True)
    for place in others:
        for source in [place] if place.is_file() else list(place.rglob("*.py")):
            if source.suffix == ".py" and source.with_suffix(".pyc").exists():
                source.unlink()


def settings(root: Path) -> None:
    """Writes users, the command `epp`, and the built-in configuration, and links `python3` and `sleep`, which the chart calls."""
    (root / "etc/passwd").write_text(f"root:x:0:0:root:/:/sbin/nologin\nepp:x:{USER}:{USER}::/nonexistent:/sbin/nologin\n")
    (root / "etc/group").write_text(f"root:x:0:\nepp:x:{USER}:\n")
    command = root / "usr/bin/epp"
    command.write_text(f"#!/usr/bin/python{PYTHON} -P\nfrom workers.cli import main\n\nmain()\n")
    command.chmod(0o755)
    for name, target in (("sleep", "busybox"), ("python3", f"python{PYTHON}")):
        (root / "usr/bin" / name).unlink(missing_ok=True)
        (root / "usr/bin" / name).symlink_to(target)
    (root / "etc/epp").mkdir()
    shutil.copyfile(ROOT / "deploy/config/default.yaml", root / "etc/epp/config.yaml")
    for name in ("dev", "proc", "sys", "tmp", "run"):
        (root / name).mkdir(exist_ok=True)
    for device in (root / "dev").iterdir():
        _remove(device)


def size(root: Path) -> int:
    """Returns the bytes of all files."""
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> None:
    line = argparse.ArgumentParser(prog="python -m release.image.root", description="Assembles the root of the image.")
    line.add_argument("--wheel", type=Path, required=True)
    line.add_argument("--root", type=Path, required=True, help="a folder that does not exist yet")
    line.add_argument("--machine", choices=MACHINES, default=platform.machine())
    given = line.parse_args(arguments)
    assemble(given.root, given.wheel, given.machine)
    print(f"{given.root}: {size(given.root) / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
