"""Defines the type of a micro-benchmark."""

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """A call to time. `each`: the number of operations in one call; the figure is per operation.

    `target`: the limit of the figure in microseconds; 0: it has none.
    """

    name: str
    run: Callable[[], object]
    target: float = 0.0
    each: int = 1
