"""Learning inside one process: for tests, benchmarks, and pickers without shared memory."""

from collections.abc import Sequence

from epp.learning.model import FirstToken, LatencyModel


class LocalLearning:
    """Implements `epp.plugin.Learning` with a model of its own. Every observation changes the model at once."""

    def __init__(self) -> None:
        self._model = LatencyModel()
        self._begun: dict[int, float] = {}

    def model(self) -> LatencyModel:
        return self._model

    def begun(self, slots: Sequence[int]) -> list[float]:
        return [self._begun.get(slot, 0.0) for slot in slots]

    def begins(self, slot: int, now: float) -> None:
        self._begun[slot] = max(now, self._begun.get(slot, 0.0))

    def learn_first(self, seen: FirstToken) -> None:
        self._model.learn_first(seen)

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        self._model.learn_token(slot, generation, load, observed, lasted)
