"""Pickers: scores -> targets."""

from typing import Annotated

import msgspec
import numpy as np

from epp.candidates import Scores


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many targets to name, best first; 0 and less count as 1."""

    max_num_of_endpoints: int = 1


class DrawParameters(Parameters, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`top_k`: draw among the K best only; 0 means among all."""

    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0


def best(totals: Scores, count: int, tie_break: Scores) -> list[int]:
    """Indices of the `count` best, ties in the order of `tie_break`."""
    order: list[int] = np.lexsort((tie_break, -totals))[:count].tolist()
    return order
