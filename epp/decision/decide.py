"""Request -> decision: the hot path. Read top to bottom; each function is called by a function above it.

    decide ─▶ admission ─▶ choose: screen ─▶ produce ─▶ admit ─▶ schedule: profiles (filter ─▶ score ─▶ pick) ─▶ before send
                                     ▲                    └ held: wait, then again with the endpoints of that moment
                                     └────────────────────┘

Nothing here logs, measures or reads a clock. An exception of a plugin is a bug: the request fails with 500, and the exception is
tagged with the plugin (`epp.errors.blame`). There is no silent fallback, except at the comments FAIL-OPEN.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeAlias

import numpy as np

from compiled.calls import add_scaled, copied
from epp.candidates import Candidates, Scores
from epp.decision.admission import Admission
from epp.decision.decision import Decision, ProfileRun, Response
from epp.decision.pipeline import Pipeline, ProduceCall
from epp.errors import Cause, PluginFault, ProducerFailed, Refused, blame
from epp.plugin import Plugin, Profile, ScorerCall, Waiting
from epp.request import Request, Subset

PROFILE_ROUNDS_MAX: Final = 16
HOLDS_MAX: Final = 64  # how often admitters may hold one request
ScorerFailed: TypeAlias = Callable[[Exception], None]


class Lease(Protocol):
    """Holds the pipeline that one stream uses from the request's body to the end of the response."""

    @property
    def pipeline(self) -> Pipeline: ...
    def renew(self) -> None:
        """Switches to the current pipeline, because the picker may have disabled a plugin while the request waited."""


class EndpointPool(Protocol):
    """Gives the current endpoints and their load, and counts failures of plugins."""

    def candidates(self, subset: Subset | None) -> Candidates:
        """Returns one consistent view of endpoints and load for one decision, restricted to the gateway's subset (None: unrestricted)."""

    def reloaded(self, candidates: Candidates) -> Candidates:
        """Returns the same candidates with the load in flight at this moment."""

    def now(self) -> float:
        """Returns the time in monotonic seconds."""

    def producer_failed(self, producer: Plugin, failure: ProducerFailed) -> None:
        """Counts one failure of a data producer. The request goes on without the producer's data."""

    def scorer_failed(self, problem: Exception) -> None:
        """Counts one failure of a scorer. The request goes on without it. `problem` is tagged with the scorer (`epp.errors.blame`)."""

    def shadow_failed(self, profile: Profile, problem: Exception) -> None:
        """Counts a failed run of a shadow profile."""


def reraised(problem: Exception) -> None:
    """Raises the scorer's exception, which ends the profile run. This is the default of the parameter `failed` below."""
    raise problem


async def decide(lease: Lease, request: Request, pool: EndpointPool, admission: Admission) -> Decision:
    """Waits for admission, then chooses the request's targets. The decision holds the request's ticket. Raises Refused."""
    ticket = admission.enter(request)
    if ticket is None:
        ticket = await admission.turn(request)
    try:
        if ticket.waited:
            lease.renew()
        decision = await choose(lease.pipeline, request, pool)
    except BaseException:
        ticket.done()
        raise
    decision.ticket = ticket
    return decision


async def choose(pipeline: Pipeline, request: Request, pool: EndpointPool) -> Decision:
    """Chooses the targets of a parsed and admitted request. Raises Refused, or the exception of a plugin."""
    for _ in range(HOLDS_MAX):
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
                failed_open(pipeline, produce, failure, pool)
            except TimeoutError as timeout:
                failed_open(pipeline, produce, ProducerFailed(str(timeout)), pool)
            except Exception as problem:
                blame(problem, pipeline.owner(produce))
                raise
        if waited:
            candidates = pool.reloaded(candidates)
        held = admitted(pipeline, request, candidates)
        if held is None:
            break
        with suppress(ProducerFailed, TimeoutError):  # the wait ended early: the admitter decides again
            await held
        request.now = pool.now()
    else:
        raise Refused(Cause.NOT_ADMITTED, f"it was held {HOLDS_MAX} times")
    decision = schedule(pipeline, request, candidates, pool.scorer_failed)
    if pipeline.shadows:
        decision.shadows = run_shadows(pipeline, request, candidates, pool)
    for before_send in pipeline.pre_request:
        try:
            before_send(request, decision)
        except Exception as problem:
            blame(problem, pipeline.owner(before_send))
            complete_unsent(pipeline, request, decision, pipeline.pre_request.index(before_send))
            raise
    return decision


def admitted(pipeline: Pipeline, request: Request, candidates: Candidates) -> Waiting | None:
    """Asks the admitters. Returns None if all of them accept the request, else the wait of the first one that holds it. Raises Refused."""
    for admit in pipeline.admitters:
        try:
            held = admit(request, candidates)
        except Exception as problem:
            blame(problem, pipeline.owner(admit))
            raise
        if held is not None:
            return held
    return None


def screened(pipeline: Pipeline, request: Request, candidates: Candidates) -> Candidates:
    """Returns the candidates that all screeners keep. Each screener sees all candidates. Raises Refused if no candidate remains."""
    masks = []
    for screen in pipeline.screeners:
        try:
            masks.append(screen(request, candidates))
        except Exception as problem:
            blame(problem, pipeline.owner(screen))
            raise
    remaining = candidates.keep(np.logical_and.reduce(masks))
    if not len(remaining):
        raise Refused(Cause.SCREENED_OUT)
    return remaining


def failed_open(pipeline: Pipeline, produce: ProduceCall, failure: ProducerFailed, pool: EndpointPool) -> None:
    """FAIL-OPEN: plugins that read the failed producer's data get default data. Counts the failure."""
    producer = pipeline.owner(produce)
    if producer is not None:
        pool.producer_failed(producer, failure)


def complete_unsent(pipeline: Pipeline, request: Request, decision: Decision, failed: int) -> None:
    """Calls ResponseComplete for a request that is not sent because the call at index `failed` of `pre_request` raised.

    Plugins up to the failed one may have recorded the request. In ResponseComplete, they can undo this.
    """
    for complete in pipeline.completing_unsent(failed):
        with suppress(Exception):  # the caller raises the exception of `pre_request`, not one that is raised here
            complete(request, decision, Response())


def schedule(pipeline: Pipeline, request: Request, candidates: Candidates, failed: ScorerFailed = reraised) -> Decision:
    """Runs the profiles that the handler picks, round by round, until it picks no profile. Raises Refused."""
    runs: dict[str, ProfileRun | None] = {}
    request.considered, request.runs = candidates, runs
    handler = pipeline.wiring.handler
    for _ in range(PROFILE_ROUNDS_MAX):  # bounded: a handler that never stops must not hang the worker
        try:
            profiles = pipeline.pick_profiles(request, pipeline.profiles, runs)
            if not profiles:
                return pipeline.result(request, runs)
        except Exception as problem:
            blame(problem, handler)
            raise
        for profile in profiles:
            runs[profile.name] = run(profile, request, candidates, failed)
    raise PluginFault(f"profile handler '{handler.name}' still picks profiles after {PROFILE_ROUNDS_MAX} rounds; return none to end them")


def run(profile: Profile, request: Request, candidates: Candidates, failed: ScorerFailed = reraised) -> ProfileRun | None:
    """Runs one profile: filter, score, pick. Returns None if the filters leave no candidate. `failed` gets the exceptions of scorers."""
    request.profile = profile.name
    running: object = None  # the plugin that is being called; an exception is blamed on it
    try:
        passed = []
        for keep in profile.filters:
            running = keep
            candidates = candidates.keep(keep(request, candidates, profile))
            passed.append(candidates)
            if not len(candidates):
                request.emptied = {**request.emptied, profile.name: passed}
                return None
        candidates = candidates.without_down()
        totals = static_totals(profile, request, candidates, failed)
        raw_scores = []
        for score, weight in profile.scorers:
            try:
                scores = score(request, candidates, profile)
            except Exception as problem:
                without(profile, request, score, problem, failed)
                scores = None
            raw_scores.append(scores)
            if scores is not None:
                add_scaled(totals, scores, weight)
        running = profile.pick
        picked = profile.pick(request, candidates, totals, profile)
        check_picked(profile, picked, len(candidates))
    except Exception as problem:
        blame(problem, profile.owners.get(id(running)))
        raise
    return ProfileRun(candidates, totals, picked, passed, raw_scores)


def without(profile: Profile, request: Request, score: ScorerCall, problem: Exception, failed: ScorerFailed) -> None:
    """FAIL-OPEN: passes the exception of a scorer to `failed`, so that the run goes on without that scorer.

    Refused is raised again, because it is an answer to the client.
    """
    scorer = profile.owners.get(id(score))
    blame(problem, scorer)
    if isinstance(problem, Refused):
        raise problem
    failed(problem)
    if scorer is not None:
        request.unscored = (*request.unscored, scorer.name)


def static_totals(profile: Profile, request: Request, candidates: Candidates, failed: ScorerFailed) -> Scores:
    """Returns the weighted sum of the profile's static scorers, as a new array to which the caller may add.

    The snapshot caches the sum over all endpoints. That cached sum is used only if no filter has dropped a candidate. A sum that lacks a
    failed scorer is not cached.
    """
    kept = candidates.snapshot.totals if candidates.rows is None else None
    if kept is not None and (totals := kept.get(profile.name)) is not None:
        return copied(totals)
    totals = candidates.zeros()
    for score, weight in profile.static_scorers:
        try:
            scores = score(request, candidates, profile)
        except Exception as problem:
            without(profile, request, score, problem, failed)
            scores, kept = None, None
        if scores is not None:
            add_scaled(totals, scores, weight)
    if kept is not None:
        kept[profile.name] = copied(totals)
    return totals


def run_shadows(pipeline: Pipeline, request: Request, candidates: Candidates, pool: EndpointPool) -> Mapping[str, ProfileRun | None]:
    """Runs the shadow profiles, for explanations and statistics. Their failures do not affect the request."""
    runs: dict[str, ProfileRun | None] = {}
    for profile in pipeline.shadows:
        try:
            runs[profile.name] = run(profile, request, candidates)
        except Exception as problem:  # FAIL-OPEN: no request depends on a shadow
            pool.shadow_failed(profile, problem)
    return runs


def check_picked(profile: Profile, picked: Sequence[int], size: int) -> None:
    """Raises PluginFault unless the picker returned at least one index, and all indices are different and within the candidates."""
    if len(picked) == 1 and 0 <= picked[0] < size:
        return
    if not picked or len(set(picked)) != len(picked) or min(picked) < 0 or max(picked) >= size:
        raise PluginFault(
            f"picker '{profile.picker.name}' returned {list(picked)} for {size} candidates; return at least one index, each at most once"
        )
