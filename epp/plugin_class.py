"""What can be told of a foreign plugin class before anything is made of it: that it is one, and can be called as its points are.

Otherwise a misspelt method or a wrong parameter would fail every request, or the start with a stack trace. What this does not do:
run any of the class, or know what its methods return.
"""

import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, Final

import msgspec

from epp.data import Key
from epp.plugin import EXTENSION_POINTS, Plugin

KEYS: Final = ("consumes", "produces", "optional", "keeps")


def fault(cls: object) -> str:
    """What is wrong with it, with what to write instead; nothing is the empty text."""
    points = [point for point in EXTENSION_POINTS if isinstance(cls, type) and issubclass(cls, point)]
    if not (isinstance(cls, type) and issubclass(cls, Plugin) and points):
        return "is no plugin class: inherit an extension point of epp.plugin, for example Scorer"
    if not (isinstance(cls.Params, type) and issubclass(cls.Params, msgspec.Struct)):
        return "has Params that are no msgspec.Struct: write class Params(msgspec.Struct, frozen=True, forbid_unknown_fields=True)"
    for name in KEYS:
        keys = getattr(cls, name)
        if not hasattr(keys, "__get__") and not _are_keys(keys):
            return f"has {name} = {keys!r:.80}: write a tuple of Column or Datum (epp.data), with a comma behind a single one"
    methods = ((name, method) for point in (Plugin, *points) for name, method in vars(point).items())
    wrong = (_method_fault(cls, name, method) for name, method in methods if isinstance(method, FunctionType))
    return next(filter(None, wrong), "")


def _are_keys(found: object) -> bool:
    return isinstance(found, Sequence) and not isinstance(found, str) and all(isinstance(key, Key) for key in found)


def _method_fault(cls: type[Plugin], name: str, declared: FunctionType) -> str:
    """Of one method that an extension point declares."""
    own = inspect.getattr_static(cls, name)
    if own is declared:
        missing = "NotImplementedError" in declared.__code__.co_names  # the others have something to go on with
        return f"has no method {name}{_parameters(declared)}" if missing else ""
    if not isinstance(own, FunctionType):
        return ""  # what it takes shows only when it is called
    if inspect.iscoroutinefunction(own) or inspect.isgeneratorfunction(own) or inspect.isasyncgenfunction(own):
        return f"has a method {name} that is a coroutine or generator: it must give its result when it is called"
    try:
        inspect.signature(own).bind(*inspect.signature(declared).parameters)
    except TypeError:
        return f"has a method {name}{_parameters(own)}: it is called as {name}{_parameters(declared)}"
    return ""


def _parameters(method: Callable[..., Any]) -> str:
    """Their names alone."""
    return f"({', '.join(inspect.signature(method).parameters)})"
