"""Imports compiled modules in place of their source, if they were built from exactly this source.

`choose` runs once per process, when the first package of ours is imported. The name of a build's folder is a hash of the sources of all
compiled modules, the binary interface of this Python, and the builder's version. So after a change of a source, the older build is not
found, and everything runs interpreted. With EPP_COMPILED=0 in the environment, everything runs interpreted even if there is a build; with
1, the process refuses to run interpreted.
"""

import ast
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple

from compiled.modules import ENTRY, KERNELS, PATHS, SOURCES

ROOT: Final = Path(__file__).parent.parent
BUILT: Final = Path(__file__).parent / "built"
# The binary interface of this Python. `sysconfig` knows this suffix, too, but takes more memory.
ABI: Final = importlib.machinery.EXTENSION_SUFFIXES[0].removeprefix(".").removesuffix(".so")
VARIABLE: Final = "EPP_COMPILED"
LIBRARY: Final = "epp_request_path__mypyc"  # the library with the code of all modules
BUILDER: Final = "7"  # raise it when `compiled.build` changes what it makes from the same source
SUFFIX: Final = ".so"
REASON: Final = "not-built.txt"  # a file in BUILT that says why there is no build


class Mode(NamedTuple):
    """Says whether the request path is compiled. `reason`: why it is not compiled; empty if it is."""

    compiled: bool
    reason: str

    def __str__(self) -> str:
        return "compiled" if self.compiled else f"interpreted ({self.reason})"


class NotCompiled(SystemExit):
    """Ends the process with this exception's text: EPP_COMPILED is 1 without a build of these sources, or has an unknown value."""


class LibraryLoader(importlib.machinery.ExtensionFileLoader):
    """Loads the library that has the code of all compiled modules.

    Sets the library's `__file__` to a path beside the packages, because the modules derive their own `__file__` from this path.
    """

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__file__ = str(ROOT / f"{LIBRARY}{SUFFIX}")


class ModuleLoader(importlib.abc.Loader):
    """Loads a compiled module from the library."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Returns the module. Its code has run when this returns."""
        library, entry = importlib.import_module(LIBRARY), importlib.import_module(ENTRY)
        module: ModuleType = entry.made(getattr(library, f"init_{spec.name.replace('.', '___')}"))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the module's code has run."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds the compiled modules in the folder of one build."""

    def __init__(self, folder: Path) -> None:
        library, kernels = str(folder / f"{LIBRARY}{SUFFIX}"), str(folder / f"{KERNELS}{SUFFIX}")
        self._loaders: Mapping[str, importlib.abc.Loader] = {
            **dict.fromkeys(map(module_name, PATHS), ModuleLoader()),
            LIBRARY: LibraryLoader(LIBRARY, library),
            ENTRY: importlib.machinery.ExtensionFileLoader(ENTRY, library),
            KERNELS: importlib.machinery.ExtensionFileLoader(KERNELS, kernels),
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        loader = self._loaders.get(fullname)
        return None if loader is None else importlib.util.spec_from_loader(fullname, loader)


def module_name(path: str) -> str:
    """Returns the name of the module in a file. `path`: relative to the root."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def source(module: str) -> str | None:
    """Returns the path of a module's Python source, whether the module runs compiled or not.

    Returns None for a module that is neither in the list of compiled modules nor imported from a file.
    """
    return _SOURCES.get(module) or getattr(sys.modules.get(module), "__file__", None)


def docstring(cls: type) -> str:
    """Returns the docstring of a class. Reads the source of a compiled class, because such a class has no docstring at run time."""
    if cls.__module__ not in _SOURCES or not choose().compiled:
        return inspect.cleandoc(cls.__doc__ or "")
    for node in ast.parse(Path(_SOURCES[cls.__module__]).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            return ast.get_docstring(node) or ""
    return ""


def key(root: Path = ROOT, abi: str = ABI) -> str:
    """Returns the name of the folder that a build of the sources in `root` has, for a Python with this binary interface."""
    digest = hashlib.sha256()
    for part in (f".{abi}.so", BUILDER):
        digest.update(f"{part}\0".encode())
    for path in SOURCES:
        content = (root / path).read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def decided(wanted: str | None, built: Path = BUILT, root: Path = ROOT) -> tuple[Mode, Path]:
    """Decides whether to import compiled modules. Returns the mode, and the folder of the build, whether the build exists or not. Raises
    NotCompiled.

    `wanted`: the value of EPP_COMPILED; None if it is not set.
    """
    folder = built / key(root)
    if wanted not in (None, "", "0", "1"):
        raise NotCompiled(f"{VARIABLE}={wanted}: write 0 (interpreted), 1 (compiled, or refuse to start), or leave it out")
    if wanted == "0":
        return Mode(False, f"{VARIABLE}=0"), folder
    if (folder / f"{LIBRARY}{SUFFIX}").exists():
        return Mode(True, ""), folder
    reason = _missing(built)
    if wanted == "1":
        raise NotCompiled(f"{VARIABLE}=1, but the request path is not compiled ({reason}): run python -m compiled.build")
    return Mode(False, reason), folder


def _missing(built: Path) -> str:
    """Returns why there is no build of the present source."""
    if not built.is_dir():
        return "it was never built"
    if (note := built / REASON).exists():
        return note.read_text()
    return "the source changed since it was built"


_SOURCES: Final[Mapping[str, str]] = {module_name(path): str(ROOT / path) for path in PATHS}


@functools.cache
def choose() -> Mode:
    """Decides once for this process, and makes the compiled modules importable if there are any. Raises NotCompiled."""
    mode, folder = decided(os.environ.get(VARIABLE))
    if mode.compiled:
        sys.meta_path.insert(0, Finder(folder))
    return mode
