"""Why an endpoint was chosen: a decision in plain values, for people, logs and tools.

A decision keeps references to what it was made of (`epp.decision`), so nothing is computed until somebody asks; `explain` then
turns it into an `Explanation`. No prompt text is in it: of the request it has names and sizes only. The same code explains a
live decision, a shadow profile's and one made offline.

Bounds: at most CANDIDATES_MAX candidates per profile are shown, the best ones, and NAMES_MAX names of those that a filter
dropped; the others are counted.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from epp import instrument
from epp.candidates import Candidates, Floats
from epp.data import INFLIGHT_REQUESTS, INFLIGHT_TOKENS
from epp.decision import Decision, ProfileRun
from epp.errors import Refused
from epp.pipeline import Pipeline, WiredProfile
from epp.plugin import Filter, Picker, Scorer
from epp.prefix.match import PrefixMatch
from epp.prefix.prediction import REPORTED, as_reported, compared_match, predicted_tokens
from epp.request import Request

CANDIDATES_MAX = 32
NAMES_MAX = 16
NOT_DOWN = "(not down)"  # what the runtime itself filters


class Filtered(msgspec.Struct, frozen=True):
    """One filter: how many it left, how many it dropped, and the first of them by name."""

    filter: str
    kept: int
    dropped: int
    names: list[str]


class Scored(msgspec.Struct, frozen=True):
    """What one scorer said of one candidate: `raw` in [0, 1], times its weight."""

    scorer: str
    raw: float
    weight: float
    weighted: float


class Candidate(msgspec.Struct, frozen=True):
    """One endpoint as a profile saw it. `values` are the columns that the configuration's plugins read, stale ones settled.

    `predicted_tokens`: how many tokens of the prompt a prefix producer took for cached there; None: nobody said.
    """

    endpoint: str
    address: str
    state: str
    picked: bool
    total: float
    scores: list[Scored]
    values: dict[str, float]
    predicted_tokens: int | None = None


class Profiled(msgspec.Struct, frozen=True):
    """One profile run. `candidates`, best first; `more` were left out. `margin` is the total of the picked endpoint less that
    of the best other one, `tied` how many had the picked one's total (the picker chose among them)."""

    profile: str
    shadow: bool
    picker: str
    considered: int
    filters: list[Filtered]
    candidates: list[Candidate]
    more: int
    picked: list[str]
    tied: int
    runner_up: str
    margin: float | None


class Cached(msgspec.Struct, frozen=True):
    """Prompt tokens in the prefix cache of the first target: `predicted` for the decision, `reported` of its `prompt` tokens by the
    model server when it had answered; None: not yet, or it did not say. With `prompt` known, `predicted` is in the server's tokens."""

    predicted: int
    reported: int | None = None
    prompt: int | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One decision. `ago_s`: how long ago it was made, when it was explained. `left_out`: plugins that had failed too often."""

    request_id: str
    model: str
    target_model: str
    flow: str
    priority: int
    body_bytes: int
    ago_s: float = 0.0
    worker: int = 0
    targets: list[str]
    primary: str
    headers: dict[str, str]
    profiles: list[Profiled]
    refused: str = ""
    cached: Cached | None = None
    left_out: list[str] = []


def explain(
    pipeline: Pipeline,
    request: Request,
    decision: Decision | None,
    refused: Refused | None = None,
    *,
    ago_s: float = 0.0,
    worker: int = 0,
    left_out: Sequence[str] = (),
) -> Explanation:
    """The decision that this pipeline took on this request, or how it came to refuse it."""
    wired = {profile.name: profile for profile in pipeline.recipe.profiles}
    start = request.considered
    match = _match(pipeline, request)
    shadows = decision.shadows if decision is not None else {}
    profiles = [
        _profiled(pipeline, request, wired[name], start, run, match)
        for runs in (request.runs, shadows)
        for name, run in runs.items()
    ]
    return Explanation(
        request_id=request.id,
        model=request.model,
        target_model=request.target_model,
        flow=request.fairness_id,
        priority=request.priority,
        body_bytes=request.body_bytes,
        ago_s=round(ago_s, 3),
        worker=worker,
        targets=[target.address for target in decision.targets] if decision is not None else [],
        primary=decision.primary if decision is not None else "",
        headers=dict(decision.headers) if decision is not None else {},
        profiles=profiles,
        refused=str(refused) if refused is not None else "",
        cached=_cached(request, decision, match) if decision is not None and match is not None else None,
        left_out=list(left_out),
    )


def _match(pipeline: Pipeline, request: Request) -> PrefixMatch | None:
    recipe = pipeline.recipe
    key = compared_match(recipe.producers, recipe.of(Scorer))
    return None if key is None else request[key]


def _cached(request: Request, decision: Decision, match: PrefixMatch) -> Cached | None:
    predicted, usage = predicted_tokens(match, decision), request[REPORTED]
    if predicted is None:
        return None
    if usage is None or not usage.prompt:
        return Cached(predicted)
    return Cached(as_reported(predicted, match, usage.prompt), usage.cached, usage.prompt)


def _profiled(
    pipeline: Pipeline,
    request: Request,
    wired: WiredProfile,
    start: Candidates | None,
    run: ProfileRun | None,
    match: PrefixMatch | None,
) -> Profiled:
    picker = next(member.name for member, _ in wired.members if isinstance(member, Picker))
    considered = len(start) if start is not None else 0
    if run is None:
        filters = _filtered(wired, start, request.emptied.get(wired.name, ()))
        return Profiled(wired.name, wired.shadow, picker, considered, filters, [], 0, [], 0, "", None)
    totals = run.totals.tolist()
    order = np.argsort(-run.totals, kind="stable").tolist()
    first = run.picked[0]
    shown = [*run.picked, *(i for i in order if i not in run.picked)][:CANDIDATES_MAX]
    others = [i for i in order if i != first]
    names = [endpoint.name for endpoint in run.candidates.endpoints]
    return Profiled(
        profile=wired.name,
        shadow=wired.shadow,
        picker=picker,
        considered=considered,
        filters=_filtered(wired, start, run.passed, run.candidates),
        candidates=_candidates(pipeline, request, wired, run, shown, match),
        more=len(order) - len(shown),
        picked=[names[i] for i in run.picked],
        tied=totals.count(totals[first]),
        runner_up=names[others[0]] if others else "",
        margin=_rounded(totals[first] - totals[others[0]]) if others else None,
    )


def _filtered(
    wired: WiredProfile, start: Candidates | None, passed: Sequence[Candidates], scored: Candidates | None = None
) -> list[Filtered]:
    """What each filter left; `scored`, those whom the scorers saw: without the ones that are down, unless all are."""
    filters = [member.name for member, _ in wired.members if isinstance(member, Filter)]
    if scored is not None and len(scored) < len(passed[-1] if passed else start or ()):
        filters, passed = [*filters, NOT_DOWN], [*passed, scored]
    found = []
    before = start
    for name, left in zip(filters, passed, strict=False):  # a filter that left nobody was the last to run
        kept = {id(endpoint) for endpoint in left.endpoints}
        dropped = [e.name for e in before.endpoints if id(e) not in kept] if before is not None else []
        found.append(Filtered(name, len(left), len(dropped), dropped[:NAMES_MAX]))
        before = left
    return found


def _candidates(
    pipeline: Pipeline,
    request: Request,
    wired: WiredProfile,
    run: ProfileRun,
    shown: Sequence[int],
    match: PrefixMatch | None,
) -> list[Candidate]:
    said = _said(request, wired, run)
    columns = _columns(pipeline, run.candidates)
    states = _states(run.candidates)
    held = None if match is None else _held(run.candidates, match)
    found = []
    for index in shown:
        endpoint = run.candidates.endpoint(index)
        scores = [
            Scored(name, _rounded(float(values[index])), weight, _rounded(float(values[index]) * weight))
            for name, weight, values in said
        ]
        found.append(
            Candidate(
                endpoint=endpoint.name,
                address=endpoint.address,
                state=states[index],
                picked=index in run.picked,
                total=_rounded(float(run.totals[index])),
                scores=scores,
                values={name: _rounded(float(values[index])) for name, values in columns.items()},
                predicted_tokens=None if held is None else int(held[index]),
            )
        )
    return found


def _said(request: Request, wired: WiredProfile, run: ProfileRun) -> list[tuple[str, float, Floats]]:
    """(scorer, weight, its scores), in the profile's order. Static scorers say the same again: they read scraped values only."""
    kept = iter(run.scores)
    found = []
    for member, weight in wired.members:
        if not isinstance(member, Scorer):
            continue
        if member.static:
            score: Callable[..., Floats | None] = instrument.scorer(member)
            values = score(request, run.candidates, None)
        else:
            values = next(kept)
        found.append((member.name, weight, run.candidates.zeros() if values is None else values))
    return found


def _columns(pipeline: Pipeline, candidates: Candidates) -> Mapping[str, Floats]:
    names = {INFLIGHT_REQUESTS.name: INFLIGHT_REQUESTS}
    names.update({c.name: c for c in pipeline.columns if c.type is not frozenset and c is not INFLIGHT_TOKENS})
    return {name: candidates[column] for name, column in names.items()}


def _held(candidates: Candidates, match: PrefixMatch) -> Floats:
    """Tokens in the cache of each candidate."""
    return candidates.zeros() if match.blocks is None else candidates.narrow(match.blocks) * match.block_tokens


def _states(candidates: Candidates) -> list[str]:
    snapshot = candidates.snapshot
    rows = range(len(snapshot.endpoints)) if candidates.rows is None else candidates.rows.tolist()
    return [
        "down" if snapshot.down[r] else "fresh" if snapshot.fresh[r] else "stale" if snapshot.known[r] else "unknown"
        for r in rows
    ]


def _rounded(value: float) -> float:
    return round(value, 4)
