"""The latency model of several workers in virtual time, with the delays of the picker.

A sample reaches the model after LEARN_S, when the worker has sent its frame. Workers see the model of the last multiple of PUBLISH_S, and
so does the model see the batches and queues of the last scrapes.
"""

from collections import deque
from collections.abc import Callable, Sequence

from epp.learning import state
from epp.learning.local import LocalLearning
from epp.learning.model import FirstToken, LatencyModel
from workers.supervisor.latency_keeper import PUBLISH_S
from workers.worker.plugin_handles import FLUSH_S

LEARN_S = FLUSH_S


class SharedLearning(LocalLearning):
    """Implements `epp.plugin.Learning` for all workers of a picker, which share one row of prompt starts."""

    def __init__(self) -> None:
        super().__init__()
        self._published = LatencyModel()
        self._changes = self._model.changes
        self._due = PUBLISH_S
        self._now = 0.0
        self._samples: deque[tuple[float, Callable[[], object]]] = deque()
        self._scraped: dict[int, tuple[float, float, float]] = {}  # slot -> running, waiting, KV usage, since the last look

    def model(self) -> LatencyModel:
        return self._published

    def learn_first(self, seen: FirstToken) -> None:
        self._samples.append((self._now + LEARN_S, lambda: self._model.learn_first(seen)))

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        self._samples.append((self._now + LEARN_S, lambda: self._model.learn_token(slot, generation, load, observed, lasted)))

    def scraped(self, slot: int, running: float, waiting: float, usage: float) -> None:
        """Takes the batch, the queue and the KV usage of an endpoint."""
        if running > 0.0:
            self._scraped[slot] = (running, waiting, usage)

    def listed(self, slots: Sequence[int]) -> None:
        """Forgets the endpoints that are no longer listed."""
        for slot in [slot for slot in self._model.endpoints if slot not in slots]:
            self._model.forget(slot)

    def passed(self, now: float) -> None:
        """Learns the samples that have arrived, and publishes the model when it is time."""
        self._now = now
        while self._samples and self._samples[0][0] <= now:
            self._samples.popleft()[1]()
        if now < self._due:
            return
        self._due = now - now % PUBLISH_S + PUBLISH_S
        for slot, found in self._scraped.items():
            self._model.scraped(slot, 0, *found)
        self._scraped.clear()
        if self._model.changes != self._changes:
            self._changes = self._model.changes
            self._published = state.decode(state.encode(self._model))
