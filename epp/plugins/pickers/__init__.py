"""Pickers choose targets by the scores of candidates."""

import random
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Scores
from epp.plugin import Picker, Services


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many endpoints are picked.

    max_num_of_endpoints: How many targets to return, best first; 0 or less means 1.
    """

    max_num_of_endpoints: int = 1


class DrawParameters(Parameters, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many endpoints are picked, and among how many candidates.

    top_k: Draw among this many candidates with the highest scores; 0 means among all.
    """

    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0


class CountedPicker(Picker):
    """Base class of pickers that return up to `_count` targets. `_rng`: the random generator of the picker plugin."""

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._count = max(1, params.max_num_of_endpoints)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng


class DrawingPicker(CountedPicker):
    """Base class of pickers that draw among the `_top` candidates with the highest scores, or among all if `_top` is 0."""

    def __init__(self, name: str, params: DrawParameters) -> None:
        super().__init__(name, params)
        self._top = params.top_k


def best(totals: Scores, count: int, tie_break: Scores) -> list[int]:
    """Returns the indices of the `count` highest totals, highest first. Among equal totals, a smaller `tie_break` goes first."""
    order: list[int] = np.lexsort((tie_break, -totals))[:count].tolist()
    return order
