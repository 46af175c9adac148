"""Defines what the learned latency model says of one request: typed data between its producer and the scorer."""

from typing import Final

from epp.candidates import Floats
from epp.data import Datum

LEARNED: Final = "learned-latency-producer"


class LearnedCosts:
    """Holds predictions and costs. Arrays: float64, shape (endpoints,), infinite for endpoints that were no candidates.

    `first_token_s`: predicted time to the first token. `costs`: what a choice minimises; in seconds, or without a unit if the model is not
    used. `error`: the model's mean relative error. `why_not`: why the model is not used; "" if it is.
    """

    __slots__ = ("costs", "error", "first_token_s", "why_not")

    def __init__(self, costs: Floats, first_token_s: Floats, error: float, why_not: str) -> None:
        self.costs = costs
        self.first_token_s = first_token_s
        self.error = error
        self.why_not = why_not


def learned_costs(producer: str) -> Datum[LearnedCosts]:
    """Returns the key of the costs that the named producer emits. An empty name stands for LEARNED."""
    return Datum(f"learned_costs/{producer or LEARNED}", LearnedCosts)
