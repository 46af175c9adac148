"""Makes a release of the current commit: `make release`.

    make release                          everything
    make release ARGS='--pure'            no compiled wheel and no image: half a minute
    make release ARGS='--native'          the wheel for this machine and Python only, and no image: a minute
    make release ARGS='--reproduce'       everything twice, and compares the bytes; compiles all twice, too, unless --native is given

What cannot be made on this machine is named, and everything else is made. The exit code is then 3.
"""

import argparse
import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from compiled.build import Unbuildable, native
from release import archives, materials, notes, wheels
from release.errors import Missing, Refused
from release.image import oci, root
from release.image.left_out import PYTHON
from release.pythons import ARCHITECTURES, MACHINES, VERSIONS, interpreter, running, target
from release.source import NAME, ROOT, Source, checked_out

INCOMPLETE: Final = 3
SUMS: Final = "SHA256SUMS"
NOTES: Final = "RELEASE_NOTES.md"
SHOWN_CHARS: Final = 4000  # of the output of a command that failed
TWICE: Final = "Everything was made twice from the commit, with the same bytes."
ALL, NATIVE, PURE = "all", "native", "pure"  # for which machines wheels are compiled


class Release:
    """One release in the folder `into`. `facts`: sentences for the notes; `skipped`: why parts were not made."""

    def __init__(self, source: Source, into: Path, facts: Sequence[str]) -> None:
        self._source = source
        self._into = into
        self._facts = list(facts)
        self._wheels: dict[tuple[str, str], Path] = {}
        self.skipped: list[str] = []

    def make(self, machines: str) -> None:
        """Makes everything, or what `--native` or `--pure` says. Raises Refused."""
        notes.changes((self._source.tree / "CHANGELOG.md").read_text(), self._source.version)
        _, pure = wheels.distributions(self._source, self._into)
        if machines == NATIVE:
            self._try("compiled wheel", lambda: wheels.compiled(self._source, pure, native(), running()))
        elif machines == ALL:
            for version, machine in [(version, machine) for version in VERSIONS for machine in MACHINES]:
                self._try(f"wheel for CPython {version}, {machine}", partial(self._wheel, pure, version, machine))
        self._try("chart", lambda: archives.chart(self._source, self._into))
        self._try("documentation", lambda: archives.documentation(self._source, self._into))
        bill = materials.of_package(self._source)
        materials.write(bill, self._into / f"{NAME}-{self._source.version}-package.cdx.json")
        if machines == ALL:
            self._try("image", self._image)
        made = sorted(file for file in self._into.iterdir())
        (self._into / NOTES).write_text(notes.text(self._source, made, self._facts, self.skipped))
        made.append(self._into / NOTES)
        (self._into / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests(made)))

    def _wheel(self, pure: Path, version: str, machine: str) -> Path:
        made = wheels.compiled(self._source, pure, target(version, machine), interpreter(version))
        self._wheels[version, machine] = made
        return made

    def _image(self) -> Path:
        """Makes the image for every machine that has a wheel, and its bills of materials. Raises Missing."""
        roots: dict[str, Path] = {}
        for machine in MACHINES:
            if wheel := self._wheels.get((PYTHON, machine)):
                folder = self._source.tree / f"root-{machine}"
                root.assemble(folder, wheel, machine, interpreter(PYTHON))
                roots[machine] = folder
                bill = materials.of_image(self._source, folder, ARCHITECTURES[machine])
                name = f"{NAME}-{self._source.version}-image-{ARCHITECTURES[machine]}.cdx.json"
                materials.write(bill, self._into / name)
                self._facts.append(f"The image for {machine} has {root.size(folder) / 1e6:.0f} MB unpacked.")
                print(f"  {self._facts[-1]}", flush=True)
        if not roots:
            raise Missing(f"there is no wheel for CPython {PYTHON}")
        return oci.archive(self._source, roots, self._into)

    def _try(self, what: str, make: Callable[[], Path]) -> None:
        began = time.monotonic()
        try:
            made = make()
        except (Missing, Unbuildable) as missing:
            self.skipped.append(f"{what}: {missing}")
            print(f"skipped {what}: {missing}", file=sys.stderr, flush=True)
            return
        print(f"made {made.name} ({made.stat().st_size / 1e6:.1f} MB, {time.monotonic() - began:.0f} s)", flush=True)


def digests(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Yields name and SHA-256 of each file."""
    for file in files:
        yield file.name, hashlib.sha256(file.read_bytes()).hexdigest()


def made(into: Path, machines: str, cached: bool, facts: Sequence[str] = ()) -> Release:
    """Makes a release of the current commit in the folder `into`. `cached`: object files of earlier builds may be used. Raises Refused."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="epp-release-") as folder:
        source = checked_out(Path(folder))
        print(f"release {source.version} of commit {source.commit[:12]}", flush=True)
        if cached:
            (ROOT / ".cache").mkdir(exist_ok=True)
            (source.tree / ".cache").symlink_to(ROOT / ".cache")
        release = Release(source, into, facts)
        release.make(machines)
        return release


def differing(one: Path, other: Path) -> list[str]:
    """Returns the names of files that are not the same in both folders."""
    first, second = (dict(digests(sorted(folder.iterdir()))) for folder in (one, other))
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def main() -> int:
    line = argparse.ArgumentParser(prog="make release ARGS=", description="Makes a release of the current commit.")
    line.add_argument("--into", type=Path, default=ROOT / "dist", help="the folder for the files (dist)")
    line.set_defaults(machines=ALL)
    only = line.add_mutually_exclusive_group()
    words = {NATIVE: f"only for {platform.machine()} and this Python, without the image", PURE: "no compiled wheel and no image"}
    for machines, text in words.items():
        only.add_argument(f"--{machines}", dest="machines", action="store_const", const=machines, help=text)
    line.add_argument("--reproduce", action="store_true", help="make everything twice, and compare the bytes")
    given = line.parse_args()
    into = given.into.resolve()  # builds run in other folders
    try:
        cached = given.machines == NATIVE or not given.reproduce
        facts = [TWICE] if given.reproduce else []  # if it is not true, there is no release
        release = made(into, given.machines, cached, facts)
        if given.reproduce:
            with tempfile.TemporaryDirectory(prefix="epp-release-again-") as again:
                made(Path(again), given.machines, cached, facts)
                if different := differing(into, Path(again)):
                    print(f"FAILED: the second time gave other bytes: {', '.join(different)}", file=sys.stderr)
                    return 1
                print("the second time gave the same bytes")
    except Refused as refused:
        print(f"Error: {refused}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as failed:
        said = failed.stderr or failed.stdout or b""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        print(f"Error: {' '.join(map(str, failed.cmd[:4]))} … failed; the end of its output:\n{said[-SHOWN_CHARS:]}", file=sys.stderr)
        return 1
    print(f"{into}: {len(list(into.iterdir()))} files")
    return INCOMPLETE if release.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
