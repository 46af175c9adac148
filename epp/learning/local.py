"""Learning inside one process: for tests, benchmarks, and pickers without shared memory."""

import numpy as np

from compiled import calls
from compiled.outlook import CELLS, PROMPTS, START
from epp.learning.model import FirstToken, Floats, LatencyModel


class LocalLearning:
    """Implements `epp.plugin.Learning` with a model of its own. Every observation changes the model at once."""

    def __init__(self) -> None:
        self._model = LatencyModel()
        self._starts = np.zeros((1, CELLS, 64))

    def model(self) -> LatencyModel:
        return self._model

    def starts(self) -> Floats:
        return self._starts

    def begins(self, slot: int, now: float) -> None:
        self._reach(slot)
        self._starts[0, START, slot] = max(now, self._starts[0, START, slot])

    def follows(self, slot: int, tokens: float) -> None:
        self._reach(slot)
        calls.follow(self._starts, 0, slot, tokens)

    def counts(self, slot: int, prompts: int) -> None:
        self._reach(slot)
        self._starts[0, PROMPTS, slot] += prompts

    def _reach(self, slot: int) -> None:
        missing = slot + 1 - self._starts.shape[2]
        if missing > 0:
            self._starts = np.pad(self._starts, ((0, 0), (0, 0), (0, missing)))

    def learn_first(self, seen: FirstToken) -> None:
        self._model.learn_first(seen)

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        self._model.learn_token(slot, generation, load, observed, lasted)
