"""What a micro-benchmark is made of."""

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """One call to be timed. `each`: how many things the call does; the figure is per thing. `target`: microseconds, 0 for none."""

    name: str
    run: Callable[[], object]
    target: float = 0.0
    each: int = 1
