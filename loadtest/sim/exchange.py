"""Defines the records for a model request that a simulated server works on, and for the client connection that waits for the answer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from loadtest.sim.api import Shape
from loadtest.sim.engine import Job


class Client(Protocol):
    """The part of a client connection that the server uses."""

    def send_whole(self, exchange: SimExchange) -> None:
        """Sends the answer of an unstreamed request that the engine has finished."""

    def send_token(self, exchange: SimExchange) -> None:
        """Sends the next token of a streamed request."""

    def abort(self) -> None:
        """Ends the connection at once, even during a request."""


class SimExchange:
    """A model request, from the engine's queue to the last byte of its answer."""

    __slots__ = ("connection", "cut_after", "delayed", "echo", "job", "prefill_cached", "sent", "shape")

    def __init__(self, connection: Client, shape: Shape, job: Job, echo: bytes) -> None:
        self.connection = connection
        self.shape = shape
        self.job = job
        self.echo = echo
        self.sent = 0
        self.cut_after: int | None = None
        self.delayed: asyncio.TimerHandle | asyncio.Task[None] | None = None  # the timer or task that submits it later
        self.prefill_cached: int | None = None

    @property
    def cached(self) -> int:
        """Returns the number of prompt tokens that were cached on the server that computed the prompt."""
        return self.job.cached_tokens if self.prefill_cached is None else self.prefill_cached
