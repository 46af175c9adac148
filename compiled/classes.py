"""Marks the classes of compiled modules from which interpreted classes may inherit."""

from typing import TypeVar

C = TypeVar("C", bound=type)


def subclassed(cls: C) -> C:
    """Marks a class that stays a plain Python class with compiled methods, as every plugin does.

    mypyc makes native classes, from which interpreted classes cannot inherit. But a class with any decorator, such as this one, stays
    plain.
    """
    return cls
