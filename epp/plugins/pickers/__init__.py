"""Pickers: scores -> targets."""

import random
from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Scores
from epp.plugin import Picker, Services


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many targets to name, best first; 0 and less count as 1."""

    max_num_of_endpoints: int = 1


class DrawParameters(Parameters, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`top_k`: draw among the K best only; 0 means among all."""

    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0


class CountedPicker(Picker):
    """Names up to `_count` targets, and draws by `_rng`."""

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._count = max(1, params.max_num_of_endpoints)
        self._rng: random.Random

    def start(self, services: Services) -> None:
        self._rng = services.rng


class DrawingPicker(CountedPicker):
    """Draws among the `_top` best; 0: among all."""

    def __init__(self, name: str, params: DrawParameters) -> None:
        super().__init__(name, params)
        self._top = params.top_k


def best(totals: Scores, count: int, tie_break: Scores) -> list[int]:
    """Indices of the `count` best, ties in the order of `tie_break`."""
    order: list[int] = np.lexsort((tie_break, -totals))[:count].tolist()
    return order
