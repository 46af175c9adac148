"""Defines what the learned latency model says of one request: typed data between its producer and the scorer."""

from typing import Final

from epp.candidates import Floats
from epp.data import Datum
from epp.learning.model import LatencyModel
from epp.learning.words import in_words

LEARNED: Final = "learned-latency-producer"


class LearnedCosts:
    """Holds predictions and costs. Arrays: float64, shape (endpoints,), infinite for endpoints that were no candidates.

    `first_token_s`: predicted time to the first token. `costs`: what a choice minimises; in seconds, or without a unit if the model is not
    used. `why_not`: why the model is not used; "" if it is. `model`: the model at that time.
    """

    __slots__ = ("costs", "first_token_s", "model", "why_not")

    def __init__(self, costs: Floats, first_token_s: Floats, model: LatencyModel, why_not: str) -> None:
        self.costs = costs
        self.first_token_s = first_token_s
        self.model = model
        self.why_not = why_not

    def in_words(self, row: int, slot: int, now: float) -> str:
        """Says what was predicted for the endpoint in this row of the snapshot, and why."""
        unused = f" (not used: {self.why_not})" if self.why_not else ""
        predicted = 1000.0 * float(self.first_token_s[row])
        return f"first token in {predicted:.0f} ms{unused} = {in_words(self.model, slot, now)}"


def learned_costs(producer: str) -> Datum[LearnedCosts]:
    """Returns the key of the costs that the named producer emits. An empty name stands for LEARNED."""
    return Datum(f"learned_costs/{producer or LEARNED}", LearnedCosts)
