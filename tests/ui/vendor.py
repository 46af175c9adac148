"""Rebuilds the libraries of the page from their npm packages, and compares them with the files in the repository.

    python -m tests.ui.vendor           compares; exit status 1 if a file differs
    python -m tests.ui.vendor --write   writes the files and their hashes

`packages.json` names each package with its version, its licence, the sha256 of its tarball, and the files that are taken from it. A file
is taken as it was published, except that `preact/hooks` names its neighbour by a relative path, as browsers need it. The tarballs come
from the npm registry, through npm.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "workers/supervisor/pages/ui/static/vendor"
LIST = FOLDER / "packages.json"
RENAMED = (b'from"preact"', b'from"./preact.mjs"')


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rebuilt(package: dict[str, Any], folder: Path) -> dict[str, bytes]:
    """Downloads a package and returns its files by their name in the repository. Exits if the tarball is another one."""
    wanted = f"{package['name']}@{package['version']}"
    done = subprocess.run(["npm", "pack", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    tarball = folder / done.stdout.split()[-1]
    if sha256(tarball.read_bytes()) != package["tarball_sha256"]:
        sys.exit(f"the tarball of {wanted} has another sha256 than {LIST} says: do not use it")
    found = {}
    with tarfile.open(tarball) as archive:
        for file in package["files"]:
            member = archive.extractfile(f"package/{file['from']}")
            assert member is not None, f"{wanted} has no file {file['from']}"
            found[file["to"]] = member.read().replace(*RENAMED)
    return found


def main() -> int:
    line = argparse.ArgumentParser(prog="tests.ui.vendor", description=(__doc__ or "").split("\n")[0])
    line.add_argument("--write", action="store_true", help="write the files and their hashes")
    options = line.parse_args()
    packages = json.loads(LIST.read_text())
    different = []
    with tempfile.TemporaryDirectory() as folder:
        for package in packages:
            for name, data in rebuilt(package, Path(folder)).items():
                target = FOLDER / name
                if options.write:
                    target.write_bytes(data)
                    next(file for file in package["files"] if file["to"] == name)["sha256"] = sha256(data)
                elif not target.exists() or target.read_bytes() != data:
                    different.append(name)
    if options.write:
        LIST.write_text(json.dumps(packages, indent=2) + "\n")
    for name in different:
        print(f"{FOLDER / name} is not what its package has: run python -m tests.ui.vendor --write")
    print(f"{sum(len(package['files']) for package in packages)} files, {len(different)} differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
