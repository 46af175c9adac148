"""Request -> decision: the hot path. Read top to bottom; each function is called by the one above it.

Nothing here logs, measures or looks at a clock. A plugin that raises is a bug and fails this request with 500: there is no
quiet fallback, except the one marked FAIL-OPEN.
"""

from collections.abc import Sequence
from typing import Protocol

from epp.candidates import Candidates, Scores
from epp.decision import Decision, ProfileRun
from epp.errors import Cause, PluginFault, ProducerFailed, Refused
from epp.pipeline import Pipeline
from epp.plugin import Profile
from epp.request import Request, Subset

PROFILE_ROUNDS_MAX = 16


class Pool(Protocol):
    """The endpoints of this moment."""

    def candidates(self, subset: Subset | None) -> Candidates:
        """One view of table and load for one decision, cut to the gateway's subset."""

    def producer_failed(self, failure: ProducerFailed) -> None:
        """Counts a producer that failed open."""


async def decide(pipeline: Pipeline, request: Request, pool: Pool) -> Decision:
    """The targets of a parsed request, or `Refused`."""
    candidates = pool.candidates(request.subset)
    if not len(candidates):
        raise Refused(Cause.NO_CANDIDATES)
    for produce in pipeline.producers:
        try:
            waiting = produce(request, candidates)
            if waiting is not None:
                await waiting
        except ProducerFailed as failure:
            pool.producer_failed(failure)  # FAIL-OPEN: consumers see the datum's default
    decision = schedule(pipeline, request, candidates)
    for before_send in pipeline.pre_request:
        before_send(request, decision)
    return decision


def schedule(pipeline: Pipeline, request: Request, candidates: Candidates) -> Decision:
    """Runs the profiles that the handler asks for, until it asks for none."""
    runs: dict[str, ProfileRun | None] = {}
    for _ in range(PROFILE_ROUNDS_MAX):  # a handler that never stops is a bug, not a hang
        profiles = pipeline.handler.pick(request, pipeline.profiles, runs)
        if not profiles:
            return pipeline.handler.result(request, runs)
        for profile in profiles:
            runs[profile.name] = run(profile, request, candidates)
    raise PluginFault(f"profile handler '{pipeline.handler.name}' has no result after {PROFILE_ROUNDS_MAX} rounds")


def run(profile: Profile, request: Request, candidates: Candidates) -> ProfileRun | None:
    """Filter, score, pick. None: the filters left nobody."""
    for keep in profile.filters:
        candidates = candidates.keep(keep(request, candidates, profile))
        if not len(candidates):
            return None
    candidates = candidates.without_down()
    totals = static_totals(profile, request, candidates)
    for score, weight in profile.scorers:
        scores = score(request, candidates, profile)
        if scores is not None:
            totals += weight * scores
    picked = profile.pick(request, candidates, totals, profile)
    check_picked(profile, picked, len(candidates))
    return ProfileRun(candidates, totals, picked)


def static_totals(profile: Profile, request: Request, candidates: Candidates) -> Scores:
    """What the profile's static scorers say, to be added to; kept with the snapshot while nobody was filtered out."""
    kept = candidates.snapshot.totals if candidates.rows is None else None
    if kept is not None and (totals := kept.get(profile.name)) is not None:
        return totals.copy()
    totals = candidates.zeros()
    for score, weight in profile.static_scorers:
        scores = score(request, candidates, profile)
        if scores is not None:
            totals += weight * scores
    if kept is not None:
        kept[profile.name] = totals.copy()
    return totals


def check_picked(profile: Profile, picked: Sequence[int], size: int) -> None:
    """At least one, only candidates of this run, none twice."""
    if len(picked) == 1 and 0 <= picked[0] < size:
        return
    if not picked or len(set(picked)) != len(picked) or min(picked) < 0 or max(picked) >= size:
        raise PluginFault(
            f"picker '{profile.picker.name}' returned {list(picked)} for {size} candidates; return each index at most once, at least one"
        )
