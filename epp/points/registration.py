"""Defines the `@plugin` decorator and the registry of plugin types."""

from collections.abc import Callable
from typing import Final, TypeVar

from epp.points.base import Plugin

P = TypeVar("P", bound=type[Plugin])
REGISTERED: dict[str, type[Plugin]] = {}
# type -> the module that defines it, imported or not; `epp.config.registry` reads this from the sources
BUILT_IN: dict[str, str] = {}
OWN_PACKAGE: Final = "epp.plugins."


def plugin(type_name: str, *aliases: str) -> Callable[[P], P]:
    """Registers a plugin class under the type name that configurations use, and under other names (`aliases`).

    Raises ValueError if a name is not printable text, or is registered for another class.
    """

    def register(cls: P) -> P:
        for name in (type_name, *aliases):
            if not (isinstance(name, str) and name.isprintable() and name == name.strip() != ""):
                raise ValueError(f"plugin type {name!r}: a type's name must be printable text, without spaces around it")
            other = REGISTERED.get(name, cls)
            own_module = BUILT_IN.get(name, other.__module__)
            if (own_module, other.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"plugin type '{name}' is registered by {own_module} and by {cls.__module__}")
            REGISTERED[name] = cls
        cls.type_name = type_name
        cls.aliases = aliases
        return cls

    return register


def foreign(cls: type[Plugin]) -> bool:
    """Returns whether a plugin class is foreign: not shipped with the picker."""
    return not cls.__module__.startswith(OWN_PACKAGE)
