"""Explains a decision: says why an endpoint was chosen, in plain values for people, logs and tools.

A decision keeps references to its inputs (`epp.decision.decision`), so an explanation costs nothing until `explain` is called.
An `Explanation` contains no prompt text, only names and sizes. The same code explains live decisions, shadow profiles and decisions made
offline.

`what_if` adds up the same scores with other weights, in the way that a decision does. Filters and scores stay as they were. Only the
candidates that the explanation shows can then become the best one.

Bounds: an explanation shows the best CANDIDATES_MAX candidates per profile, and the names of NAMES_MAX candidates that a filter
dropped. It only counts the others.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from compiled.calls import add_scaled
from epp.candidates import Candidates, Floats
from epp.data import CACHE_BLOCK_SIZE, CACHE_TOKENS, INFLIGHT_REQUESTS, INFLIGHT_TOKENS, Datum
from epp.decision.decision import Decision, ProfileRun
from epp.decision.pipeline import Pipeline, WiredProfile, compile_profile
from epp.errors import Refused
from epp.learning.costs import LearnedCosts
from epp.plugin import Filter, Picker, Scorer
from epp.points import instrument
from epp.prefix.match import PrefixMatch
from epp.prefix.prediction import REPORTED, compared_match, predicted_row, predicted_tokens
from epp.request import Request

CANDIDATES_MAX = 32
NAMES_MAX = 16
OF_OTHERS = "inflight_requests_of_other_replicas"  # a part of inflight_requests
NOT_SHOWN = (INFLIGHT_TOKENS, CACHE_BLOCK_SIZE, CACHE_TOKENS)  # columns that say nothing about the choice
NOT_DOWN = "(not down or ejected)"  # shown as the name of the runtime's own filter


class Filtered(msgspec.Struct, frozen=True):
    """Describes what one filter did: how many candidates it kept and dropped, and the names of the first dropped candidates."""

    filter: str
    kept: int
    dropped: int
    names: list[str]


class Scored(msgspec.Struct, frozen=True):
    """Holds the score that one scorer gave one candidate: `raw` in [0, 1], and `weighted` = raw * weight."""

    scorer: str
    raw: float
    weight: float
    weighted: float


class Candidate(msgspec.Struct, frozen=True):
    """Describes one endpoint as a profile saw it. `values`: the columns that configured plugins read, settled (`epp.candidates`).

    `state`: fresh, stale, unknown, down or ejected. `predicted_tokens`: how many prompt tokens a prefix producer predicted to be
    cached on the endpoint; None without a prediction.
    `prefix_cache`: `precise`, or `approximate: ` and the reason; empty without a precise prefix producer.
    `latency`: what the learned latency model predicted, in words; empty without learned-latency-producer.
    """

    endpoint: str
    address: str
    state: str
    picked: bool
    total: float
    scores: list[Scored]
    values: dict[str, float]
    predicted_tokens: int | None = None
    prefix_cache: str = ""
    latency: str = ""


class Profiled(msgspec.Struct, frozen=True):
    """Describes one run of a profile.

    `considered`: the number of candidates at the beginning of the run. `candidates`: the picked candidates, then the others, best first.
    `more`: how many candidates are not shown. `tied`: how many candidates have the same total as the first picked one (the picker chose
    among them). `runner_up`: the best other candidate. `margin`: the total of the first picked candidate minus the total of the runner-up;
    None without a runner-up.
    """

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
    """Compares two counts of prompt tokens that the first target had cached: the picker's prediction and the server's report.

    `predicted`: cached tokens as the picker predicted them at the decision. `reported`: cached tokens as the model server reported them;
    None without a report. `prompt`: all prompt tokens as the server reported them; if known, `predicted` is in the server's tokens.
    """

    predicted: int
    reported: int | None = None
    prompt: int | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Explains one decision. `ago_s`: how many seconds ago the decision was made. `left_out`: plugins that were disabled because they had
    failed too often.

    `refused`: why the request got no endpoint; the cause `internal` is a fault, for which the client gets 500. `unscored`: scorers that
    raised in this request. `outcome`: how a recorded request ended. `pool`: the name of the pool; "" if the picker has one pool.
    """

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
    unscored: list[str] = []
    outcome: str = ""
    pool: str = ""


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
    """Explains how `pipeline` decided `request`, or why it refused the request (`decision` is then None)."""
    wired = {profile.name: profile for profile in pipeline.wiring.profiles}
    start = request.considered
    match = prefix_match(pipeline, request)
    shadows = decision.shadows if decision is not None else {}
    profiles = [
        _profiled(pipeline, request, wired[name], start, run, match) for runs in (request.runs, shadows) for name, run in runs.items()
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
        unscored=list(request.unscored),
    )


def prefix_match(pipeline: Pipeline, request: Request) -> PrefixMatch | None:
    """Returns the predicted prefix match of a request; None if no plugin matches prefixes."""
    wiring = pipeline.wiring
    key = compared_match(wiring.producers, wiring.of(Scorer))
    return None if key is None else request[key]


def _cached(request: Request, decision: Decision, match: PrefixMatch) -> Cached | None:
    predicted, usage = predicted_tokens(match, decision), request[REPORTED]
    if predicted is None:
        return None
    if usage is None or not usage.prompt:
        return Cached(predicted)
    return Cached(match.reported(predicted_row(decision), usage.prompt), usage.cached, usage.prompt)


def _profiled(
    pipeline: Pipeline, request: Request, wired: WiredProfile, start: Candidates | None, run: ProfileRun | None, match: PrefixMatch | None
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
    rivals = [i for i in order if i != first]
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
        runner_up=names[rivals[0]] if rivals else "",
        margin=_rounded(totals[first] - totals[rivals[0]]) if rivals else None,
    )


def _filtered(
    wired: WiredProfile, start: Candidates | None, passed: Sequence[Candidates], scored: Candidates | None = None
) -> list[Filtered]:
    """Returns one entry per filter, in order: which candidates the filter kept and dropped.

    `scored`: the scored candidates; None if no candidate was scored. If fewer candidates were scored than the filters kept, the runtime has
    dropped candidates that are down or ejected; this step gets an entry, too.
    """
    filters = [member.name for member, _ in wired.members if isinstance(member, Filter)]
    if scored is not None and len(scored) < len(passed[-1] if passed else start or ()):
        filters, passed = [*filters, NOT_DOWN], [*passed, scored]
    steps = []
    before = start
    # Zip may stop early, because no filter runs after a filter that keeps no candidate.
    for name, remaining in zip(filters, passed, strict=False):
        kept = {id(endpoint) for endpoint in remaining.endpoints}
        dropped = [e.name for e in before.endpoints if id(e) not in kept] if before is not None else []
        steps.append(Filtered(name, len(remaining), len(dropped), dropped[:NAMES_MAX]))
        before = remaining
    return steps


def _candidates(
    pipeline: Pipeline, request: Request, wired: WiredProfile, run: ProfileRun, shown: Sequence[int], match: PrefixMatch | None
) -> list[Candidate]:
    scorers = scores_of(request, wired, run)
    columns = dict(_columns(pipeline, run.candidates))
    if run.candidates.of_others is not None:  # None without a replica store
        columns[OF_OTHERS] = run.candidates.of_others
    states = _states(run.candidates)
    known_by = _known_by(run.candidates, match)
    predicted = None
    if match is not None:
        predicted = run.candidates.zeros() if match.cached is None else run.candidates.narrow(match.cached)
    latencies = _latencies(pipeline, request, run.candidates)
    rows = []
    for index in shown:
        endpoint = run.candidates.endpoint(index)
        scores = [
            Scored(name, _rounded(float(values[index])), weight, _rounded(float(values[index]) * weight))
            for name, weight, values in scorers
        ]
        rows.append(
            Candidate(
                endpoint=endpoint.name,
                address=endpoint.address,
                state=states[index],
                picked=index in run.picked,
                total=_rounded(float(run.totals[index])),
                scores=scores,
                values={name: _rounded(float(values[index])) for name, values in columns.items()},
                predicted_tokens=None if predicted is None else int(predicted[index]),
                prefix_cache=known_by[index],
                latency=latencies[index],
            )
        )
    return rows


def scores_of(request: Request, wired: WiredProfile, run: ProfileRun) -> list[tuple[str, float, Floats]]:
    """Returns (scorer, weight, scores) for each scorer, in the profile's order. The scores of a scorer that raised are 0.

    Calls static scorers again, because a run does not keep the scores of these. They read scraped values only, so the scores are the same.
    """
    kept = iter(run.scores)
    profile = compile_profile(wired)
    scorers = []
    for member, weight in wired.members:
        if not isinstance(member, Scorer):
            continue
        if member.static and member.name in request.unscored:
            values = None
        elif member.static:
            score: Callable[..., Floats | None] = instrument.scorer(member)
            values = score(request, run.candidates, profile)
        else:
            values = next(kept)
        scorers.append((member.name, weight, run.candidates.zeros() if values is None else values))
    return scorers


def _columns(pipeline: Pipeline, candidates: Candidates) -> Mapping[str, Floats]:
    names = {INFLIGHT_REQUESTS.name: INFLIGHT_REQUESTS}
    names.update({c.name: c for c in pipeline.columns if c.type is not frozenset and c not in NOT_SHOWN})
    return {name: candidates[column] for name, column in names.items()}


def _known_by(candidates: Candidates, match: PrefixMatch | None) -> list[str]:
    """Says for each candidate whether the prefix match is `precise`, or why it is approximate; "" without a precise producer."""
    rows = range(len(candidates.snapshot.endpoints)) if candidates.rows is None else candidates.rows.tolist()
    if match is None or not match.why:
        return [""] * len(rows)
    return [f"approximate: {match.why[row]}" if match.why[row] else "precise" for row in rows]


def learned_costs(pipeline: Pipeline, request: Request) -> LearnedCosts | None:
    """Returns what the learned latency model predicted for a request; None without a model."""
    produced = [key for producer in pipeline.wiring.producers for key in producer.produces]
    key = next((key for key in produced if isinstance(key, Datum) and key.type is LearnedCosts), None)
    learned: LearnedCosts | None = None if key is None else request[key]
    return learned


def _latencies(pipeline: Pipeline, request: Request, candidates: Candidates) -> list[str]:
    """Returns for each candidate what the latency model predicted, in words; "" without a model."""
    learned = learned_costs(pipeline, request)
    if learned is None:
        return [""] * len(candidates)
    rows = range(len(candidates)) if candidates.rows is None else candidates.rows.tolist()
    endpoints = candidates.endpoints
    return [learned.in_words(row, endpoint.slot, request.now) for row, endpoint in zip(rows, endpoints, strict=True)]


def _states(candidates: Candidates) -> list[str]:
    snapshot = candidates.snapshot
    rows = range(len(snapshot.endpoints)) if candidates.rows is None else candidates.rows.tolist()
    ejected = snapshot.ejected
    return [
        "ejected"
        if ejected is not None and ejected[r]
        else "down"
        if snapshot.down[r]
        else "fresh"
        if snapshot.fresh[r]
        else "stale"
        if snapshot.known[r]
        else "unknown"
        for r in rows
    ]


def _rounded(value: float) -> float:
    return round(value, 4)


class Ranked(msgspec.Struct, frozen=True):
    """One candidate with other weights. `parts`: scorer -> its part of `total`."""

    endpoint: str
    total: float
    parts: dict[str, float]


class WhatIf(msgspec.Struct, frozen=True):
    """The result of a profile with other weights. `ranked`: the candidates, best first; candidates with equal totals are in the order of
    the decision.

    `same`: whether the decision picked the first candidate. `margin`: the total of the first candidate minus the total of the second;
    None if there is only one. `more`: how many candidates the explanation does not show.
    """

    profile: str
    weights: dict[str, float]
    ranked: list[Ranked]
    same: bool
    margin: float | None
    more: int


def what_if(profile: Profiled, weights: Mapping[str, float]) -> WhatIf | None:
    """Ranks the candidates of a profile anew. `weights`: scorer -> its new weight; a missing scorer keeps its weight.

    Returns None if the profile had no candidate.
    """
    if not profile.candidates:
        return None
    first = profile.candidates[0]
    used = {scored.scorer: weights.get(scored.scorer, scored.weight) for scored in first.scores}
    raw: Sequence[Floats] = [np.array([candidate.scores[at].raw for candidate in profile.candidates]) for at in range(len(first.scores))]
    totals: Floats = np.zeros(len(profile.candidates))
    for scores, weight in zip(raw, used.values(), strict=True):
        add_scaled(totals, scores, weight)
    order = np.argsort(-totals, kind="stable").tolist()
    ranked = [
        Ranked(
            profile.candidates[row].endpoint,
            round(float(totals[row]), 4),
            {name: round(float(raw[at][row]) * weight, 4) for at, (name, weight) in enumerate(used.items())},
        )
        for row in order
    ]
    margin = round(float(totals[order[0]] - totals[order[1]]), 4) if len(order) > 1 else None
    return WhatIf(profile.profile, used, ranked, profile.candidates[order[0]].picked, margin, profile.more)
