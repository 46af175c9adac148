"""A server that, from some time on, works more slowly than its model: the model's clock then runs more slowly than the owner's clock.

All work takes `factor` times as long: prefill, decode, and also work that had begun before. Times that the model writes into a `Job` are
times of the model's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import KvPool
from loadtest.sim.server_model import ServerModel

ROUNDING_S = 1e-9  # differences of the two clocks that come from rounding


class SlowedServer:
    """A `ServerModel` that slows another model down."""

    def __init__(self, model: ServerModel, factor: float = 1.0) -> None:
        self._model = model
        self._factor = factor
        self._since = self._model_since = 0.0  # the last change of the factor, on the owner's and on the model's clock

    def slow(self, factor: float, now: float) -> None:
        """Slows the model down: from `now` on, all work takes `factor` times as long as in the model. Call `advance(now)` first."""
        self._model_since = self._inner(now)
        self._since = now
        self._factor = factor

    @property
    def pool(self) -> KvPool:
        return self._model.pool

    @property
    def running(self) -> int:
        return self._model.running

    @property
    def waiting(self) -> int:
        return self._model.waiting

    def submit(self, job: Job, now: float) -> None:
        self._model.submit(job, self._inner(now))

    def cancel(self, job: Job, now: float) -> None:
        self._model.cancel(job, self._inner(now))

    def next_due(self) -> float | None:
        due = self._model.next_due()
        return None if due is None else self._since + (due - self._model_since) * self._factor

    def advance(self, now: float) -> list[Job]:
        return self._model.advance(self._inner(now))

    def mute(self, job: Job) -> None:
        self._model.mute(job)

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        return self._model.first_token_in(sent, self._inner(now)) * self._factor

    def beyond_half_s(self, now: float) -> float:
        return self._model.beyond_half_s(self._inner(now)) * self._factor

    def _inner(self, now: float) -> float:
        """Returns the time of the model's clock at `now`. If the model has results due at `now`, returns exactly their time."""
        inner = self._model_since + (now - self._since) / self._factor
        due = self._model.next_due()
        return due if due is not None and abs(due - inner) < ROUNDING_S else inner
