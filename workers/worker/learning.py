"""What a worker's plugins know of latencies: they predict with the model that the supervisor publishes, and send it what they observe."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from compiled.calls import raise_to
from epp.learning import samples
from epp.learning.model import FirstToken, Floats, LatencyModel
from epp.learning.state import UnusableModel, decode
from shm.documents import DocumentReader
from shm.prefills import PromptStarts

FLUSH_S: Final = 0.02  # how long a sample waits for others
BATCH: Final = 32

assert BATCH <= samples.SAMPLES_MAX


class SharedLearning:
    """Implements `epp.plugin.Learning` over shared memory. Needs a running event loop for `learn_first` and `learn_token`."""

    def __init__(self, published: DocumentReader, starts: PromptStarts, send: Callable[[bytes], object], pool: int = 0) -> None:
        """`published`: has the model of each pool as a document. `send`: passes a frame on to the supervisor, without waiting."""
        self._published = published
        self._pool = pool
        self._words, self._at = published.version_word(pool)
        self._starts = starts
        self._send = send
        self._version = 0
        self._model = LatencyModel()
        self._pending: list[bytes] = []

    def model(self) -> LatencyModel:
        version = self._words[self._at]
        if version != self._version:
            self._version = version
            found = self._published.read(self._pool)
            if found is not None:
                with contextlib.suppress(UnusableModel):  # of another version: keep the last one
                    self._model = decode(found[1])
        return self._model

    def starts(self) -> Floats:
        return self._starts.rows

    def begins(self, slot: int, now: float) -> None:
        raise_to(self._starts.own, slot, now)

    def learn_first(self, seen: FirstToken) -> None:
        self._learn(samples.first_token(seen))

    def learn_token(self, slot: int, generation: int, load: float, observed: float, lasted: float) -> None:
        self._learn(samples.per_token(slot, generation, load, observed, lasted))

    def flush(self) -> None:
        """Sends the samples that wait."""
        pending, self._pending = self._pending, []
        if pending:
            self._send(samples.frame(pending))

    def _learn(self, sample: bytes) -> None:
        pending = self._pending
        pending.append(sample)
        if len(pending) >= BATCH:
            self.flush()
        elif len(pending) == 1:
            asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
