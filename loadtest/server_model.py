"""Defines the interface of the server models: what a model of a server takes and tells, whatever it computes.

    loadtest.engine        shared prefill: each step computes the waiting prompts whole, and all requests of the server wait for it
    loadtest.slots         a fixed number of requests at a time, each with its own prefill; further requests wait for a slot
    loadtest.chunked       steps with a budget of tokens, in which prefills advance by chunks beside the decodes
    loadtest.slowed        any of them, slower from some time on

The owner calls `advance(now)` at `next_due()`, and right before each `submit` and `cancel`. A model reads no clock and draws no random
numbers: equal calls give equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loadtest.engine import Job
from loadtest.kv_pool import KvPool


class ServerModel(Protocol):
    """One simulated server. Times are in seconds of the owner's clock, except those that the model writes into a `Job`."""

    @property
    def pool(self) -> KvPool:
        """Returns its KV cache."""

    @property
    def running(self) -> int:
        """Requests that it works on."""

    @property
    def waiting(self) -> int:
        """Requests in its queue."""

    def submit(self, job: Job, now: float) -> None:
        """Queues a new request."""

    def cancel(self, job: Job, now: float) -> None:
        """Ends a request early. Does nothing if it has ended."""

    def next_due(self) -> float | None:
        """Returns the time at which `advance` will have results; None while the server is idle."""

    def advance(self, now: float) -> list[Job]:
        """Works up to `now`. Returns the requests that have their first token or have ended since, in order.

        A model may return a request with a streamed answer for each further token, too, until `mute`.
        """

    def mute(self, job: Job) -> None:
        """Says that the owner wants no more news of the request until its end."""

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        """Returns the seconds from `now` to the first token of the last one of `sent` if these arrive now, in this order, and no others.

        Changes nothing. Evictions between now and then are not foreseen.
        """
