"""The sdist, the pure wheel, and wheels with the compiled request path.

A wheel with compiled modules is the pure wheel plus one folder of shared libraries. Its tags say for which Python and for which versions of
glibc it is: the tag of the platform follows from the symbols that the libraries need.
"""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from compiled.build import Target
from compiled.finder import REASON, key
from release.errors import Missing
from release.pythons import Interpreter
from release.source import NAME, Source

OWN: Final = frozenset({"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"})
GLIBC_MIN: Final = 17  # of glibc 2.x: the lowest for which tags exist, on both machines
BUILT: Final = "compiled/built"
NOTE: Final = "this is the wheel for any platform; wheels with the compiled request path are for CPython 3.11 to 3.14 on Linux with glibc"
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_GLIBC = re.compile(r"\bGLIBC_2\.(\d+)\b")
_TAG = re.compile(r"^(Root-Is-Purelib|Tag): .*\n", re.MULTILINE)


def distributions(source: Source, into: Path) -> tuple[Path, Path]:
    """Makes the sdist and the pure wheel. Returns their paths. Raises CalledProcessError."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--target", "wheel", "--directory", str(into)]
    environment = {**source.environment, "EPP_COMPILED": "0"}
    subprocess.run(command, cwd=source.tree, env=environment, check=True, capture_output=True)
    stem = f"{NAME.replace('-', '_')}-{source.version}"
    pure = into / f"{stem}-py3-none-any.whl"
    _rewrite(pure, pure, {f"{BUILT}/{REASON}": NOTE.encode()}, "py3-none-any")
    return into / f"{stem}.tar.gz", pure


def compiled(source: Source, pure: Path, target: Target, builder: Interpreter) -> Path:
    """Compiles the request path for a target, and makes a wheel of the pure wheel and the result. Returns its path.

    `builder`: the Python that runs mypyc, of the target's version. Raises Missing and CalledProcessError.
    """
    folder = source.tree / BUILT / key(source.tree, target.abi)
    command = [str(builder.python), "-m", "compiled.build", "--abi", target.abi]
    command += [f"--compiler={' '.join(target.compiler)}", *(f"--include={folder}" for folder in target.includes)]
    environment = builder.environment(source.environment)
    subprocess.run(command, cwd=source.tree, env=environment, check=True, capture_output=True)
    libraries = sorted(folder.glob("*.so"))
    if not libraries:
        raise Missing((source.tree / BUILT / REASON).read_text())
    _, version, machine, *_ = target.abi.split("-")
    tag = f"cp{version}-cp{version}-{platform_tag(libraries, machine)}"
    files = {f"{BUILT}/{folder.name}/{file.name}": file.read_bytes() for file in libraries}
    wheel = pure.with_name(pure.name.replace("py3-none-any", tag))
    _rewrite(pure, wheel, files, tag)
    return wheel


def platform_tag(libraries: Sequence[Path], machine: str) -> str:
    """Returns the manylinux tag (PEP 600) that these shared libraries may have. Raises Missing if they need libraries beside glibc's."""
    least = GLIBC_MIN
    for library in libraries:
        said = _readelf("--dynamic", "--version-info", str(library))
        if others := set(_NEEDED.findall(said)) - OWN:
            raise Missing(f"{library.name} needs {', '.join(sorted(others))}, which not every Linux has")
        least = max(least, *map(int, _GLIBC.findall(said)), 0)
    return f"manylinux_2_{least}_{machine}"


def _readelf(*arguments: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}
    return subprocess.run(["readelf", "--wide", *arguments], env=environment, check=True, capture_output=True, text=True).stdout


def _rewrite(pure: Path, wheel: Path, files: Mapping[str, bytes], tag: str) -> None:
    """Writes a wheel: the files of the pure wheel without its note, `files`, and the tag. Times are those of the pure wheel."""
    with zipfile.ZipFile(pure) as archive:
        content = {info.filename: archive.read(info) for info in archive.infolist()}
        time = archive.infolist()[0].date_time
    content.pop(f"{BUILT}/{REASON}", None)
    content |= files
    meta = next(name.partition("/")[0] for name in content if name.endswith(".dist-info/WHEEL"))
    purelib = str(tag.endswith("-none-any")).lower()
    described = _TAG.sub("", content[f"{meta}/WHEEL"].decode())
    content[f"{meta}/WHEEL"] = f"{described}Root-Is-Purelib: {purelib}\nTag: {tag}\n".encode()
    del content[f"{meta}/RECORD"]
    names = sorted(content, key=lambda name: (name.startswith(f"{meta}/"), name))
    lines = [f"{name},sha256={_digest(content[name])},{len(content[name])}" for name in names]
    content[f"{meta}/RECORD"] = "".join(f"{line}\n" for line in (*lines, f"{meta}/RECORD,,")).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in (*names, f"{meta}/RECORD"):
            info = zipfile.ZipInfo(name, time)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(info, content[name])


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
