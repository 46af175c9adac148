"""Defines N pickers that share nothing: a request goes to a random one, as through a load balancer.

Each picker has its own workers, its own prefix index, and counts only its own requests in flight. All scrape the same servers.
"""

import random
from collections.abc import Sequence

from loadtest.sim.engine import Job
from loadtest.sim.kv_pool import Change
from loadtest.sim.server_model import ServerModel
from tests.bench.routing_fleet import Call
from tests.bench.routing_policies import Picked

REPLICAS = 3


class Replicas:
    """Implements `Policy` over several pickers. The picker of a request follows from seed and request, whatever the configuration."""

    def __init__(self, text: str, seed: int, count: int = REPLICAS) -> None:
        self._pickers = [Picked(text, seed * count + replica) for replica in range(count)]
        self._rng = random.Random(f"{seed}/replicas")
        self._of: dict[int, Picked] = {}  # id of a call -> its picker

    def choose(self, call: Call, now: float) -> int:
        picker = self._of[call.id] = self._rng.choice(self._pickers)
        return picker.choose(call, now)

    def first_token(self, call: Call, now: float) -> None:
        self._of[call.id].first_token(call, now)

    def ended(self, call: Call, now: float) -> None:
        self._of.pop(call.id).ended(call, now)

    def failed(self, call: Call, now: float) -> None:
        self._of.pop(call.id).failed(call, now)

    def scraped(self, server: int, model: ServerModel, now: float) -> None:
        for picker in self._pickers:
            picker.scraped(server, model, now)

    def refused(self, server: int, now: float) -> None:
        for picker in self._pickers:
            picker.refused(server, now)

    def members(self, servers: Sequence[int]) -> None:
        for picker in self._pickers:
            picker.members(servers)

    def changed(self, server: int, job: Job, changes: Sequence[Change], now: float) -> None:
        for picker in self._pickers:
            picker.changed(server, job, changes, now)

    def passed(self, now: float) -> None:
        for picker in self._pickers:
            picker.passed(now)
