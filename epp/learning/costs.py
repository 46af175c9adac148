"""Defines what the learned latency model says of one request: typed data that the producer passes to the scorer."""

from collections.abc import Sequence
from math import inf
from typing import Final

import numpy as np

from compiled import calls
from compiled.outlook import COSTS, MEMORY, TIMES
from epp.candidates import Candidates, Floats
from epp.data import Datum
from epp.learning.model import LatencyModel
from epp.learning.words import in_words

LEARNED: Final = "learned-latency-producer"
FEW: Final = "too few answers so far"
WORSE: Final = "its predictions are worse than the pool's mean time"


class LearnedCosts:
    """Holds predictions and costs. Arrays: float64, shape (endpoints,), infinite for endpoints that were no candidates.

    `costs`: what a choice minimises; in seconds, or in tokens if the model is not used. `why_not`: FEW or WORSE says why the model is
    not used; "" if it is used. `model`: the model at the decision. `outlook`: from `LatencyModel.outlook` for `candidates`. `waiting`: the
    candidates that compute a prefix of the prompt for another request. `sent`: what the producer keeps from the decision to the request's
    end.
    """

    __slots__ = ("candidates", "costs", "model", "outlook", "sent", "waiting", "why_not")

    def __init__(self, costs: Floats, outlook: Floats, candidates: Candidates, model: LatencyModel, why_not: str) -> None:
        """`costs`: one per candidate."""
        self.outlook = outlook
        self.candidates = candidates
        self.costs = self._widened(costs)
        self.model = model
        self.why_not = why_not
        self.waiting: Sequence[int] = ()
        self.sent: object = None

    @property
    def first_token_s(self) -> Floats:
        """Returns the predicted times to the first token."""
        return self._widened(self.outlook[TIMES])

    def predicted_s(self, row: int) -> float:
        """Returns the predicted time to the first token at the endpoint in this row; infinite if the endpoint was no candidate."""
        index = self.candidates.index_of(row)
        return inf if index < 0 else calls.cell(self.outlook, TIMES, index)

    @property
    def seconds(self) -> Floats:
        """Returns the model's costs, in seconds, even if the choice does not use the model."""
        return self._widened(self.outlook[COSTS])

    @property
    def known(self) -> bool:
        """Returns whether the model has seen enough answers for predictions that mean something."""
        return self.why_not != FEW

    def _widened(self, narrow: Floats) -> Floats:
        """Returns the candidates' values in the shape of the snapshot."""
        rows = self.candidates.rows
        if rows is None:
            return narrow
        wide = np.full(len(self.candidates.snapshot.endpoints), np.inf)
        wide[rows] = narrow
        return wide

    def in_words(self, row: int, slot: int, now: float) -> str:
        """Says what was predicted for the endpoint in this row of the snapshot, and why."""
        unused = f" (not used: {self.why_not})" if self.why_not else ""
        predicted = 1000.0 * float(self.first_token_s[row])
        memory = 1000.0 * float(self._widened(self.outlook[MEMORY])[row])
        waits = f"{memory:.0f} ms until its KV cache has room + " if 0.0 < memory < inf else ""
        return f"first token in {predicted:.0f} ms{unused} = {waits}{in_words(self.model, slot, now)}"


def learned_costs(producer: str) -> Datum[LearnedCosts]:
    """Returns the key of the costs that the named producer emits. An empty name stands for LEARNED."""
    return Datum(f"learned_costs/{producer or LEARNED}", LearnedCosts)
