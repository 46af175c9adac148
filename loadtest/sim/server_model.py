"""Defines the interface that all models of a server have.

    loadtest.sim.engine        shared prefill: a step computes whole waiting prompts, and all requests of the server wait for its end
    loadtest.sim.slots         a fixed number of requests at a time, each with its own prefill; further requests wait for a slot
    loadtest.sim.chunked       steps with a budget of tokens, in which prefills advance by chunks beside the decodes
    loadtest.sim.slowed        any other model, slower from some time on

The owner calls `advance(now)` at `next_due()`, and right before each `submit` and `cancel`. A model reads no clock and draws no random
numbers: equal calls give equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import KvPool


class ServerModel(Protocol):
    """One simulated server. Times are in seconds of the owner's clock, except the times that the model writes into a `Job`."""

    @property
    def pool(self) -> KvPool:
        """Returns the server's KV cache."""

    @property
    def running(self) -> int:
        """Returns the number of requests on which the server works."""

    @property
    def waiting(self) -> int:
        """Returns the number of requests in the queue."""

    def submit(self, job: Job, now: float) -> None:
        """Queues a new request."""

    def cancel(self, job: Job, now: float) -> None:
        """Ends a request early. Does nothing if the request has ended."""

    def next_due(self) -> float | None:
        """Returns the time at which `advance` will have results; None while the server is idle."""

    def advance(self, now: float) -> list[Job]:
        """Works up to `now`. Returns the requests that got their first token or ended since the last call, in order.

        A model may also return a request with a streamed answer once per further token, until `mute` is called for it.
        """

    def mute(self, job: Job) -> None:
        """Makes `advance` return the request only once more, when it ends."""

    def first_token_in(self, sent: Sequence[Job], now: float) -> float:
        """Predicts the first token of the last request of `sent`, if these requests, and no others, arrive now in this order.

        Returns the seconds from `now`. Changes nothing. Does not foresee evictions until then.
        """

    def beyond_half_s(self, now: float) -> float:
        """Returns how many seconds more than half of the present step are left; below 0 if less than half is left.

        Returns 0 if no step is under way, or if it computes prompts.
        """
