"""Spread requests that hit no cache: each goes to the endpoint that had none for the longest time, so that caches grow evenly.

The order of use is this worker's own: every worker spreads what it decides, and nothing is shared. It holds at most `lruSize`
endpoints, by namespace and name; the one that was used longest ago is forgotten first. Endpoints that are gone keep their place
until then, and take none among the candidates.
"""

import msgspec
import numpy as np

from epp.candidates import Candidates, Endpoint, Floats, Roster, Scores
from epp.data import Datum
from epp.decision import Decision, ProfileRun
from epp.plugin import PreRequest, Profile, Scorer, plugin
from epp.prefix.match import APPROXIMATE, prefix_match
from epp.request import Request

LRU_SIZE = 1024
NEUTRAL = 0.5
NEVER = 0.0


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """`lru_size`: 0 and less stand for the default. `prefix_plugin_*` are accepted and have no effect, as in the field."""

    lru_size: int = LRU_SIZE
    prefix_match_info_producer_name: str = ""
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""


@plugin("no-hit-lru-scorer")
class NoHitLru(Scorer, PreRequest):
    """Any candidate holds blocks of the prompt: 0.5 for all. None does: 1 - rank / (n - 1), never used first, then oldest first.

    Never used endpoints rank in their order among the candidates; a single candidate scores 1. A request that was cold when it
    was scored last makes its target the most recent one, and that of the prefill profile too.
    """

    Params = Parameters

    def __init__(self, name: str, params: Parameters) -> None:
        super().__init__(name, params)
        self._match = prefix_match(params.prefix_match_info_producer_name or APPROXIMATE)
        self._cold: Datum[dict[str, bool]] = Datum(f"no_hit_lru_cold/{name}", dict)
        self.consumes = (self._match,)
        self.keeps = (self._cold,)
        legacy = {"prefixPluginType": params.prefix_plugin_type, "prefixPluginName": params.prefix_plugin_name}
        self.without_effect = [
            f"{field}: has no effect; prefixMatchInfoProducerName says whose matches are read"
            for field, given in legacy.items()
            if given
        ]
        self._size = params.lru_size if params.lru_size > 0 else LRU_SIZE
        self._used: dict[tuple[str, str], float] = {}  # when last, oldest first
        self._now = NEVER
        self._roster = Roster(())
        self._rows: dict[tuple[str, str], int] = {}
        self._used_at: Floats = np.zeros(0)  # per row of the roster
        self._ladder: Floats = np.ones(1)  # the scores of n candidates in their order of use

    def score(self, request: Request, candidates: Candidates, profile: Profile) -> Scores:
        match = request[self._match]
        cold = match is None or match.blocks is None or not candidates.narrow(match.blocks).any()
        said = request[self._cold]
        if said is None:
            request[self._cold] = said = {}
        said[profile.name] = cold
        if not cold:
            return np.full(len(candidates), NEUTRAL)
        if candidates.snapshot.roster is not self._roster:
            self._follow(candidates.snapshot.roster)
        size = len(candidates)
        if size != len(self._ladder):
            self._ladder = np.linspace(1.0, 0.0, size) if size > 1 else np.ones(1)
        scores = np.empty(size)
        scores[candidates.narrow(self._used_at).argsort(kind="stable")] = self._ladder
        return scores

    def before_send(self, request: Request, decision: Decision) -> None:
        said = request[self._cold]
        runs = decision.runs
        colds = [said[name] for name in runs if name in said] if said else []  # a shadow profile's word does not count
        if not colds or not colds[-1]:
            return
        self._use(runs[decision.primary])
        if decision.primary != decision.prefill:
            self._use(runs.get(decision.prefill))

    def _use(self, run: ProfileRun | None) -> None:
        if run is None:
            return
        who = _identity(run.candidates.endpoint(run.picked[0]))
        self._now += 1.0
        self._used.pop(who, None)
        self._used[who] = self._now
        self._mark(who, self._now)
        if len(self._used) > self._size:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._mark(oldest, NEVER)

    def _mark(self, who: tuple[str, str], when: float) -> None:
        row = self._rows.get(who)
        if row is not None:
            self._used_at[row] = when

    def _follow(self, roster: Roster) -> None:
        self._roster = roster
        self._rows = {_identity(endpoint): row for row, endpoint in enumerate(roster.endpoints)}
        self._used_at = np.array([self._used.get(who, NEVER) for who in self._rows])


def _identity(endpoint: Endpoint) -> tuple[str, str]:
    return endpoint.namespace, endpoint.name
