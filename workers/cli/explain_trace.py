"""Explains a recorded decision: why the picker decided so, and where another configuration would send the request at the same moment.

The first explanation comes from the recording alone. For the second explanation, the code of workers decides on the recorded endpoints,
values, load and cached prefixes. The recording has no prompt, so another prompt of the same length stands for it.
"""

import datetime
import math
from collections.abc import Iterator, Sequence

import msgspec

from epp.config.load import EffectiveConfig
from epp.data import CACHE_BLOCK_SIZE
from epp.decision.explain import Candidate, Explanation, Profiled, Scored
from epp.endpoints.server_blocks import whole
from epp.recording.keys import id_hash
from epp.recording.records import Decided, Member, Record, Run, Scoring, floats, ints
from epp.recording.trace import Trace, Traced, requests
from workers.cli.offline import FilePool, Known, OfflineRequest, decided_on
from workers.shared.recording import Unreadable
from workers.supervisor.endpoints.discovery import Entry

PATH = "/v1/completions"
STATES = ("unknown", "fresh", "stale")
DOWN, EJECTED = 4, 8


def found(batches: Iterator[list[Record]], wanted: str) -> tuple[Traced, Trace]:
    """Returns the request with this x-request-id or number, and the recording up to its end. Raises Unreadable without such a request."""
    trace, hashed = Trace(), id_hash(wanted)
    for request in requests(batches, trace):
        if has_id(request, wanted, hashed):
            return request, trace
    kind = "" if hashed else " (an id that is no UUID is not recorded; `epp record export` lists numbers)"
    raise Unreadable(f"the recording has no request {wanted}{kind}")


def has_id(request: Traced, wanted: str, hashed: int) -> bool:
    """Returns whether a request has this x-request-id or number. `hashed`: `id_hash(wanted)`."""
    return request.number == wanted or bool(hashed and request.decided.id == hashed)


def why_then(request: Traced, trace: Trace) -> Explanation:
    """Explains the decision from the recording. Fairness id and headers are not known."""
    decided, ended = request.decided, request.ended
    profiles = {profile.name: profile for profile in request.config.profiles} if request.config is not None else {}
    addresses = {member.slot: member.address for member in request.endpoints if member is not None}
    return Explanation(
        request_id=request.number,
        pool=decided.pool,
        model=decided.model,
        target_model=decided.target_model or decided.model,
        flow=f"{decided.flow:016x}" if decided.flow else "default-flow",
        priority=decided.priority,
        body_bytes=decided.body_bytes,
        worker=request.worker,
        targets=[addresses.get(slot, f"slot {slot}") for slot in decided.targets],
        primary=decided.runs[0].profile if decided.runs else "",
        headers={},
        profiles=[_profiled(request, trace, run, profiles.get(run.profile)) for run in decided.runs],
        refused=decided.refused or ("no answer came" if ended is not None and not ended.status else ""),
        outcome=_outcome(request),
    )


def _outcome(request: Traced) -> str:
    """Describes when the request arrived, how long it waited in the picker, and the server's answer."""
    decided, ended = request.decided, request.ended
    arrived = f"arrived {datetime.datetime.fromtimestamp(request.at, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC" if request.at else "arrived"
    parts = [f"{arrived}, decided after {_time(decided.waited_s)}"]
    if ended is None:
        return parts[0] if decided.refused else f"{parts[0]}; its end was not recorded"
    if ended.first_s == ended.first_s:
        parts.append(f"first {'token' if ended.streaming else 'byte'} after {_time(ended.first_s)}")
    whole = "end" if ended.whole else "broken off"
    parts.append(f"{whole} after {_time(ended.lasted_s)} with status {ended.status or 'none'}")
    if ended.prompt is not None and ended.cached is not None:
        parts.append(f"{ended.cached} of {ended.prompt} prompt tokens were cached")
    return ", ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def with_config(config: EffectiveConfig, request: Traced, trace: Trace) -> Explanation:
    """Decides on the request again with this configuration, for the recorded moment. Raises OfflineError."""
    decided, members = request.decided, request.considered()
    here = [(row, member) for row, member in enumerate(members) if member is not None]
    inflight = ints(decided.inflight)
    cached = _cached(request)
    known = []
    for row, member in here:
        values, state = _values(trace, member, decided.at)
        known.append(
            Known(
                values={name: value for name, value in values.items() if not math.isnan(value)},
                in_flight=int(inflight[row]),
                cached=cached[row],
                state="down" if state & (DOWN | EJECTED) else STATES[state & 3],  # type: ignore[arg-type]
            )
        )
    entries = [_entry(member) for _, member in here]
    prompt = "x" * max(decided.body_bytes - len(decided.model), 1)
    body = msgspec.json.encode({"model": decided.model, "prompt": prompt, "stream": decided.streaming})
    return decided_on(config, OfflineRequest(PATH, {}, body), FilePool(config, entries, known))


def _entry(member: Member) -> Entry:
    host, _, port = member.address.rpartition(":")
    return Entry(member.namespace, member.name, host.strip("[]"), int(port), tuple(member.labels.items()))


def _cached(request: Traced) -> list[float]:
    decided = request.decided
    total = len(decided.hashes) // 8
    if decided.matched is None or not total:
        return [0.0] * len(request.considered())
    shares = floats(decided.matched) / total
    return list((shares if decided.rows is None else shares[ints(decided.rows)]).clip(0.0, 1.0).tolist())


def _values(trace: Trace, member: Member, at: float) -> tuple[dict[str, float], int]:
    scraped = trace.scraped(member.slot, at)
    if scraped is None:
        return {}, 0
    values, state = scraped
    return dict(zip(trace.columns, values.tolist(), strict=False)), state


def _profiled(request: Traced, trace: Trace, run: Run, profile: Scoring | None) -> Profiled:
    decided = request.decided
    picker = profile.picker if profile is not None else "its picker"
    considered = len(request.considered())
    if not run.picked:
        return Profiled(run.profile, False, picker, considered, [], [], 0, [], 0, "", None)
    rows = list(range(len(request.endpoints))) if run.rows is None else ints(run.rows).tolist()
    totals = floats(run.totals).tolist()
    order = sorted(range(len(rows)), key=lambda index: -totals[index])
    first = run.picked[0]
    shown = [*run.picked, *(index for index in order if index not in run.picked)]
    names = [_name(request.endpoints[row], row) for row in rows]
    rivals = [index for index in order if index != first]
    scored = _scores(run, profile, totals)
    place = _places(decided, len(request.endpoints))
    return Profiled(
        profile=run.profile,
        shadow=False,
        picker=picker,
        considered=considered,
        filters=[],
        candidates=[_candidate(request, trace, run, rows[i], place, totals[i], scored[i], i) for i in shown],
        more=0,
        picked=[names[index] for index in run.picked],
        tied=totals.count(totals[first]),
        runner_up=names[rivals[0]] if rivals else "",
        margin=round(totals[first] - totals[rivals[0]], 4) if rivals else None,
    )


def _places(decided: Decided, size: int) -> dict[int, int]:
    """Returns row in the endpoint list -> index in `decided.inflight`."""
    rows = range(size) if decided.rows is None else ints(decided.rows).tolist()
    return {row: place for place, row in enumerate(rows)}


def _candidate(
    request: Traced, trace: Trace, run: Run, row: int, place: dict[int, int], total: float, scores: list[Scored], index: int
) -> Candidate:
    decided, member = request.decided, request.endpoints[row]
    values, state = ({}, 0) if member is None else _values(trace, member, decided.at)
    held = 0 if decided.matched is None else int(floats(decided.matched)[row]) * decided.block_tokens
    size = values.get(CACHE_BLOCK_SIZE.name, math.nan)
    at = place.get(row)
    load = {} if at is None else {"inflight_requests": float(ints(decided.inflight)[at])}
    return Candidate(
        endpoint=_name(member, row),
        address="" if member is None else member.address,
        state="ejected" if state & EJECTED else "down" if state & DOWN else STATES[state & 3],
        picked=index in run.picked,
        total=round(total, 4),
        scores=scores,
        values=load | {name: round(value, 4) for name, value in values.items() if not math.isnan(value)},
        predicted_tokens=whole(held, decided.prompt_tokens, size) if decided.block_tokens else None,
    )


def _scores(run: Run, profile: Scoring | None, totals: Sequence[float]) -> list[list[Scored]]:
    """Returns the scores of each scored endpoint. Static scorers share the rest of the total."""
    rest = list(totals)
    rows: list[list[Scored]] = [[] for _ in totals]
    if profile is None:
        return rows
    recorded = iter(run.scores)
    static = [(name, weight) for name, weight, is_static in profile.scorers if is_static]
    for name, weight, is_static in profile.scorers:
        if is_static:
            continue
        data = next(recorded, None)
        values = floats(data).tolist() if data is not None else [0.0] * len(rows)
        for index, value in enumerate(values):
            rows[index].append(Scored(name, round(value, 4), weight, round(value * weight, 4)))
            rest[index] -= value * weight
    if static:
        weight = static[0][1] if len(static) == 1 and static[0][1] else 1.0
        joined = " + ".join(name for name, _ in static)
        for index, left in enumerate(rest):
            rows[index].append(Scored(joined, round(left / weight, 4), weight, round(left, 4)))
    return rows


def _name(member: Member | None, row: int) -> str:
    return member.name if member is not None else f"row {row}"
