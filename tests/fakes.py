"""Fakes of the objects that `workers` passes to `epp`, beside those of `epp.testing`: predictions, held blocks, services, pools."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from compiled.outlook import COSTS, MEMORY, TIMES
from epp import testing
from epp.candidates import Candidates, EndpointList
from epp.data import WAITING
from epp.errors import ProducerFailed
from epp.learning.costs import LearnedCosts
from epp.learning.model import LatencyModel
from epp.plugin import DataProducer, Hashes, HeldView, Measure, Profile
from epp.request import Subset
from epp.testing import FakeCall, FakeWaiting, candidates, endpoints, request, snapshot
from shm.prefills import local_prefills

__all__ = ["FakeCall", "FakePool", "FakeServices", "FakeWaiting", "candidates", "endpoints", "request", "snapshot"]


def predictions(
    first_s: Sequence[float], *, costs: Sequence[float] | None = None, model: LatencyModel | None = None, why_not: str = ""
) -> LearnedCosts:
    """Makes predicted times to the first token, one per endpoint, with these costs in seconds (the same, if None)."""
    outlook = np.zeros((MEMORY + 1, len(first_s)))
    outlook[TIMES], outlook[COSTS] = first_s, first_s if costs is None else costs
    pool = candidates({WAITING.name: [0.0] * len(first_s)})
    return LearnedCosts(outlook[COSTS], outlook, pool, model or LatencyModel(), why_not)


class FakeHeld:
    """An `epp.plugin.HeldBlocks`. Tests set `view_` (None: no endpoint is precise) and `by_row`: row -> keys of its blocks."""

    def __init__(self) -> None:
        self.view_: HeldView | None = None
        self.by_row: dict[int, dict[int, int]] = {}  # row -> key -> weight in thousandths
        self.expected: list[tuple[list[int], int, int]] = []

    def view(self, endpoint_list: EndpointList, now: float) -> HeldView:
        size = len(endpoint_list.endpoints)
        none = np.zeros(size, dtype=bool)
        return self.view_ or HeldView((), none, none, (0,) * size, ("not followed",) * size, frozenset())

    def match(self, view: HeldView, hashes: Hashes, block_tokens: int) -> tuple[list[int], list[int]]:
        blocks, weighted = [], []
        for row, size in enumerate(view.block_tokens):
            held = self.by_row.get(row, {}) if size == block_tokens and view.followed[row] else {}
            weights = list(itertools.takewhile(bool, (held.get(key, 0) for key in hashes.tolist())))
            blocks.append(len(weights))
            weighted.append(sum(weights))
        return blocks, weighted

    def measure(self, latency: Measure) -> None:
        """Does nothing, because tests do not read the latency."""

    def expect(self, hashes: Hashes, owner: int, block_tokens: int) -> None:
        self.expected.append((hashes.tolist(), owner, block_tokens))


class FakeServices(testing.FakeServices):
    """An `epp.plugin.Services` with KV events and prefills, too."""

    held_blocks: FakeHeld

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.held_blocks = FakeHeld()
        self.prefills = local_prefills()


class FakePool:
    """An `epp.decision.decide.EndpointPool` over fixed candidates."""

    def __init__(self, fixed: Candidates) -> None:
        self.fixed = fixed
        self.time = 0.0
        self.failures: list[tuple[str, str]] = []
        self.scorer_failures: list[Exception] = []
        self.shadow_failures: list[Exception] = []

    trials: Mapping[int, int] = {}

    def candidates(self, subset: Subset | None) -> Candidates:
        if subset is None:
            return self.fixed
        allowed = set(subset.entries)
        return self.fixed.keep(np.array([e.address in allowed or e.host in allowed for e in self.fixed.endpoints], dtype=bool))

    def reloaded(self, candidates: Candidates) -> Candidates:
        return self.fixed if candidates.rows is None else candidates

    def now(self) -> float:
        return self.time

    def scorer_failed(self, problem: Exception) -> None:
        self.scorer_failures.append(problem)

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        self.shadow_failures.append(problem)

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        self.failures.append((producer.name, str(failure)))
