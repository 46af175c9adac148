"""Request -> decision: the hot path. Read top to bottom; each function is called by the one above it.

Nothing here logs, measures or looks at a clock. A plugin that raises is a bug and fails this request with 500: there is no
quiet fallback, except where FAIL-OPEN stands.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import numpy as np

from epp.candidates import Candidates, Scores
from epp.decision import Decision, ProfileRun, Response
from epp.errors import Cause, PluginFault, ProducerFailed, Refused
from epp.pipeline import Pipeline
from epp.plugin import DataProducer, Profile
from epp.request import Request, Subset

PROFILE_ROUNDS_MAX = 16


class Pool(Protocol):
    """The endpoints of this moment."""

    def candidates(self, subset: Subset | None) -> Candidates:
        """One view of table and load for one decision, cut to the gateway's subset."""

    def reloaded(self, candidates: Candidates) -> Candidates:
        """The same candidates with the load that is in flight now."""

    def producer_failed(self, producer: DataProducer, failure: ProducerFailed) -> None:
        """Counts a producer that failed open."""

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        """Counts a shadow profile whose run raised."""


async def decide(pipeline: Pipeline, request: Request, pool: Pool) -> Decision:
    """The targets of a parsed request, or `Refused`."""
    candidates = pool.candidates(request.subset)
    if not len(candidates):
        raise Refused(Cause.NO_CANDIDATES)
    if pipeline.screeners:
        candidates = screened(pipeline, request, candidates)
    waited = False
    for produce in pipeline.producers:
        try:
            waiting = produce(request, candidates)
            if waiting is not None:
                waited = True
                await waiting
        except ProducerFailed as failure:
            pool.producer_failed(pipeline.producer(produce), failure)  # FAIL-OPEN: consumers see the datum's default
        except TimeoutError as late:  # what it waited for took too long: FAIL-OPEN too
            pool.producer_failed(pipeline.producer(produce), ProducerFailed(str(late)))
    if waited:
        candidates = pool.reloaded(candidates)
    for admit in pipeline.admitters:
        admit(request, candidates)
    decision = schedule(pipeline, request, candidates)
    if pipeline.shadows:
        decision.shadows = run_shadows(pipeline, request, candidates, pool)
    try:
        for before_send in pipeline.pre_request:
            before_send(request, decision)
    except Exception:
        never_sent(pipeline, request, decision, pipeline.pre_request.index(before_send))
        raise
    return decision


def never_sent(pipeline: Pipeline, request: Request, decision: Decision, failed: int) -> None:
    """The call at `failed` of those before a request is sent has raised: what it and those before it have noted is taken back."""
    for complete in pipeline.taking_back(failed):
        with suppress(Exception):  # the first failure is the one that counts
            complete(request, decision, Response())


def screened(pipeline: Pipeline, request: Request, candidates: Candidates) -> Candidates:
    """Who passes all screeners; each sees everybody."""
    masks = [screen(request, candidates) for screen in pipeline.screeners]
    left = candidates.keep(np.logical_and.reduce(masks))
    if not len(left):
        raise Refused(Cause.SCREENED_OUT)
    return left


def schedule(pipeline: Pipeline, request: Request, candidates: Candidates) -> Decision:
    """Runs the profiles that the handler asks for, until it asks for none."""
    runs: dict[str, ProfileRun | None] = {}
    request.considered, request.runs = candidates, runs
    for _ in range(PROFILE_ROUNDS_MAX):  # a handler that never stops is a bug, not a hang
        profiles = pipeline.pick_profiles(request, pipeline.profiles, runs)
        if not profiles:
            return pipeline.result(request, runs)
        for profile in profiles:
            runs[profile.name] = run(profile, request, candidates)
    handler = pipeline.recipe.handler.name
    raise PluginFault(f"profile handler '{handler}' has no result after {PROFILE_ROUNDS_MAX} rounds")


def run(profile: Profile, request: Request, candidates: Candidates) -> ProfileRun | None:
    """Filter, score, pick. None: the filters left nobody."""
    request.profile = profile.name
    passed = []
    for keep in profile.filters:
        candidates = candidates.keep(keep(request, candidates, profile))
        passed.append(candidates)
        if not len(candidates):
            request.emptied = {**request.emptied, profile.name: passed}
            return None
    candidates = candidates.without_down()
    totals = static_totals(profile, request, candidates)
    said = []
    for score, weight in profile.scorers:
        scores = score(request, candidates, profile)
        said.append(scores)
        if scores is not None:
            totals += scores if weight == 1.0 else weight * scores
    picked = profile.pick(request, candidates, totals, profile)
    check_picked(profile, picked, len(candidates))
    return ProfileRun(candidates, totals, picked, passed, said)


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


def run_shadows(
    pipeline: Pipeline, request: Request, candidates: Candidates, pool: Pool
) -> Mapping[str, ProfileRun | None]:
    """What the shadow profiles would have done: seen by explanations alone, and a failure costs the request nothing."""
    runs: dict[str, ProfileRun | None] = {}
    for profile in pipeline.shadows:
        try:
            runs[profile.name] = run(profile, request, candidates)
        except Exception as problem:  # FAIL-OPEN: nobody waits for a shadow
            pool.shadow_failed(profile, problem)
    return runs


def check_picked(profile: Profile, picked: Sequence[int], size: int) -> None:
    """At least one, only candidates of this run, none twice."""
    if len(picked) == 1 and 0 <= picked[0] < size:
        return
    if not picked or len(set(picked)) != len(picked) or min(picked) < 0 or max(picked) >= size:
        raise PluginFault(
            f"picker '{profile.picker.name}' returned {list(picked)} for {size} candidates; return each index at most once, at least one"
        )
