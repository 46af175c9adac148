"""Imports kubernetes_asyncio without its generated part: 830 modules of API classes and models, 31 MiB that this project never uses.

`without_models` replaces these modules by empty ones while the package is imported. The session needs only the package's configuration,
credentials and REST client. Afterwards the empty modules leave `sys.modules`, so that a later import of a model gets the real one.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

GENERATED: Final = ("kubernetes_asyncio.client.models.", "kubernetes_asyncio.client.api.")


class _Empty(ModuleType):
    """A module in which every name is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(GENERATED) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing, because the module is empty."""


@contextlib.contextmanager
def without_models() -> Iterator[None]:
    """Keeps the generated modules empty for the first import of kubernetes_asyncio in this process. Later imports are unaffected."""
    finder, before = _Finder(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(GENERATED) and name not in before]:
            del sys.modules[name]
