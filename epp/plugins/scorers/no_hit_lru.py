"""Spreads requests without a cache hit: each goes to the endpoint that got such a request longest ago, so that caches grow evenly.

Each worker keeps its own order of use for its own decisions. The order has at most `lruSize` endpoints, by namespace and name, and forgets
the least recently used endpoint first. An endpoint that has left keeps its place in the order until it is forgotten, but does not affect
the scores of candidates.
"""

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, EndpointList, Floats, Scores
from epp.data import Datum
from epp.decision.decision import Decision, ProfileRun
from epp.plugin import Plugin, PreRequest, Profile, Scorer, plugin
from epp.prefix.match import APPROXIMATE, FollowsMatches, prefix_match
from epp.request import Request

LRU_SIZE = 1024
NEUTRAL = 0.5
NEVER = 0.0


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """How many endpoints are remembered, and which producer is read.

    lru_size: How many endpoints are remembered; 0 or less means the default.
    prefix_match_info_producer_name: The producer of the prefix matches to read.
    prefix_plugin_type: Accepted, without effect: `prefix_match_info_producer_name` names the producer of the matches.
    prefix_plugin_name: Accepted, without effect: `prefix_match_info_producer_name` names the producer of the matches.
    """

    lru_size: int = LRU_SIZE
    prefix_match_info_producer_name: str = ""
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""


@plugin("no-hit-lru-scorer")
class NoHitLru(FollowsMatches, Scorer, PreRequest):
    """Spreads requests without a prefix-cache hit: the endpoint that got such a request least recently scores highest.

    If a candidate holds blocks of the prompt, all score 0.5. Otherwise the score is 1 - rank / (n - 1), for rank 0 to n - 1: endpoints
    that were never used come first, in candidate order, then the others from least to most recently used. A single candidate scores 1. If
    the request had no hit at its last scoring, the target of the prefill profile and the primary target are now recorded as used.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._cold: Datum[dict[str, bool]] = Datum(f"no_hit_lru_cold/{name}", dict)
        self.consumes = (self._match,)
        self.keeps = (self._cold,)
        self._size = params.lru_size if params.lru_size > 0 else LRU_SIZE
        self._used: dict[tuple[str, str], float] = {}  # endpoint -> time of its last use, the oldest time first
        self._now = NEVER
        self._endpoint_list = EndpointList(())
        self._rows: dict[tuple[str, str], int] = {}
        self._used_at: Floats = np.zeros(0)  # times of last use, by row of the endpoint list
        self._ladder: Floats = np.ones(1)  # the scores of n candidates, least recently used first

    def take_over(self, predecessor: Plugin) -> None:
        if isinstance(predecessor, type(self)):
            self._used, self._now = dict(predecessor._used), predecessor._now

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        match = request[self._match]
        cold = match is None or match.cached is None or not candidates.narrow(match.cached).any()
        by_profile = request[self._cold]
        if by_profile is None:
            request[self._cold] = by_profile = {}
        by_profile[profile.name] = cold
        if not cold:
            return np.full(len(candidates), NEUTRAL)
        if candidates.snapshot.endpoint_list is not self._endpoint_list:
            self._follow(candidates.snapshot.endpoint_list)
        size = len(candidates)
        if size != len(self._ladder):
            self._ladder = np.linspace(1.0, 0.0, size) if size > 1 else np.ones(1)
        scores = np.empty(size)
        scores[candidates.narrow(self._used_at).argsort(kind="stable")] = self._ladder
        return scores

    def before_send(self, request: Request, decision: Decision) -> None:
        by_profile = request[self._cold]
        runs = decision.runs
        # `runs` has no shadow profiles
        colds = [by_profile[name] for name in runs if name in by_profile] if by_profile else []
        if not colds or not colds[-1]:
            return
        self._use(runs[decision.primary])
        if decision.primary != decision.prefill:
            self._use(runs.get(decision.prefill))

    def _use(self, run: ProfileRun | None) -> None:
        if run is None:
            return
        key = _identity(run.candidates.endpoint(run.picked[0]))
        self._now += 1.0
        self._used.pop(key, None)
        self._used[key] = self._now
        self._set_used(key, self._now)
        if len(self._used) > self._size:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._set_used(oldest, NEVER)

    def _set_used(self, key: tuple[str, str], when: float) -> None:
        row = self._rows.get(key)
        if row is not None:
            self._used_at[row] = when

    def _follow(self, endpoint_list: EndpointList) -> None:
        self._endpoint_list = endpoint_list
        self._rows = {_identity(endpoint): row for row, endpoint in enumerate(endpoint_list.endpoints)}
        self._used_at = np.array([self._used.get(key, NEVER) for key in self._rows])


def _identity(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.namespace, endpoint.name
