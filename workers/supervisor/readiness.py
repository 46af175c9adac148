"""Decides whether this picker is ready: whether gateways may send requests to it. If not, the page /readyz gives the reason.

A picker is ready if it is not stopping, every condition holds, endpoints are known, and at least one worker serves. Components add
conditions with `require`. For example, with leader election only the leader is ready.
"""

import time
from collections.abc import Callable

from shm.areas import Area
from workers.process.instance import Instance
from workers.process.layout import LOADED

WORKER_HEARTBEAT_MAX_S = 1.0  # a worker with an older heartbeat is ignored


class Readiness:
    """Decides whether one picker is ready. `orphaned`: whether the parent process is gone; the supervisor sets it."""

    def __init__(self, instance: Instance, area: Area) -> None:
        """`area`: the area of the supervisor."""
        self._instance = instance
        self._scalars = area.scalars
        self._loaded_at = area.schema.scalar[LOADED]
        self._conditions: list[Callable[[], str]] = []
        self.orphaned = False

    @property
    def loaded(self) -> bool:
        """Whether endpoints are known. Workers also read this value in shared memory."""
        return bool(self._scalars[self._loaded_at])

    @loaded.setter
    def loaded(self, loaded: bool) -> None:
        self._scalars[self._loaded_at] = int(loaded)

    @property
    def leaving(self) -> bool:
        """Whether the whole picker ends. A supervisor that ends alone has a successor."""
        return self.orphaned or self._instance.words.stopping

    def require(self, condition: Callable[[], str]) -> None:
        """Adds a condition: a function that returns the reason why the condition fails, or "" if it holds."""
        self._conditions.append(condition)

    def ready(self) -> bool:
        """Returns whether the picker is ready."""
        return not self.missing()

    def missing(self) -> str:
        """Returns the first reason why the picker is not ready, or ""."""
        if self.leaving:
            return "stopping"
        if reason := next(filter(None, (condition() for condition in self._conditions)), ""):
            return reason
        if not self.loaded:
            return "no endpoints were loaded yet"
        areas = self._instance.memory.areas
        ages = areas.ages(time.monotonic())
        if any(areas.serving(ordinal) and ages[ordinal] < WORKER_HEARTBEAT_MAX_S for ordinal in range(1, len(ages))):
            return ""
        return "no worker serves"
