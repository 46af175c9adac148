"""Import kubernetes_asyncio without its generated half: 830 modules of API classes and models, 31 MiB that nothing here uses.

`without_models` stands empty modules in for them while the package imports itself; the session needs its configuration, credentials
and REST client only. Afterwards the stand-ins are gone from `sys.modules`, so that who wants a model imports the real one.
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
    """Has every class that is imported from it, as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(GENERATED) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """It is empty."""


@contextlib.contextmanager
def without_models() -> Iterator[None]:
    """For the first import of kubernetes_asyncio in this process; a later one finds what is there."""
    finder, before = _Finder(), set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.startswith(GENERATED) and name not in before]:
            del sys.modules[name]
