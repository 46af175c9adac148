"""`python -m compiled.build` compiles the request path: the modules of `compiled.modules` with mypyc, and the kernels
(`compiled/kernels/*.c`). The build uses the C compiler with which Python was built.

The result is a folder `compiled/built/<key>`. The key is a hash of the sources (`compiled.finder`), so a build that exists already is not
made again. Object files are cached in .cache/compiled by a hash of their source, so a change in one module recompiles little more than that
module. If the C compiler, the Python headers or mypy is missing, nothing is built and a line says why. Even then the exit code is 0,
because everything works interpreted.

With --abi, --include and --compiler, the command compiles for another machine. The Python there must have the same version as the running
Python, because mypyc writes C for the version that runs it.
"""

import argparse
import contextlib
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from compiled.finder import ABI, BUILT, LIBRARY, REASON, ROOT, SUFFIX, key
from compiled.modules import ENTRY_SOURCE, KERNEL_SOURCES, KERNELS, PATHS

CACHE: Final = ROOT / ".cache" / "compiled"
OBJECTS_MAX: Final = 600
BUILDS_MAX: Final = 4  # older builds that are kept, so that a change to another branch and back builds nothing
# -O2 takes 1.5 times as long, and saves 2.5 % of a request's instructions.
FLAGS: Final = ("-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-fno-strict-overflow", "-DNDEBUG", "-w")
KERNEL_FLAGS: Final = (*FLAGS, "-O3", "-ffp-contract=off")  # a fused multiplication would round differently than NumPy does
MYPY_SETTINGS: Final = "[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n"
PLUGIN_CLASS: Final = re.compile(r"^@(?:plugin\(.*\)|subclassed)\nclass (\w+)", re.MULTILINE)
STRUCT: Final = re.compile(r"^class \w+\(.*\bStruct\b", re.MULTILINE)


class Unbuildable(Exception):
    """Raised if something that the build needs is missing. The text names the missing thing."""


class Target(NamedTuple):
    """The Python for which the modules are compiled.

    `abi`: the binary interface of this Python (SOABI); `compiler`: the command of a C compiler for this Python's machine; `includes`: the
    folders with this Python's headers.
    """

    abi: str
    compiler: Sequence[str]
    includes: Sequence[str]


def native() -> Target:
    """Returns the running Python as the target. Raises Unbuildable if there is no compiler, or no Python.h."""
    includes = [sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    return Target(ABI, compiler(), includes)


def compiler() -> list[str]:
    """Returns the command of the C compiler. Raises Unbuildable if there is none, or no Python.h."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        raise Unbuildable(f"Python's headers are missing ({header}; on Debian: apt install python3-dev)")
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    raise Unbuildable("there is no C compiler (on Debian: apt install gcc)")


def check_mypyc() -> None:
    """Raises Unbuildable if mypyc cannot be imported."""
    try:
        import mypyc.build  # noqa: F401
    except ImportError as error:
        raise Unbuildable(f"the Python module {error.name} is missing (pip install mypy setuptools)") from error


def struct_faults() -> list[str]:
    """Returns an error for each compiled module that defines a msgspec Struct.

    mypyc silently drops the annotations of a Struct, so the Struct would lose all its fields.
    """
    return [
        f"{path} defines a msgspec Struct: move it to a module that is not compiled"
        for path in PATHS
        if STRUCT.search((ROOT / path).read_text())
    ]


def generate(target: Path) -> tuple[list[Path], list[Path], list[str]]:
    """Writes the library's C sources to `target`. Returns their paths, the paths of mypyc's own sources, and the folders with headers."""
    from mypyc.build import include_dir, mypyc_build
    from mypyc.common import RUNTIME_C_FILES
    from mypyc.options import CompilerOptions

    settings = target / "mypy.ini"
    settings.write_text(MYPY_SETTINGS)
    options = CompilerOptions(
        multi_file=True, include_runtime_files=False, target_dir=str(target), group_name=LIBRARY.removesuffix("__mypyc")
    )
    arguments = [f"--config-file={settings}", f"--python-executable={sys.executable}", "--no-incremental", "--no-sqlite-cache", *PATHS]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            _groups, ((files, _headers),), dependencies = mypyc_build(arguments, options)
    except SystemExit:  # mypyc ends the process on errors
        raise SystemExit(said.getvalue()) from None
    runtime = [*RUNTIME_C_FILES, *(dependency.path for dependency in dependencies)]
    folders = [str(target), include_dir(), *(str(Path(include_dir(), f)) for d in dependencies for f in d.include_dirs)]
    own = [Path(include_dir(), file) for file in runtime if file.endswith(".c")]
    return [Path(file) for file in files], own, folders


def admit_subclasses(target: Path) -> None:
    """Lets interpreted classes inherit from compiled plugins.

    mypyc assumes that a class without compiled subclasses has no subclasses at all, so its C sources check the type of an object by
    identity. But plugins and classes marked as `subclassed` may have interpreted subclasses. For them, this function replaces the identity
    checks in the C sources by checks that admit subclasses.
    """
    for path in PATHS:
        names = PLUGIN_CLASS.findall((ROOT / path).read_text())
        if not names:
            continue
        identity = re.compile(rf"Py_TYPE\((\w+)\) == (CPyType_\w+___(?:{'|'.join(names)})\b)")
        for file in target.rglob("*.c"):
            text = file.read_text()
            if changed := identity.sub(r"PyObject_TypeCheck(\1, \2)", text):
                file.write_text(changed)


class Cached:
    """Compiles C files. Caches the objects by the hash of everything that influences them.

    `headers_in`: the folder of headers that are part of the hash.
    """

    def __init__(self, target: Target, folders: Sequence[str], headers_in: Path, flags: Sequence[str] = FLAGS) -> None:
        includes = dict.fromkeys([*folders, *target.includes])
        self._command = [*target.compiler, *flags, *(f"-I{folder}" for folder in includes)]
        self._objects = CACHE / "objects"
        self._objects.mkdir(parents=True, exist_ok=True)
        headers = b"".join(file.read_bytes() for file in sorted(headers_in.rglob("*.h")))
        version = subprocess.run([*target.compiler, "--version"], capture_output=True, text=True, check=True).stdout
        named = "\0".join((*target.compiler, version, *flags, sys.version, _mypy_version(), np.__version__))
        self._base = hashlib.sha256(named.encode() + headers)

    def precompile(self, header: Path) -> None:
        """Reads `header` once for all files that are compiled from now on. These files must include the same headers first."""
        _run([*self._command, "-x", "c-header", str(header), "-o", f"{header}.gch"])
        self._command += ["-include", str(header)]

    def compiled(self, source: Path) -> Path:
        """Returns the object file of a C file, compiled or from the cache. Raises CalledProcessError."""
        digest = self._base.copy()
        digest.update(source.read_bytes())
        found = self._objects / f"{digest.hexdigest()}.o"
        if found.exists():
            found.touch()
            return found
        with tempfile.NamedTemporaryFile(dir=self._objects, suffix=".tmp") as unfinished:
            _run([*self._command, "-c", str(source), "-o", unfinished.name])
            shutil.copyfile(unfinished.name, f"{unfinished.name}.o")
            os.replace(f"{unfinished.name}.o", found)
        return found

    def prune(self) -> None:
        """Keeps the OBJECTS_MAX object files that were used last, and removes all others."""
        oldest_last = sorted(self._objects.glob("*.o"), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in oldest_last[OBJECTS_MAX:]:
            file.unlink(missing_ok=True)


def build(target: Target | None = None, jobs: int | None = None) -> bool:
    """Builds the library, unless a build of these sources exists. Returns whether a build was made. `target`: the Python to build for; None
    means the running Python.

    `jobs`: the number of C files compiled at a time; None means one per CPU. Raises Unbuildable and CalledProcessError.
    """
    folder = BUILT / key(abi=target.abi if target else ABI)
    if folder.is_dir():
        return False
    target = target or native()
    check_mypyc()
    if faults := struct_faults():
        raise SystemExit("\n".join(faults))
    print("compiling the request path: 100 seconds the first time; make skips it with EPP_COMPILED=0", flush=True)
    os.chdir(ROOT)  # module names come from relative paths
    BUILT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        generated = Path(scratch)
        kernels = Cached(target, [np.get_include()], ROOT / "compiled" / "kernels", KERNEL_FLAGS)
        numeric = pool.map(kernels.compiled, [ROOT / path for path in KERNEL_SOURCES])  # while mypyc runs, on one CPU
        sources, runtime, folders = generate(generated)
        admit_subclasses(generated)
        cached = Cached(target, folders, generated)
        objects = list(pool.map(cached.compiled, [*runtime, ROOT / ENTRY_SOURCE]))
        cached.precompile(_first_headers(generated))
        objects += pool.map(cached.compiled, sorted(sources, key=os.path.getsize, reverse=True))
        ready = Path(tempfile.mkdtemp(dir=BUILT, prefix=".unfinished-"))
        for name, files in ((KERNELS, numeric), (LIBRARY, objects)):
            _run([*target.compiler, "-shared", *map(str, files), "-o", str(ready / f"{name}{SUFFIX}")])
        cached.prune()
    ready.chmod(0o755)
    try:
        os.rename(ready, folder)
    except OSError:  # another build has finished first: keep its result
        shutil.rmtree(ready)
    (BUILT / REASON).unlink(missing_ok=True)
    _forget_others(folder)
    return True


def _first_headers(generated: Path) -> Path:
    """Writes a header that includes what each generated source includes first. Returns its path."""
    header, group = generated / "first.h", LIBRARY.removesuffix("__mypyc")
    header.write_text(f'#include "__native_{group}.h"\n#include "__native_internal_{group}.h"\n')
    return header


def _forget_others(kept: Path) -> None:
    folders = [path for path in BUILT.iterdir() if path.is_dir() and path != kept]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[BUILDS_MAX:]:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        print(finished.stderr[-4000:], file=sys.stderr)
        finished.check_returncode()


def _mypy_version() -> str:
    from mypy.version import __version__

    return __version__


def main() -> None:
    """Builds, or prints why nothing can be built."""
    line = argparse.ArgumentParser(prog="python -m compiled.build", description="Compiles the request path.")
    line.add_argument("--abi", help="the SOABI of another Python, such as cpython-313-aarch64-linux-gnu")
    line.add_argument("--include", action="append", help="a folder of that Python's headers")
    line.add_argument("--compiler", help="the command of a C compiler for its machine")
    given = line.parse_args()
    another = [given.abi, given.include, given.compiler]
    if any(another) and not all(another):
        line.error("--abi, --include and --compiler belong together")
    target = Target(given.abi, shlex.split(given.compiler), given.include) if given.abi else None
    began = time.monotonic()
    try:
        done = build(target)
    except Unbuildable as error:
        BUILT.mkdir(exist_ok=True)
        (BUILT / REASON).write_text(str(error))
        print(f"the request path is not compiled: {error}; everything works interpreted", file=sys.stderr)
        return
    if done:
        print(f"compiled the request path in {time.monotonic() - began:.0f} s", flush=True)
        os._exit(0)  # because freeing what mypy has built takes 18 s


if __name__ == "__main__":
    main()
